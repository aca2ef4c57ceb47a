# SPDX-License-Identifier: Apache-2.0
"""What scripts written for Horovod do with gradients, in real jobs of many checks each."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

import fastps.torch as hvd  # noqa: E402
from fastps.frameworks import horovod  # noqa: E402

PROGRAM = Path(__file__).with_name("programs_torch_horovod.py")
PARTS = 6  # jobs, among which the checks are shared out: compilers need seconds for some
LIMIT_S = 170.0  # 12 s of a processor for each worker, on a machine that has much else to do


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("workers", "shared"), [(2, "0"), (3, "1")])
def test_gradients_are_those_of_one_process(
    tmp_path: Path, workers: int, shared: str, part: int
) -> None:
    script = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    call = f"programs_torch_horovod.checks({part}, {PARTS})"
    script += f"import programs_torch_horovod\nreport({call})\n"
    job = run_workers(
        script, tmp_path, workers=workers, servers=1, timeout_s=LIMIT_S,
        environ={"FASTPS_SHARED_MEMORY": shared},
    ).check()  # fmt: skip
    assert job.reports == ((None,),) * workers


REDUCING = "tensor average name op prescale_factor postscale_factor process_set"
ROOTED, NAMED = "tensor root_rank name process_set", "tensor name process_set"
SCATTERING = "tensor name op process_set prescale_factor postscale_factor"
# What a script may call, and with which keywords or positions: those of Horovod 0.28.
ORDERED = {
    **dict.fromkeys(["allreduce_async", "allreduce_", "allreduce_async_"], REDUCING),
    **dict.fromkeys(["broadcast", "broadcast_async", "broadcast_", "broadcast_async_"], ROOTED),
    **dict.fromkeys(["allgather", "allgather_async"], NAMED),
    **dict.fromkeys(["alltoall", "alltoall_async"], "tensor splits name process_set"),
    "allreduce": REDUCING.replace("op", "compression op", 1),
    "reducescatter": SCATTERING.replace("op", "compression op", 1),
    "reducescatter_async": SCATTERING,
    "sparse_allreduce_async": "tensor name op process_set",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "barrier": "process_set",
    "join": "device",
    "poll": "handle",
    "synchronize": "handle",
    "init": "comm process_sets",
    "start_timeline": "file_path mark_cycles",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
}
KNOWN = {
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "broadcast_parameters": "params root_rank process_set",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats process_set",
}
NAMES = """Adasum Average Compression HorovodInternalError HostsUpdatedInterrupt Max Min ProcessSet
Product Sum ccl_built cross_rank cross_size
cuda_built ddl_built global_process_set gloo_built gloo_enabled
is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported
nccl_built rank rocm_built shutdown size stop_timeline"""


def test_names_and_keywords_are_those_of_horovod():
    assert [name for name in NAMES.split() if not hasattr(hvd, name)] == []
    for name, words in ORDERED.items():
        ours = list(inspect.signature(getattr(hvd, name)).parameters)
        assert ours[: len(words.split())] == words.split(), name
    for name in [one for one in ORDERED if f"grouped_{one}" in dir(hvd)]:
        words = ORDERED[name].replace("tensor", "tensors").split()
        ours = list(inspect.signature(getattr(hvd, f"grouped_{name}")).parameters)
        assert ours[: len(words)] == words, name
    for name, words in KNOWN.items():
        assert set(words.split()) <= set(inspect.signature(getattr(hvd, name)).parameters), name


def test_names_are_checked_before_a_job_is_needed():
    modules = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    optimizer = torch.optim.SGD([one for module in modules for one in module.parameters()])
    named = [pair for module in modules for pair in module.named_parameters()]
    with pytest.raises(ValueError, match="weight"):
        hvd.DistributedOptimizer(optimizer, named)
    with pytest.raises(ValueError, match="does not name every parameter"):
        hvd.DistributedOptimizer(optimizer, named[:1])


def test_start_timeline_marks_a_part_of_a_timeline_that_is_recorded(monkeypatch):
    told: list[tuple[str, ...]] = []
    recorder = SimpleNamespace(
        begin_activity=lambda *words: told.append(("begin", *words)),
        end_activity=lambda *words: told.append(("end", *words)),
    )
    steps = SimpleNamespace(recorder=recorder)
    monkeypatch.setattr(horovod, "current", lambda: SimpleNamespace(steps=steps))
    horovod.start_timeline("first.json")
    horovod.start_timeline("second.json")  # ends the first
    horovod.stop_timeline()
    part = horovod._PART
    begun = [("begin", name, part) for name in ("first.json", "second.json")]
    assert told == [("end", part), begun[0], ("end", part), begun[1], ("end", part)]
