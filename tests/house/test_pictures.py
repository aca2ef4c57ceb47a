# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/architecture.md show the code as it is."""

from __future__ import annotations

import sys

import pytest
from house_source import ROOT, text_of
from test_layers import FLOORS

sys.path.insert(0, str(ROOT / "tools"))

import pictures


@pytest.mark.parametrize("name", sorted(pictures.PICTURES))
def test_pictures_are_up_to_date(name):
    drawn = pictures.PICTURES[name]()
    assert drawn == text_of(pictures.FIGURES / name), "run python tools/pictures.py"


def test_the_architecture_page_lists_every_room():
    page = text_of(ROOT / "docs" / "architecture.md")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    listed = {
        f"fastps.{room.strip('`/ ')}": int(row[1])
        for row in rows if row[1].strip().isdigit() for room in row[2].split(", ")
    }  # fmt: skip
    listed["fastps"] = listed.pop("fastps.fastps` itself")
    assert listed == FLOORS
