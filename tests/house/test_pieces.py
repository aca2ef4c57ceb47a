# SPDX-License-Identifier: Apache-2.0
"""Pieces of a Cython module (.pxi) read from top to bottom: each calls what stands above it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from house_source import PACKAGE, code_lines, cython_files, name_of

INCLUDE = re.compile(r'^include "([\w./]+)"')


def pieces_of(module: Path) -> list[tuple[Path, list[str]]]:
    """Give (file, lines) in the order in which the compiler reads them."""
    found: list[tuple[Path, list[str]]] = [(module, [])]
    for line in code_lines(module):
        match = INCLUDE.match(line)
        if match is None:
            found[-1][1].append(line)
        else:
            piece = module.parent / match[1]
            found += [(piece, code_lines(piece)), (module, [])]
    return found


def definitions(lines: list[str]) -> set[str]:
    """Name the C functions that these lines define."""
    text = "\n".join(lines)
    return {
        match[1]
        for match in re.finditer(
            r"^cdef\s+(?!struct|class|enum|extern|packed)[^=(\n]*?\b(\w+)\((?:[^()]|\([^()]*\))*\)"
            r"[^\n:]*:\s*$",
            text,
            re.M,
        )
    }


def calls(lines: list[str]) -> set[str]:
    """Name whatever these lines call."""
    return set(re.findall(r"(?<![\w.])(\w+)\(", "\n".join(lines)))


def wrong_calls(module: Path) -> list[str]:
    """List the calls from a piece to functions that only later pieces define."""
    pieces = pieces_of(module)
    defined = [definitions(lines) for _, lines in pieces]
    wrong = []
    for place, (path, lines) in enumerate(pieces):
        if path == module:
            continue  # the module's own text declares what it needs in one glance
        later = set().union(*defined[place + 1 :]) - set().union(*defined[: place + 1])
        wrong += [f"{name_of(path)} calls {name}()" for name in sorted(calls(lines) & later)]
    return wrong


@pytest.mark.parametrize(
    "module", [path for path in cython_files() if path.suffix == ".pyx"], ids=name_of
)
def test_pieces_call_what_stands_above(module):
    wrong = wrong_calls(module)
    assert not wrong, "include the piece that is called first, or move it: " + ", ".join(wrong)


def test_every_piece_is_included_once():
    included = [
        path.parent / match[1]
        for path in cython_files()
        for line in code_lines(path)
        if (match := INCLUDE.match(line))
    ]
    assert sorted(included) == sorted(PACKAGE.rglob("*.pxi"))


def test_a_call_downwards_is_found(tmp_path):
    (tmp_path / "_a.pxi").write_text(
        "cdef int f(int a,\n           int b) noexcept nogil:\n    return g(a) + h(b)\n"
    )
    (tmp_path / "_b.pxi").write_text("cdef int g(int a) noexcept nogil:\n    return f(a, a)\n")
    module = tmp_path / "m.pyx"
    module.write_text('cdef int h(int a):\n    return a\n\ninclude "_a.pxi"\ninclude "_b.pxi"\n')
    pieces = pieces_of(module)
    assert [definitions(lines) for _, lines in pieces] == [{"h"}, {"f"}, set(), {"g"}, set()]
    assert calls(pieces[1][1]) >= {"g", "h"}
