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

# room -> floor. A room is a module or a package; the files of one room may import each other.
FLOORS = {
    "fastps.errors": 0,
    "fastps.types": 0,
    "fastps.config": 1,
    "fastps.auth": 1,
    "fastps.wire": 1,
    "fastps.contract": 1,
    "fastps.partition": 1,
    "fastps.search": 1,
    "fastps.topology": 1,
    "fastps.affinity": 1,
    "fastps.objects": 1,
    "fastps.versions": 1,
    "fastps._floats": 1,
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
    "fastps.frameworks": 9,
    "fastps.launch": 9,
    "fastps.bench": 9,
}
# Modules that are part of another room: faces, and files that a room had to keep beside itself.
PART_OF = {
    "fastps.tokens": "fastps.auth",
    "fastps.coding": "fastps.contract",
    "fastps.compression": "fastps.contract",
    "fastps.rules": "fastps.contract",
    "fastps": "fastps.session",
    "fastps.torch": "fastps.frameworks",
    "fastps.bluefog": "fastps.frameworks",
    "fastps.notebook": "fastps.launch",
    "fastps.jax": "fastps.frameworks",
    "fastps.keras": "fastps.frameworks",
    "fastps.tensorflow": "fastps.frameworks",
    "fastps.mxnet": "fastps.frameworks",
    "fastps.ray": "fastps.frameworks",
    "fastps._atomic": "fastps._core",
    "fastps._copy": "fastps._core",
    "fastps._futex": "fastps._core",
    "fastps._table": "fastps._core",
    "fastps._posix": "fastps._core",
    "fastps.adasum": "fastps.session",
    "fastps.banner": "fastps.session",
    "fastps.arrays": "fastps.session",
    "fastps.apart": "fastps.session",
    "fastps.current": "fastps.session",
    "fastps.host": "fastps.session",
    "fastps.flights": "fastps.session",
    "fastps.groups": "fastps.session",
    "fastps.joining": "fastps.session",
    "fastps.links": "fastps.session",
    "fastps.neighbors": "fastps.session",
    "fastps.operations": "fastps.session",
    "fastps.sets": "fastps.session",
    "fastps.uneven": "fastps.session",
    "fastps.stalls": "fastps.session",
    "fastps.retiring": "fastps.session",
    "fastps.differences": "fastps.session",
    "fastps.ways": "fastps.session",
    "fastps.drift": "fastps.session",
    "fastps.tracebacks": "fastps.session",
    "fastps.asynchronous": "fastps.session",
    "fastps.held": "fastps.session",
    "fastps.inbox": "fastps.session",
    "fastps.validators": "fastps.session",
    "fastps.validated": "fastps.session",
    "fastps.local_async": "fastps.session",
    "fastps.local_blocks": "fastps.session",
    "fastps.local_sgd": "fastps.session",
    "fastps.gathered": "fastps.session",
    "fastps.residuals": "fastps.session",
    "fastps.given": "fastps.session",
    "fastps.local_steps": "fastps.session",
    "fastps.outer": "fastps.session",
    "fastps.steps": "fastps.session",
    "fastps.tuning": "fastps.session",
    "fastps.alone": "fastps.session",
    "fastps.forked": "fastps.session",
    "fastps.windows": "fastps.session",
}
# Upwards, and why: who calls it is a user of the job that is started, not one of its workers.
UPWARDS = {("fastps", "fastps.launch.team"): "fastps.run() starts processes"}
# One subject in two extension modules, which are to be one
KNOWN_CIRCLES = [["fastps.collectives._calls", "fastps.collectives._repeated"]]
CORE_PART = re.compile(r"fastps\._core(_\w+)?$")

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
    "select": ("fastps.transport", "fastps.control", "fastps.launch"),
    "selectors": ("fastps.transport", "fastps.control", "fastps.launch"),
    "ssl": ("fastps.transport", "fastps.control", "fastps.launch"),
    "prometheus_client": ("fastps.telemetry",),
    "asyncio": ("fastps.transport", "fastps.control", "fastps.server", "fastps.launch"),
    "pyverbs": ("fastps.transport",),
    "msgspec": ("fastps.objects", "fastps.control", "fastps.telemetry", "fastps.bench"),
    "rich": ("fastps.launch", "fastps.telemetry", "fastps.bench"),
    "matplotlib": ("fastps.bench", "fastps.launch"),
    "networkx": ("fastps.topology",),
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
FRAMEWORKS = ("torch", "jax", "tensorflow", "keras", "mxnet", "ray")

CYTHON_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+c?import\s+(.+)")
CYTHON_IMPORT = re.compile(r"^\s*c?import\s+([\w.]+)")


def room_of(module: str) -> str:
    """Give the room a module belongs to; empty when nobody has named it."""
    if CORE_PART.match(module):
        return "fastps._core"
    while module:
        if module in FLOORS:
            return module
        if module in PART_OF:
            return PART_OF[module] if module != "fastps" else ""
        module = module.rpartition(".")[0]
    return ""


def room_of_file(path: Path) -> str:
    """Give the room of a file; the package's own __init__ belongs to the session."""
    module = module_of(path)
    return "fastps.session" if module in ("fastps", "fastps.__main__") else room_of(module)


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
    assert room_of_file(path) in FLOORS, (
        f"{name_of(path)} belongs to no room; put it into one, "
        "or give it a floor in FLOORS of this test and in docs/architecture.md"
    )


def test_imports_go_down():
    wrong = []
    for path, line, module in all_imports():
        if module.split(".")[0] != "fastps":
            continue
        if (module_of(path), module) in UPWARDS:
            continue
        mine, other = room_of_file(path), room_of(module) or "fastps.session"
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
    assert circles_of(file_imports()) == KNOWN_CIRCLES


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
        if FLOORS.get(room_of_file(path), 99) <= PURE_FLOOR and module.split(".")[0] in IMPURE
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
        ("fastps._core_queue", "fastps._core"),
        ("fastps.torch", "fastps.frameworks"),
        ("fastps.unknown", ""),
        ("fastps", ""),
    ],
)
def test_rooms_are_found(module, room):
    assert room_of(module) == room


def test_hidden_imports_are_seen(tmp_path):
    source = tmp_path / "x.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from fastps import session, errors\n"
        "def f():\n    import fastps.server.main\n    importlib.import_module('fastps.torch')\n"
    )
    assert [module for _, module in python_imports(source)] == [
        "typing",
        "fastps.session",
        "fastps.errors",
        "fastps.server.main",
        "fastps.torch",
    ]
    cython = tmp_path / "x.pyx"
    cython.write_text(
        '"""import this\n"""\nfrom libc.stdint cimport int64_t  # c\n'
        "from fastps cimport wire, _core\ncimport cython\n    from fastps._core cimport (\n"
    )
    assert [module for _, module in cython_imports(cython)] == [
        "libc.stdint",
        "fastps.wire",
        "fastps._core",
        "cython",
        "fastps._core",
    ]
