# SPDX-License-Identifier: Apache-2.0
"""Build the Cython extensions; metadata stands in setup.cfg.

``python setup.py build_ext --inplace`` builds beside the sources, the aids of tests and
benchmarks too, which are never installed. What is installed has no symbols for debuggers.
FASTPS_DEBUG=1 in the environment compiles the life-cycle counters in; FASTPS_ANNOTATE=1 writes
Cython's HTML reports; FASTPS_JOBS says how many compile at a time, else all processors do.
"""

import os
import sys

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MODULES = [
    "fastps._core",
    "fastps.native._floats",
    "fastps.security._cipher",
    "fastps.reduce._partition",
    "fastps.transport._link",
    "fastps.transport.tcp._transport",
    "fastps.transport.rdma._transport",
    "fastps.transport.rdma._verbs",
    "fastps.server._policies",
    "fastps.server._store",
    "fastps.transport.pipe._transport",
    "fastps.worker._plan",
    "fastps.worker._engine",
    "fastps.worker._board",
    "fastps.collectives._exchange",
    "fastps.collectives._calls",
    "fastps.graph._windows",
    "fastps.frameworks._borrowed_memory",
    "fastps.frameworks.jax._ffi",
    "fastps.frameworks.tensorflow._ops",
]
AIDS = ["aids.boards", "aids.faces", "aids.mailbox", "aids.queue_bench", "aids.scrambler"]
FOLDERS = {"aids": "tests/aids"}
# An editable installation of packages that all lie in one folder is a line with its path, which
# type checkers and editors follow; of others it is a hook in Python, which they do not run.
ONE_FOLDER = {"": "."}
# Modules that need a library's header; nothing of the library is linked.
OPTIONAL = {"fastps.transport.rdma._verbs": "infiniband/verbs.h"}
INCLUDE_FOLDERS = ("/usr/include", "/usr/local/include")
# Without optimization, what a sanitizer watches compiles several times faster.
OPTIMIZATION = "-O0" if "-fsanitize" in os.environ.get("CFLAGS", "") else "-O3"
# Else some compilers round a product and a sum at once, which NumPy does not.
COMPILE_ARGS = [OPTIMIZATION, "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unused-function"]
# No symbols; and one commit gives the same bytes in any folder and at any time.
INSTALLED_ARGS = [
    "-g0",
    f"-ffile-prefix-map={os.getcwd()}=.",
    f"-ffile-prefix-map={numpy.get_include()}=numpy",
    "-Werror=date-time",
]
IS_DEBUG = os.environ.get("FASTPS_DEBUG") == "1"
IS_INSTALLED = "--inplace" not in sys.argv and not IS_DEBUG
JOBS = int(os.environ.get("FASTPS_JOBS") or len(os.sched_getaffinity(0)))


class Build(build_ext):
    """Build on all processors, and say what is done."""

    built = 0

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or JOBS

    def build_extensions(self):
        """Some Pythons have extensions look for libraries in their own folder, which is here."""
        if IS_INSTALLED:
            linker = self.compiler.linker_so
            self.compiler.linker_so = [one for one in linker if not one.startswith("-Wl,-rpath")]
        super().build_extensions()

    def build_extension(self, ext):
        super().build_extension(ext)
        self.built += 1
        print(f"compiled {self.built} of {len(self.extensions)}: {ext.name}", flush=True)


def has_header(name):
    """Tell whether the header that a module needs is there."""
    header = OPTIONAL.get(name, "")
    return any(os.path.exists(os.path.join(folder, header)) for folder in INCLUDE_FOLDERS)


def source(name):
    """Give the path of a module's Cython file."""
    folder, _, rest = name.partition(".")
    return f"{FOLDERS.get(folder, folder)}/{rest.replace('.', '/')}.pyx"


def extensions():
    """List one extension per Cython module; FASTPS_ONLY=name builds that one alone."""
    only = os.environ.get("FASTPS_ONLY")
    names = MODULES + (AIDS if "--inplace" in sys.argv else [])
    return [
        Extension(
            name,
            [source(name)],
            depends=["fastps/transport/rdma/ibverbs.h"] if name in OPTIONAL else [],
            include_dirs=[numpy.get_include()],
            define_macros=[
                ("FASTPS_DEBUG", str(int(IS_DEBUG))),
                ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
                ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),  # the oldest of setup.cfg
            ],
            extra_compile_args=[*COMPILE_ARGS, *(INSTALLED_ARGS if IS_INSTALLED else [])],
            extra_link_args=["-Wl,-s"] if IS_INSTALLED else [],
            libraries=["pthread", "dl"],
        )
        for name in names
        if os.path.exists(source(name)) and only in (None, name) and has_header(name)
    ]


if __name__ == "__main__":  # from Python 3.14 on processes that Cython starts import this file
    setup(
        package_dir=FOLDERS if "--inplace" in sys.argv else ONE_FOLDER,
        cmdclass={"build_ext": Build},
        ext_modules=cythonize(
            extensions(),
            nthreads=JOBS,
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
