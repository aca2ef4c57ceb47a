# SPDX-License-Identifier: Apache-2.0
"""docs/compared.md: each "yes" of ours has a test, and each row has all columns."""

from __future__ import annotations

import re

from house_source import ROOT

PAGE = ROOT / "docs" / "compared.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
LINK = re.compile(r"\[[^]]+\]\(\.\./(tests/[^)]+)\)")


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_every_yes_of_ours_names_a_test():
    for row in ROWS[1:]:
        ours = cells(row)[1]
        assert ours.startswith("no") or LINK.match(ours), row


def test_the_tests_exist_and_hold_tests():
    paths = [path for row in ROWS for path in LINK.findall(row)]
    assert len(paths) > 10
    for path in paths:
        assert "def test_" in (ROOT / path).read_text(), path


def test_rows_have_all_columns():
    width = len(cells(ROWS[0]))
    assert width == 9
    assert {len(cells(row)) for row in ROWS} == {width}
