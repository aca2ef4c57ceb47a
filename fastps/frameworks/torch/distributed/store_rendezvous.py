# SPDX-License-Identifier: Apache-2.0
"""How the default process group of torch.distributed joins and leaves a job.

After fastps.init() it uses the existing session. Under fastps-run it joins that job; rank 0 hosts
torch's store, which torch always needs, on one address, and others find it through the job.
Otherwise, as under plain torchrun, rank 0 hosts the scheduler, and its address and a fresh token
travel through torch's store. The same happens for fastps.init() where torchrun has several
machines. The token is as safe as the store: torch's TCPStore neither authenticates nor encrypts,
so anyone who reaches its port can read the token and join the job. Where that matters use
fastps-run, whose token never travels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeAlias

from torch import distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from fastps.config import DAY_S, load, process_environment
from fastps.config.launchers import Launcher
from fastps.control import rendezvous
from fastps.errors import ConfigError, TransportTimeout
from fastps.session import current
from fastps.transport import sockets
from fastps.transport.interfaces import own_address

_LOOPBACK = "127.0.0.1"
_STORE = "torch.distributed's store"
Patience: TypeAlias = dict[str, object]  # the setting start_timeout_s, or nothing
_LIMITS = ("FASTPS_START_TIMEOUT_S", "BLUEFOG_START_TIMEOUT")


def has_job() -> bool:
    """Return whether init() or fastps-run provide a job, and the environment means no other.

    fastps-run sets RANK and WORLD_SIZE to its own; with other values a user means another group.
    """
    environment = process_environment()
    ours, theirs = (
        [environment.get(f"{prefix}{name}") for name in ("RANK", size)]
        for prefix, size in (("FASTPS_", "SIZE"), ("", "WORLD_SIZE"))
    )
    if "MASTER_PORT" not in environment:
        return current.is_initialized() or ours[0] is not None
    return ours[0] is not None and ours == theirs


def meet(timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    """Yield torch's store, and rank and size in the job, as a rendezvous handler does."""
    session = current.init(_patience(timeout))
    if session.size == 1:
        yield HashStore(), 0, 1
        return
    if session.rank == 0:
        is_here = session.local_size == session.size and sockets.has_loopback()
        store = _serve_store(_LOOPBACK if is_here else own_address(load({})), timeout)
        host = store.host
        session.broadcast_object([host, store.port], 0, _STORE)
    else:
        host, port = session.broadcast_object(None, 0, _STORE)
        store = TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    yield store, session.rank, session.size


def _serve_store(host: str, timeout: timedelta) -> TCPStore:
    """Return a store that listens on one address; of itself it listens on all of them.

    It authenticates nobody, so whoever reaches that address can change what torch keeps there.
    """
    listener = sockets.listen(host, 0)[0]
    listener.setblocking(True)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def join(store: Store, rank: int, size: int, timeout: timedelta) -> Callable[[], None]:
    """Join a job as rank of size; return a function that leaves it.

    Blocks until all workers have joined, or the timeout. Raises what fastps.init() does.
    """
    leave = _begin(store, rank, size, _patience(timeout))
    session = current.current()
    if (session.rank, session.size) != (rank, size):
        where = f"worker {session.rank} of {session.size}"
        leave()
        raise ConfigError(
            f"this process is rank {rank} of {size} for torch.distributed, but {where} of its "
            "fastps job: leave RANK and WORLD_SIZE to the launcher"
        )
    return leave


def join_beside(store: Store, ranks: Sequence[int], timeout: timedelta) -> None:
    """Join a job for a group of all ranks beside a default group of another backend.

    The process stays in it until its end, for further groups. ConfigError for a group of fewer
    ranks.
    """
    everybody = range(dist.get_world_size())
    if list(ranks) != list(everybody):
        raise ConfigError(
            f"the first fastps group has ranks {list(ranks)}, but only one of all "
            f"{len(everybody)} ranks can join a job: call fastps.init() before "
            "new_group(backend='fastps'), or make fastps the default backend"
        )
    join(store, dist.get_rank(), len(everybody), timeout)


def _patience(timeout: timedelta) -> Patience:
    """Return torch's timeout as that of the start, unless the environment sets one."""
    if any(process_environment().get(name, "").strip() for name in _LIMITS):
        return {}
    return {"start_timeout_s": min(max(timeout.total_seconds(), 0.1), DAY_S)}


def _begin(store: Store, rank: int, size: int, patience: Patience) -> Callable[[], None]:
    if current.is_initialized():
        return lambda: None
    is_launched = bool(load({}).scheduler_port)
    if not is_launched and size > 1:
        return _begin_by_store(store, {"rank": rank, "size": size, "num_servers": 0, **patience})
    current.init(patience if is_launched else {"rank": 0, "size": 1, "num_servers": 0})
    return current.shutdown


def _begin_by_store(store: Store, mine: dict[str, object]) -> Callable[[], None]:
    """Join a job whose scheduler rank 0 hosts; a store may serve several jobs in turn."""
    config = load(mine)
    board = StoreBoard(store, f"fastps/job/{store.add(f'fastps/turn/{config.rank}', 1)}")
    close: Callable[[], None] = _nothing
    is_one_machine = config.local_size == config.size
    if config.rank == 0:
        job, close = rendezvous.host(
            config, board, at=_host_of(store), is_one_machine=is_one_machine
        )
    else:
        job = rendezvous.find(config, board, is_one_machine=is_one_machine)
    try:
        current.init({**job, **mine})
    except BaseException:
        close()
        raise
    if config.rank == 0:  # all have joined, and need it no more
        board.clear()

    def leave() -> None:
        current.shutdown()
        close()

    return leave


def _nothing() -> None:
    """End nothing: another rank hosts."""


class StoreBoard:
    """A Board (control/rendezvous.py) in a store of torch.distributed."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key

    def post(self, text: str) -> None:
        """Store the text."""
        self._store.set(self._key, text)

    def read(self, *, timeout_s: float) -> str:
        """Wait for the text and return it; TransportTimeout if none is posted in time."""
        try:
            self._store.wait([self._key], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "timeout" not in str(error).lower():  # each kind of store has its own
                raise
            raise TransportTimeout(
                f"rank 0 has not posted the job's address in {_STORE} within {timeout_s:.3g} s: "
                "see what rank 0 printed, or raise FASTPS_START_TIMEOUT_S if it only starts slowly"
            ) from error
        return self._store.get(self._key).decode()

    def clear(self) -> None:
        """Delete the text."""
        with contextlib.suppress(RuntimeError):  # of a store that cannot delete
            self._store.delete_key(self._key)


def agent_board(launcher: Launcher) -> StoreBoard | None:
    """Return a board in the store of torchrun's agents; None if they have none."""
    environment = process_environment()
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    return StoreBoard(store, f"fastps/init/{launcher.run}")


def _host_of(store: Store) -> str:
    """Return the host of torch's store; the loopback for a file store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", _LOOPBACK)
