# SPDX-License-Identifier: Apache-2.0
"""The table of statistics has each number that a process counts, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from house_source import PACKAGE, ROOT, code_lines, cython_files, name_of, python_files, tree_of

from fastps.telemetry.statistics import STATISTICS, find_statistic, markdown

TABLE = PACKAGE / "telemetry" / "statistics.py"
# Structs of counters whose fields statistics() does not report.
OTHER_STRUCTS = {"QueueStats"}
# PipeTransport.statistics() has two more, which LocalGroup.statistics() gives other names.
OF_PIPES = {"readable"}
STRUCT = re.compile(r"cdef struct (\w+(?:Stats|Counts)):$")
FIELD = re.compile(r"    u?int64_t (\w+)$")
KEY = re.compile(r'"([a-z_]+)": |(?:result|counts)\["([a-z_]+)"\] = ')


def fields_of_structs() -> Iterator[tuple[Path, str]]:
    """Yield the file and name of each field of the structs that statistics() reports."""
    for path in cython_files():
        is_inside = False
        for line in code_lines(path):
            if match := STRUCT.match(line):
                is_inside = match[1] not in OTHER_STRUCTS
            elif is_inside and (match := FIELD.match(line)):
                yield path, match[1]
            else:
                is_inside = False


def keys_in_cython() -> Iterator[tuple[Path, str]]:
    """Yield the file and each key that a statistics() of a Cython file writes."""
    for path in cython_files():
        is_inside = False
        for line in code_lines(path):
            if line.strip() and re.match(r" {0,4}\S", line):
                is_inside = bool(re.match(r"    (?:def|cdef dict) statistics\(self\):", line))
            elif is_inside:
                yield from ((path, match[1] or match[2]) for match in KEY.finditer(line))


def keys_in_python() -> Iterator[tuple[Path, str]]:
    """Yield the file and each key that a statistics() or numbers() of a Python file writes."""
    for path in python_files():
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef) or function.name not in (
                "statistics", "numbers", "_counted",
            ):  # fmt: skip
                continue
            for node in ast.walk(function):
                keys = node.keys if isinstance(node, ast.Dict) else []
                is_stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
                for key in [*keys, node.slice] if is_stored else keys:
                    if isinstance(key, ast.Constant):
                        yield path, str(key.value)
                    elif isinstance(key, ast.JoinedStr):
                        parts = [part.value if isinstance(part, ast.Constant) else "1"
                                 for part in key.values]  # fmt: skip
                        yield path, "".join(map(str, parts))


def all_keys() -> list[tuple[Path, str]]:
    """List each number that some statistics() reports, with its file."""
    return [*fields_of_structs(), *keys_in_cython(), *keys_in_python()]


def test_each_number_has_a_row():
    wrong = [
        f"{name_of(path)}: {key} needs a row in {name_of(TABLE)}"
        for path, key in all_keys()
        if key not in OF_PIPES and key != "server_1" and find_statistic(key) is None
    ]
    assert not wrong, "\n".join(wrong)


def test_each_row_is_a_number_that_something_counts():
    counted = {row.name for _, key in all_keys() if (row := find_statistic(key))}
    counted |= {"updates_refused_of_worker_N", "refused_KIND", "refused_of_worker_N_KIND",
                "accepted_of_worker_N"}  # fmt: skip
    assert {row.name for row in STATISTICS} == counted


def test_the_page_is_printed_from_the_table():
    page = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert page == markdown(), (
        "docs/statistics.md is out of date; run: "
        "python -m fastps.telemetry.statistics > docs/statistics.md"
    )


def test_numbers_of_one_worker_are_found():
    names = {
        "server_tensors": "tensors",
        "updates_refused_of_worker_3": "updates_refused_of_worker_N",
        "server_rounds_missed_of_worker_12": "rounds_missed_of_worker_N",
        "refused_of_worker_3_too_old": "refused_of_worker_N_KIND",
        "accepted_of_worker_0": "accepted_of_worker_N",
        "refused_wrong_token": "refused_KIND",
        "refused": "refused",
    }
    found = {key: row.name for key in names if (row := find_statistic(key))}
    assert found == names
    assert find_statistic("unheard_of") is None
