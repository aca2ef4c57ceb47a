# SPDX-License-Identifier: Apache-2.0
"""The command: run targets, print a table, save what they did not take well."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from .driver import Outcome, fuzz, is_sanitized, run_one
from .targets import TARGETS

FOLDER = Path("out/fuzz")


class _Unwritten(logging.Handler):
    """Format what is logged, and write nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


def main() -> int:
    """Return 1 if there are findings."""
    logging.basicConfig(handlers=[_Unwritten()])
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS),
        help="default: all; under a sanitizer, those that reach native code",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (default 60)")
    parser.add_argument(
        "--rounds", type=int, default=0,
        help="a number of inputs instead, the same in each run; a round takes a second or two",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="chooses other inputs (default 1)")
    parser.add_argument("--repeat", type=Path, help="a saved input; with one --target")
    given = parser.parse_args()
    names = given.target or [
        name for name, target in TARGETS.items() if target.is_native or not is_sanitized()
    ]
    if given.repeat is not None:
        return repeat(names, given.repeat)
    n_findings = 0
    for name in names:
        target = TARGETS[name]
        inputs = given.rounds * target.per_round
        seconds = 0.0 if inputs else given.seconds / len(names)
        outcome = fuzz(target, seed=given.seed, inputs=inputs, seconds=seconds)
        n_findings += len(outcome.findings)
        show(outcome)
    return 1 if n_findings else 0


def repeat(names: list[str], path: Path) -> int:
    """Take a saved input in this process, where a debugger can look."""
    if len(names) != 1:
        sys.exit("--repeat takes one --target")
    target = TARGETS[names[0]]
    target.open()
    run_one(target, path.read_bytes())
    target.close()
    print(f"{path}: taken, or refused with an error of fastps")
    return 0


def show(outcome: Outcome) -> None:
    """Print a line of the table, and each finding with the command that repeats it."""
    target, n = outcome.target, sum(one.times for one in outcome.findings.values())
    rate = outcome.inputs / max(outcome.seconds, 1e-9)
    valid = 100 * outcome.n_valid / max(outcome.inputs, 1)
    print(f"{target.name:<14}{outcome.inputs:>10} inputs{rate:>9.0f}/s{valid:>6.1f}% valid"
          f"{n:>8} findings", flush=True)  # fmt: skip
    if not outcome.findings:
        return
    paths = outcome.save(FOLDER, target.seeds())
    for path, (where, one) in zip(paths, outcome.findings.items(), strict=True):
        print(f"  {where}, {one.times} times:\n{one.what}")
        print(f"  python -m tests.fuzz --target {target.name} --repeat {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
