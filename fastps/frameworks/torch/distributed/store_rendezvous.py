# SPDX-License-Identifier: Apache-2.0
"""How the default process group of torch.distributed joins a job, and leaves it.

After fastps.init() it belongs to the session that is there. Under fastps-run it joins that job,
and torch's store, which torch wants in any case, is hosted by rank 0 and found through the job.
Otherwise, as under plain torchrun, rank 0 hosts the scheduler, and its address and a fresh token
travel through torch's store; so they do for fastps.init() where torchrun has several machines.
That token is worth what the store is: torch's TCPStore asks nobody who he is and encrypts nothing,
so whoever reaches its port can read the token and join the job. Where that matters start with
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
from fastps.transport.interfaces import own_address

_LOOPBACK = "127.0.0.1"
_STORE = "torch.distributed's store"
Patience: TypeAlias = dict[str, object]  # the setting of how long to wait for the others, if any
_LIMITS = ("FASTPS_START_TIMEOUT_S", "BLUEFOG_START_TIMEOUT")


def has_job() -> bool:
    """Return whether a job is known, by init() or from fastps-run, and torch is told of no other.

    fastps-run sets RANK and WORLD_SIZE too, to its own; with others a user means another group.
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
    """Yield torch's store, and rank and size in the job that is known, as a rendezvous does."""
    session = current.init(_patience(timeout))
    if session.size == 1:
        yield HashStore(), 0, 1
        return
    host = own_address(load({}))
    if session.rank == 0:
        store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        session.broadcast_object([host, store.port], 0, _STORE)
    else:
        host, port = session.broadcast_object(None, 0, _STORE)
        store = TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    yield store, session.rank, session.size


def join(store: Store, rank: int, size: int, timeout: timedelta) -> Callable[[], None]:
    """Be rank of size in a job; give what ends, at last, what was begun for that.

    Blocks until all workers are there, or time is up. Raises what fastps.init() does.
    """
    leave = _begin(store, rank, size, _patience(timeout))
    session = current.current()
    if (session.rank, session.size) != (rank, size):
        where = f"worker {session.rank} of {session.size}"
        leave()
        raise ConfigError(
            f"torch.distributed calls this process rank {rank} of {size}, but in its fastps job "
            f"it is {where}; leave RANK and WORLD_SIZE to the launcher"
        )
    return leave


def join_beside(store: Store, ranks: Sequence[int], timeout: timedelta) -> None:
    """Join a job for a group of all ranks beside a default one of another backend.

    Until the process ends: more such groups may come. ConfigError where the group lacks ranks.
    """
    everybody = range(dist.get_world_size())
    if list(ranks) != list(everybody):
        raise ConfigError(
            f"a first group of ranks {list(ranks)} cannot join a job that is for all "
            f"{len(everybody)}: call fastps.init() before new_group(backend='fastps'), or make "
            "fastps the default group"
        )
    join(store, dist.get_rank(), len(everybody), timeout)


def _patience(timeout: timedelta) -> Patience:
    """Return torch's time limit as that of the start, where the environment names none."""
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
    """Join a job whose scheduler rank 0 hosts; a store may see several, one after the other."""
    config = load(mine)
    board = StoreBoard(store, f"fastps/job/{store.add(f'fastps/turn/{config.rank}', 1)}")
    close: Callable[[], None] = _nothing
    if config.rank == 0:
        job, close = rendezvous.host(
            config, board, at=_host_of(store), is_one_machine=config.local_size == config.size
        )
    else:
        job = rendezvous.find(board, timeout_s=config.start_timeout_s)
    try:
        current.init({**job, **mine})
    except BaseException:
        close()
        raise
    if config.rank == 0:  # all are in: nobody needs it any more
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
        """Leave the text."""
        self._store.set(self._key, text)

    def read(self, *, timeout_s: float) -> str:
        """Wait for the text; TransportTimeout where none comes."""
        try:
            self._store.wait([self._key], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "timeout" not in str(error).lower():  # each kind of store has its own
                raise
            raise TransportTimeout(
                f"rank 0 has left no word of the job in {_STORE} within {timeout_s:.3g} s"
            ) from error
        return self._store.get(self._key).decode()

    def clear(self) -> None:
        """Take it away."""
        with contextlib.suppress(RuntimeError):  # a store that cannot forget
            self._store.delete_key(self._key)


def agent_board(launcher: Launcher) -> StoreBoard | None:
    """Leave the text in the store that torchrun's agents have, where they have one."""
    environment = process_environment()
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    return StoreBoard(store, f"fastps/init/{launcher.run}")


def _host_of(store: Store) -> str:
    """Return the host that torch's store was found at; the loopback for one in a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", _LOOPBACK)
