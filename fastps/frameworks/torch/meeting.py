# SPDX-License-Identifier: Apache-2.0
"""How the default process group of torch.distributed joins a job, and leaves it.

After fastps.init() it belongs to the session that is there. Under fastps-run it joins that job,
and torch's store, which torch wants in any case, is hosted by rank 0 and found through the job.
Otherwise, as under plain torchrun, rank 0 hosts the scheduler, and its address and a fresh token
travel through torch's store. That token is worth what the store is: torch's TCPStore asks nobody
who he is and encrypts nothing, so whoever reaches its port can read the token and join the job.
Where that matters start with fastps-run, whose token never travels.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from fastps import current
from fastps.config import Config, load, process_environment
from fastps.control.hosted import HostedScheduler
from fastps.errors import ConfigError
from fastps.transport import sockets
from fastps.transport.interfaces import own_address

_TOKEN_BYTES = 32
_LOOPBACK = "127.0.0.1"
_STORE = "torch.distributed's store"


def has_job() -> bool:
    """Tell whether a job is known, by init() or from fastps-run, and torch is told of none."""
    environment = process_environment()
    is_known = current.is_initialized() or "FASTPS_RANK" in environment
    return is_known and "MASTER_PORT" not in environment


def meet(timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    """Give torch's store, and rank and size in the job that is known, as a rendezvous does."""
    session = current.init({})
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


def join(store: Store, rank: int, size: int) -> Callable[[], None]:
    """Be rank of size in a job; give what ends, at last, what was begun for that.

    Blocks until all workers are there. Raises what fastps.init() does.
    """
    leave = _begin(store, rank, size)
    session = current.current()
    if (session.rank, session.size) != (rank, size):
        where = f"worker {session.rank} of {session.size}"
        leave()
        raise ConfigError(
            f"torch.distributed calls this process rank {rank} of {size}, but in its fastps job "
            f"it is {where}; leave RANK and WORLD_SIZE to the launcher"
        )
    return leave


def _begin(store: Store, rank: int, size: int) -> Callable[[], None]:
    if current.is_initialized():
        return lambda: None
    is_launched = bool(load({}).scheduler_port)
    if not is_launched and size > 1:
        return _begin_by_store(store, rank, size)
    current.init({} if is_launched else {"rank": 0, "size": 1, "num_servers": 0})
    return current.shutdown


def _begin_by_store(store: Store, rank: int, size: int) -> Callable[[], None]:
    """Join a job whose scheduler rank 0 hosts; a store may see several, one after the other."""
    key = f"fastps/job/{store.add(f'fastps/turn/{rank}', 1)}"
    close = _host(store, key, size) if rank == 0 else lambda: None
    try:
        job = json.loads(store.get(key))
        if "error" in job:
            raise ConfigError(f"rank 0 could not host the job's scheduler: {job['error']}")
        current.init({**job, "rank": rank, "size": size, "num_servers": 0})
    except BaseException:
        close()
        raise
    if rank == 0:  # all are in: nobody needs it any more
        with contextlib.suppress(RuntimeError):  # a store that cannot forget
            store.delete_key(key)

    def leave() -> None:
        current.shutdown()
        close()

    return leave


def _host(store: Store, key: str, size: int) -> Callable[[], None]:
    """Host a scheduler and tell the others through the store; give what ends it."""
    token = secrets.token_hex(_TOKEN_BYTES)
    try:
        config = _scheduler_config(_host_of(store), size, token)
        hosted = HostedScheduler(config)
    except Exception as error:
        store.set(key, json.dumps({"error": str(error)}))
        raise
    hosted.start()
    host, port = hosted.address
    store.set(key, json.dumps({"scheduler_host": host, "scheduler_port": port, "token": token}))

    def close() -> None:
        atexit.unregister(close)
        hosted.close(config.shutdown_timeout_s)

    atexit.register(close)  # before the session's: it runs after that
    return close


def _scheduler_config(host: str, size: int, token: str) -> Config:
    """Choose where to listen: on the loopback if no other machine can be meant."""
    settings = {
        "role": "scheduler", "size": size, "num_servers": 0, "token": token,
        "scheduler_host": host, "scheduler_port": 0,
    }  # fmt: skip
    config = load(settings)
    is_one_machine = config.local_size == size
    if is_one_machine and not (config.host or config.interface):
        return dataclasses.replace(config, host=_LOOPBACK)
    address = own_address(config)
    if sockets.is_loopback(address) and not (host == "localhost" or sockets.is_loopback(host)):
        raise ConfigError(
            f"{host} leads to the loopback on its own machine, where other machines cannot come; "
            "set FASTPS_HOST or FASTPS_INTERFACE for rank 0"
        )
    return dataclasses.replace(config, host=address)


def _host_of(store: Store) -> str:
    """Give the host that torch's store was found at; the loopback for one in a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", _LOOPBACK)
