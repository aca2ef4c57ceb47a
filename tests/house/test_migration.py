# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/from-*.md are true of this version: names exist, and take these arguments."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator

import pytest
from house_source import ROOT

# How the programs of a page name fastps's modules.
MODULES = {
    "from-bluefog.md": {
        "bf": "fastps.bluefog.torch", "topology_util": "fastps.bluefog.common.topology_util"},
    "from-byteps.md": {"bps": "fastps.torch"},
    "from-ddp.md": {"fps": "fastps.torch"},
    "from-horovod.md": {"hvd": "fastps.torch"},
    "from-ray.md": {"fps": "fastps.torch", "fastps": "fastps"},
}  # fmt: skip
SPAN = re.compile(r"`([^`]+)`")


def lines_of(page: str) -> Iterator[str]:
    """Yield the code that a page promises: the last column, and the old line where it stays."""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) < 3:
            continue
        stays = any(cell.startswith("the same") for cell in cells[2:])
        for cell in cells[1:] if stays else cells[2:]:
            yield from SPAN.findall(cell)


def resolve(node: ast.expr, modules: dict[str, str]) -> object:
    """Return the object that a name with dots means here; None where it is not of fastps."""
    if isinstance(node, ast.Name) and node.id in modules:
        return importlib.import_module(modules[node.id])
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, modules)
        if node.attr == "ray" and inspect.ismodule(owner):
            has_ray = importlib.util.find_spec("ray") is not None
            return importlib.import_module("fastps.ray") if has_ray else None
        return None if owner is None else getattr(owner, node.attr)
    return None


def check(code: str, modules: dict[str, str]) -> int:
    """Look up each name of a line, and each argument of its calls; return the number of names."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a command of the shell
        return 0
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found += resolve(node, modules) is not None
        if isinstance(node, ast.Call) and callable(target := resolve(node.func, modules)):
            named = {one.arg: None for one in node.keywords if one.arg}
            given = [None for one in node.args if ast.unparse(one) != "..."]
            inspect.signature(target).bind_partial(*given, **named)
    return found


@pytest.mark.parametrize("page", MODULES)
def test_the_new_lines_of_a_page_are_true(page):
    assert sum(check(line, MODULES[page]) for line in lines_of(page)) >= 3


def test_every_page_is_checked():
    assert {path.name for path in (ROOT / "docs").glob("from-*.md")} == set(MODULES)


@pytest.mark.parametrize("line", ["hvd.nothing(x)", "hvd.allreduce(x, colour=1)"])
def test_a_wrong_line_is_found(line):
    with pytest.raises((AttributeError, TypeError)):
        check(line, MODULES["from-horovod.md"])
