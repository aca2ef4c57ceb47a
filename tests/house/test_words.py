# SPDX-License-Identifier: Apache-2.0
"""Plain English: short sentences, the field's terms, and no name of this house that is gone.

The counts below may only shrink: whoever shortens sentences lowers them.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_source import PACKAGE, ROOT, name_of, package_files, python_files, text_of, tree_of

MOST_WORDS = 35  # of a sentence
LONG_SENTENCES = {"docs": 0, "docstrings": 5}
AIM_WORDS = 25  # of most sentences
OVER_THE_AIM = {"docs": 3}
PHRASES = re.compile(
    r"\b(none that is|none but|but for|for want of|in the place of|is no [a-z]+ that)\b"
)
README_LINES = 180
MANY_PHRASES = {"docs": 0, "docstrings": 0, "errors": 0}
# What classes and functions were called; docs/concepts.md has the words of today.
GONE = re.compile(
    r"\b(Landed|Lots|Uneven|Steady|Ledger|Asked|Absentees|Evened|Forgetting|hands_copy|hands_do"
    r"|hands_help|hear_late|come_late|odd_one|is_ghost|forget_calls|changes_so_far|what_else"
    r"|set_deaf|sit_down|leave_seats|OF_SENDER|OF_RECEIVER|UNHEARD)\b"
)
SUBJECT = re.compile(r"[a-z][a-z0-9_ ,./-]*: [a-z0-9`_]\S*( .*)?")
SUBJECTS_SINCE = "7c6899838d1654a5a1c524cbf3485348f4375794"
MOST_CHARACTERS = 72


def prose_of(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown or of a docstring: no code, tables, headings or lists."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.S | re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in paragraph.splitlines()]
        if any(re.match(r"([|#>]|\w[\w/.,_ ]*\.pyx?  )", line) for line in lines):
            continue
        flat = " ".join(re.sub(r"^([-*]|\d+\.)\s+", ". ", line) for line in lines)
        yield from re.split(r"(?<=[.!?:;])\s+", flat)


def docstrings() -> Iterator[tuple[Path, str]]:
    """Yield (file, text) of the docstrings of Python files."""
    for path in python_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and (text := ast.get_docstring(node)):
                yield path, text


def docs() -> list[tuple[Path, str]]:
    """List (file, text) of what people read."""
    found = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [(path, text_of(path)) for path in sorted(found)]


def errors() -> Iterator[tuple[Path, str]]:
    """Yield (file, text) of each string that is raised."""
    for path in python_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for part in ast.walk(node.exc):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield path, part.value


HEAD = re.compile(
    r"# [^\n]+\n\n\*(Tutorial|How-to|Reference|Explanation), (for|of) [^*]+\*", re.MULTILINE
)  # what a page is and whom it serves

TEXTS = {"docs": docs, "docstrings": docstrings, "errors": errors}


@pytest.mark.parametrize("kind", LONG_SENTENCES)
def test_sentences_are_short(kind):
    found = Counter(
        name_of(path)
        for path, text in TEXTS[kind]()
        for sentence in prose_of(text)
        if len(sentence.split()) > MOST_WORDS
    )
    assert found.total() <= LONG_SENTENCES[kind], found.most_common(8)


@pytest.mark.parametrize("kind", OVER_THE_AIM)
def test_most_sentences_are_shorter(kind):
    found = Counter(
        name_of(path)
        for path, text in TEXTS[kind]()
        for sentence in prose_of(text)
        if len(sentence.split()) > AIM_WORDS
    )
    assert found.total() <= OVER_THE_AIM[kind], found.most_common(8)


def test_pages_say_what_they_are_and_for_whom():
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert not [path.name for path in pages if not HEAD.match(text_of(path))]


def test_the_readme_is_read_in_three_minutes():
    assert len(text_of(ROOT / "README.md").splitlines()) <= README_LINES


@pytest.mark.parametrize("kind", MANY_PHRASES)
def test_the_verb_stands_near_its_object(kind):
    found = Counter(
        f"{name_of(path)}: {match[0]}"
        for path, text in TEXTS[kind]()
        for match in PHRASES.finditer(" ".join(text.split()))
    )
    assert found.total() <= MANY_PHRASES[kind], found.most_common(8)


def test_names_that_are_gone_stay_gone():
    wrong = [
        f"{name_of(path)}: {match[0]}"
        for path in package_files() for match in GONE.finditer(text_of(path))
    ]  # fmt: skip
    assert not wrong


def test_long_sentences_and_phrases_are_found():
    text = (
        "# A heading\n\nShort. "
        + "word " * 40
        + "end.\n\n| a | b |\n\n```sh\n"
        + "x " * 50
        + "\n```\n"
    )
    assert [len(one.split()) > MOST_WORDS for one in prose_of(text)].count(True) == 1
    assert PHRASES.search("give a median in the place of the sum")
    assert (PACKAGE / "errors.py") in {path for path, _ in docstrings()}


def test_commit_subjects_say_area_and_what():
    done = subprocess.run(
        ["git", "log", "--format=%s", f"{SUBJECTS_SINCE}..HEAD"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("no history here")
    wrong = [
        subject for subject in done.stdout.splitlines()
        if not SUBJECT.fullmatch(subject) or len(subject) > MOST_CHARACTERS
    ]  # fmt: skip
    assert not wrong
