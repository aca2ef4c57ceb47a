# SPDX-License-Identifier: Apache-2.0
"""Why a job ends before its workers have finished: which part failed first, and the report of it.

Decides the first cause from how parts ended, from the last lines they wrote and from what the
scheduler knows. Knows nothing of signals, pipes or time. A process that lost a peer may end before
that peer: the peer may end slowly, be stopped, or run on another machine. So the scheduler's
report, or else the accusation in a part's last lines, counts more than the order of the ends.
Pure.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import TypeAlias

from fastps.control.blame import LEFT
from fastps.errors import GUIDE, guide_of
from fastps.launch.machine import Machine
from fastps.launch.output import Screen
from fastps.launch.processes import Child
from fastps.launch.scheduler import ENDED_BY, SchedulerProcess

PROGRAMS = ("worker", "validator", "machine")  # parts that run the user's command
GAVE_UP = "it lost the scheduler"  # the begin of what a scheduler is told of a process

Part: TypeAlias = Child | SchedulerProcess | Machine

_LOG_HEAD = re.compile(r"[-\d]+ [\d:,]+ \w+ [A-Z]+ [\w.]+: ")  # time, role, level and place
# Lines that do not explain why a process ended: our banner, and what JAX, TensorFlow and gdb add.
_NOISE = re.compile(
    r"\[fastps\] |-+$|For simplicity, JAX has removed|\[\[\{\{node |[IW]\d{4} "
    r"|WARNING: All log messages before absl|Argument to arithmetic operation not a number"
)
_MEMBER = re.compile(
    r"\b(?P<role>worker|validator|server|scheduler)(?: (?P<rank>\d+))?(?: \([^()]*\))? "
    rf"(?P<how>(?:is lost\b|{LEFT}).*)"
)
_OTHERS = re.compile(rf"(?P<ended>{ENDED_BY}.*)|\b(?:PeerLostError|StallError):? (?P<error>.*)")
_OF_SERVICES = re.compile(r"is lost\b|cannot start\b")  # in the logs of scheduler and servers
# Words of a cause, and the section of the guide about it.
_GUIDES = {
    "its program ended with": "",  # an error of the user's program, of whatever worker
    " is lost": "peerlosterror",
    "were never in one job together": "it-stops",
    "(SIGSTOP)": "it-stops",
    "(OOM killer)": "it-stops",
    "the connection to ": "it-stops",
    "cannot start": "it-does-not-start",
    "the job did not start within": "it-does-not-start",
    "was killed by SIG": "it-stops",
}
_CURES = re.compile(r"(?:; let all workers call|\. Restart the job|\. Let all workers call).*")


@dataclasses.dataclass(frozen=True)
class Accusation:
    """A part's report that another process is to blame for its failure.

    role and rank: of that process, empty and -1 if no member is named. how: what happened to it.
    text: the whole report, in one line.
    """

    text: str
    role: str = ""
    rank: int = -1
    how: str = ""

    @property
    def is_about_an_end(self) -> bool:
        """Return whether the accused process ends by itself, if it has not ended yet."""
        return any(words in self.how for words in ("its program ended with", "closed", LEFT))


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why the job ends before its workers have finished: a text for the user and the exit code.

    part: the part that failed first; how: what happened to it; words: its last output, as a
    sentence. accusation: its report about a process that this launcher did not start.
    has_time: the job was not told to end, so that the reader of its output may take its time.
    """

    text: str
    exit_code: int
    part: Part | None = None
    how: str = ""
    words: str = ""
    accusation: str = ""
    has_time: bool = True

    @property
    def is_refusal(self) -> bool:
        """Return whether the launcher itself ended or refused the job, not a part or a signal."""
        return self.part is None and self.exit_code < 124


def accusation_of(part: Part) -> Accusation | None:
    """Return what a failed part reports about another one in its last lines, if anything."""
    if isinstance(part, Machine):
        return Accusation(part.accusation) if part.accusation else None
    if (part.exit_code or 0) <= 0:
        return None
    for line in reversed(part.stderr.tail):
        found = _read(line.decode(errors="replace").strip(), part.role in PROGRAMS)
        if found is not None:
            return None if (found.role, found.rank) == (part.role, part.rank) else found
    return None


def _read(line: str, is_program: bool) -> Accusation | None:
    """Return the accusation in a line of the standard error of a program or a service."""
    other = _OTHERS.search(line)
    if other is None and (is_program or not _OF_SERVICES.search(line)):
        return None
    text = _CURES.sub("", _LOG_HEAD.sub("", line))
    member = _MEMBER.search(text)
    if member is not None:
        rank = int(member["rank"] or 0)
        return Accusation(member[0], member["role"], rank, member["how"])
    if other is not None:
        text = _CURES.sub("", other["ended"] or other["error"])
    return Accusation(text)


def first_of(failed: Sequence[Part]) -> Part:
    """Return the likeliest first cause among failed parts, listed in the order of their ends.

    A process that a signal killed comes before one that exited with an error; a process that
    itself blames another one comes last.
    """
    return min(failed, key=lambda part: (accusation_of(part) is not None, _has_given_up(part)))


def how_it_ended(child: Child) -> str:
    """Return how a process ended, for the scheduler; that it gave up the scheduler is said."""
    accusation = accusation_of(child)
    if accusation is None or accusation.role != SchedulerProcess.role:
        return f"it {child.describe_end()}"
    why = accusation.how.removeprefix("is lost: ")
    return f"{GAVE_UP} ({why}) and {child.describe_end()}"


def cause_of(failed: Part, accusation: Accusation | None) -> Cause:
    """Return the first cause where a part failed; accusation: its report about another process."""
    code, how = failed.exit_code or 0, failed.describe_end()
    code = code if code > 0 else 128 - code
    if accusation is None:
        return Cause(f"{failed.describe()} {how}", code, failed, how, last_output(failed))
    text = f"{accusation.text}; {failed.describe()} gave up because of that and {how}"
    if failed.describe().startswith(SchedulerProcess.description):
        text = accusation.text
    return Cause(text, code, failed, how, accusation=accusation.text)


def cause_where_accused(accused: Part, accusation: Accusation) -> Cause:
    """Return the first cause where an accused part failed, maybe only for a silent scheduler."""
    has_given_up = GAVE_UP in accusation.how
    return cause_of(accused, accusation_of(accused) if has_given_up else None)


def cause_in(accused: Part, accusation: Accusation) -> Cause:
    """Return the first cause where an accused part of this launcher still runs, or succeeded.

    Its exit code is 1, whatever the exit codes of the parts that failed because of it.
    """
    how = accusation.how if accused.is_alive else f"{accused.describe_end()} and {accusation.how}"
    return Cause(f"{accused.describe()} {how}", 1, accused, how)


def report(screen: Screen, cause: Cause, *, output_dir: pathlib.Path | None) -> None:
    """Print the first cause, as the last line of the job."""
    part = cause.part
    if isinstance(part, Machine) and not part.has_culprit:
        part = None
    if isinstance(part, Child) and output_dir is not None:
        screen.report(f"full output: {output_dir}/{part.name.replace(' ', '-')}.stderr")
    if part is None:
        ending = f"exit code {cause.exit_code}"
    elif cause.accusation:
        ending = "so the job was ended"
    else:
        ending = f"it failed first, so the job was ended{cause.words}"
    guide = guide_to(cause)
    more = f"; see {guide}" if guide else ""
    screen.report(f"{cause.text}; {ending}{more}", is_alarm=True)


def guide_to(cause: Cause) -> str:
    """Return the place of the guide about a cause; empty for an error of the user's program."""
    text = f"{cause.text} {cause.words}"
    by_words = (anchor for words, anchor in _GUIDES.items() if words in text)
    found = next(by_words, "messages-of-fastps-run" if cause.is_refusal else "")
    return guide_of(text) or (f"{GUIDE}#{found}" if found else "")


def last_output(part: Part) -> str:
    """Return, as a sentence, the last line that a part which failed by itself wrote on stderr."""
    if isinstance(part, Machine):
        return part.last_output
    if not _has_given_up(part):
        return ""
    lines = [line.decode(errors="replace").strip() for line in part.stderr.tail]
    theirs = [line for line in lines if line and not _NOISE.match(line)]
    last = _LOG_HEAD.sub("", theirs[-1]) if theirs else ""
    return f". Its last output: {last}" if last else ""


def _has_given_up(part: Part) -> bool:
    return (part.exit_code or 0) > 0
