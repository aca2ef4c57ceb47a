# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs the training that goes on beside it.

    fastps-run -np 2 python tools/bench/checkpoint.py /data/trial --steps 8 --rounds 5

A model with Adam is trained; its state has about --mbytes. Blocks of steps with a save at their
beginning, and blocks without, take turns in one run. Printed for each pair: seconds of both, the
seconds of the copy, and the processor time that a save adds; at the end medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import fastps.torch as fps
from fastps.config.closed_pipe import ends_quietly


def options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--mbytes", type=int, default=1000, help="of the state, Adam's included")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help="of a block")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of blocks")
    return parser.parse_args()


def model_of(mbytes: int) -> torch.nn.Module:
    """Make a model whose parameters, and the two moments of each, have so many MB."""
    width = 2048
    layers = max(round(mbytes * 1e6 / 12 / width**2), 1)
    return torch.nn.Sequential(
        *(one for _ in range(layers) for one in (torch.nn.Linear(width, width), torch.nn.ReLU()))
    )


@ends_quietly
def main() -> None:
    """Train, and print what saves cost."""
    given = options()
    fps.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = model_of(given.mbytes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    optimizer = fps.DistributedOptimizer(optimizer, model.named_parameters())
    data = torch.randn(given.batch, 2048)

    def block() -> float:
        began = time.perf_counter()
        for _ in range(given.steps):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        fps.barrier()
        return time.perf_counter() - began

    block()
    quotients, extra, cpu = [], [], []
    for number in range(given.rounds + 1):
        used = [time.process_time()]
        without = block()
        used.append(time.process_time())
        began = time.perf_counter()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        handle = fps.checkpoint.save_async(state, given.folder, step=number, keep=2)
        copied = time.perf_counter() - began
        train = block()
        is_beside = handle.poll()
        whole = copied + train
        handle.wait()
        saved = time.perf_counter() - began
        used.append(time.process_time())
        if number == 0:  # which also gets its memory
            continue
        quotients.append(whole / without)
        extra.append(whole - without)
        cpu.append(used[2] - used[1] - (used[1] - used[0]))
        if fps.rank() == 0:
            print(
                f"{given.steps} steps without {without:.2f} s, with a save {whole:.2f} s "
                f"({quotients[-1] - 1:+.1%}); the copy {copied:.3f} s, complete "
                f"{'within them' if is_beside else f'after {saved:.2f} s'}; "
                f"{cpu[-1]:.2f} s of processor more", flush=True,
            )  # fmt: skip
    nbytes = sum(3 * one.nbytes for one in model.parameters())
    if fps.rank() == 0:
        middle = statistics.median
        print(
            f"{nbytes / 1e9:.2f} GB: {middle(quotients) - 1:+.1%}, {middle(extra):+.2f} s, "
            f"{middle(cpu):.2f} s of processor in each worker, in the median"
        )
    fps.shutdown()


if __name__ == "__main__":
    main()
