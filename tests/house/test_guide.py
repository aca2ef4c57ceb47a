# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md has every error class and every message of the launcher."""

from __future__ import annotations

import ast
import re

import pytest
from house_source import PACKAGE, ROOT, name_of, tree_of

from fastps import errors
from fastps.launch.cause import _GUIDES, Cause, report

PAGE = (ROOT / errors.GUIDE).read_text()
ENTRIES = [text.split("…") for text in re.findall(r"^\*\*`(.*)`\*\*$", PAGE, re.M)]
# Calls whose text a user sees. Wrong arguments (error(), ValueError) are one section.
SHOWN = {"report", "report_once", "Cause", "StartError", "ConfigError", "FastPSError"}
MORE = {"…; ……", "… …; …", "… …"}  # made of other texts


PART = object()  # a process of the job


class Shown:
    """A screen that keeps what is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, text: str, *, is_alarm: bool = False) -> None:
        self.lines.append(text)


def text_of(node: ast.expr) -> str:
    """Return a string of the code, "…" for what is filled in; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
        return "".join(map(str, parts))
    return ""


def messages() -> list[tuple[str, str]]:
    """List (place, text) of what the launcher says."""
    found = []
    for path in sorted((PACKAGE / "launch").glob("*.py")):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if ast.unparse(node.func).rpartition(".")[2] in SHOWN:
                text = text_of(node.args[0])
                if text and text not in MORE:
                    found.append((f"{name_of(path)}:{node.lineno}", text))
    return found


def anchors() -> set[str]:
    """Return the anchors of the page's headings, as Markdown makes them."""
    heads = re.findall(r"^##+ (.*)$", PAGE, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("kind", errors.every_error(), ids=lambda kind: kind.__name__)
def test_every_error_class_has_a_section(kind):
    assert re.search(rf"^### {kind.__name__}\n\n[\w`]", PAGE, re.M)
    place, _, anchor = errors.guide_of(kind.__name__).partition("#")
    assert (ROOT / place).is_file()
    assert anchor in anchors()


def test_all_errors_are_listed():
    defined = {
        one for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, Exception)
    }  # fmt: skip
    assert set(errors.every_error()) == defined


def test_every_message_of_the_launcher_has_an_entry():
    found = messages()
    assert len(found) > 30
    missing = [
        f"{place}: {text}"
        for place, text in found
        if not any(all(part in text for part in parts) for parts in ENTRIES)
    ]
    assert not missing, "\n".join(missing)


def test_the_sections_that_the_launcher_names_exist():
    assert {*_GUIDES.values(), "messages-of-fastps-run"} - {""} <= anchors()


@pytest.mark.parametrize(
    ("text", "anchor"),
    [
        ("worker 1 failed. Its last output: fastps.errors.AuthError: refused", "#autherror"),
        ("TransportTimeout: no answer", "#transporttimeout"),
        ("ValueError: of the user", ""),
        ("NotOurError: PeerLostErrors", ""),
    ],
)
def test_the_guide_to_a_text(text, anchor):
    assert errors.guide_of(text) == (anchor and errors.GUIDE + anchor)


@pytest.mark.parametrize(
    ("cause", "anchor"),
    [
        (Cause("worker 1 is lost: it was silent for longer than its lease of 1 s", 1),
         "#peerlosterror"),
        (Cause("worker 1 is lost: its program ended with ValueError: no", 1, PART), ""),
        (Cause("worker 0 ended with exit code 1", 1, PART, words=". It said: AuthError: x"),
         "#autherror"),
        (Cause("worker 0 ended with exit code 1", 1, PART, words=". It said: KeyError: 1"),
         ""),
        (Cause("worker 0 was killed by SIGKILL: the kernel had no memory left in its control "
               "group (OOM killer)", 137, PART), "#it-stops"),
        (Cause("worker 0 (pid 7) was killed by SIGKILL", 137, PART), "#it-stops"),
        (Cause("the job did not start within 5 s: 1 of 2 workers joined", 1),
         "#it-does-not-start"),
        (Cause("the job did not end within --timeout 5 seconds", 124), ""),
        (Cause("interrupted by SIGINT", 130), ""),
        (Cause("no answer from b within 5 s, so nothing was started", 1),
         "#messages-of-fastps-run"),
    ],
)  # fmt: skip
def test_the_last_line_of_the_launcher_names_the_section(cause, anchor):
    shown = Shown()
    report(shown, cause, output_dir=None)
    (line,) = shown.lines
    end = f"; see {errors.GUIDE}{anchor}"
    assert line.endswith(end) if anchor else errors.GUIDE not in line
