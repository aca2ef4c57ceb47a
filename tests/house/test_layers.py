# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: every import, lazy and typing ones too, goes to a lower floor."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_source import (
    PACKAGE,
    code_lines,
    cython_files,
    module_of,
    name_of,
    python_files,
    tree_of,
)

# room -> floor. A room is a folder, or a module of fastps/ itself; files of one room may import
# each other.
FLOORS = {
    "fastps.errors": 0,
    "fastps.files": 0,
    "fastps.types": 0,
    "fastps.native": 0,
    "fastps.config": 1,
    "fastps.contract": 1,
    "fastps.security": 1,
    "fastps.topology": 1,
    "fastps._core": 2,
    "fastps.reduce": 2,
    "fastps.transport": 3,
    "fastps.control": 4,
    "fastps.telemetry": 4,
    "fastps.server": 5,
    "fastps.worker": 5,
    "fastps.collectives": 6,
    "fastps.graph": 7,
    "fastps.byzantine": 7,
    "fastps.session": 8,
    "fastps.ops": 9,
    "fastps.algorithms": 10,
    "fastps.checkpoint": 10,
    "fastps.launch": 10,
    "fastps": 11,  # the package's own names: the NumPy face
    "fastps.frameworks": 12,
    "fastps.elastic": 13,
    "fastps.torch": 13,
    "fastps.jax": 13,
    "fastps.tensorflow": 13,
    "fastps.keras": 13,
    "fastps.mxnet": 13,
    "fastps.ray": 13,
    "fastps.notebook": 13,
    "fastps.bluefog": 14,
    "fastps.bench": 14,
    "fastps.__main__": 15,
}
CORE_PART = re.compile(r"fastps\.native\.core_\w+$")  # pieces of the module _core

# What only some rooms may import; a name covers its submodules. An empty tuple: nobody.
RESTRICTED = {
    "numba": ("fastps.reduce",),
    "llvmlite": ("fastps.reduce",),
    "socket": (
        "fastps.transport",
        "fastps.control",
        "fastps.telemetry",
        "fastps.launch",
        "fastps.bench",
    ),
    "select": (
        "fastps.transport",
        "fastps.control",
        "fastps.launch",
        "fastps.config.closed_pipe",
    ),
    "selectors": ("fastps.transport", "fastps.control", "fastps.launch"),
    "ssl": ("fastps.transport", "fastps.control", "fastps.launch"),
    "prometheus_client": ("fastps.telemetry",),
    "asyncio": ("fastps.transport", "fastps.control", "fastps.server", "fastps.launch"),
    "pyverbs": ("fastps.transport",),
    "msgspec": (
        "fastps.collectives.objects",
        "fastps.control",
        "fastps.telemetry",
        "fastps.bench",
    ),
    "rich": ("fastps.launch", "fastps.telemetry", "fastps.bench"),
    "matplotlib": ("fastps.bench", "fastps.launch"),
    "networkx": ("fastps.topology",),
    "argcomplete": ("fastps.launch", "fastps.__main__"),
    "cloudpickle": ("fastps.launch", "fastps.notebook"),
    "subprocess": ("fastps.launch", "fastps.bench"),
    "multiprocessing": (),
    "http": ("fastps.telemetry",),
    "torch": (
        "fastps.frameworks.torch",
        "fastps.torch",
        "fastps.bluefog.torch",
        "fastps.bench.gloo",  # what is compared with
    ),
    "jax": ("fastps.frameworks.jax", "fastps.jax"),
    "tensorflow": ("fastps.frameworks.tensorflow", "fastps.tensorflow"),
    "keras": ("fastps.frameworks.keras", "fastps.keras"),
    "mxnet": ("fastps.frameworks.mxnet", "fastps.mxnet"),
    "ray": ("fastps.frameworks.ray", "fastps.ray"),
}
DECLARED = {"numpy", "ml_dtypes", "cython", *RESTRICTED}
# Floors 0 and 1 are pure.
IMPURE = ("threading", "time", "asyncio", "socket", "select", "selectors", "subprocess", "signal")
PURE_FLOOR = 1
# of all commands, and of all conditions, on whatever floor
IMPURE_FILES = ("fastps.config.closed_pipe", "fastps.native.condition")
FRAMEWORKS = ("torch", "jax", "tensorflow", "keras", "mxnet", "ray")

CYTHON_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+c?import\s+(.+)")
CYTHON_IMPORT = re.compile(r"^\s*c?import\s+([\w.]+)")


def room_of(module: str) -> str:
    """Return the room a module belongs to; empty where nobody has named it."""
    if CORE_PART.match(module):
        return "fastps._core"
    room = ".".join(module.split(".")[:2])
    return room if room in FLOORS else ""


def targets(module: str, names: list[str]) -> Iterator[str]:
    """Turn `from module import names` into module names."""
    if module != "fastps":
        yield module
        return
    for name in names:
        yield f"fastps.{name}" if room_of(f"fastps.{name}") else "fastps"


def python_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import anywhere in a Python file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)}:{node.lineno}: import absolutely from fastps"
            found = targets(node.module or "", [alias.name for alias in node.names])
            yield from ((node.lineno, target) for target in found)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func).rpartition(".")[2]:
            yield from _named_import(node)


def _named_import(node: ast.Call) -> Iterator[tuple[int, str]]:
    """Read importlib.import_module("name")."""
    if node.args and isinstance(node.args[0], ast.Constant):
        yield node.lineno, str(node.args[0].value)


def cython_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of each import and cimport of a Cython file."""
    for number, line in enumerate(code_lines(path), 1):
        if match := CYTHON_FROM.match(line):
            names = [name.split()[0] for name in match[2].strip(" ()").split(",") if name.strip()]
            yield from ((number, target) for target in targets(match[1], names))
        elif match := CYTHON_IMPORT.match(line):
            yield number, match[1]


def all_imports() -> list[tuple[Path, int, str]]:
    """List (file, line, imported module) of the whole package."""
    found = [(path, *item) for path in python_files() for item in python_imports(path)]
    return found + [(path, *item) for path in cython_files() for item in cython_imports(path)]


@pytest.mark.parametrize("path", [*python_files(), *cython_files()], ids=name_of)
def test_every_file_has_a_floor(path):
    assert room_of(module_of(path)) in FLOORS, (
        f"{name_of(path)} belongs to no room; put it into one, "
        "or give it a floor in FLOORS of this test and in docs/architecture.md"
    )


def test_imports_go_down():
    wrong = []
    for path, line, module in all_imports():
        if module.split(".")[0] != "fastps":
            continue
        mine, other = room_of(module_of(path)), room_of(module) or "fastps"
        if mine in FLOORS and mine != other and FLOORS[other] >= FLOORS[mine]:
            wrong.append(
                f"{name_of(path)}:{line}: {mine} (floor {FLOORS[mine]}) imports {module} "
                f"(floor {FLOORS[other]}); let the upper room pass in what is needed"
            )
    assert not wrong, "\n".join(wrong)


def file_imports() -> dict[str, set[str]]:
    """Return the modules of this package that each module imports, itself left out."""
    files = [*python_files(), *cython_files()]
    modules = {module_of(path) for path in files}
    found: dict[str, set[str]] = {module: set() for module in modules}
    for path in files:
        if path.suffix == ".py":
            named = [
                (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name, alias.name)
                for node in ast.walk(tree_of(path))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            ]
        else:
            matches = [match for line in code_lines(path) if (match := CYTHON_FROM.match(line))]
            named = [
                (match[1], name.split()[0])
                for match in matches for name in match[2].strip(" ()").split(",") if name.strip()
            ]  # fmt: skip
            plain = [match for line in code_lines(path) if (match := CYTHON_IMPORT.match(line))]
            named += [(match[1], "") for match in plain]
        for module, name in named:
            part = f"{module}.{name}"
            found[module_of(path)].add(part if part in modules else module)
    return {module: (targets & modules) - {module} for module, targets in found.items()}


def circles_of(imports: dict[str, set[str]]) -> list[list[str]]:
    """List the circles: modules each of which reaches the others by imports (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        path.append(module)
        for other in sorted(imports.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in path:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            start = path.index(module)
            if len(path) - start > 1:
                circles.append(sorted(path[start:]))
            del path[start:]

    for module in sorted(imports):
        if module not in index:
            visit(module)
    return circles


def test_no_files_import_each_other_in_a_circle():
    """Lazy and typing imports count: a reader follows them as well."""
    assert circles_of(file_imports()) == []


def test_circles_are_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "f"}, "f": {"e"}}
    assert circles_of(imports) == [["b", "c"], ["e", "f"]]


def is_under(module: str, roots: tuple[str, ...]) -> bool:
    """Tell whether a module is one of the roots or inside one."""
    return any(module == root or module.startswith(root + ".") for root in roots)


def test_foreign_modules_stay_in_their_rooms():
    wrong = []
    for path, line, module in all_imports():
        top = module.split(".")[0]
        if top in RESTRICTED and not is_under(module_of(path), RESTRICTED[top]):
            allowed = ", ".join(RESTRICTED[top]) or "nobody"
            wrong.append(f"{name_of(path)}:{line}: {top} may be imported by {allowed}")
    assert not wrong, "\n".join(wrong)


def test_low_floors_are_pure():
    wrong = [
        f"{name_of(path)}:{line}: floors 0 and 1 decide without {module}"
        for path, line, module in all_imports()
        if FLOORS.get(room_of(module_of(path)), 99) <= PURE_FLOOR
        and module_of(path) not in IMPURE_FILES
        and module.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_only_declared_dependencies():
    known = sys.stdlib_module_names | DECLARED | {"fastps", "libc", "posix", "cpython"}
    wrong = [
        f"{name_of(path)}:{line}: {module} is not a dependency of setup.cfg"
        for path, line, module in all_imports()
        if module.split(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_import_starts_nothing_and_loads_no_framework():
    """A worker that only sends must not pay for Numba or a framework."""
    heavy = (*FRAMEWORKS, "numba", "rich")
    program = (
        "import sys, threading, fastps\n"
        f"loaded = [name for name in {heavy!r} if name in sys.modules]\n"
        "sys.exit(f'{loaded} {threading.active_count()}' "
        "if loaded or threading.active_count() > 1 else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, f"import fastps loads or starts: {result.stderr}"


@pytest.mark.parametrize(
    ("module", "room"),
    [
        ("fastps.control.client", "fastps.control"),
        ("fastps.native.core_queue", "fastps._core"),
        ("fastps.native.atomic", "fastps.native"),
        ("fastps.torch", "fastps.torch"),
        ("fastps.unknown", ""),
        ("fastps", "fastps"),
    ],
)
def test_rooms_are_found(module, room):
    assert room_of(module) == room


def test_hidden_imports_are_seen(tmp_path):
    source = tmp_path / "x.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from fastps import topology, errors\n"
        "def f():\n    import fastps.server.main\n    importlib.import_module('fastps.torch')\n"
    )
    assert [module for _, module in python_imports(source)] == [
        "typing",
        "fastps.topology",
        "fastps.errors",
        "fastps.server.main",
        "fastps.torch",
    ]
    cython = tmp_path / "x.pyx"
    cython.write_text(
        '"""import this\n"""\nfrom libc.stdint cimport int64_t  # c\n'
        "from fastps cimport topology, _core\ncimport cython\n    from fastps._core cimport (\n"
    )
    assert [module for _, module in cython_imports(cython)] == [
        "libc.stdint",
        "fastps.topology",
        "fastps._core",
        "cython",
        "fastps._core",
    ]
