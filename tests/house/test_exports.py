# SPDX-License-Identifier: Apache-2.0
"""What users import stands in __all__: existing, sorted and complete.

Elsewhere a name without an underscore is on offer to other rooms, and nothing says so again.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from house_source import PACKAGE, FunctionNode, module_of, name_of, python_files, tree_of

FACES = [
    PACKAGE / f"{name}.py" for name in ("torch", "jax", "keras", "tensorflow", "mxnet", "ray")
]
# All operations that Horovod, BlueFog and MPI have, most of them in two forms, and their ops.
MAX_PUBLIC_NAMES = 174  # those of Horovod, BytePS and BlueFog in one face, one for type checkers


def exports_of(path: Path) -> list[str] | None:
    """Read a module's __all__ without importing it."""
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "__all__":
            return list(ast.literal_eval(node.value)) if node.value else None
    return None


def defined_in(path: Path) -> tuple[set[str], set[str]]:
    """Give (public functions and classes, all top-level names) of a module."""
    offered, names = set(), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in tree_of(path).body:
        if isinstance(node, FunctionNode | ast.ClassDef):
            names.add(node.name)
            if not node.name.startswith("_"):
                offered.add(node.name)
    return offered, names


def rank(name: str) -> tuple[int, str]:
    """Order CONSTANTS, then Classes, then functions, as ruff does."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name


@pytest.mark.parametrize("path", [p for p in python_files() if exports_of(p)], ids=name_of)
def test_exports_are_sorted_and_complete(path):
    exports = exports_of(path) or []
    offered, names = defined_in(path)
    submodules = (
        {child.stem for child in path.parent.iterdir()} if path.stem == "__init__" else set()
    )
    assert len(set(exports)) == len(exports), f"{name_of(path)}: __all__ repeats a name"
    assert exports == sorted(exports, key=rank), (
        f"{name_of(path)}: sort __all__ (ruff check --fix)"
    )
    missing = sorted(offered - set(exports))
    assert not missing, f"{name_of(path)}: add {missing} to __all__ or begin them with _"
    unknown = sorted(set(exports) - names - submodules)
    has_getattr = "__getattr__" in names
    assert has_getattr or not unknown, f"{name_of(path)}: __all__ names {unknown}, not defined"


def fronts() -> list[Path]:
    """List the modules that users import: the package and the faces of frameworks."""
    found = [path for path in [PACKAGE / "__init__.py", *FACES] if path.exists()]
    return [path for path in found if tree_of(path).body]


@pytest.mark.parametrize("name", ["__init__.py", "torch.py"])
def test_all_errors_can_be_caught_by_the_name_of_a_face(name):
    errors = {node.name for node in tree_of(PACKAGE / "errors.py").body
              if isinstance(node, ast.ClassDef) and node.name != "Status"}  # fmt: skip
    missing = errors - set(exports_of(PACKAGE / name) or [])
    assert not missing, f"{name}: export {missing}"


@pytest.mark.parametrize("path", fronts(), ids=name_of)
def test_fronts_say_what_they_offer(path):
    tree = tree_of(path)
    exports = exports_of(path)
    assert exports is not None, f"{name_of(path)} needs an __all__"
    assert len(exports) < MAX_PUBLIC_NAMES, f"{name_of(path)}: {len(exports)} public names"
    lines = [
        alias.lineno
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in exports
    ]
    assert len(set(lines)) == len(lines), (
        f"{name_of(path)}: one offered name per line, a comma after the last"
    )


def test_the_table_of_rooms_is_read():
    assert "sum_kernel" in (exports_of(PACKAGE / "reduce" / "__init__.py") or [])
    assert module_of(PACKAGE / "__init__.py") == "fastps"
