# SPDX-License-Identifier: Apache-2.0
"""C structs stay small enough to be taken in at a glance; what belongs together is nested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_source import code_lines, cython_files, name_of

MAX_FIELDS = 40  # a nested struct counts as one
BEGIN = re.compile(r"^cdef (?:packed )?(?:struct|union) (\w+):$")


def structs_of(path: Path) -> Iterator[tuple[str, int]]:
    """Give name and number of fields of every struct that a file defines."""
    name, body = "", ""
    for line in [*code_lines(path), "end"]:
        if line and not line.startswith(" "):
            if name:
                yield name, count_fields(body)
            match = BEGIN.match(line)
            name, body = (match[1] if match else ""), ""
        elif name:
            body += line + "\n"


def count_fields(body: str) -> int:
    """Count declared names: one a line, or several with commas between; functions count as one."""
    innermost = re.compile(r"[(\[][^()\[\]]*[)\]]")
    while innermost.search(body):
        body = innermost.sub("", body)
    return sum(1 + line.count(",") for line in body.splitlines() if line.strip())


@pytest.mark.parametrize("path", cython_files(), ids=name_of)
def test_a_struct_has_few_fields(path):
    large = {name: count for name, count in structs_of(path) if count > MAX_FIELDS}
    assert not large, f"more than {MAX_FIELDS} fields: let what belongs together be a struct"


def test_fields_are_counted(tmp_path):
    path = tmp_path / "m.pxd"
    path.write_text(
        "cdef struct Later\n"
        "cdef struct Some:       # on one thread\n"
        "    Later* first, second\n"
        "\n"
        "    # what it does\n"
        "    int (*call)(int a, void (*then)(int b, int c) noexcept,\n"
        "                int d) noexcept nogil\n"
        "    char text[16]\n"
        "cdef packed struct Other:\n"
        "    int a\n"
        "cdef class Face:\n"
        "    cdef int b\n"
    )
    assert list(structs_of(path)) == [("Some", 4), ("Other", 1)]
