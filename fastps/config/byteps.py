# SPDX-License-Identifier: Apache-2.0
"""BytePS's and ps-lite's variables without a setting in fastps, and what to use instead.

The table is for docs/env.md and for the warning where one of them is set. Variables that fastps
understands are aliases in the table of settings. Pure.
"""

from __future__ import annotations

_GPU = "nothing: there is no NCCL; tensors on a GPU are copied through the host"
_RDMA = "the rdma_ settings, as FASTPS_RDMA_PINNED_BYTES; queue depths are chosen"
_UCX = "FASTPS_TRANSPORT=rdma; there is no UCX"
_ZMQ = "FASTPS_IO_THREADS and FASTPS_LINKS_PER_PEER; there is no ZeroMQ"
_ALWAYS = "nothing: it is always so"
_BUILD = "nothing: `pip install .` needs a C compiler alone"

# Some names with one answer.
_ROWS: tuple[tuple[str, str], ...] = (
    ("BYTEPS_ENABLE_IPC", "FASTPS_SHARED_MEMORY, which is on"),
    ("BYTEPS_IPC_ENABLE_ASYNC_COPY", "FASTPS_SHARED_MEMORY"),
    ("BYTEPS_MIXED_MODE_BOUND", "nothing: partitions are shared by bytes, without buckets"),
    ("BYTEPS_OMP_THREAD_PER_GPU", "FASTPS_ENGINE_THREADS on servers"),
    ("BYTEPS_PCIE_SWITCH_SIZE BYTEPS_REDUCE_ROOTS BYTEPS_NCCL_GROUP_SIZE BYTEPS_NCCL_NUM_RINGS",
     _GPU),
    ("BYTEPS_NCCL_HOME BYTEPS_NCCL_LINK BYTEPS_CUDA_HOME BYTEPS_CUDA_INCLUDE BYTEPS_CUDA_LIB",
     _BUILD),
    ("BYTEPS_WITH_TENSORFLOW BYTEPS_WITHOUT_TENSORFLOW BYTEPS_WITH_PYTORCH "
     "BYTEPS_WITHOUT_PYTORCH BYTEPS_WITH_MXNET BYTEPS_WITHOUT_MXNET BYTEPS_WITHOUT_PRESETUP "
     "BYTEPS_WITH_UCX BYTEPS_UCX_HOME BYTEPS_UCX_PREFIX BYTEPS_UCX_TARBALL_PATH BYTEPS_USE_MPI "
     "BYTEPS_MPICXX_SHOW", _BUILD),
    ("BYTEPS_SOCKET_PATH", "nothing: processes of a machine meet without files"),
    ("BYTEPS_LOG_HIDE_TIME", "the formatter of Python's logging"),
    ("BYTEPS_SERVER_ENABLE_SCHEDULE", _ALWAYS),
    ("BYTEPS_SERVER_ENGINE_BLOCKING", "FASTPS_ENGINE_THREADS=0"),
    ("BYTEPS_NUMA_ON BYTEPS_NUMA_DEFAULT_QUOTA BYTEPS_NUMA_ROOT_QUOTA BYTEPS_CPU_BLACKLIST "
     "BYTEPS_MULTITHREADED_CPU", "FASTPS_CPUS and FASTPS_NUMA_NODE, or fastps-run"),
    ("BYTEPS_ORDERED_HOSTS DMLC_RANK", "FASTPS_RANK"),
    ("BYTEPS_RDMA_START_DEPTH BYTEPS_RDMA_RX_DEPTH BYTEPS_RDMA_MAX_CONCURR_WR "
     "BYTEPS_PRINT_RDMA_LOG BYTEPS_ADDRESS_POOL_SIZE", _RDMA),
    ("BYTEPS_ZMQ_MAX_SOCKET BYTEPS_ZMQ_NTHREADS", _ZMQ),
    ("DMLC_ENABLE_UCX BYTEPS_UCX_SHORT_THRESH BYTEPS_UCX_FORCE_REQ_ORDER "
     "BYTEPS_UCX_QUEUE_SENDS BYTEPS_UCX_ERRH_ENABLE BYTEPS_UCX_RECONNECT_TMO "
     "DMLC_NUM_CPU_DEV DMLC_NUM_GPU_DEV", _UCX),
    ("DMLC_GROUP_SIZE DMLC_NUM_PORTS", "FASTPS_LINKS_PER_PEER"),
    ("DMLC_LOCAL", "FASTPS_UNIX_SOCKETS, which is on"),
    ("DMLC_USE_KUBERNETES", "FASTPS_INTERFACE=0.0.0.0/0 and FASTPS_HOST"),
    ("DMLC_LOCKLESS_QUEUE DMLC_POLLING_IN_NANOSECOND", "FASTPS_SPIN_US"),
    ("PS_VERBOSE", "FASTPS_LOG_LEVEL=DEBUG"),
    ("PS_HEARTBEAT_INTERVAL", "FASTPS_HEARTBEAT_S"),
    ("PS_HEARTBEAT_TIMEOUT", "FASTPS_LEASE_S"),
    ("PS_RESEND PS_RESEND_TIMEOUT", "nothing: TCP and RDMA send again by themselves"),
    ("PS_DROP_MSG", "FASTPS_FAULT"),
    ("BYTEPS_STALENESS", "DistributedOptimizer(staleness=...)"),
    ("BYTEPS_PIPESGD_WARMUP_ITER", "DistributedOptimizer(pipesgd_warmup_iter=...)"),
    ("BYTEPS_BUCKET_SIZE_BYTES BYTEPS_BUCKET_CAP_MB", "DistributedOptimizer(bucket_bytes=...)"),
    ("BYTEPS_CPU_ONLY", _ALWAYS),
    ("BYTEPS_DEBUG_SAMPLE_TENSOR BYTEPS_SERVER_DEBUG BYTEPS_SERVER_DEBUG_KEY",
     "FASTPS_TRACE_ON, a timeline of every stage of every tensor, on workers and servers"),
)  # fmt: skip
INSTEAD = {name: answer for names, answer in _ROWS for name in names.split()}
PREFIXES = ("BYTEPS_", "DMLC_")  # of names that are checked for misspellings
# Read where an alias is derived, and by launchers.
UNDERSTOOD = {
    "DMLC_NUM_WORKER": "FASTPS_SIZE",
    "DMLC_WORKER_ID": "FASTPS_RANK",
    "DMLC_WORKER_TYPE": "FASTPS_ROLE",
    "DMLC_VALIDATOR_ID": "FASTPS_RANK",
    "DMLC_ENABLE_RDMA": "FASTPS_TRANSPORT",
    "BYTEPS_ENABLE_MIXED_MODE": "FASTPS_COLOCATE",
    "BYTEPS_SCHEDULING_CREDIT": "FASTPS_CREDIT_BYTES",
    "BYTEPS_VISIBLE_CPU_CORES": "FASTPS_CPUS",
}


def answer(name: str) -> str:
    """Return the end of a sentence: what to use instead of a variable, or why nothing."""
    found = INSTEAD[name]
    is_nothing = found.startswith("nothing: ")
    return f" here: {found.removeprefix('nothing: ')}" if is_nothing else f"; use {found}"
