# SPDX-License-Identifier: Apache-2.0
"""Check what the workers of one job wrote about their steps: pure.

Decides whether a history can be believed; knows neither processes nor time limits. A history is
the list of records (dictionaries) of all workers. `check` returns one sentence for each rule that
is broken:

- a worker finishes consecutive steps: none is lost, and none comes twice. Its first step is 0, or
  the one that its record "joined" names ("from"), for workers that join a running job
- all workers together finish every step from 0 to the last
- all that finish a step have the same parameters, bit for bit, and the same contributors
- the parameters are those of a replay in NumPy of the log of contributors
- a step is finished in one epoch, epochs never decrease, and one epoch has one view
- a contributor belongs to the view, and a worker that finishes a step contributed to it
- in a job that ends with its first loss, every worker contributes to every step
- a source is overwritten only after its step was finished

Fields of a record: member ("RANK:PID", one incarnation), rank, what, at (seconds). A "step" also
has step, hash, who (contributors, decoded from the sum itself), order (of contributors, as a log
of the library has it, or null), epoch and view (a list of ranks; both may be null). An "error" has
step, type, text and is_source_kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.chaos.gradients import Floats, digest, first_model, ordered_sum, total

Record = Mapping[str, Any]
SHOWN = 3  # broken rules of one kind that are worded


class Replay:
    """The parameters after each step, for the contributors of every step so far."""

    def __init__(self, seed: int, *, has_fractions: bool) -> None:
        """Start with the parameters before step 0."""
        self._seed = seed
        self._has_fractions = has_fractions
        self._step = 0
        self._model: list[Floats] = first_model(has_fractions=has_fractions)

    def add(self, ranks: Sequence[int]) -> str:
        """Apply the next step of these contributors, in this order; return the hash."""
        sums = total(self._seed, self._step, ranks)
        if self._has_fractions:
            sums.append(ordered_sum(self._seed, self._step, ranks))
        for array, change in zip(self._model, sums, strict=True):
            array -= change
        self._step += 1
        return digest(self._model)


def check(
    records: Iterable[Record], *, seed: int, ranks: int, has_fractions: bool = False,
    goes_on: bool = False,
) -> list[str]:  # fmt: skip
    """Return the rules that a history breaks, as sentences.

    ranks: workers at the start. has_fractions: the model has the tensor whose sum depends on the
    order. goes_on: workers may be lost or join; otherwise all contribute to every step.
    """
    ordered = sorted(records, key=lambda record: record["at"])
    steps = [record for record in ordered if record["what"] == "step"]
    broken = [
        _consecutive(ordered),
        _complete(steps),
        _same(steps),
        _epochs(steps),
        _views(steps),
        [] if goes_on else _everybody(steps, ranks),
        _sources(ordered),
    ]
    replayed = [] if broken[0] or broken[1] or broken[2] else _replayed(
        steps, Replay(seed, has_fractions=has_fractions)
    )  # fmt: skip
    return [line for lines in (*broken, replayed) for line in lines[:SHOWN]]


def _consecutive(records: Sequence[Record]) -> list[str]:
    broken, wanted = [], {}
    for record in records:
        member = record["member"]
        if record["what"] == "joined":
            wanted[member] = record.get("from", 0)
        if record["what"] != "step":
            continue
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
            for what in ("hash", "who", "order"):
                if other.get(what) != first.get(what):
                    broken.append(
                        f"step {step}: worker {other['member']} has {what} {other.get(what)}, "
                        f"and worker {first['member']} has {first.get(what)}"
                    )
    return broken


def _epochs(steps: Sequence[Record]) -> list[str]:
    broken, last, highest = [], dict[str, int](), -1
    for record in steps:
        epoch, member = record.get("epoch"), record["member"]
        if epoch is None:
            continue
        if epoch < last.get(member, epoch):
            broken.append(
                f"worker {member} went back from epoch {last[member]} to {epoch} in step "
                f"{record['step']}"
            )
        last[member] = epoch
    for step, records in _by_step(steps).items():
        found = sorted({one["epoch"] for one in records if one.get("epoch") is not None})
        if len(found) > 1:
            broken.append(f"step {step} was finished in the epochs {found}")
        if found and found[0] < highest:
            broken.append(f"step {step} was finished in epoch {found[0]}, after {highest}")
        highest = max(highest, *found) if found else highest
    return broken


def _views(steps: Sequence[Record]) -> list[str]:
    broken, views = [], dict[int, tuple[Any, Record]]()
    for record in steps:
        epoch, view, who = record.get("epoch"), record.get("view"), record["who"]
        if epoch is not None:
            seen, by = views.setdefault(epoch, (view, record))
            if seen != view:
                broken.append(
                    f"epoch {epoch} has two views: {seen} of worker {by['member']}, and {view} of "
                    f"worker {record['member']}"
                )
        if view is not None and not set(who) <= set(view):
            broken.append(
                f"step {record['step']}: contributors {who} are not all in the view {view}"
            )
        if record["rank"] not in who:
            broken.append(
                f"worker {record['member']} finished step {record['step']} without contributing"
            )
        if record.get("order") is not None and sorted(record["order"]) != sorted(who):
            broken.append(
                f"step {record['step']}: the log names {record['order']}, the sum has {who}"
            )
    return broken


def _everybody(steps: Sequence[Record], ranks: int) -> list[str]:
    return [
        f"worker {record['member']} got a sum of {record['who']} in step {record['step']}, and no "
        "error"
        for record in steps if record["who"] != list(range(ranks))
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
        wanted = replay.add(record.get("order") or record["who"])
        if record["hash"] != wanted:
            return [
                f"step {step}: parameters differ from the replay (hash {record['hash']}, wanted "
                f"{wanted})"
            ]
    return []
