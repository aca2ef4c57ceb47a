# SPDX-License-Identifier: Apache-2.0
"""Which workers contributed to which results of an elastic job, and how to make them again.

A line of the log is a view: its workers, and the number of the last result of each name that was
committed in it. What has a higher number was made in a later view. Another job can make the same
results of the same contributors: the same bits. It starts with the same workers, commits no more
in a view than the log says, and then loses the worker that the next view lacks. Decides nothing
else. Pure, except the two functions that read and write the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fastps.errors import ConfigError
from fastps.files import open_folder, read_file, text_of

NOT_REPLAYED = (
    "the log of FASTPS_REPLAY does not lose it here, so results would differ from here on: "
    "start the replay again"
)
ALL_LEFT = "all workers have left"  # how a view ends that no other one of its program follows


class ViewRecord(msgspec.Struct, frozen=True):
    """One view: the ranks that its workers began with, what was committed last, and its end.

    has_boundary: workers joined or left at its end, and results are counted anew from there.
    """

    view: int
    workers: tuple[int, ...]
    committed: dict[str, int]  # by commits.key_of() a name; that of an operation ends with #
    end: str = ""
    has_boundary: bool = False


class Replay:
    """What a job that makes another again may commit, and which workers it loses when."""

    def __init__(self, records: Sequence[ViewRecord]) -> None:
        self._records = _merged(records)
        self._last: dict[str, int] = {}  # that was committed in the present view

    def __bool__(self) -> bool:
        """Whether a loss is still to come; after the last one, all may be committed."""
        return len(self._records) > 1

    def allows(self, key: str, number: int) -> bool:
        """Return whether a result was committed in the present view, or may be."""
        return not self or number <= self._records[0].committed.get(key, 0)

    def commit(self, key: str, number: int) -> None:
        """Take what was committed."""
        self._last[key] = number

    @property
    def next_loss(self) -> int | None:
        """The worker that is lost now, by the rank that it began with; None: nobody is."""
        if not self:
            return None
        present, following = self._records[:2]
        lost = set(present.workers) - set(following.workers)
        return min(lost) if self._is_over else None

    @property
    def _is_over(self) -> bool:
        """Whether all is committed that the present view of the log committed."""
        present = self._records[0].committed
        return all(self._last.get(key, 0) >= last for key, last in present.items())

    def next_view(self, workers: Sequence[int]) -> bool:
        """Go on to the view of these workers; False: the log goes on otherwise."""
        if self._records:
            following = self._records[1].workers if self else workers
            if not self._is_over or set(workers) != set(following):
                return False
            del self._records[0]
        self._last = {}
        return True


def _merged(records: Sequence[ViewRecord]) -> list[ViewRecord]:
    """Merge views of the same workers, between which servers were lost."""
    merged: list[ViewRecord] = []
    for record in records:
        if merged and merged[-1].workers == record.workers:
            last = dict(merged[-1].committed)
            counted = Counter({k: n for k, n in last.items() if k.endswith("#")})
            counted.update({k: n for k, n in record.committed.items() if k.endswith("#")})
            merged[-1] = msgspec.structs.replace(
                record, committed=last | record.committed | dict(counted)
            )
        else:
            merged.append(record)
    return merged


def views_before(records: Sequence[ViewRecord]) -> int:
    """Return how many views have ended before the first one of the present program."""
    return max((one.view for one in records if one.end == ALL_LEFT), default=0)


def write_records(path: str, records: Sequence[ViewRecord]) -> None:
    """Write the views of a job so far, in place of an older log; raises OSError."""
    place = Path(path)
    with open_folder(place.parent) as folder, folder.replace(place.name) as file:
        file.writelines(msgspec.json.encode(record) + b"\n" for record in records)


def read_records(path: str) -> list[ViewRecord]:
    """Read a log; ConfigError for what is none."""
    try:
        with read_file(Path(path)) as file:
            lines = file.readlines()
        found = [msgspec.json.decode(line, type=ViewRecord) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"FASTPS_REPLAY={path} cannot be read: "
            f"{text_of(error) if isinstance(error, OSError) else error}; give the file that a job "
            "wrote with FASTPS_VIEW_LOG"
        ) from error
    if not found or [one.view for one in found] != list(range(1, len(found) + 1)):
        raise ConfigError(
            f"FASTPS_REPLAY={path} does not hold the views of one job in their order; give the "
            "file that one job wrote with FASTPS_VIEW_LOG"
        )
    return found
