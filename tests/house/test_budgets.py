# SPDX-License-Identifier: Apache-2.0
"""Sizes of files and functions, and which files stand in no room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from house_source import (
    PACKAGE,
    SOURCE_SUFFIXES,
    code_lines,
    cython_files,
    functions_of,
    name_of,
    project_files,
    python_files,
    text_of,
)

MAX_FILE_LINES = 1000
MAX_FUNCTION_LINES = 80
# What users import, the core, and what every room may know. Everything else stands in a room.
LOOSE_FILES = {
    "__init__.pxd", "__init__.py", "__main__.py", "_core.pxd", "_core.pyi", "_core.pyx",
    "elastic.py", "errors.py", "files.py", "jax.py", "keras.py", "mxnet.py", "notebook.py",
    "py.typed", "ray.py", "tensorflow.py", "topology.py", "torch.py", "types.py",
}  # fmt: skip
CYTHON_FUNCTION = re.compile(
    r"^( *)(?:def|cdef|cpdef)\b(?! (?:packed )?(?:class|struct|enum))[^=]*\("
)


def count_lines(path: Path) -> int:
    """Count the lines of a file."""
    return len(text_of(path).splitlines())


@pytest.mark.parametrize(
    "path",
    [p for p in project_files() if p.suffix in (".py", ".pyx", ".pxd", ".pxi")],
    ids=name_of,
)
def test_files_are_short(path):
    lines = count_lines(path)
    assert lines <= MAX_FILE_LINES, f"{name_of(path)} has {lines} lines; split it by subject"


def cython_functions(path: Path) -> list[tuple[int, int]]:
    """Give (line, length) of each function of a Cython file, by indentation."""
    lines = code_lines(path)
    found = []
    for start, line in enumerate(lines):
        match = CYTHON_FUNCTION.match(line)
        if match is None:
            continue
        indent, end = len(match[1]), start
        for number in range(start + 1, len(lines)):
            text = lines[number]
            if text and len(text) - len(text.lstrip()) <= indent and text.lstrip()[0] not in ")]":
                break
            end = number if text else end
        found.append((start + 1, end - start + 1))
    return found


def python_functions(path: Path) -> list[tuple[int, int]]:
    """Give (line, length) of each function of a Python file."""
    return [(node.lineno, (node.end_lineno or 0) - node.lineno + 1) for node in functions_of(path)]


def all_functions() -> list[tuple[Path, int, int]]:
    """List (file, line, length) of all functions of the package."""
    found = [(path, *item) for path in python_files() for item in python_functions(path)]
    sources = [path for path in cython_files() if path.suffix != ".pxd"]
    return found + [(path, *item) for path in sources for item in cython_functions(path)]


def test_functions_are_short():
    wrong = [
        f"{name_of(path)}:{line}: {length} lines; split it below {MAX_FUNCTION_LINES}"
        for path, line, length in all_functions()
        if length > MAX_FUNCTION_LINES
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stand_in_rooms():
    """A newcomer finds a file by its room; docs/architecture.md lists them."""
    loose = {p.name for p in PACKAGE.iterdir() if p.suffix in (*SOURCE_SUFFIXES, ".typed")}
    assert loose == LOOSE_FILES


def test_cython_functions_are_measured(tmp_path):
    path = tmp_path / "x.pyx"
    path.write_text(
        "cdef int f(int a,\n           int b) noexcept nogil:\n    return a\n\n"
        "cdef class C:\n    def g(self):\n        pass\n    cdef int x\n\n"
        "cdef class D(C):\n    pass\n"
    )
    assert cython_functions(path) == [(1, 3), (6, 2)]
