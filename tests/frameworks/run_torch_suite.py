# SPDX-License-Identifier: Apache-2.0
"""Run the tests that PyTorch ships for its own backends (distributed_test.py) with "fastps".

    python tests/frameworks/run_torch_suite.py --world-size 2 [--match REGEX] [--backend gloo]
    python tests/frameworks/run_torch_suite.py --world-size 2 --list tests/.../passes.txt

Torch and its tests are imported once; every test then runs in freshly forked ranks, so that it
costs neither their start nor what the test before it left behind. A rank that does not end in time
is killed, the others with it. With --list the outcome is compared with a list of what passes;
exit code 1 when something of it fails. Of conditions like `BACKEND != "gloo"` and "mpi" fastps
passes for both, so it has to do what either does on CPU.
"""
# ruff: noqa: PLC0415  (torch's modules read the environment when they are imported)

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"
# What the backend imports when a job begins: here once, not in every rank.
PRELOADED = (
    "fastps.session.connections",
    "fastps.session.groups",
    "fastps.frameworks.torch.distributed.store_rendezvous",
    "fastps.frameworks.torch.distributed.process_group",
)
SKIP_CODES = range(70, 100)  # TEST_SKIPS of common_distributed
PG_TIMEOUT_S = 30.0


class BackendName(str):
    """A backend's name that is also the names of those whose tests it runs."""

    STANDS_FOR = ("gloo", "mpi")

    def __eq__(self, other):
        return str.__eq__(self, other) or other in self.STANDS_FOR

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def _stub_expecttest():
    """Give torch's test helpers the one module that they want and these tests do not use."""
    if find_spec("expecttest") is None:
        stub = types.ModuleType("expecttest")
        stub.TestCase, stub.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stub


def load_suite(backend: str, world_size: int):
    """Import torch's tests for a backend that torch does not know."""
    _stub_expecttest()
    os.environ.update(
        BACKEND=backend, WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    from torch.testing._internal.common_distributed import (
        DistTestCases,
        find_free_port,
        initialize_temp_directories,
    )

    os.environ["MASTER_PORT"] = str(find_free_port())
    initialize_temp_directories()

    torch.set_num_threads(1)
    for feature in ("ddp", "subgroup", "gpu", "cuda"):
        DistTestCases.backend_feature[feature].add(backend)
    if backend == "gloo":
        module = __import__(SUITE, fromlist=["x"])
    else:
        module = types.ModuleType(SUITE)
        path = Path(find_spec(SUITE).origin)
        source = path.read_text(encoding="utf-8")
        line = 'BACKEND = os.environ["BACKEND"]'
        assert line in source
        module.__dict__["_name"] = BackendName(backend)
        sys.modules[SUITE] = module
        source = source.replace(line, "BACKEND = _name")
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    module.PROFILING_SUPPORTED_BACKENDS[:] = []
    module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS[:] = []
    return module


def make_case(module):
    """Join the pieces of which torch's own runners make a test case."""

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def _barrier(self, *args, **kwargs):
            self.turn = getattr(self, "turn", 0) + 1
            self.meeting.add(f"barrier/{self.turn}", 1)
            deadline = time.monotonic() + PG_TIMEOUT_S
            while self.meeting.add(f"barrier/{self.turn}", 0) < int(self.world_size):
                assert time.monotonic() < deadline, "a rank did not come to the barrier"
                time.sleep(0.002)

    return Suite


def run_rank(case, name, rank, backend, world_size, folder) -> tuple[str, str]:
    """Run one test as one rank; give its outcome and a text."""
    import torch.distributed as dist

    test = case(name)
    test.rank, test.file_name = rank, f"{folder}/init"
    test.meeting = dist.FileStore(f"{folder}/meeting", world_size)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/init", world_size=world_size, rank=rank,
            timeout=timedelta(seconds=PG_TIMEOUT_S),
        )  # fmt: skip
        test._barrier()
        getattr(test, name)()
        test._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as why:
        return "skip", str(why)
    except SystemExit as end:
        outcome = "skip" if end.code in SKIP_CODES else "pass" if not end.code else "fail"
        return outcome, f"exit {end.code}"
    except BaseException:
        return "fail", traceback.format_exc()
    return "pass", ""


def fork_rank(case, name, rank, args, folder) -> int:
    """Start a rank; it writes its outcome into a file."""
    child = os.fork()
    if child:
        return child
    with open(f"{folder}/out.{rank}", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    import faulthandler

    faulthandler.dump_traceback_later(args.timeout - 2, file=sys.__stderr__)
    outcome = run_rank(case, name, rank, args.backend, args.world_size, folder)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)


def run_test(case, name, args) -> tuple[str, str]:
    """Run one test as a job of its own."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork_rank(case, name, rank, args, folder) for rank in range(args.world_size)]
        deadline, waiting = time.monotonic() + args.timeout, set(ranks)
        has_failed = False
        while waiting and time.monotonic() < deadline:
            for child in list(waiting):
                if os.waitpid(child, os.WNOHANG)[0]:
                    waiting.discard(child)
            done = [path for path in Path(folder).glob("*.json") if path.stat().st_size]
            if not has_failed and any(json.loads(p.read_text())[0] == "fail" for p in done):
                has_failed, deadline = True, min(deadline, time.monotonic() + 10)
            time.sleep(0.005)
        for child in waiting:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        outcomes = []
        for rank in range(args.world_size):
            path = Path(f"{folder}/{rank}.json")
            if path.exists() and path.stat().st_size:
                outcomes.append(json.loads(path.read_text()))
            else:
                tail = Path(f"{folder}/out.{rank}").read_text(errors="replace")[-3000:]
                outcomes.append(("fail", f"rank {rank} did not end by itself\n{tail}"))
    kinds = {kind for kind, _ in outcomes}
    kind = "fail" if "fail" in kinds else "skip" if kinds == {"skip"} else "pass"
    return kind, "\n".join(f"rank {i}: {text}" for i, (_, text) in enumerate(outcomes) if text)


def read_list(path: Path, world_size: int) -> set[str]:
    """Read the names of the tests that pass with this many ranks: lines like `test_x 2 3`."""
    rows = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    return {row[0] for row in rows if row and str(world_size) in row[1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--backend", default="fastps")
    parser.add_argument("--match", default="")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--list", type=Path)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    module = load_suite(args.backend, args.world_size)
    if args.backend == "fastps":
        from fastps.frameworks.torch.distributed.backend import register

        register()
        for name in PRELOADED:
            importlib.import_module(name)
    case = make_case(module)
    gc.collect()
    gc.freeze()  # else every collection in a rank copies the memory of what was imported
    wanted = read_list(args.list, args.world_size) if args.list else None
    names = [name for name in sorted(dir(case)) if name.startswith("test_")]
    names = [name for name in names if re.search(args.match, name)]
    if wanted is not None:
        names = [name for name in names if name in wanted]
    missing = [] if wanted is None else sorted(wanted - set(names))
    counts: dict[str, int] = {}
    for name in names:
        began = time.monotonic()
        kind, text = run_test(case, name, args)
        counts[kind] = counts.get(kind, 0) + 1
        print(f"{kind} {name} {time.monotonic() - began:.1f} s", flush=True)
        if text and (args.verbose or kind == "fail"):
            print(text, flush=True)
        if wanted is not None and kind != "pass":
            missing.append(name)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    if missing:
        print("of the list these did not pass: " + ", ".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
