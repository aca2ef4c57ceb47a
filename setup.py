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
    "fastps.transport._base",
    "fastps.transport._tcp",
    "fastps.transport._rdma",
    "fastps.transport._rdma_board",
    "fastps.transport._rdma_verbs",
    "fastps.transport._inproc",
    "fastps.transport._mailbox",
    "fastps.server._rounds",
    "fastps.server._accumulate",
    "fastps.server._store",
    "fastps.worker._tensor",
    "fastps.worker._engine",
    "fastps.transport._shm",
    "fastps.worker._local",
    "fastps.worker._scrambler",
]
# Modules that need a library; built only where its header is found.
OPTIONAL = {"fastps.transport._rdma_verbs": ("infiniband/verbs.h", "ibverbs")}
INCLUDE_FOLDERS = ("/usr/include", "/usr/local/include")
COMPILE_ARGS = ["-O3", "-fno-strict-aliasing", "-Wno-unused-function"]


def libraries(name):
    """List what a module links with; None when the header that it needs is missing."""
    header, library = OPTIONAL.get(name, ("", ""))
    if not any(os.path.exists(os.path.join(folder, header)) for folder in INCLUDE_FOLDERS):
        return None
    return ["pthread", *filter(None, [library])]


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
            libraries=libraries(name),
        )
        for name in MODULES
        if os.path.exists(name.replace(".", "/") + ".pyx")
        and only in (None, name)
        and libraries(name)
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
