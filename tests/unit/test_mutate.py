# SPDX-License-Identifier: Apache-2.0
"""tools/mutate.py: which mutations it makes, and that the seed alone chooses among them."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import mutate
import mutations

ROOT = mutate.ROOT
PROGRAM = b'''
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1


def f(x: int = 3, *, y: "Literal[4]" = 5) -> int:
    """Return 1 + 1."""
    _log.debug("%d", x + 1)
    assert x > 0
    if f"{x + 1}" in y or g(x):
        raise ValueError(x - 1)
    h("\xc3\xa9", not x)
    x += (2)
    return min(x, 1.5)
'''


def changes(text: str) -> set[tuple[str, str]]:
    """List (kind, line) of all mutations of a program."""
    return {(one.kind, one.after) for one in mutations.Source("x.py", text.encode()).mutations()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", {("comparison", "x = a <= b"), ("comparison", "x = a >= b")}),
        ("x = a is  not b", {("comparison", "x = a is b")}),
        ("x = (a) not in (b)", {("comparison", "x = (a) in (b)")}),
        ("x = a == b != c", {("comparison", "x = a != b != c"),
                             ("comparison", "x = a == b == c")}),
        ("x = a // b", {("arithmetic", "x = a * b")}),
        ("x <<= y", {("arithmetic", "x >>= y")}),
        ("x = a and b", {("boolean", "x = a or b")}),
        ("x = not a", {("not", "x = a")}),
        ("x = 7", {("constant", "x = 8")}),
        ("x = True", {("constant", "x = False")}),
        ("x = min(a)", {("call", "x = max(a)")}),
        ("x = any(a)", {("call", "x = all(a)")}),
        ("f(x)", {("dropped", "pass")}),
        ("if f(x): pass", {("condition", "if not (f(x)): pass")}),
        ("def f(): return x", {("return", "def f(): return None")}),
        ("raise ValueError(1 + 1)", {("raise", "ValueError(1 + 1)")}),
        ("raise", {("raise", "pass")}),
    ],
)  # fmt: skip
def test_each_kind_of_mutation_is_made(line, expected):
    assert changes(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "x: int[1] = y", "@f(1)\ndef f(): pass", "'''1 + 1'''", "_log.info(1 + 1)",
        "assert x > 1", "x = f'{a + 1}'", "x = 'a' + b", "def __repr__(self): return 1",
        "raise NotImplementedError", "x = KeyError(1)", "return None", "x: TypeAlias = a | b",
        "x = zip(a, b, strict=True)",
    ],
)  # fmt: skip
def test_what_is_for_people_or_checkers_stays(line):
    assert not changes(line)


def test_a_mutation_changes_one_line_and_no_other_byte():
    found = list(mutations.Source("x.py", PROGRAM).mutations())
    assert {one.kind for one in found} == {
        "constant", "comparison", "boolean", "condition", "raise", "dropped", "not", "arithmetic",
        "return", "call",
    }  # fmt: skip
    for one in found:
        before, after = PROGRAM.splitlines(), one.text.splitlines()
        changed = [
            row for row, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1
        ]
        assert changed == [one.line - 1]
        assert before[one.line - 1].decode().strip() == one.before
        assert after[one.line - 1].decode().strip() == one.after


def test_the_seed_decides_and_lines_elsewhere_do_not():
    source = "\n".join(f"x{number} = {number} < y" for number in range(300)).encode()
    chosen = mutations.pick({"x.py": source}, 1, 20)
    assert [one.key for one in chosen] == [
        one.key for one in mutations.pick({"x.py": b"import x\n" + source}, 1, 20)
    ]
    assert chosen[:5] == mutations.pick({"x.py": source}, 1, 5)
    assert len({one.line for one in chosen}) == 20
    others = mutations.pick({"x.py": source}, 2, 20)
    assert len({one.key for one in chosen} & {one.key for one in others}) < 10


def test_a_mutation_that_is_the_same_program_is_not_picked():
    assert not mutations.pick({"x.py": b"x = 1e300"}, 1, 9)


class Tree:
    """Where the mutations of a run end as the test says."""

    def __init__(self, *results: str) -> None:
        self.results = list(results)

    def run(self, one: mutations.Mutation, tests: str, limit_s: float) -> tuple[str, float, str]:
        return self.results.pop(0), 1.0, "FAILED tests/x.py::y - z"


def results_of(run: mutate.Run) -> dict[str, str]:
    return {json.loads(key)[-1]: entry["result"] for key, entry in run.results.items()}


def test_a_run_continues_from_its_log(tmp_path, capsys):
    chosen = list(mutations.Source("x.py", b"x = y < 3\n").mutations())
    named = {"file": "x.py", "before": "x = y < 3", "after": "x = y < 4", "reason": "so it is"}
    table = {"tests": [{"files": ["x.py"], "run": "x.py"}], "equivalent": [named]}
    log, until = tmp_path / "log", time.monotonic() + 60
    log.write_text('{"tests": "x.py", "limit_s": 9}\n')
    run = mutate.Run(table, log, until, False)
    tree = Tree("timeout", "killed", "survived", "survived")
    run.work(tree, list(chosen))
    expected = {"x = y <= 3": "killed", "x = y >= 3": "survived", "x = y < 4": "survived"}
    assert results_of(run) == results_of(mutate.Run(table, log, until, False)) == expected
    assert run.report(chosen) == 0.5
    assert "2 survived" not in capsys.readouterr().out
    again = mutate.Run(table, log, until, True)
    del expected["x = y >= 3"]
    assert results_of(again) == expected
    again.work(Tree("timeout", "timeout"), [one for one in chosen if one.key not in again.results])
    assert results_of(again)["x = y >= 3"] == "timeout"
    assert again.report(chosen) == 1


def test_the_table_names_files_that_are_there():
    table = tomllib.loads((ROOT / "tools/mutate.toml").read_text())
    for path, tests in mutate.tests_of(table).items():
        assert (ROOT / path).is_file(), path
        for name in tests.split():
            is_file = ".py" in name
            assert not is_file or (ROOT / "tests" / name.partition("::")[0]).is_file(), name
    for one in table.get("equivalent", ()):
        lines = (ROOT / one["file"]).read_text().splitlines()
        assert one["before"] in [line.strip() for line in lines], one
        assert one["reason"]
