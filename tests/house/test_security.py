# SPDX-License-Identifier: Apache-2.0
"""The table of SECURITY.md: each defence has tests, which exist."""

from __future__ import annotations

import re

from house_source import ROOT

NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
COLUMNS = ["attacker", "wants", "defence", "what stays possible", "test"]


def rows() -> list[list[str]]:
    """List the cells of each row below the head."""
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    begin = table.index(COLUMNS) + 2
    return table[begin : table.index([""], begin)]


def test_each_defence_has_tests():
    assert len(rows()) > 25
    for _, wants, defence, left, tests in rows():
        assert wants
        assert bool(NAMED.search(tests)) != defence.startswith("none: "), defence
        assert "**" in left or not defence.startswith("none: "), "what nothing defends is said"


def test_the_tests_that_it_names_exist():
    for cells in rows():
        for file, name in NAMED.findall(cells[-1]):
            text = (ROOT / "tests" / file).read_text()
            assert re.search(rf"^ *def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
