# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/architecture.md show the code as it is."""

from __future__ import annotations

import re
import sys

import pytest
from house_source import PACKAGE, ROOT, text_of
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


FOLDERS = ("fastps", "fastps/frameworks", ".", "tests")  # in which documents look for files
NAMED = re.compile(r"`((?:[a-z_]+/)+\w[\w.*]*)`")  # a file or a folder, with or without its suffix


def test_documents_name_files_that_exist():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"ops"}  # ops/s is a unit
    missing = [
        f"{page.name}: {name}"
        for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
        for name in NAMED.findall(text_of(page))
        if name.split("/")[0] in rooms | {"tests", "tools", "examples"}
        and "yours" not in name  # what a reader is told to write
        and not any([*(ROOT / folder).glob(name), *(ROOT / folder).glob(f"{name}.*")]
                    for folder in FOLDERS)
    ]  # fmt: skip
    assert not missing
