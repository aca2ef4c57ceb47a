# SPDX-License-Identifier: Apache-2.0
"""The name "fastps" for trainers that keep lists of strategies or backends of their own.

Lightning and its Fabric get a strategy of that name, Accelerate and transformers' Trainer a
backend. None of them has an entry point for this, so watch() acts when they are imported, and
imports nothing itself. Decides only how a trainer comes to the process group of backend.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "fastps"


def watch() -> None:
    """Complete the trainers of this process, now or when they are imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, complete in _TRAINERS.items():
        if name in sys.modules:
            complete(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Find the modules of trainers as Python does, and complete them after their code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a trainer's module; None leaves a module to the other finders."""
        complete = _TRAINERS.get(name)
        if complete is None:
            return None
        others = (one for one in sys.meta_path if one is not self)
        spec = next(filter(None, (one.find_spec(name, path, target) for one in others)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                complete(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_strategy(module: Any) -> None:
    """Register Trainer(strategy="fastps"): Lightning's DDP strategy over the backend."""
    registry = getattr(module, "StrategyRegistry", None) or module.STRATEGY_REGISTRY
    registry.register(
        NAME,
        module.DDPStrategy,
        description="DDP over the backend fastps of torch.distributed, on CPUs",
        process_group_backend=NAME,
    )


def _accept_backend(module: Any) -> None:
    """Let PartialState, which makes the process group of Accelerate, take backend="fastps"."""
    state = module.PartialState
    theirs = state.__init__

    @functools.wraps(theirs)
    def init(self: Any, cpu: bool = False, **options: Any) -> None:
        if options.get("backend") != NAME or self._shared_state:
            theirs(self, cpu, **options)
            return
        del options["backend"]
        cpu = cpu or not module.torch.cuda.is_available()
        if not cpu:
            raise ValueError(
                f"backend {NAME!r} is for tensors on the CPU, but this machine has a GPU, which "
                "Accelerate would use; pass use_cpu=True to TrainingArguments, or cpu=True to "
                "Accelerator, or leave the backend out"
            )
        dist = module.torch.distributed
        if not dist.is_initialized() and int(module.os.environ.get("WORLD_SIZE", "1")) > 1:
            limit = {name: options[name] for name in ("timeout",) if options.get(name)}
            dist.init_process_group(NAME, **limit)
        theirs(self, cpu, **options)  # takes the group that is there
        self.backend = NAME if dist.is_initialized() else None

    state.__init__ = init


_TRAINERS: dict[str, Callable[[Any], None]] = {
    "lightning.pytorch.strategies": _add_strategy,
    "lightning.fabric.strategies": _add_strategy,
    "pytorch_lightning.strategies": _add_strategy,
    "lightning_fabric.strategies": _add_strategy,
    "accelerate.state": _accept_backend,
}
