# SPDX-License-Identifier: Apache-2.0
r"""Compare the speed of two checkouts of fastps: a commit before a change, and one after it.

    git worktree add ../before COMMIT && make -C ../before build
    python tools/bench/paired.py ../before . --rounds 7

Or of two values of a setting:

    python tools/bench/paired.py . . --layouts tcp --env-before FASTPS_PAYLOAD_CHECK=off \
        --env-after FASTPS_PAYLOAD_CHECK=on

Both are compiled and run with this Python. Two workers, in shared memory and (apart) with two
servers over Unix sockets or (tcp) TCP, do the same operations in one checkout and then in the
other, and change the order in every round, because machines are noisy. Columns: median over rounds
of the median time of an operation, in microseconds, before and after; median of the ratios within
a round, and their range. A ratio above 1 says that the second checkout is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from fastps.config.closed_pipe import ends_quietly

PEER = Path(__file__).with_name("_paired_peer.py")
LAUNCH = "import sys; from fastps.launch.run import main; sys.exit(main())"
LAYOUTS = {"together": ["-s", "0"], "apart": ["-s", "2", "--env", "FASTPS_SHARED_MEMORY=0"]}
LAYOUTS["tcp"] = [*LAYOUTS["apart"], "--env", "FASTPS_UNIX_SOCKETS=0"]


def measure(tree: Path, layout: str, kinds: str, settings: list[str]) -> dict[str, float]:
    """Run the workers of one checkout; return microseconds by operation."""
    given = [word for setting in settings for word in ("--env", setting)]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "times.json"
        subprocess.run(
            [sys.executable, "-c", LAUNCH, "-np", "2", *LAYOUTS[layout], *given,
             sys.executable, str(PEER), str(found), kinds],
            cwd=folder, env=dict(os.environ, PYTHONPATH=str(tree)), check=True, timeout=300,
        )  # fmt: skip
        times: dict[str, float] = json.loads(found.read_text(encoding="utf-8"))
    return {f"{layout}: {name}": value for name, value in times.items()}


@ends_quietly
def main() -> None:
    """Measure, and print one line for each operation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="checkout, compiled, to compare with")
    parser.add_argument("after", type=Path, help="checkout, compiled, that was changed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", default="together,apart", help=f"of {','.join(LAYOUTS)}")
    for which in ("before", "after"):
        parser.add_argument(f"--env-{which}", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--kinds", default="all", help="push_pull, group, step or all")
    options = parser.parse_args()
    trees = options.before.resolve(), options.after.resolve()
    settings = options.env_before, options.env_after
    rounds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for turn in range(options.rounds):
        for layout in options.layouts.split(","):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            both = {
                which: measure(trees[which], layout, options.kinds, settings[which])
                for which in order
            }
            for name, before in both[0].items():
                rounds[name].append((before, both[1][name]))
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(f"{'operation':44} {'before':>10} {'after':>10} {'ratio':>6}  range")
    for name, pairs in rounds.items():
        ratios = sorted(after / before for before, after in pairs)
        before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(
            f"{name:44} {before:10.1f} {after:10.1f} {statistics.median(ratios):6.3f}  "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
