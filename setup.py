# SPDX-License-Identifier: Apache-2.0
"""Build the Cython extensions; metadata stands in setup.cfg.

``python setup.py build_ext --inplace`` builds beside the sources, the aids of tests and
benchmarks too, which are never installed. FASTPS_DEBUG=1 in the environment compiles the
life-cycle counters in; FASTPS_ANNOTATE=1 writes Cython's HTML reports.
"""

import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

MODULES = [
    "fastps._core",
    "fastps._trace",
    "fastps.reduce.codec._coder",
    "fastps.reduce._combiner",
    "fastps.transport._link",
    "fastps.transport._base",
    "fastps.transport.tcp._transport",
    "fastps.transport.rdma._transport",
    "fastps.transport.rdma._verbs",
    "fastps.transport.inproc._transport",
    "fastps.server._coded",
    "fastps.server._ruled",
    "fastps.server._rounds",
    "fastps.server._accumulate",
    "fastps.server._store",
    "fastps.worker._tensor",
    "fastps.worker._codec",
    "fastps.worker._engine",
    "fastps.transport._shm",
    "fastps.worker._local",
    "fastps.transport.pipe._transport",
    "fastps.collectives._exchange",
    "fastps.graph._windows",
]
AIDS = ["aids.boards", "aids.faces", "aids.mailbox", "aids.queue_bench", "aids.scrambler"]
FOLDERS = {"aids": "tests/aids"}
# Modules that need a library; built only where its header is found.
OPTIONAL = {"fastps.transport.rdma._verbs": ("infiniband/verbs.h", "ibverbs")}
INCLUDE_FOLDERS = ("/usr/include", "/usr/local/include")
COMPILE_ARGS = ["-O3", "-fno-strict-aliasing", "-Wno-unused-function"]


def libraries(name):
    """List what a module links with; None when the header that it needs is missing."""
    header, library = OPTIONAL.get(name, ("", ""))
    if not any(os.path.exists(os.path.join(folder, header)) for folder in INCLUDE_FOLDERS):
        return None
    return ["pthread", *filter(None, [library])]


def source(name):
    """Give the path of a module's Cython file."""
    folder, _, rest = name.partition(".")
    return f"{FOLDERS.get(folder, folder)}/{rest.replace('.', '/')}.pyx"


def extensions():
    """List one extension per Cython module; FASTPS_ONLY=name builds that one alone."""
    only = os.environ.get("FASTPS_ONLY")
    names = MODULES + (AIDS if "--inplace" in sys.argv else [])
    debug = "1" if os.environ.get("FASTPS_DEBUG") == "1" else "0"
    return [
        Extension(
            name,
            [source(name)],
            define_macros=[("FASTPS_DEBUG", debug)],
            extra_compile_args=COMPILE_ARGS,
            libraries=libraries(name),
        )
        for name in names
        if os.path.exists(source(name)) and only in (None, name) and libraries(name)
    ]


setup(
    package_dir=FOLDERS,
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
    ),
)
