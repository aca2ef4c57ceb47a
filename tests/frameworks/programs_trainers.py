# SPDX-License-Identifier: Apache-2.0
"""Train small models with Lightning, Accelerate and the Trainer of transformers, and save them.

    python programs_trainers.py FOLDER                  one process, whole batches
    torchrun --nproc-per-node 2 programs_trainers.py FOLDER      backend "fastps", half of each
    fastps-run -np 2 python programs_trainers.py FOLDER          the same
    fastps-run -np 2 --env WORLD_SIZE=1 --env LOCAL_RANK=-1 ...  our optimizer or wrapper, the same

Writes FOLDER/<trainer>.npz: the weights at the end, of rank 0, which are those of all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import fastps.torch as fps  # an installed fastps needs no import for the backend

SIZE = int(os.environ.get("FASTPS_SIZE", os.environ.get("WORLD_SIZE", "1")))
RANK = int(os.environ.get("RANK", "0"))
IS_FASTPS = int(os.environ.get("WORLD_SIZE", "1")) < SIZE  # trainers know of no other rank
IS_BACKEND = SIZE > 1 and not IS_FASTPS
BATCH = 8  # of all ranks
STEPS = 6
WIDTH = 12


def points() -> TensorDataset:
    """Make data to learn from."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH * STEPS, WIDTH, generator=generator)
    return TensorDataset(x, x.square().sum(1, keepdim=True))


def net() -> nn.Module:
    """Make the model, the same on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def lightning(folder: Path) -> nn.Module:
    """Let Lightning do all of it: the group of processes too."""
    import lightning  # noqa: PLC0415

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=SIZE, strategy="fastps" if SIZE > 1 else "auto", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
    )  # fmt: skip
    module, data = Module(), points()
    sampler = DistributedSampler(data, SIZE, RANK, shuffle=False)  # Lightning's own one shuffles
    trainer.fit(module, DataLoader(data, batch_size=BATCH // SIZE, sampler=sampler))
    assert trainer.global_step == STEPS
    return module.net


def accelerate(folder: Path) -> nn.Module:
    """Let Accelerate prepare a loop of our own."""
    from accelerate import Accelerator, DataLoaderConfiguration  # noqa: PLC0415
    from accelerate.utils import InitProcessGroupKwargs  # noqa: PLC0415

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[InitProcessGroupKwargs(backend="fastps")] if SIZE > 1 else [],
    )  # fmt: skip
    assert accelerator.num_processes == SIZE
    assert SIZE == 1 or accelerator.state.backend == "fastps"
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(points(), batch_size=BATCH)
    )
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    losses = accelerator.gather(torch.full((1,), float(accelerator.process_index)))
    assert losses.tolist() == list(range(SIZE))
    return accelerator.unwrap_model(model)


class Sentences(Dataset):
    """Sequences of small numbers to predict."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(10) * (index % 5 + 1)) % 32
        return {"input_ids": words, "labels": words}


def language_model() -> nn.Module:
    """Make a tiny one of random weights, the same on all ranks."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def arguments(folder: Path) -> Any:
    """Say how the Trainer trains; it clips."""
    from transformers import TrainingArguments  # noqa: PLC0415

    return TrainingArguments(
        output_dir=str(folder / "trainer"), use_cpu=not IS_BACKEND,
        ddp_backend="fastps" if IS_BACKEND else None, max_steps=STEPS, learning_rate=0.01,
        per_device_train_batch_size=BATCH // SIZE, max_grad_norm=1.0, save_strategy="no",
        report_to=[], disable_tqdm=True, seed=5, data_seed=5, logging_strategy="no",
        lr_scheduler_type="constant",
        # The gradient of a bias of keys is rounding alone, which Adam else makes a whole step of.
        adam_epsilon=1e-3,
    )  # fmt: skip


def transformers(folder: Path) -> nn.Module:
    """Let the Trainer train a language model, with its clipping."""
    from transformers import Trainer  # noqa: PLC0415

    model = language_model()
    trainer = Trainer(model=model, args=arguments(folder), train_dataset=Sentences())
    trainer.train()
    assert trainer.state.global_step == STEPS
    return model


def with_own_data(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    """Make a Trainer whose data are those of this rank, which it knows nothing of."""
    from transformers import Trainer  # noqa: PLC0415

    class OwnData(Trainer):
        def get_train_dataloader(self):
            sampler = DistributedSampler(Sentences(), SIZE, RANK, shuffle=False)
            return DataLoader(Sentences(), batch_size=BATCH // SIZE, sampler=sampler)

    return OwnData(model=model, args=arguments(folder), optimizers=(optimizer, None))


def wrapped(folder: Path) -> nn.Module:
    """Give the Trainer a DistributedOptimizer; it clips averages, between backward and step."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # not so blind to scale as Adam is
    if SIZE > 1:
        optimizer = fps.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), finish_in_backward=True
        )
    trainer = with_own_data(model, optimizer, folder)
    trainer.train()
    assert trainer.state.global_step == STEPS
    return model


def parallel(folder: Path) -> nn.Module:
    """Give the Trainer a model in our wrapper; it saves the one within, whose weights are tied."""
    from accelerate import Accelerator  # noqa: PLC0415
    from transformers.modeling_utils import unwrap_model  # noqa: PLC0415

    model = outer = language_model()
    if SIZE > 1:
        outer = fps.DistributedDataParallel(model)
        assert unwrap_model(outer) is model
        assert unwrap_model(outer, recursive=True) is model
        assert Accelerator(cpu=True).unwrap_model(outer) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = with_own_data(outer, optimizer, folder)
    trainer.train()
    assert trainer.state.global_step == STEPS
    place = folder / f"saved by {RANK}"
    trainer.save_model(str(place))  # with keys that begin with "module.", as of torch's class
    unwrap_model(trainer.model).save_pretrained(place)
    loaded = type(model).from_pretrained(place).state_dict()
    for name, one in model.state_dict().items():
        assert torch.equal(loaded[name], one), name
    return model


PARTS: dict[str, Callable[[Path], nn.Module]] = {
    "lightning": lightning, "accelerate": accelerate, "transformers": transformers,
    "wrapped": wrapped, "parallel": parallel,
}  # fmt: skip


def parts() -> list[str]:
    """List what is trained in this way of starting."""
    if SIZE == 1:
        return list(PARTS)
    if IS_FASTPS:
        return ["wrapped", "parallel"]
    # The first of them makes the group: another one under each launcher.
    kinds = ["lightning", "accelerate", "transformers"]
    return kinds[::-1] if "FASTPS_SIZE" in os.environ else kinds


def save(model: nn.Module, path: Path) -> None:
    """Write the weights, which all ranks have to have alike."""
    weights = {name: one.detach().numpy() for name, one in model.state_dict().items()}
    if IS_FASTPS:
        for name, one in weights.items():
            everybody = fps.allgather(torch.from_numpy(one.reshape(1, -1)))
            assert bool((everybody == everybody[:1]).all()), name
    elif SIZE > 1:
        assert dist.get_backend() == "fastps"
        for name, one in weights.items():
            others = [torch.empty(one.shape) for _ in range(SIZE)]
            dist.all_gather(others, torch.from_numpy(np.ascontiguousarray(one)))
            assert all(np.array_equal(one, other.numpy()) for other in others), name
    if RANK == 0:
        np.savez(path, **weights)


def main() -> None:
    """Train with all of them, one after the other."""
    folder = Path(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    if IS_FASTPS:
        fps.init()
    for name in parts():
        save(PARTS[name](folder), folder / f"{name}.npz")
        print(f"{name} done", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
