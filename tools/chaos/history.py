# SPDX-License-Identifier: Apache-2.0
"""Check what the workers of one job wrote about their steps: pure.

Decides whether a history can be believed; knows neither processes nor time limits. A history is
the list of records (dictionaries) of all workers. `check` returns one sentence for each rule that
is broken:

- a worker finishes consecutive steps from 0 on: none is lost, and none comes twice
- all workers together finish every step from 0 to the last
- all that finish a step have the same parameters, bit for bit, and the same contributors
- the parameters are those of a replay in NumPy of the contributors of each tensor
- numbers of views grow, at a worker by one for each loss that the cause of its view names
- one number is one view: the same size, and the same last losses, on all
- a worker that finishes a step contributed to all its sums; who is lost contributes no more
- a sum has as many contributors as a view in which its step was under way has workers
- in a job that ends with its first loss, every worker contributes to every sum
- a source is overwritten only after its step was finished

Fields of a record: member ("RANK:PID", RANK of the start), rank, what, at (seconds). A "step" also
has step, hash, who (for each tensor its contributors, decoded from the sum itself), and, in an
elastic job, most and least (the size of the view when it began, and when it was finished). A
"view" has number, size, cause and seconds. An "error" has step, type, text and is_source_kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.chaos.gradients import Floats, digest, first_model, ordered_sum, total

Record = Mapping[str, Any]
SHOWN = 3  # broken rules of one kind that are worded
LOST = " is lost"  # once in the words for a loss, or more often


class Replay:
    """The parameters after each step, for the contributors of every step so far."""

    def __init__(self, seed: int, *, has_fractions: bool) -> None:
        """Start with the parameters before step 0."""
        self._seed = seed
        self._has_fractions = has_fractions
        self._step = 0
        self._model: list[Floats] = first_model(has_fractions=has_fractions)

    def add(self, who: Sequence[Sequence[int]]) -> str:
        """Apply the next step, with these contributors of each tensor; return the hash."""
        sums = {tuple(ranks): total(self._seed, self._step, ranks) for ranks in who}
        for place, (array, ranks) in enumerate(zip(self._model, who, strict=True)):
            is_last = self._has_fractions and place == len(who) - 1
            array -= (
                ordered_sum(self._seed, self._step, ranks)
                if is_last
                else sums[tuple(ranks)][place]
            )
        self._step += 1
        return digest(self._model)


def check(
    records: Iterable[Record], *, seed: int, ranks: int, has_fractions: bool = False,
    goes_on: bool = False,
) -> list[str]:  # fmt: skip
    """Return the rules that a history breaks, as sentences.

    ranks: workers at the start. has_fractions: the model has the tensor whose sum depends on the
    order. goes_on: workers may be lost; otherwise all contribute to every sum.
    """
    ordered = sorted(records, key=lambda record: record["at"])
    steps = [record for record in ordered if record["what"] == "step"]
    broken = [
        _consecutive(steps),
        _complete(steps),
        _same(steps),
        _views(ordered),
        _contributors(steps),
        [] if goes_on else _everybody(steps, ranks),
        _sources(ordered),
    ]
    replayed = [] if broken[0] or broken[1] or broken[2] else _replayed(
        steps, Replay(seed, has_fractions=has_fractions)
    )  # fmt: skip
    return [line for lines in (*broken, replayed) for line in lines[:SHOWN]]


def _consecutive(records: Sequence[Record]) -> list[str]:
    broken, wanted = [], dict[str, int]()
    for record in records:
        member = record["member"]
        step, expected = record["step"], wanted.get(member, 0)
        if step != expected:
            how = "twice" if step < expected else "too early"
            broken.append(f"worker {member} finished step {step} {how}: step {expected} was next")
        wanted[member] = max(step, expected - 1) + 1
    return broken


def _complete(steps: Sequence[Record]) -> list[str]:
    found = {record["step"] for record in steps}
    lost = sorted(set(range(max(found, default=-1) + 1)) - found)
    return [f"no worker finished step {step}" for step in lost]


def _by_step(steps: Sequence[Record]) -> dict[int, list[Record]]:
    found = defaultdict(list)
    for record in steps:
        found[record["step"]].append(record)
    return dict(sorted(found.items()))


def _same(steps: Sequence[Record]) -> list[str]:
    broken = []
    for step, records in _by_step(steps).items():
        first = records[0]
        for other in records[1:]:
            for what in ("hash", "who"):
                if other.get(what) != first.get(what):
                    broken.append(
                        f"step {step}: worker {other['member']} has {what} {other.get(what)}, "
                        f"and worker {first['member']} has {first.get(what)}"
                    )
    return broken


def _views(records: Sequence[Record]) -> list[str]:
    broken, last, views = [], dict[str, int](), dict[int, tuple[Any, Record]]()
    for record in records:
        if record["what"] != "view":
            continue
        number, member = record["number"], record["member"]
        passed = number - last.get(member, 1)
        if not 0 < passed <= record["cause"].count(LOST):
            broken.append(f"worker {member} came to view {number} after {last.get(member, 1)}")
        last[member] = number
        mine = record["size"], record["cause"]
        seen, by = views.setdefault(number, (mine, record))
        causes = sorted((mine[1], seen[1]), key=len)
        if seen[0] != mine[0] or not causes[1].endswith(causes[0]):
            broken.append(
                f"view {number} is {seen} on worker {by['member']}, and {mine} on worker {member}"
            )
    return broken


def _contributors(steps: Sequence[Record]) -> list[str]:
    broken, last = [], dict[int, set[int]]()
    for step, records in _by_step(steps).items():
        for record in records:
            member, sums = record["member"], record["who"]
            if not all(record["rank"] in who for who in sums):
                broken.append(f"worker {member} finished step {step} without contributing")
            least, most = record.get("least"), record.get("most")
            if least and not all(least <= len(who) <= most for who in sums):
                broken.append(
                    f"step {step}: worker {member} has sums of {sums} in views of {most} and "
                    f"{least} workers"
                )
        for place, who in enumerate(records[0]["who"]):
            if not set(who) <= last.get(place, set(who)):
                broken.append(f"step {step}: {who} contributed to tensor {place}, after the sum "
                              f"of {sorted(last[place])} alone")  # fmt: skip
            last[place] = set(who)
    return broken


def _everybody(steps: Sequence[Record], ranks: int) -> list[str]:
    return [
        f"worker {record['member']} got sums of {record['who']} in step {record['step']}, and no "
        "error"
        for record in steps
        if any(who != list(range(ranks)) for who in record["who"])
    ]  # fmt: skip


def _sources(records: Sequence[Record]) -> list[str]:
    return [
        f"worker {record['member']}: the source of step {record['step']} was overwritten although "
        "the step failed"
        for record in records
        if record["what"] == "error" and record.get("is_source_kept") is False
    ]


def _replayed(steps: Sequence[Record], replay: Replay) -> list[str]:
    for step, records in _by_step(steps).items():
        record = records[0]
        wanted = replay.add(record["who"])
        if record["hash"] != wanted:
            return [
                f"step {step}: parameters differ from the replay (hash {record['hash']}, wanted "
                f"{wanted})"
            ]
    return []
