# SPDX-License-Identifier: Apache-2.0
"""Registration of the backend "fastps" of torch.distributed.

register() is cheap and runs whenever torch is imported where fastps is installed (entry point
torch.backends), so the rest is imported by the first init_process_group(). store_rendezvous.py
decides how the default group joins a job.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from datetime import timedelta
from typing import Any

from fastps.config.launchers import CARRIERS, Launcher
from fastps.frameworks.torch.distributed import trainers
from fastps.session import outside_job

NAME = "fastps"  # torch is imported in functions, since it loads this file during its import


def register() -> None:
    """Register the backend for init_process_group("fastps"); a second call does nothing."""
    from torch import distributed as dist  # noqa: PLC0415

    outside_job.watch()
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
        _patch_rendezvous(dist.default_pg_timeout)
        _patch_shutdown()
        _patch_comm_hooks()
        _patch_reducer()
        CARRIERS["torchrun"] = _agent_board
        trainers.watch()


def _agent_board(launcher: Launcher) -> Any:
    """Let fastps.init() use torchrun's store."""
    from fastps.frameworks.torch.distributed.store_rendezvous import agent_board  # noqa: PLC0415

    return agent_board(launcher)


def _patch_rendezvous(default_timeout: timedelta) -> None:
    """Make torch's env:// rendezvous use the job of fastps-run, unless MASTER_PORT is set."""
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    theirs = handlers["env"]

    def env(url: str, timeout: timedelta = default_timeout, **options: Any) -> Any:
        from fastps.frameworks.torch.distributed.store_rendezvous import has_job, meet  # noqa: PLC0415

        return meet(timeout) if has_job() else theirs(url, timeout=timeout, **options)

    handlers["env"] = env


def _patch_shutdown() -> None:
    """Make destroy_process_group() end fastps groups: torch before 2.7 ends only NCCL's."""
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


def _patch_comm_hooks() -> None:
    """Replace DDP's FP16 hook in C++, which cannot read results of Python's Futures."""
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


def _patch_reducer() -> None:
    """Keep alive the Work by which DDP counts the ranks that have not joined.

    Its reducer, in C++, holds only the C++ part of a Work made in Python, whose wait() never
    returns. So the last Work of each reducer is kept here.
    """
    reducers: Any = importlib.import_module("torch.distributed").Reducer
    theirs = reducers._set_forward_pass_work_handle
    last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def take(reducer: Any, work: Any, is_static: bool) -> None:
        last[reducer] = work
        theirs(reducer, work, is_static)

    reducers._set_forward_pass_work_handle = take


def create(options: Any, _: Any = None) -> Any:
    """Return a process group for torch; options: of register_backend(extended_api=True).

    The default group joins the job and blocks until all workers have joined, or the timeout.
    Groups of some of its ranks need no communication. A group beside another backend's default
    group joins too, if it is the first. Raises what fastps.init() does.
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
    """Import what torch's functional collectives would import in the first step.

    Takes a second or more; only for programs that use them, as FSDP2 and DTensor do.
    """
    if "torch.distributed._functional_collectives" in sys.modules:
        importlib.import_module("torch._dynamo")


def _nothing() -> None:
    """Do nothing, at the end of a group that did not join the job."""
