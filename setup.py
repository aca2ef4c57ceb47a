# SPDX-License-Identifier: Apache-2.0
"""Build the Cython extensions; metadata stands in setup.cfg.

``python setup.py build_ext --inplace`` builds beside the sources. FASTPS_DEBUG=1 in the
environment compiles the life-cycle counters in; FASTPS_ANNOTATE=1 writes Cython's HTML reports.
"""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

MODULES = [
    "fastps._core",
    "fastps.transport._link",
    "fastps.transport._tcp",
    "fastps.transport._inproc",
    "fastps.transport._mailbox",
    "fastps.server._store",
    "fastps.worker._tensor",
    "fastps.worker._engine",
    "fastps.transport._shm",
    "fastps.worker._local",
]
COMPILE_ARGS = ["-O3", "-fno-strict-aliasing", "-Wno-unused-function"]


def extensions():
    """List one extension per Cython module; FASTPS_ONLY=name builds that one alone."""
    only = os.environ.get("FASTPS_ONLY")
    debug = "1" if os.environ.get("FASTPS_DEBUG") == "1" else "0"
    return [
        Extension(
            name,
            [name.replace(".", "/") + ".pyx"],
            define_macros=[("FASTPS_DEBUG", debug)],
            extra_compile_args=COMPILE_ARGS,
            libraries=["pthread"],
        )
        for name in MODULES
        if os.path.exists(name.replace(".", "/") + ".pyx") and only in (None, name)
    ]


setup(
    ext_modules=cythonize(
        extensions(),
        annotate=os.environ.get("FASTPS_ANNOTATE") == "1",
        compiler_directives={
            "language_level": 3,
            "auto_pickle": False,
            "autotestdict": False,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "freethreading_compatible": False,
        },
    )
)
