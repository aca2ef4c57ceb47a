# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/architecture.md as SVG: python tools/pictures.py

rooms.svg shows the rooms by floor, and what imports what: read from the imports themselves.
gradient.svg and threads.svg are drawn from the lists below. The same input makes the same bytes,
so tests/house notices a picture that is out of date.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "house"))

from test_layers import FLOORS, file_imports, room_of  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
WIDTH, BOX_HEIGHT, ROW_HEIGHT, MARGIN = 1000, 34, 74, 20
STYLE = (
    "<style>text{font:13px sans-serif;fill:#222}.s{font-size:11px;fill:#555}"
    "rect{fill:#e6f2f1;stroke:#00796b;rx:5}line{stroke:#9e9e9e;stroke-width:.7}"
    ".a{stroke:#00796b;stroke-width:1.5;marker-end:url(#m)}.b{fill:#fff8e1;stroke:#b28704}"
    ".bg{fill:#fff;stroke:none}</style>"
    '<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#00796b"/></marker></defs>'
)
FACES = "torch, jax, keras, ..."  # modules that only re-export: one box

# (where, what), in the order of a gradient's way
GRADIENT = [
    [
        ("backward()", "a hook: the gradient is ready"),
        ("frameworks/", "buckets; names a tensor"),
        ("session/", "servers, or shared memory"),
        ("worker/_engine", "one record per partition"),
    ],
    [
        ("transport/", "PUSH, most urgent first"),
        ("server/_rounds", "lends the buffer it lands in"),
        ("reduce/", "adds in rank order, divides"),
        ("transport/", "RESULT to every worker"),
    ],
    [
        ("worker/_remote", "lands in the output tensor"),
        ("_core", "completion wakes the waiter"),
        ("worker/handle", "scale; result or error"),
        ("step()", "the optimizer"),
    ],
]
HOLDS_THE_GIL = {
    "backward()", "frameworks/", "session/", "worker/_engine", "worker/handle", "step()"
}  # fmt: skip
# (thread, how many, what it enters, whether it takes the GIL)
THREADS = [
    (
        "the program's own",
        "the user's",
        "session, ops: start and wait",
        "they wait without the GIL",
    ),
    ("io", "FASTPS_IO_THREADS", "transport/, and callbacks of its owners", "never the GIL"),
    ("local", "1 per rank", "worker/: tasks in shared memory", "never the GIL"),
    ("copiers", "FASTPS_COPY_THREADS", "_core: pieces of long copies and sums", "never the GIL"),
    (
        "codec, rules",
        "FASTPS_CODEC_THREADS",
        "worker/, server/: encode, robust rules",
        "never the GIL",
    ),
    ("windows", "1 where there are any", "graph/: one-sided actions", "never the GIL"),
    ("pulse", "1 per member", "_core: heartbeats to and from the scheduler", "never the GIL"),
    ("beats", "1 per job", "_core: heartbeats of the scheduler", "never the GIL"),
    ("fastps:control", "1 per member", "control/: answers, events, watches", "Python"),
    ("fastps:accept", "1 where a port is open", "transport/: handshakes", "Python"),
    ("fastps:scheduler", "1 per job", "control/: membership, one event loop", "Python"),
    ("checkpoint", "2 while one is saved", "checkpoint/: words; a file", "Python"),
]


def box(x: float, y: float, width: float, words: Iterable[str], kind: str = "") -> str:
    """Return a box with one or two lines of words in its middle."""
    lines = list(words)
    found = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX_HEIGHT}"/>'
    for place, line in enumerate(lines):
        at = y + BOX_HEIGHT / 2 + 4 + (place - (len(lines) - 1) / 2) * 14
        small = ' class="s"' if place else ""
        found += (
            f'<text{small} x="{x + width / 2:g}" y="{at:g}" text-anchor="middle">'
            f"{escape(line)}</text>"
        )
    return found


def line(start: tuple[float, float], end: tuple[float, float], kind: str = "") -> str:
    """Return a line between two points."""
    return (
        f'<line class="{kind}" x1="{start[0]:g}" y1="{start[1]:g}" '
        f'x2="{end[0]:g}" y2="{end[1]:g}"/>'
    )


def picture(height: float, parts: Iterable[str]) -> str:
    """Return a whole SVG file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}">'
    return "\n".join([head, STYLE, f'<rect class="bg" width="{WIDTH}" height="{height:g}"/>',
                      *parts, "</svg>\n"])  # fmt: skip


def shown_as(room: str) -> str:
    """Return the name of a room as the picture has it; the frameworks' faces are one box."""
    if FLOORS[room] == FLOORS["fastps.torch"]:
        return FACES
    return room.removeprefix("fastps.") if room != "fastps" else "fastps (NumPy)"


def reached(room: str, below: dict[str, set[str]]) -> set[str]:
    """Return the rooms that a room imports, and those that these import."""
    return below[room].union(*(reached(other, below) for other in below[room]))


def rooms() -> str:
    """Draw the rooms by floor, and lines to those that each imports, unless by way of another."""
    floors: dict[int, list[str]] = {}
    for room, floor in FLOORS.items():
        names = floors.setdefault(floor, [])
        if shown_as(room) not in names:
            names.append(shown_as(room))
    top, places, boxes = max(floors), {}, []
    for floor, names in floors.items():
        y = MARGIN + (top - floor) * ROW_HEIGHT
        boxes.append(f'<text class="s" x="6" y="{y + 22}">{floor}</text>')
        step = (WIDTH - 2 * MARGIN - 20) / len(names)
        for place, name in enumerate(names):
            width = min(step - 16, 150)
            x = MARGIN + 20 + place * step + (step - width) / 2
            places[name] = (x + width / 2, y)
            boxes.append(box(x, y, width, [name]))
    below: dict[str, set[str]] = {name: set() for name in places}
    for module, others in file_imports().items():
        mine = shown_as(room_of(module))
        below[mine] |= {shown_as(room_of(other)) for other in others} - {mine}
    lines = [
        line((places[a][0], places[a][1] + BOX_HEIGHT), places[b])
        for a in below
        for b in sorted(below[a] - {c for other in below[a] for c in reached(other, below)})
    ]
    return picture(MARGIN * 2 + top * ROW_HEIGHT + BOX_HEIGHT, [*lines, *boxes])


def gradient() -> str:
    """Draw the path of a gradient; boxes in yellow hold the GIL."""
    parts, width, gap = [], 205, 40
    for row, steps in enumerate(GRADIENT):
        y = MARGIN + row * ROW_HEIGHT
        for place, (where, what) in enumerate(steps):
            x = MARGIN + place * (width + gap)
            kind = "b" if where in HOLDS_THE_GIL else ""
            parts.append(box(x, y, width, [where, what], kind))
            middle = y + BOX_HEIGHT / 2
            if place:
                parts.append(line((x - gap, middle), (x, middle), "a"))
            elif row:
                from_x = MARGIN + (len(steps) - 1) * (width + gap) + width / 2
                bend = y - (ROW_HEIGHT - BOX_HEIGHT) / 2
                above = y - ROW_HEIGHT + BOX_HEIGHT
                parts += [
                    line((from_x, above), (from_x, bend)),
                    line((from_x, bend), (x + width / 2, bend)),
                    line((x + width / 2, bend), (x + width / 2, y), "a"),
                ]
    return picture(MARGIN * 2 + (len(GRADIENT) - 1) * ROW_HEIGHT + BOX_HEIGHT, parts)


def threads() -> str:
    """Draw the threads of a job: how many there are, what they enter, what they never take."""
    parts, step = [], 46
    for row, (name, count, enters, never) in enumerate(THREADS):
        y = MARGIN + row * step
        parts.append(box(MARGIN, y, 200, [name, count], "b" if "user" in count else ""))
        parts.append(line((MARGIN + 200, y + 17), (MARGIN + 250, y + 17), "a"))
        parts.append(box(MARGIN + 250, y, 340, [enters]))
        parts.append(f'<text class="s" x="{MARGIN + 610}" y="{y + 21}">{escape(never)}</text>')
    return picture(MARGIN * 2 + len(THREADS) * step - 12, parts)


PICTURES = {"rooms.svg": rooms, "gradient.svg": gradient, "threads.svg": threads}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FIGURES / name).write_text(draw(), encoding="utf-8")
        sys.stdout.write(f"{FIGURES / name}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head -1` ends it quietly
    main()
