# SPDX-License-Identifier: Apache-2.0
"""Check what the workers of a job wrote that they come to and leave. Pure.

`check` returns a sentence for each rule that is broken:

- every step from 0 to the last was finished by some worker, and consecutive ones by each worker
- all that finish a step have the same weights, bit for bit, and the same contributors
- the weights are those of a replay of the contributors in NumPy, each of which counts once
- a worker that finishes a step contributed to it; a step has as many contributors as a view in
  which it was under way has workers
- a worker that was not killed has no error; it left, or ended after the last step
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from tools.churn.program import SIZE, digest, integers

Record = Mapping[str, Any]
SHOWN = 5  # broken rules that are worded


def check(records: Iterable[Record], *, seed: int, killed: Collection[int]) -> list[str]:
    """Return the rules that a history breaks; killed: numbers of processes."""
    by_step: dict[int, list[Record]] = defaultdict(list)
    of: dict[int, list[Record]] = defaultdict(list)
    ends: dict[int, int] = {}  # by worker: the step that would come next, -1 if it left
    broken: list[str] = []
    for record in records:
        if record["what"] == "step":
            by_step[record["step"]].append(record)
            of[record["number"]].append(record)
        elif record["what"] in ("left", "end"):
            ends[record["number"]] = record.get("step", -1)
        elif record["what"] == "error" and record["number"] not in killed:
            broken.append(f"worker {record['number']}: {record['type']}: {record['text']}")
    if not by_step:
        return [*broken, "no step was finished"]
    last = max(by_step)
    if missing := [step for step in range(last) if step not in by_step]:
        return [*broken, f"nobody finished steps {missing[:SHOWN]}"]
    weights = np.zeros(SIZE, np.int64)
    for step in range(last + 1):
        found = by_step[step]
        first = found[0]
        for number in first["who"]:
            weights -= integers(seed, step, number)
        right = digest(weights)
        for one in found:
            broken += _wrong(one, first, right)
    for number, steps in of.items():
        numbers = [one["step"] for one in steps]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            broken.append(f"worker {number}: steps are not consecutive: {numbers[:SHOWN]}...")
        if number not in killed and ends.get(number, 0) not in (-1, last + 1):
            broken.append(f"worker {number} neither left nor ended after step {last}")
    return broken


def _wrong(one: Record, first: Record, right: str) -> list[str]:
    """Return what is wrong with a step of one worker; first: the same step of another."""
    me = f"worker {one['number']}, step {one['step']}"
    if one["who"] != first["who"]:
        return [f"{me}: contributors {one['who']}, and worker {first['number']} {first['who']}"]
    if one["hash"] != right:
        return [f"{me}: weights {one['hash']}, and a replay has {right}"]
    if one["most"] != 1:
        return [f"{me}: somebody contributed {one['most']} times"]
    if one["number"] not in one["who"]:
        return [f"{me}: is not among the contributors {one['who']}"]
    if len(one["who"]) not in one["sizes"]:
        return [f"{me}: {len(one['who'])} contributors in views of {one['sizes']} workers"]
    return []
