# SPDX-License-Identifier: Apache-2.0
"""Tables of what happened: by event and layout, and the findings in full. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # of the log: event, name, verdict, seconds, load
HEADS = (
    "event",
    "layout",
    "n",
    "well",
    "failed",
    "p50 s",
    "p99 s",
    "blamed",
    "wrong",
    "left",
    "other",
)
QUICK = ("kill", "segv", "term")  # ends that others notice at once
LAST = ("wrong blame", "wrong report", "wrong type")


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of all lies, a value that was seen."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def table(rows: Iterable[Row]) -> str:
    """Return a table of counts, times until an error or the next step, blame and leftovers."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["name"], row["event"]["layout"]].append(row)
    lines = [HEADS]
    for (name, layout), found in sorted(groups.items()):
        verdicts = [one["verdict"] for one in found]
        times = [value for one in verdicts for value in one["detections"]]
        kinds = [finding["kind"] for one in verdicts for finding in one["findings"]]
        well = sum(one["outcome"] == "ended well" for one in verdicts)
        lines.append((
            name, layout, str(len(found)), str(well), str(len(found) - well),
            f"{quantile(times, 0.5):.2f}" if times else "-",
            f"{quantile(times, 0.99):.2f}" if times else "-",
            str(sum(one["blames"] for one in verdicts)),
            str(sum(kind in LAST for kind in kinds)), str(kinds.count("left behind")),
            str(sum(kind not in (*LAST, "left behind") for kind in kinds)),
        ))  # fmt: skip
    return _aligned(lines)


def stalls(rows: Iterable[Row]) -> str:
    """Return a table of how long survivors of elastic jobs stood still; empty if none did.

    stall: from the event to the first step in the next view; news: to the word of the loss.
    """
    groups = defaultdict[tuple[str, str], list[Row]](list)
    for row in rows:
        if row["verdict"].get("news"):
            event = row["event"]
            kind = "cut or stopped" if event["kind"] not in QUICK else "killed"
            groups[f"{event['role']} {kind}", event["layout"]].append(row)
            groups[f"all {kind}", "all"].append(row)
    lines = [("lost", "layout", "jobs", "stall p50 s", "p99 s", "news p50 s", "p99 s")]
    for (name, layout), found in sorted(groups.items()):
        values = [
            [value for row in found for value in row["verdict"][what]]
            for what in ("detections", "news")
        ]
        cells = (f"{quantile(one, q):.3f}" if one else "-" for one in values for q in (0.5, 0.99))
        lines.append((name, layout, str(len(found)), *cells))
    return _aligned(lines) if len(lines) > 1 else ""


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table: the first two columns to the left."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def findings(rows: Iterable[Row]) -> str:
    """Return all findings, each with the event that shows it."""
    lines = []
    for row in rows:
        for finding in row["verdict"]["findings"]:
            load = row["load"]
            lines.append(
                f"{finding['kind']}: {row['words']}\n    {finding['text']}\n    load "
                f"{load.get('share', 0):.1f}, driver late {load.get('driver_late_s', 0):.2f} s"
            )
    return "\n".join(lines)
