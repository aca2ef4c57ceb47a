# SPDX-License-Identifier: Apache-2.0
"""The form of docstrings: present, an imperative first sentence, nothing restated."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_source import PACKAGE, FunctionNode, name_of, python_files, tree_of

# A verb in the third person where an imperative should stand.
THIRD_PERSON = re.compile(
    r"(Return|Get|Set|Create|Make|Read|Write|Send|Receive|Give|Take|Check|Compute|Run|Start|Stop"
    r"|Wait|Call|Add|Remove|Build|Convert|Tell|List|Find|Handle|Load|Open|Close|Print|Raise"
    r"|Register|Yield|Update|Initialize|Init)e?s\b"
)
RESTATES = re.compile(
    r"^\s*(:param|:type|:return|Args:|Arguments:|Parameters\n|Returns:|Returns\n)", re.M
)
EMPTY_WORDS = re.compile(r"\b(This|The) (function|method|class|module)\b")

# Words of this house where the field has one: return, return whether, start.
DIALECT = re.compile(r"(Give(?! up\b)|Tell (whether|if)|Say (whether|if)|Begin)\b")

# A name out of the code may begin a sentence in lower case.
CODE_WORD = re.compile(r"\w+\(\)|\w*_\w|fastps\b")

Documented = FunctionNode | ast.ClassDef | ast.Module


def public_of(node: ast.Module | ast.ClassDef) -> Iterator[FunctionNode | ast.ClassDef]:
    """Walk over public functions, classes and their public methods; not over inner functions."""
    for child in node.body:
        if not isinstance(child, FunctionNode | ast.ClassDef) or child.name.startswith("_"):
            continue
        yield child
        if isinstance(child, ast.ClassDef):
            yield from public_of(child)


def is_second_half(node: Documented) -> bool:
    """Tell whether a function repeats one that is documented: a setter, an overload."""
    marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
    return any(mark.endswith((".setter", "overload", "override")) for mark in marks)


def is_property(node: Documented) -> bool:
    """Tell whether a function reads like a value, so that its docstring may be a noun."""
    marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
    return any("property" in mark for mark in marks)


def faults_of(node: Documented, name: str) -> Iterator[str]:
    """Say what is wrong with one docstring."""
    docstring = ast.get_docstring(node)
    if not docstring:
        yield "has no docstring"
        return
    first = docstring.splitlines()[0]
    if not first.endswith("."):
        yield f"first line must be a sentence with a full stop: {first!r}"
    if first[0].islower() and not CODE_WORD.match(first):
        yield f"first line must begin with a capital: {first!r}"
    if RESTATES.search(docstring):
        yield "restates its signature; say only what the annotations do not"
    if EMPTY_WORDS.match(first):
        yield f"says nothing in its first words: {first!r}"
    yield from _faults_of_function(node, first, name)


def _faults_of_function(node: Documented, first: str, name: str) -> Iterator[str]:
    if not isinstance(node, FunctionNode):
        return
    if THIRD_PERSON.match(first) and not is_property(node):
        yield f"first line must be imperative: {first!r}"
    if DIALECT.match(first):
        yield f"first line must begin with Return, Return whether or Start: {first!r}"
    words = [word.lower() for word in re.findall(r"\w+", first)]
    if [word for word in words if word not in ("a", "an", "the")] == name.split("_"):
        yield f"repeats the name: {first!r}"


@pytest.mark.parametrize("path", [p for p in python_files() if tree_of(p).body], ids=name_of)
def test_public_names_are_documented(path):
    tree = tree_of(path)
    nodes: list[tuple[str, Documented]] = [("module", tree)]
    nodes += [(node.name, node) for node in public_of(tree) if not is_second_half(node)]
    wrong = [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)}: {name} {fault}"
        for name, node in nodes
        for fault in faults_of(node, name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def f(): pass", "no docstring"),
        ("def f():\n    'Return it'", "full stop"),
        ("def f():\n    'returns it.'", "capital"),
        ("def f():\n    'Give it.'", "Return"),
        ("def f():\n    'Tell whether it is.'", "Return whether"),
        ("def f():\n    'Begin it.'", "Start"),
        ("def f():\n    'Returns it.'", "imperative"),
        ("def return_it():\n    'Return it.'", "repeats"),
        ("def f(x):\n    'Do it.\\n\\n    :param x: an x'", "restates"),
        ("def f():\n    'This function is good.'", "nothing"),
    ],
)
def test_each_fault_is_found(source, fault):
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    assert any(fault in found for found in faults_of(node, node.name))


def test_a_good_docstring_has_no_fault():
    (node,) = ast.parse("def f():\n    'Return the sum of all ranks.'").body
    assert isinstance(node, ast.FunctionDef)
    assert not list(faults_of(node, node.name))


def test_files_are_seen():
    assert any(path.name == "partition.py" for path in python_files())
    assert all(isinstance(path, Path) for path in python_files())


@pytest.mark.parametrize(
    "room",
    ["algorithms", "byzantine", "checkpoint", "collectives", "contract", "control", "frameworks",
     "graph", "launch", "native", "ops", "security", "server", "session", "telemetry",
     "transport", "worker"],
)  # fmt: skip
def test_a_room_says_what_it_decides(room):
    """Its page: what it decides, and what it must never know; docs/architecture.md says so."""
    text = " ".join((ast.get_docstring(tree_of(PACKAGE / room / "__init__.py")) or "").split())
    assert "Decides" in text, room
    assert "ust never know" in text or "Pure" in text or "Knows no" in text, room
