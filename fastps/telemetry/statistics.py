# SPDX-License-Identifier: Apache-2.0
"""The one table of statistics: which numbers a process counts, and what each means.

docs/statistics.md and the help and the types of /metrics come from it; tests compare it with the
fields of the native counters. Must never know how a number is counted. Pure; no threads.
`python -m fastps.telemetry.statistics` prints docs/statistics.md.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

OF_SERVER = "server_"  # before the numbers of a server beside a worker
COUNTER, GAUGE = "counter", "gauge"  # a counter only grows; a gauge may fall again


class Statistic(NamedTuple):
    """One row of the table. A name ends in _of_worker_N or _KIND if there are several."""

    part: str
    name: str
    kind: str
    meaning: str


_STEPS = "Steps and operations of a worker"
_MEMORY = "Shared memory of a machine"
_MESSAGES = "Messages between members"
_CODECS = "Compression"
_LINKS = "Links"
_RDMA = "Links by RDMA"
_SERVER = "Servers"
_SCHEDULER = "The scheduler, and refused connections"
_VALIDATOR = "Validators"
_TUNING = "Autotuning"

STATISTICS = tuple(Statistic(*row) for row in (
    (_STEPS, "steps", COUNTER, "training steps that were marked, without the first"),
    (_STEPS, "step_seconds", GAUGE, "length of the last step"),
    (_STEPS, "communication_seconds", COUNTER, "time with operations in flight, in all steps"),
    (_STEPS, "exposed_share", GAUGE, "share of it in which the program waited, in all steps"),
    (_STEPS, "exposed_share_of_step", GAUGE, "the same, in the last step"),
    (_STEPS, "wait_seconds", COUNTER, "time in which the program waited for results"),
    (_STEPS, "operations", COUNTER, "operations on declared tensors that were started"),
    (_STEPS, "bytes_started", COUNTER, "bytes of their tensors"),
    (_STEPS, "tensors", GAUGE, "declared tensors; of a server: those with a partition there"),
    (_MEMORY, "bytes_registered", COUNTER, "bytes summed where the tensors lie"),
    (_MEMORY, "bytes_staged", COUNTER, "bytes of private tensors, copied in and out"),
    (_MEMORY, "shared_memory_bytes", GAUGE, "bytes in use of this worker's arena"),
    (_MEMORY, "pipes", GAUGE, "pipes in shared memory that have sent frames"),
    (_MEMORY, "pipe_bytes", COUNTER, "bytes sent by pipes, headers included"),
    (_MEMORY, "peer_memory", GAUGE, "workers whose memory this one reads directly"),
    (_MESSAGES, "messages", COUNTER, "steps of collectives: messages and copies"),
    (_MESSAGES, "message_bytes", COUNTER, "bytes of messages that were sent"),
    (_MESSAGES, "messages_kept", GAUGE, "messages that arrived before their operation"),
    (_CODECS, "bytes_before_compression", COUNTER, "bytes of tensors that were encoded"),
    (_CODECS, "bytes_after_compression", COUNTER, "bytes of their codes"),
    (_LINKS, "bytes_sent", COUNTER, "bytes sent, headers included"),
    (_LINKS, "bytes_received", COUNTER, "bytes received, headers included"),
    (_LINKS, "frames_sent", COUNTER, "frames sent"),
    (_LINKS, "frames_received", COUNTER, "frames received"),
    (_LINKS, "writes", COUNTER, "system calls (in memory: copies) that sent"),
    (_LINKS, "reads", COUNTER, "system calls (in memory: copies) that received"),
    (_LINKS, "loans", COUNTER, "times that a link borrowed credit after a long wait"),
    (_LINKS, "links", GAUGE, "open links"),
    (_LINKS, "credit_bytes", GAUGE, "largest credit of a link to a server"),
    (_LINKS, "bytes_over_links", COUNTER, "the same as bytes_sent, of a worker"),
    (_RDMA, "work_requests", COUNTER, "sends and writes that were posted"),
    (_RDMA, "announced", COUNTER, "frames that asked for a grant"),
    (_RDMA, "standing", COUNTER, "frames whose place the peer had granted before"),
    (_RDMA, "credit_messages", COUNTER, "messages that returned receive buffers"),
    (_RDMA, "binds", COUNTER, "windows that were bound to memory"),
    (_RDMA, "bytes_copied", COUNTER, "bytes of payloads copied; small frames count twice"),
    (_RDMA, "windows", GAUGE, "open memory windows"),
    (_RDMA, "bytes_pinned", GAUGE, "bytes of memory that the device may reach"),
    (_RDMA, "pinnings", COUNTER, "times that memory was pinned"),
    (_RDMA, "pinnings_for_one_frame", COUNTER, "those that lasted for one frame"),
    (_SERVER, "chunks_summed", COUNTER, "units that a sum or rule worked on"),
    (_SERVER, "bytes_summed", COUNTER, "bytes of results"),
    (_SERVER, "rounds_failed", COUNTER, "rounds that ended with an error"),
    (_SERVER, "buffers_not_kept", COUNTER, "buffers given back between rounds, for lack of room"),
    (_SERVER, "frames_late", COUNTER, "frames of failed rounds that were dropped"),
    (_SERVER, "updates_refused", COUNTER, "updates that robust rules refused"),
    (_SERVER, "updates_refused_of_worker_N", COUNTER, "those of one worker"),
    (_SERVER, "rounds_missed", COUNTER, "deadline rounds that ended without a worker"),
    (_SERVER, "rounds_missed_of_worker_N", COUNTER, "those without this worker"),
    (_SERVER, "updates_late", COUNTER, "updates that came after their deadline round"),
    (_SERVER, "updates_late_of_worker_N", COUNTER, "those of one worker"),
    (_SCHEDULER, "generation", GAUGE, "how often the job has met"),
    (_SCHEDULER, "members", GAUGE, "members of the job"),
    (_SCHEDULER, "half_open", GAUGE, "connections that have not yet authenticated"),
    (_SCHEDULER, "refused", COUNTER, "refused connections; the scheduler's declarations too"),
    (_SCHEDULER, "refused_KIND", COUNTER, "those of one kind, such as a wrong token"),
    (_VALIDATOR, "bytes_of_updates", COUNTER, "bytes of updates that were received"),
    (_VALIDATOR, "accepted_of_worker_N", COUNTER, "accepted blocks of one worker"),
    (_VALIDATOR, "refused_of_worker_N_KIND", COUNTER, "its refused blocks, by reason"),
    (_VALIDATOR, "accepted_share_of_worker_N", GAUGE, "share of its blocks that was accepted"),
    (_VALIDATOR, "score_of_worker_N", GAUGE, "mean of its scores"),
    (_VALIDATOR, "last_score_of_worker_N", GAUGE, "its last score"),
    (_TUNING, "autotune_is_over", GAUGE, "1 when tuning has ended"),
    (_TUNING, "autotune_trials", COUNTER, "settings that were tried; rank 0 knows it"),
    (_TUNING, "autotune_gain", GAUGE, "share of a step that was saved; rank 0 knows it"),
    (_TUNING, "autotune_credit_bytes", GAUGE, "credit in force; 0: what links find by themselves"),
    (_TUNING, "autotune_partition_bytes", GAUGE, "size of partitions in force"),
    (_TUNING, "autotune_bucket_bytes", GAUGE, "size of buckets in force"),
))  # fmt: skip
_BY_NAME = {row.name: row for row in STATISTICS}

_HEAD = """\
# Statistics

*Reference, of all numbers that a process counts, for whoever watches jobs.*

Generated by `python -m fastps.telemetry.statistics`; do not edit.

`fastps.statistics()` returns them on a worker or validator. `/status.json` and `/metrics` have
them on every process ([watching](watching.md)). In Prometheus a name begins with `fastps_`, and a
counter's ends with `_total`. A worker shows those of a colocated server with `server_` before the
name. Numbers of a part that a process does not have are missing. *N* is the rank of a worker,
*KIND* a reason. A counter only grows; a gauge may fall again.
"""


def find_statistic(key: str) -> Statistic | None:
    """Return the row of a key of statistics(); None if there is none."""
    key = key.removeprefix(OF_SERVER)
    name = re.sub(r"_of_worker_\d+", "_of_worker_N", key)
    name = re.sub(r"(_N)_\w+$", r"\1_KIND", name)
    if name not in _BY_NAME and name.startswith("refused_"):
        name = "refused_KIND"
    return _BY_NAME.get(name)


def is_counter(key: str) -> bool:
    """Return whether the number of a key of statistics() only grows."""
    row = find_statistic(key)
    return row is not None and row.kind == COUNTER


def markdown() -> str:
    """Return the text of docs/statistics.md."""
    sections = [_HEAD]
    for part in dict.fromkeys(row.part for row in STATISTICS):
        rows = [f"| `{row.name}` | {row.kind} | {row.meaning} |"
                for row in STATISTICS if row.part == part]  # fmt: skip
        sections.append("\n".join([f"## {part}\n", "| name | kind | meaning |", "|---|---|---|",
                                   *rows, ""]))  # fmt: skip
    return "\n".join(sections)


if __name__ == "__main__":
    sys.stdout.write(markdown())
