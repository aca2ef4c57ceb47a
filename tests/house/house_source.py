# SPDX-License-Identifier: Apache-2.0
"""The project's files, parsed once, for the house tests."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fastps"
CYTHON_SUFFIXES = (".pyx", ".pxd", ".pxi")
SOURCE_SUFFIXES = (".py", ".pyi", *CYTHON_SUFFIXES)
TEXT_SUFFIXES = (*SOURCE_SUFFIXES, ".md", ".cfg", ".toml", ".sh", ".yml", ".yaml", ".txt")
FOLDERS = ("fastps", "tests", "tools", "docs", "examples")
# Programs: they may write to the terminal.
CLI_FILES = ("config/__main__.py", "reduce/__main__.py", "server/main.py", "launch/")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def python_files() -> list[Path]:
    """List the Python files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def cython_files() -> list[Path]:
    """List the Cython files of the package."""
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in CYTHON_SUFFIXES)


def package_files() -> list[Path]:
    """List all source files of the package."""
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in SOURCE_SUFFIXES)


def project_files() -> list[Path]:
    """List the text files that people write: package, tests, tools, docs, examples, root."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if _is_text(path))


def _is_text(path: Path) -> bool:
    if "__pycache__" in path.parts:
        return False
    if path.suffix in TEXT_SUFFIXES:
        return True
    return path.suffix == "" and path.name in ("Makefile", "check", "LICENSE")


def name_of(path: Path) -> str:
    """Give the path as people write it, from the project's root."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """Give the dotted name of a file's module."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def text_of(path: Path) -> str:
    """Read a file once."""
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a Python file once."""
    return ast.parse(text_of(path), filename=str(path))


def functions_of(path: Path) -> Iterator[FunctionNode]:
    """Walk over all functions and methods of a Python file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, FunctionNode):
            yield node


def is_cli(path: Path) -> bool:
    """Tell whether a file belongs to a program with a terminal."""
    name = path.relative_to(PACKAGE).as_posix()
    return any(
        name == known or (known.endswith("/") and name.startswith(known)) for known in CLI_FILES
    )


def code_lines(path: Path) -> list[str]:
    """Give the lines of a Cython file without comments and without docstrings."""
    text = re.sub(r'"""(?:.|\n)*?"""', lambda m: "\n" * m[0].count("\n"), text_of(path))
    return [line.split("#")[0].rstrip() for line in text.splitlines()]
