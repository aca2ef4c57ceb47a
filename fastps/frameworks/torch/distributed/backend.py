# SPDX-License-Identifier: Apache-2.0
"""The backend "fastps" of torch.distributed: how it gets known.

`register` costs next to nothing and runs whenever torch is imported where fastps is installed
(entry point torch.backends), so the rest is imported at the first init_process_group(). How the
default group joins a job stands in store_rendezvous.py.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from datetime import timedelta
from typing import Any

from fastps.config.launchers import CARRIERS, Launcher
from fastps.session import outside_job

NAME = "fastps"  # torch is imported below: it loads this file at the end of its own import


def register() -> None:
    """Make init_process_group("fastps") known; a second call does nothing."""
    from torch import distributed as dist  # noqa: PLC0415

    outside_job.watch()
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
        _meet_by_job(dist.default_pg_timeout)
        _end_with_torch()
        _offer_hooks()
        _keep_news_of_join()
        CARRIERS["torchrun"] = _agent_board


def _agent_board(launcher: Launcher) -> Any:
    """Let fastps.init() use the store that torchrun has."""
    from fastps.frameworks.torch.distributed.store_rendezvous import agent_board  # noqa: PLC0415

    return agent_board(launcher)


def _meet_by_job(patience: timedelta) -> None:
    """Let torch find the job of fastps-run where the environment tells of nothing else."""
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    theirs = handlers["env"]

    def env(url: str, timeout: timedelta = patience, **options: Any) -> Any:
        from fastps.frameworks.torch.distributed.store_rendezvous import has_job, meet  # noqa: PLC0415

        return meet(timeout) if has_job() else theirs(url, timeout=timeout, **options)

    handlers["env"] = env


def _end_with_torch() -> None:
    """Let destroy_process_group() end our groups: before 2.7 torch ends those of NCCL alone."""
    module = importlib.import_module("torch.distributed.distributed_c10d")
    theirs = getattr(module, "_shutdown_backend", None)
    if theirs is None:
        return

    def end(group: Any) -> None:
        if group.name() == NAME:
            group.shutdown()
        else:
            theirs(group)

    module._shutdown_backend = end  # type: ignore[attr-defined]


def _offer_hooks() -> None:
    """Let DDP's hooks in C++ work: that of half precision reads no results of Python's Futures."""
    from torch import distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    theirs = DistributedDataParallel._register_builtin_comm_hook

    def register_hook(model: Any, kind: Any) -> None:
        is_half = kind.name == "FP16_COMPRESS"
        if is_half and dist.get_backend(model.process_group) == NAME:
            hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
            half = importlib.import_module(hooks).fp16_compress_hook
            model.register_comm_hook(model.process_group, half)  # the same in Python
        else:
            theirs(model, kind)  # type: ignore[no-untyped-call]

    DistributedDataParallel._register_builtin_comm_hook = register_hook  # type: ignore[method-assign]


def _keep_news_of_join() -> None:
    """Let DDP divide by how many have not joined: its reducer, in C++, waits for a Work of that.

    Of one made in Python it holds only what is inherited, whose wait() has no end. So the last one
    of each reducer is kept here.
    """
    reducers: Any = importlib.import_module("torch.distributed").Reducer
    theirs = reducers._set_forward_pass_work_handle
    last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def take(reducer: Any, work: Any, is_static: bool) -> None:
        last[reducer] = work
        theirs(reducer, work, is_static)

    reducers._set_forward_pass_work_handle = take


def create(options: Any, _: Any = None) -> Any:
    """Make a process group for torch; options: what register_backend() promises to give.

    The default group joins the job and blocks until all workers are there, or time is up. Groups
    of some of its ranks need no communication, except for a first one beside another backend's,
    which joins too. Raises what fastps.init() does.
    """
    from fastps.frameworks.torch.distributed.process_group import make_shell  # noqa: PLC0415
    from fastps.frameworks.torch.distributed.store_rendezvous import join, join_beside  # noqa: PLC0415
    from fastps.session import current  # noqa: PLC0415

    ranks, leave = options.global_ranks_in_group, _nothing
    if not ranks:
        ranks = range(options.group_size)
        leave = join(options.store, options.group_rank, options.group_size, options.timeout)
        _warm_up()
    elif not current.is_initialized():
        join_beside(options.store, ranks, options.timeout)
    return make_shell(
        current.current().groups.group(tuple(ranks), key=options.group_id),
        backend=NAME,
        name=options.group_id,
        timeout_s=options.timeout.total_seconds(),
        on_shutdown=leave,
    )


def _warm_up() -> None:
    """Import now what torch's functional collectives else import in the first step.

    Takes a second or more; only for programs that imported what uses them, as FSDP2 and DTensor.
    """
    if "torch.distributed._functional_collectives" in sys.modules:
        importlib.import_module("torch._dynamo")


def _nothing() -> None:
    """End a group that did not join the job: its operations end by themselves."""
