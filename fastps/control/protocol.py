# SPDX-License-Identifier: Apache-2.0
"""The messages between the members of a job and its scheduler, and their frames.

Decides the shape and the bounds of every control message. Knows no socket, thread or clock.
A frame is a 4-byte little-endian length and one MessagePack array whose first item names the
message. A frame is only decoded from a peer that has authenticated; a message that does not fit
its types and bounds is a ProtocolError, never a half-built value. All values are frozen.

A member's requests carry a number; the scheduler answers each one exactly once, with the answer
for it, with `Done` or with `Failed`. Every other message of the scheduler is an `Event`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeAlias, get_args

import msgspec
from msgspec import Meta

from fastps.config import MIN_CHUNK_BYTES
from fastps.config.words import encoded_name
from fastps.contract.codec import PLAIN, Coding
from fastps.contract.contract import ALONE, PROMPT, Compensation, Gathering, Givers, Policy
from fastps.contract.partition import (
    ALIGNMENT,
    MAX_PARTITION_BYTES,
    MAX_PIECES,
    server_weights,
)
from fastps.contract.rule import SUMMED, Rule
from fastps.errors import (
    ConfigError,
    FastPSError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    ShutdownError,
    StallError,
    ViewChangedError,
)
from fastps.security.tokens import KEY_BYTES
from fastps.types import MAX_SECONDS

LENGTH = struct.Struct("<I")
MAX_BLOB_BYTES = 64 << 20  # a broadcast object; larger ones go as tensors
MAX_FRAME_BYTES = MAX_BLOB_BYTES + (64 << 10)  # a blob and the fields around it
MAX_NAME_CHARS = 1024  # tensors, barriers, blobs
MAX_TEXT_CHARS = 16384  # causes and reasons
MAX_DIMENSIONS = 64
COOKIE_BYTES = 32  # half of them ask, half of them answer
MAX_MEMBERS = 1 << 16

Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Entry: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_CHARS + 24, pattern=r"#[0-9]+#?\Z")]
Role: TypeAlias = Annotated[str, Meta(pattern=r"\A(worker|server|scheduler|validator)\Z")]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_MEMBERS)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
Nbytes: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Id: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Sender: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]  # a field of the handshake
Version: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]  # a field of the frame header
Code: TypeAlias = Annotated[int, Meta(ge=1, le=255)]
Shape: TypeAlias = Annotated[tuple[Nbytes, ...], Meta(max_length=MAX_DIMENSIONS)]
# The bounds of the settings, since the scheduler does what other members request.
_Part = Meta(ge=MIN_CHUNK_BYTES, le=MAX_PARTITION_BYTES, multiple_of=ALIGNMENT)
PartBytes: TypeAlias = Annotated[int, _Part]
Staleness: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]  # operations
Cookie: TypeAlias = Annotated[bytes, Meta(max_length=COOKIE_BYTES)]
Pieces: TypeAlias = tuple[tuple[Nbytes, Rank], ...]  # bytes and owner of each partition
# A job has no more tensors than pieces, so no message has more names.
_Many = Meta(max_length=MAX_PIECES)
Parts: TypeAlias = Annotated[tuple[tuple[Text, Code, Shape], ...], _Many]
# Entries by the members that they landed on; (): all.
Committed: TypeAlias = tuple[tuple[tuple[Rank, ...], tuple[Entry, ...]], ...]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: frozen, an array on the wire, named by its first item."""


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of values inside messages, which are in no reference cycle."""


# ---- values ----
class Member(_Record, frozen=True):
    """One worker or server of the job, and where its data connections arrive.

    machine: dense number; those with workers come first, by their lowest rank. unix: abstract
    name of a Unix socket, empty if it has none, for peers of the same host_id. gid: address of
    its RDMA device, empty if it has none that it can use. place: the rank that it began with.
    """

    role: Role
    rank: Rank
    host: Text
    port: Port
    pid: Id
    hostname: Text
    machine: Id
    unix: Text
    host_id: Text
    gid: Text = ""
    place: Rank = 0


class Job(_Record, frozen=True):
    """What a member knows of its job once all members have joined; me: its own number.

    size: number of processes that run the user's program: workers and validators. members: every
    process except the scheduler, by number: the workers by rank, then the validators, then the
    servers that are processes of their own. owners: numbers of the members that can own keys:
    these servers, then, in a job with joint servers, the lowest rank of every machine, or all
    validators if there are some. is_local: all workers share one machine, so that no member needs
    to own keys. view: its number in an elastic job, from 1 on. has_board: in this view the workers
    commit results by themselves, on a board in shared memory (worker/_board), not the scheduler.
    """

    job_id: Text
    generation: Id
    me: Rank
    size: Count
    local_rank: Rank
    local_size: Count
    members: tuple[Member, ...]
    owners: tuple[Rank, ...]
    is_local: bool
    validators: Count = 0
    view: Count = 1
    has_board: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for numbers of members that are not there."""
        most = max((self.me, self.size - 1, *self.owners))
        if most >= len(self.members) or self.validators > self.size:
            raise ValueError(
                f"there are {len(self.members)} members, got size={self.size}, me={self.me}, "
                f"owners={self.owners}, validators={self.validators}"
            )

    @property
    def n_workers(self) -> int:
        """The number of workers."""
        return self.size - self.validators

    @property
    def workers(self) -> tuple[Member, ...]:
        """The members that run the user's program: the workers by rank, then the validators."""
        return self.members[: self.size]

    @property
    def servers(self) -> tuple[Member, ...]:
        """The owners, by their number in errors."""
        return tuple(self.members[owner] for owner in self.owners)

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the workers and validators of each machine, in the order of machines."""
        found: dict[int, list[int]] = {}
        for number, worker in enumerate(self.workers):
            found.setdefault(worker.machine, []).append(number)
        return tuple(tuple(found[machine]) for machine in sorted(found))

    @property
    def weights(self) -> tuple[int, ...]:
        """The share of each owner, relative to the others."""
        if self.validators:
            return (1,) * len(self.owners)
        n_apart = len(self.members) - self.size
        is_joint = len(self.owners) > n_apart
        return server_weights(len(self.machines), n_apart, is_colocated=is_joint)

    def owner_name(self, number: int) -> str:
        """Return the name of a member for errors; of an owner with the worker it is in."""
        host = self.members[number]
        name = f"{host.role} {host.rank}"
        if number not in self.owners:
            return name
        return f"server {self.owners.index(number)}" + f" (in {name})" * (number < self.size)


class Layout(
    msgspec.Struct, frozen=True, cache_hash=True, gc=False, omit_defaults=True,
    forbid_unknown_fields=True,
):  # fmt: skip
    """The properties of a tensor that all workers must declare alike.

    Equal layouts are sent once: hundreds of thousands of tensors have few of them. Sent by field
    names without defaults. dtype: code of fastps.types.DType. partition_bytes: the most that a
    partition may have; the scheduler cuts. policy to gathering: see fastps.contract.contract.
    beside: of codec state, the tensor that the codecs belong to; both are cut alike. updates: of
    tensors that validators change, how workers' updates are coded; parts: name, dtype and shape
    of all user tensors in this one and in those declared with it. Servers do not use these two.
    """

    dtype: Code
    shape: Shape
    nbytes: Nbytes
    partition_bytes: PartBytes
    chunk_bytes: PartBytes
    policy: Policy = Policy.SUM
    staleness: Staleness = 0
    coding: Coding = PLAIN
    rule: Rule = SUMMED
    compensation: Compensation = PROMPT
    givers: Givers = Givers.WORKERS
    gathering: Gathering = ALONE
    beside: Text = ""
    updates: Coding = PLAIN
    parts: Parts = ()


class TensorSpec(_Record, frozen=True):
    """A worker's declaration of one tensor."""

    name: Name
    layout: Layout


class DeclaredTensor(_Record, frozen=True):
    """The scheduler's answer: id, bytes and owner of each partition, and the last version."""

    tensor_id: Id
    pieces: Pieces
    version: Version = 0


class KeySpec(_Record, frozen=True):
    """What a server needs to hold its partitions of one tensor.

    beside: of codec state, id of the other tensor. version: the last one of earlier tensors with
    this id.
    """

    tensor_id: Id
    name: Name
    layout: Layout
    pieces: Pieces
    version: Version = 0
    beside: Id = 0


def _number_layouts(layouts: Iterable[Layout]) -> tuple[tuple[Layout, ...], list[int]]:
    """Return the distinct layouts, and the number among them of each given one."""
    places: dict[Layout, int] = {}
    numbers = [places.setdefault(one, len(places)) for one in layouts]
    return tuple(places), numbers


# ---- member to scheduler ----
class Join(_Message, frozen=True):
    """Ask to join the job; None or 0 means "not configured here".

    host_id: equal for processes that reach each other by Unix sockets. machine: equal for workers
    that can share memory; a suffix after # distinguishes workers of one machine that cannot.
    serves: whether it may own keys. gid: see Member. links_per_peer: 0 if not given. goes_on:
    whether it continues without lost workers. size: number of workers alone. elastic_min: with
    how many workers the job continues in a new view. is_watched: its parent is a launcher, which
    reports how it ends. probe_host, probe_port, cookie: where it takes datagrams, and the secret
    of them as in _core.Pulse; 0 and empty if it takes none. is_newcomer: it joins a running
    elastic job, whose size it does not know. elastic_max: how many workers that may have.
    """

    request: Id
    role: Role
    rank: Rank | None
    local_rank: Rank | None
    local_size: Count | None
    size: Count
    num_servers: Count
    host: Text
    port: Port
    pid: Id
    hostname: Text
    host_id: Text
    machine: Text
    unix: Text
    gid: Text = ""
    links_per_peer: Count = 0
    serves: bool = True
    goes_on: bool = False
    num_validators: Count = 0
    elastic_min: Count = 0
    is_watched: bool = False
    probe_host: Text = ""
    probe_port: Port = 0
    cookie: Cookie = b""
    is_newcomer: bool = False
    elastic_max: Count = 0


class Absent(_Message, frozen=True):
    """Report, instead of a Join, that a process of this machine has ended; without answer.

    From launchers. Before the start it counts where there is no such member, later where there is
    one with this pid. is_newcomer: it joined a running job, or was to. has_succeeded: its exit
    code was 0.
    """

    role: Role
    rank: Rank
    host: Text
    pid: Id
    cause: Text
    is_newcomer: bool = False
    has_succeeded: bool = False


class Attend(_Message, frozen=True):
    """Ask, instead of a Join, which member is lost first; answered by PeerLost once one is.

    From a launcher; role and rank are those of one of its processes.
    """

    role: Role
    rank: Rank


class Rejoin(_Message, frozen=True):
    """Ask, instead of a Join, to go on after a death of the scheduler; answered by Rejoined.

    job: the last one that started here. term: of the scheduler that died. told, boundary:
    generations of the last view that it announced, and of the last for newcomers. committed: the
    last of each name, as this member knows. met: answers in this view: meeting, number among
    those of its name, answer.
    """

    request: Id
    join: Join
    job: Job
    term: Id
    told: Id
    boundary: Id
    left: Annotated[tuple[Rank, ...], Meta(max_length=MAX_MEMBERS)] = ()
    committed: Committed = ()
    met: Met = ()
    leaves: bool = False


class AwaitEnds(_Message, frozen=True):
    """Wait until these processes are out of the job; only after Attend.

    Answered by PeerLost, or by Done if no member was lost.
    """

    request: Id
    places: Annotated[tuple[tuple[Role, Rank], ...], Meta(max_length=MAX_MEMBERS)]


class AwaitStart(_Message, frozen=True):
    """Wait until the job is complete; answered by Started.

    limit_s: the whole limit of the start, for the text of an error; 0: timeout_s. port, unix:
    where a survivor of the last view listens now; see Join.
    """

    request: Id
    timeout_s: Seconds
    port: Port = 0
    unix: Text = ""
    limit_s: Seconds = 0.0


class AskClock(_Message, frozen=True):
    """Ask for the scheduler's time; answered at once by ClockTold."""

    request: Id


class Declare(_Message, frozen=True):
    """Declare a batch of tensors; answered by Declared when every server is ready for them.

    tensors: name and layout number of each.
    """

    request: Id
    layouts: Annotated[tuple[Layout, ...], _Many]
    tensors: Annotated[tuple[tuple[Name, Id], ...], _Many]
    timeout_s: Seconds

    @classmethod
    def of(cls, request: int, specs: Sequence[TensorSpec], timeout_s: float) -> Declare:
        """Return the message that declares these tensors."""
        layouts, numbers = _number_layouts(spec.layout for spec in specs)
        names = [spec.name for spec in specs]
        return cls(request, layouts, tuple(zip(names, numbers, strict=True)), timeout_s)


class Barrier(_Message, frozen=True):
    """Wait until every worker has entered the barrier of this name."""

    request: Id
    name: Name
    timeout_s: Seconds


class Blob(_Message, frozen=True):
    """Send (root) or get (others, data None) a small object; answered by BlobData or Done."""

    request: Id
    name: Name
    root_rank: Rank
    data: Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)] | None
    timeout_s: Seconds


class Forget(_Message, frozen=True):
    """Forget tensors that this worker no longer uses; all workers must name the same ones.

    tensors: with the version of its last operation on each. timeout_s: for the others to ask, and
    again for the servers. Answered by Done when all servers have dropped the keys.
    """

    request: Id
    tensors: Annotated[tuple[tuple[Name, Version], ...], _Many]
    timeout_s: Seconds


class Dropped(_Message, frozen=True):
    """Report that a worker has carried out an answered Forget: its ids may be used again."""

    request: Id


class Regroup(_Message, frozen=True):
    """Say that this worker of an elastic job is at a boundary, where newcomers may join.

    generation: in which all workers have agreed on that. leaves: this one wants to leave there.
    Answered by Regrouped when all are there.
    """

    request: Id
    name: Name  # of the boundary
    generation: Id
    timeout_s: Seconds
    leaves: bool = False


class Dispute(_Message, frozen=True):
    """Report what was started on a tensor whose workers started different operations.

    version: number of the operation on this tensor. Answered by Failed with the reports of all
    workers, the same text for each, when all have reported or the first has waited for timeout_s.
    """

    request: Id
    name: Name
    version: Id
    started: Text
    timeout_s: Seconds


class KeysReady(_Message, frozen=True):
    """Report that a server can take pushes for a DeclareKeys, or has carried out a ForgetKeys."""

    request_id: Id


class KeysFailed(_Message, frozen=True):
    """Report that a server cannot carry out a DeclareKeys or ForgetKeys."""

    request_id: Id
    message: Text


class ReportLost(_Message, frozen=True):
    """Report that a data connection to a member broke; the scheduler decides which is to blame.

    is_owner: the connection was for keys that the member owns. generation: in which it was; 0:
    the present one.
    """

    member: Rank
    cause: Text
    is_owner: bool = False
    generation: Id = 0


class Unheard(_Message, frozen=True):
    """Report that this member has not heard the scheduler for its lease, and has given up."""

    seconds: Seconds


class Confirmed(_Message, frozen=True):
    """Answer a Confirm: how many milliseconds the other member took; None if it did not answer."""

    suspect: Id
    reached_ms: Id | None


class Tell(_Message, frozen=True):
    """Send data to some workers; each gets a Told.

    has_joined: this worker has run out of data, and enters no meeting until all have.
    """

    members: Annotated[tuple[Rank, ...], Meta(max_length=MAX_MEMBERS)]
    data: Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES // 8)]  # decoded, up to 150 times
    has_joined: bool = False


class ResultsLanded(_Message, frozen=True):
    """Report which results of a view have landed on this worker; see control/commits.py.

    members: numbers of the workers that each has to land on; empty: all.
    """

    generation: Id
    entries: Annotated[tuple[Entry, ...], _Many]
    members: Annotated[tuple[Rank, ...], Meta(max_length=MAX_MEMBERS)] = ()


class BoardRead(_Message, frozen=True):
    """Report what a board has committed in a view that ends for this worker, for the log of views.

    entries: of the last result of each name that was committed in it.
    """

    generation: Id
    entries: Annotated[tuple[Entry, ...], _Many]


class Waiting(_Message, frozen=True):
    """Report what this worker waits for, and for how long; answered by StallTold.

    place: name of the counter of operations, empty if there is none; number: of operations that
    all members must have begun. request: 0 for the scheduler's log alone, without an answer.
    """

    request: Id
    place: Text
    number: Id
    what: Text
    members: Annotated[tuple[Rank, ...], Meta(max_length=MAX_MEMBERS)]
    seconds: Seconds


class Whereabouts(_Message, frozen=True):
    """Answer a Locate: how many operations of the place this worker has begun, and where it is.

    waits: what it waits for, or failed to get; stack: of the main thread, innermost first.
    """

    inquiry: Id
    count: Id
    waits: Text
    stack: Text


class Leave(_Message, frozen=True):
    """Leave in order; answered by Done.

    A worker whose process also serves is answered when all workers have asked, since it serves
    until then, but after timeout_s at the latest.
    """

    request: Id
    timeout_s: Seconds


class Malformed(_Record, frozen=True):
    """A request that does not fit its types or bounds, as decoded; answered by Failed."""

    request: Id
    message: Text


Meeting: TypeAlias = Barrier | Blob | Forget | Dispute | Regroup  # all workers must come
# these are answered
Request: TypeAlias = Join | Rejoin | AwaitStart | AskClock | Declare | Meeting | Waiting | Leave
ToScheduler: TypeAlias = (
    Request
    | Absent
    | Attend
    | AwaitEnds
    | Dropped
    | KeysReady
    | KeysFailed
    | ReportLost
    | Unheard
    | Confirmed
    | Tell
    | ResultsLanded
    | BoardRead
    | Whereabouts
)

# ---- scheduler to member: answers ----


class Joined(_Message, frozen=True):
    """The member has joined; `member`: its sender number for the pulse connection.

    pid, host_id: of the scheduler, as the members say theirs in Join. rank, size: those that a
    newcomer would have now. term: of this scheduler; 0: no other one follows if it dies.
    """

    request: Id
    member: Sender
    pid: Id = 0
    host_id: Text = ""
    rank: Rank = 0
    size: Count = 0
    term: Id = 0


class Rejoined(_Message, frozen=True):
    """All members have come back, or are lost; committed, met: what only others know."""

    request: Id
    member: Sender
    pid: Id = 0
    host_id: Text = ""
    term: Id = 0
    committed: Committed = ()
    met: Met = ()


class Started(_Message, frozen=True):
    """The job is complete.

    keys: of security/tokens.py, sealed; none for a member that has the job's token.
    """

    request: Id
    job: Job
    keys: Annotated[bytes, Meta(max_length=(MAX_MEMBERS + 1) * KEY_BYTES)] = b""


class ClockTold(_Message, frozen=True):
    """CLOCK_MONOTONIC of the scheduler's machine, in seconds."""

    request: Id
    seconds: Seconds


class Declared(_Message, frozen=True):
    """Ids and owners in the order of the declared batch."""

    request: Id
    tensors: tuple[DeclaredTensor, ...]


class BlobData(_Message, frozen=True):
    """The root's object."""

    request: Id
    data: bytes


class Done(_Message, frozen=True):
    """A request without result has been fulfilled."""

    request: Id


class Regrouped(_Message, frozen=True):
    """All workers are at a boundary.

    generation: of the next view, if somebody joins or leaves; else 0.
    """

    request: Id
    generation: Id


class StallTold(_Message, frozen=True):
    """Which workers delay an operation, in words."""

    request: Id
    text: str


class Failed(_Message, frozen=True):
    """A request cannot be fulfilled; kind is a key of FAILURES."""

    request: Id
    kind: str
    message: str


# ---- scheduler to member: events ----


class PeerLost(_Message, frozen=True):
    """The first cause: this member died, was cut off or was silent.

    goes_on: the job continues without this member.
    """

    role: Role
    rank: Rank
    host: Text
    pid: Id
    cause: str
    goes_on: bool = False

    def __str__(self) -> str:
        """Return which member is lost, and why."""
        pid = f", pid {self.pid}" if self.pid else ""
        where = f" ({self.host}{pid})" if self.host else ""
        name = self.role if self.role == "scheduler" else f"{self.role} {self.rank}"
        return f"{name}{where} is lost: {self.cause}"


class ViewLost(_Message, frozen=True):
    """A member is lost, and the job goes on without it in a new view.

    A view is a generation that begins while some are still there. generation: of the next view.
    survives: whether the member that gets this takes part in it.
    """

    generation: Id
    lost: PeerLost
    survives: bool

    @property
    def cause(self) -> str:
        """Why the view has ended."""
        return str(self.lost)


class ViewJoined(_Message, frozen=True):
    """Newcomers join an elastic job, or workers leave it, and it goes on in a new view.

    All workers were at a boundary. generation: of the next view. cause: who joins or leaves, in
    words. survives: as of ViewLost; who leaves ends the view, and then leaves instead of coming.
    """

    generation: Id
    cause: Text
    survives: bool = True


class Newcomers(_Message, frozen=True):
    """So many newcomers would join at the next boundary; see Regroup."""

    count: Count


class ResultsCommitted(_Message, frozen=True):
    """Results have landed on all workers of the view, or these members: they may be handed out."""

    entries: tuple[Entry, ...]
    members: tuple[Rank, ...] = ()


class PeerLeft(_Message, frozen=True):
    """A worker left in order; its keys may still be served to others."""

    member: Rank


class OwnerLeft(_Message, frozen=True):
    """A worker that has left stops serving: its keys are gone."""

    member: Rank


class TensorPoisoned(_Message, frozen=True):
    """A tensor must not be used any more, mostly because workers declared it differently."""

    tensor_id: Id
    name: Name
    message: str


class Told(_Message, frozen=True):
    """Data from another worker (Tell); all receivers get all of them in the same order."""

    member: Rank
    data: bytes


class Locate(_Message, frozen=True):
    """Ask how many operations of a place a worker has begun; inquiry 0: what it waits for.

    Answered by Whereabouts.
    """

    inquiry: Id
    place: Text


class Confirm(_Message, frozen=True):
    """Ask whether a member answers that the scheduler does not hear; answered by Confirmed.

    suspect: a number for the answer. cookie: of its Join. seconds: for the answer to be useful.
    """

    suspect: Id
    host: Text
    port: Port
    cookie: Cookie
    seconds: Seconds


class DeclareKeys(_Message, frozen=True):
    """Servers only: prepare these keys, then send KeysReady or KeysFailed.

    tensors: the fields of KeySpec, with the layout's number.
    """

    request_id: Id
    layouts: tuple[Layout, ...]
    tensors: tuple[tuple[Id, Name, Id, Pieces, Version, Id], ...]

    @classmethod
    def of(cls, request_id: int, keys: Sequence[KeySpec]) -> DeclareKeys:
        """Return the message that asks to prepare these keys."""
        layouts, numbers = _number_layouts(key.layout for key in keys)
        return cls(
            request_id,
            layouts,
            tuple(
                (key.tensor_id, key.name, number, key.pieces, key.version, key.beside)
                for key, number in zip(keys, numbers, strict=True)
            ),
        )

    @property
    def keys(self) -> Iterator[KeySpec]:
        """The keys to prepare. Raises ProtocolError for one without a layout."""
        for tensor_id, name, number, pieces, version, beside in self.tensors:
            if number >= len(self.layouts):
                raise ProtocolError(
                    f"tensor {name!r} has layout {number}, there are {len(self.layouts)}"
                )
            yield KeySpec(tensor_id, name, self.layouts[number], pieces, version, beside)


class ForgetKeys(_Message, frozen=True):
    """Servers only: drop these tensors, then send KeysReady or KeysFailed; ids are used again."""

    request_id: Id
    tensor_ids: tuple[Id, ...]


class NewGeneration(_Message, frozen=True):
    """Servers only: all workers left; forget all keys."""

    generation: Id


class NewJob(_Message, frozen=True):
    """Servers only: the workers of a new generation are complete."""

    job: Job


class JobOver(_Message, frozen=True):
    """The job has ended; leave."""

    reason: str


Event: TypeAlias = (
    PeerLost
    | ViewLost
    | ViewJoined
    | Newcomers
    | ResultsCommitted
    | PeerLeft
    | OwnerLeft
    | TensorPoisoned
    | Told
    | Locate
    | Confirm
    | DeclareKeys
    | ForgetKeys
    | NewGeneration
    | NewJob
    | JobOver
)
Success: TypeAlias = Done | BlobData | Regrouped  # of a meeting
Met: TypeAlias = tuple[tuple[Text, Id, Success], ...]
Answer: TypeAlias = (
    Joined | Rejoined | Started | ClockTold | Declared | Success | StallTold | Failed
)
ToMember: TypeAlias = Event | Answer

FAILURES: dict[str, type[FastPSError]] = {
    "config": ConfigError,
    "mismatch": MismatchError,
    "peer_lost": PeerLostError,
    "protocol": ProtocolError,
    "shutdown": ShutdownError,
    "stall": StallError,
    "view": ViewChangedError,
    "error": FastPSError,
}


class _Numbered(msgspec.Struct, frozen=True, array_like=True):
    """The head of a request; only this is read of a malformed one."""

    name: str
    request: Id


_REQUESTS = {kind.__name__ for kind in get_args(Request)}
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_to_scheduler: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(ToScheduler)
_to_member: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)
_to_numbered = msgspec.msgpack.Decoder(_Numbered)


def pack(message: ToScheduler | ToMember) -> bytearray:
    """Return the frame of a message; ProtocolError if it is too large."""
    frame = bytearray(LENGTH.size)
    _encoder.encode_into(message, frame, LENGTH.size)
    nbytes = len(frame) - LENGTH.size
    if nbytes > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} message of {nbytes} bytes exceeds the limit of "
            f"{MAX_FRAME_BYTES}; send fewer tensors or a smaller object at once"
        )
    LENGTH.pack_into(frame, 0, nbytes)
    return frame


def body_nbytes(prefix: bytes) -> int:
    """Return the length of the frame's body; ProtocolError if it is out of bounds."""
    nbytes: int = LENGTH.unpack(prefix)[0]
    if not 0 < nbytes <= MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a control frame has {nbytes} bytes, 1 to {MAX_FRAME_BYTES} are allowed"
        )
    return nbytes


def pack_to_scheduler(message: ToScheduler) -> bytearray:
    """Return the frame of a member's message; ConfigError if the scheduler would refuse it.

    So a number out of bounds is an error in the process that gave it.
    """
    try:
        frame = pack(message)
        _to_scheduler.decode(memoryview(frame)[LENGTH.size :])
    except (*_MALFORMED, TypeError, OverflowError) as error:
        raise ConfigError(f"a {type(message).__name__} cannot be sent: {error}") from error
    return frame


def unpack_to_scheduler(body: bytes) -> ToScheduler | Malformed:
    """Decode a member's message; ProtocolError if it is malformed and has no request number."""
    try:
        return _to_scheduler.decode(body)
    except _MALFORMED as error:
        text = f"a control message from a member is malformed: {error}"
        request = _number_of(body)
        if request is None:
            raise ProtocolError(text) from error
        return Malformed(request, text)


def _number_of(body: bytes) -> int | None:
    """Return a request's number without decoding the rest; None if it is not a request."""
    try:
        head = _to_numbered.decode(body)
    except _MALFORMED:
        return None
    return head.request if head.name in _REQUESTS else None


def unpack_to_member(body: bytes) -> ToMember:
    """Decode a message of the scheduler; ProtocolError if it is malformed."""
    try:
        return _to_member.decode(body)
    except _MALFORMED as error:
        raise ProtocolError(f"a message of the scheduler is malformed: {error}") from error


def text_of(text: str) -> str:
    """Return a text that can be sent: cut to the limit, without lone surrogates."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8")


def check_name(name: str, *, dimensions: int = 0) -> None:
    """Raise ConfigError for a name, or a number of dimensions, that cannot be sent."""
    if len(name) > MAX_NAME_CHARS:
        text = f"{len(name)} characters, at most {MAX_NAME_CHARS} are allowed"
        raise ConfigError(f"the name {name[:40]!r}... has {text}")
    encoded_name(name)
    if dimensions > MAX_DIMENSIONS:
        raise ConfigError(
            f"tensor {name!r} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed"
        )


def failure_of(answer: Failed) -> FastPSError:
    """Return the exception of a refusal."""
    return FAILURES.get(answer.kind, FastPSError)(answer.message)
