# SPDX-License-Identifier: Apache-2.0
"""The one table of settings, and the only reader of the environment.

Decides the name, bounds and source of every setting: keyword, then its FASTPS_ name, then the
alias names in listed order, then the default. Never knows what a setting does. Invariant: a
`Config` holds values that passed their bounds, and does not change. Threads: any; there is no
state. __main__.py is the command that shows the table.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from fastps.config import bluefog, byteps, derived
from fastps.config.derived import Environ, Values
from fastps.config.parsers import (
    as_aligned,
    as_boolean,
    as_integer,
    as_log_level,
    as_partition,
    as_path,
    as_path_mtu,
    as_seconds,
    as_text,
)
from fastps.config.token import read_token
from fastps.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "FASTPS_"
# Read by setup.py when the extensions are compiled; known here so that they raise no warning.
BUILD_NAMES = ("FASTPS_ANNOTATE", "FASTPS_DEBUG", "FASTPS_ONLY")
MIN_CHUNK_BYTES = 4096
GIB = 1 << 30
MAX_PROCESSES = 65535
MAX_POOL_BYTES = 1 << 50
MAX_VERSION = (1 << 32) - 1
DAY_S = 86400.0
MIN_PULSE_S = 0.05
ROLES = ("worker", "server", "scheduler", "validator")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class Derived(NamedTuple):
    """An alias that is computed: its label in docs, and the rule that computes it.

    The rule gets the environment and the settings earlier in the table. It returns None where
    the variables that it needs are not set.
    """

    label: str
    rule: Callable[[Environ, Values], object | None]


class Setting(NamedTuple):
    """One setting: a row of the table and of docs/env.md."""

    section: str
    field: str
    parse: Callable[[object], Any]
    default: Any
    aliases: tuple[str | Derived, ...]
    unit: str  # of numbers
    allowed: tuple[Any, ...]  # (low, high) for numbers, the choices for texts, () for any
    sentence: str
    is_secret: bool  # must never be shown

    @property
    def name(self) -> str:
        """Return the FASTPS_ name of the setting."""
        return PREFIX + self.field.upper()

    @property
    def bounds(self) -> str:
        """Return the allowed values as text; empty when any value is allowed."""
        if self.parse is as_boolean:
            return "1 or 0"
        if not self.allowed or isinstance(self.allowed[0], str):
            return "one of " + ", ".join(self.allowed) if self.allowed else ""
        low, high = self.allowed
        return f"{format_value(low)} to {format_value(high)} {self.unit}".rstrip()

    @property
    def example(self) -> str:
        """Return a line that sets an allowed value."""
        value = self.default
        if value in (None, "") or self.parse is as_boolean:
            value = self.allowed[0] if self.allowed else EXAMPLES.get(self.field, "1")
        return f"{self.name}={format_value(value)}"


EXAMPLES = {
    "fault": "worker_result@3:kill",
    "scheduler_host": "10.0.0.1",
    "host": "10.0.0.2",
    "interface": "eth0",
    "cpus": "0-3,8",
    "token_file": "job.token",
    "job_id": "my-job",
    "same_host_congestion": "cubic,reno",
    "rdma_device": "mlx5_0",
}

JOB = "Job"
ADDRESS = "Addresses"
SECURITY = "Security"
DATA = "Data path"
THREADS = "Threads and memory"
TIMES = "Time limits"
TRACING = "Timeline and telemetry"
DEBUGGING = "Logs and faults"


def _set(
    section: str,
    default: Any,
    *aliases: str | Derived,
    text: str,
    parse: Callable[[object], Any] | None = None,
    unit: str = "",
    allowed: tuple[Any, ...] = (),
    is_secret: bool = False,
) -> Any:
    """Return a field of Config with its row of the table; parse: default by the field's type."""
    row = (section, parse, default, aliases, unit, allowed, text, is_secret)
    return field(repr=not is_secret, metadata={"row": row})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one process, made by `load`. The fields are the table of settings."""

    # fmt: off
    role: str = _set(JOB, "worker", Derived("DMLC_WORKER_TYPE=validator", derived.role_of_zenops),
        "DMLC_ROLE", allowed=ROLES, text="What this process is.")
    job_id: str = _set(JOB, "", "BYTEPS_JOB_ID",
        text="Name of the job; processes of different jobs never join each other.")
    local_rank: int | None = _set(JOB, None, "LOCAL_RANK", "BYTEPS_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", allowed=(0, MAX_PROCESSES - 1),
        text="Number of this worker among those of its machine; unset, the scheduler gives it.")
    local_size: int | None = _set(JOB, None, "LOCAL_WORLD_SIZE", "BYTEPS_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE", unit="processes", allowed=(1, MAX_PROCESSES),
        text="Number of workers on this machine; unset, the scheduler counts them.")
    size: int = _set(JOB, 1, "FASTPS_NUM_WORKERS", "WORLD_SIZE",
        Derived("DMLC_NUM_WORKER x local size", derived.size_of_machines), "OMPI_COMM_WORLD_SIZE",
        "SLURM_NTASKS", unit="processes", allowed=(1, MAX_PROCESSES),
        text="Number of worker processes of the job.")
    num_servers: int = _set(JOB, 0, "DMLC_NUM_SERVER", unit="processes",
        allowed=(0, MAX_PROCESSES), text="Number of server processes of the job.")
    num_validators: int = _set(JOB, 0, "DMLC_NUM_VALIDATOR", unit="processes",
        allowed=(0, 256),
        text="Number of validators of the job, trusted processes that run the workers' program; "
             "see docs/byzantine.md. The same in all processes.")
    rank: int | None = _set(JOB, None, Derived("DMLC_VALIDATOR_ID", derived.rank_of_validator),
        "RANK", "BYTEPS_GLOBAL_RANK",
        Derived("DMLC_WORKER_ID x local size + local rank", derived.rank_of_machine),
        "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", allowed=(0, MAX_PROCESSES - 1),
        text="Number of this worker, or validator, in the job; unset, the scheduler gives it.")
    force_distributed: bool = _set(JOB, False, "BYTEPS_FORCE_DISTRIBUTED",
        text="Use the servers even when all workers are on one machine.")
    machine: str = _set(JOB, "", Derived(bluefog.NODES_PER_MACHINE, bluefog.machine_of),
        text="Name of the machine this process counts as part of; unset, the kernel's boot id "
             "and the network namespace tell machines apart.")
    colocate: str = _set(JOB, "auto", Derived("BYTEPS_ENABLE_MIXED_MODE", derived.mixed_mode),
        allowed=("auto", "on", "off"),
        text="Whether one worker of every machine serves a share of the bytes too; auto: where "
             "there are fewer servers than worker machines.")
    on_loss: str = _set(JOB, "fail", allowed=("fail", "reweight"),
        text="What happens when a worker is lost. fail: the job ends. reweight: the job goes on; "
             "neighbors leave the worker out and weigh the others anew, servers change the "
             "parameters they hold without it (LocalSGD, AsyncLocalSGD), and validators judge "
             "without it. The same on all workers.")
    elastic_min: int = _set(JOB, 0, unit="processes", allowed=(0, MAX_PROCESSES),
        text="Least number of workers with which training goes on when workers or servers are "
             "lost, see docs/fault-tolerance.md; 0: a loss ends the job. The same in all "
             "processes.")
    elastic_max: int = _set(JOB, 0, unit="processes", allowed=(0, MAX_PROCESSES),
        text="Most workers of an elastic job, up to which others may join it; 0: nobody joins. "
             "The scheduler's counts.")
    elastic_join: bool = _set(JOB, False,
        text="This worker joins an elastic job that runs; set by fastps-run.")
    view_log: str = _set(JOB, "", parse=as_path,
        text="File in which the scheduler of an elastic job writes a line for each view: its "
             "workers, and the last result of each name; for FASTPS_REPLAY.")
    replay: str = _set(JOB, "", parse=as_path,
        text="Log of views of an elastic job that this one makes again: the same workers "
             "contribute to the same results. Read by the scheduler.")
    check_weights: bool = _set(JOB, True,
        text="Compare the weights of all workers before the first step of a DistributedOptimizer, "
             "so that a forgotten broadcast_parameters() is an error; turn it off where local "
             "models differ on purpose.")
    join_average: str = _set(JOB, "present", allowed=("present", "all"),
        text="Divisor of averages while some workers are in join(): the number of workers "
             "present, or of all workers, as with Horovod. The same on all workers.")
    enable_async: bool = _set(JOB, False, "BYTEPS_ENABLE_ASYNC",
        text="Let optimizers train asynchronously by default.")
    commit_dir: str = _set(JOB, "", parse=as_path,
        text="Directory where rank 0 saves the commits of elastic training, for a job that is "
             "started again; fastps-run --restarts sets one.")
    scheduler_host: str = _set(ADDRESS, "", "DMLC_PS_ROOT_URI", "MASTER_ADDR",
        text="Name or address of the scheduler.")
    scheduler_port: int = _set(ADDRESS, 0, "DMLC_PS_ROOT_PORT", allowed=(0, 65535),
        text="Port of the scheduler; as the scheduler's own setting, 0 takes any free port.")
    meeting_dir: str = _set(ADDRESS, "", parse=as_path,
        text="Directory that all machines share, where workers of torchrun, mpirun or srun find "
             "rank 0, which hosts the scheduler; see docs/launchers.md.")
    interface: str = _set(ADDRESS, "", "DMLC_INTERFACE",
        text="Network to listen on: name of an interface, an address, or a network as "
             "10.0.0.0/24; if unset, the one that leads to the scheduler.")
    host: str = _set(ADDRESS, "", "DMLC_NODE_HOST",
        text="Address by which others reach this process, where it differs from the one it "
             "listens on.")
    port: int = _set(ADDRESS, 0, "DMLC_PORT", allowed=(0, 65535),
        text="Port this process listens on; 0 takes any free port.")
    token: str = _set(SECURITY, "", is_secret=True,
        text="Secret that all processes of the job share, at least 16 bytes; it never travels, "
             "is never logged, and init() takes it out of the environment.")
    token_file: str = _set(SECURITY, "", parse=as_path,
        text="File that holds the token, of mode 0600 or stricter; used when the token is unset.")
    insecure: bool = _set(SECURITY, False,
        text="Allow a job without a token: any process that reaches a port may join it.")
    transport: str = _set(DATA, "auto", Derived("DMLC_ENABLE_RDMA=1", derived.rdma),
        allowed=("auto", "tcp", "rdma"),
        text="How tensors travel: auto takes RDMA between machines that both have an RDMA device, "
             "else TCP; rdma takes RDMA alone, also within one machine.")
    rdma_device: str = _set(DATA, "",
        text="Name of the RDMA device; empty takes the first with an active port.")
    rdma_port: int = _set(DATA, 0, allowed=(0, 255),
        text="Port of the RDMA device; 0 takes the first that is active.")
    rdma_gid_index: int = _set(DATA, -1, allowed=(-1, 65535),
        text="Index of this process's address in the port's GID table; -1 takes the most "
             "routable one.")
    rdma_mtu: int = _set(DATA, 0, parse=as_path_mtu, unit="bytes", allowed=(0, 4096),
        text="Largest packet of RDMA: 256, 512, 1024, 2048 or 4096; 0 takes the port's.")
    rdma_traffic_class: int = _set(DATA, 0, allowed=(0, 255),
        text="Traffic class of RDMA packets, which chooses the queue in the switches.")
    rdma_timeout_s: float = _set(DATA, 8.0, unit="seconds", allowed=(0.1, 120.0),
        text="Time after which a peer that does not answer RDMA packets counts as lost.")
    # 7 is for ever on some devices: a dead peer would go unnoticed
    rdma_retries: int = _set(DATA, 6, allowed=(1, 6),
        text="How often an RDMA packet is sent again within rdma_timeout_s.")
    rdma_pinned_bytes: int = _set(DATA, 4 * GIB, unit="bytes", allowed=(0, MAX_POOL_BYTES),
        text="Most memory of tensors that stays pinned for RDMA, and most that a server keeps "
             "pinned for incoming frames; beyond it each frame costs more.")
    rdma_data_path: str = _set(DATA, "auto", allowed=("auto", "native", "pyverbs"),
        text="Code that drives the RDMA device; auto: native where fastps was built with the "
             "header of libibverbs, else pyverbs.")
    shared_memory: bool = _set(DATA, True,
        text="Let the workers of one machine reduce in shared memory; 0 makes each of them a "
             "machine of its own.")
    shared_memory_bytes: int = _set(DATA, 0, unit="bytes", allowed=(0, MAX_POOL_BYTES),
        text="Most shared memory that one process may take; 0 sets no limit besides that of the "
             "machine or container.")
    peer_memory: bool = _set(DATA, True,
        text="Let workers that share memory copy arrays of 256 KiB and more in parallel, private "
             "arrays directly if the kernel allows that, and back reused private arrays with huge "
             "pages. 0: the receiver copies alone, private arrays through shared memory.")
    launcher_pid: int = _set(DATA, 0, allowed=(0, 1 << 22),
        text="Process of fastps-run on this machine, whose descendants may reach this worker's "
             "memory where Yama restricts that; set by fastps-run.")
    unix_sockets: bool = _set(DATA, True,
        text="Use Unix sockets instead of TCP between processes of one machine.")
    partition_bytes: int = _set(DATA, 4096000, "BYTEPS_PARTITION_BYTES", parse=as_partition,
        unit="bytes", allowed=(4096, GIB),
        text="Largest piece of a tensor that one server owns; rounded up to a multiple of 64. "
             "Up to 2 GiB is taken, as BytePS does, and means 1 GiB.")
    chunk_bytes: int = _set(DATA, 0, parse=as_aligned, unit="bytes", allowed=(0, GIB),
        text="Largest frame of a partition, the grain of overlap; rounded up to a multiple of "
             "64, at least 4096. 0 chooses: 512 KiB if all servers are on the loopback, else 64 "
             "KiB.")
    min_compress_bytes: int = _set(DATA, 65536, "BYTEPS_MIN_COMPRESS_BYTES", unit="bytes",
        allowed=(0, GIB),
        text="Smaller tensors travel uncompressed, whatever compression is asked for.")
    credit_bytes: int = _set(DATA, 0,
        Derived("BYTEPS_SCHEDULING_CREDIT x partition_bytes", derived.credit_in_partitions),
        unit="bytes", allowed=(0, MAX_POOL_BYTES),
        text="Bytes pushed on one link that have no result yet, before the rest waits; keeps "
             "bulk data in the caches and lets urgent tensors overtake. 0 chooses: 640 KiB to a "
             "server on the same machine, 256 KiB to others, 64 KiB to those that own less than "
             "another one; between machines more with rate and latency of the link, up to 4 MiB.")
    key_hash: str = _set(DATA, "bytes", "BYTEPS_KEY_HASH_FN",
        allowed=("bytes", "naive", "built_in", "djb2", "sdbm"),
        text="How partitions are shared among servers: by bytes, or by one of BytePS's hashes.")
    built_in_hash_coef: int = _set(DATA, 1, "BYTEPS_BUILT_IN_HASH_COEF",
        allowed=(1, (1 << 31) - 1), text="Multiplier of the built_in hash.")
    autotune: bool = _set(DATA, False, "HOROVOD_AUTOTUNE", "BYTESCHEDULER_CREDIT_TUNING",
        text="Try other credits, partitions and buckets while the job trains, and keep what makes "
             "steps shorter; see docs/tuning.md. The same on all workers.")
    autotune_steps: int = _set(DATA, 10, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", unit="steps",
        allowed=(2, 10000), text="Steps that are measured with each setting.")
    autotune_seed: int = _set(DATA, 0, allowed=(0, (1 << 31) - 1),
        text="Seed of the order in which settings are tried.")
    payload_check: str = _set(DATA, "auto", allowed=("auto", "on", "off"),
        text="Whether frames carry a CRC-32C of their payload, so that damaged bytes end the link "
             "and are never summed. auto: over TCP between machines; on: over all sockets. A link "
             "is checked if either end wants it. RDMA has a CRC of its own.")
    encrypt: str = _set(DATA, "off", allowed=("auto", "on", "integrity", "off"),
        text="Which TCP connections are encrypted, with keys that each handshake makes. auto: "
             "those between machines, where both have libcrypto; on: all, and what cannot be is "
             "refused; integrity: as on, but tensors stay readable, and cannot be changed. The "
             "same in all processes; see docs/encryption.md.")
    links_per_peer: int = _set(DATA, 1, unit="connections", allowed=(1, 16),
        text="Data connections between a worker and a server.")
    same_host_congestion: str = _set(DATA, "cubic,reno",
        text="Congestion control for peers on the same machine: the first of the list that the "
             "kernel has; empty keeps the machine's default.")
    io_threads: int = _set(THREADS, 1, unit="threads", allowed=(1, 64),
        text="Threads that move bytes.")
    engine_threads: int = _set(THREADS, -1, "BYTEPS_SERVER_ENGINE_THREAD", unit="threads",
        allowed=(-1, 64),
        text="Threads of a server that sum; 0 sums on the threads that move bytes. -1 chooses: a "
             "quarter of the CPUs, at most 4, so none where cores are few.")
    codec_threads: int = _set(THREADS, 0, "BYTEPS_THREADPOOL_SIZE", unit="threads",
        allowed=(0, 64),
        text="Threads of a worker that compress and decompress; none before a tensor is declared "
             "with compression. 0 chooses: a quarter of the CPUs, 1 to 4.")
    copy_threads: int = _set(THREADS, -1, "BYTEPS_IPC_COPY_NUM_THREADS", unit="threads",
        allowed=(-1, 16), text="Threads of a worker that share each long copy and sum in shared "
        "memory. -1 chooses: its share of the CPUs, at most 4.")
    rules: str = _set(DATA, "",
        text="User-defined rules (docs/byzantine.md) that a server may import, as "
             "module:function, separated by commas. Workers name them; no code comes from "
             "workers.")
    inline_sum_bytes: int = _set(THREADS, 65536, unit="bytes", allowed=(0, GIB),
        text="Chunks up to this size are summed where they arrive, waking no other thread.")
    spin_us: int = _set(THREADS, 50, unit="microseconds", allowed=(0, 10000),
        text="How long a waiting thread spins before it sleeps.")
    cpus: str = _set(THREADS, "", Derived("BYTEPS_VISIBLE_CPU_CORES", derived.cpus_of_local_rank),
        text="CPUs for the library's threads, as 0-3,8; empty: all CPUs of the process.")
    numa_node: int = _set(THREADS, -1, allowed=(-1, 1023),
        text="NUMA node for the library's threads and memory; -1 leaves it to the kernel.")
    pool_bytes: int = _set(THREADS, 0, unit="bytes", allowed=(0, MAX_POOL_BYTES),
        text="Most memory the buffer pool may take; 0 sets no limit.")
    start_timeout_s: float = _set(TIMES, 60.0, "BLUEFOG_START_TIMEOUT", unit="seconds",
        allowed=(0.1, DAY_S),
        text="How long a process waits until the whole job has joined.")
    start_watch_s: float = _set(TIMES, 20.0, unit="seconds", allowed=(0.0, 86400.0),
        text="How long the first process may wait for the start before the scheduler logs which "
             "processes are missing; again after twice that time, and so on. 0 turns it off.")
    stall_watch_s: float = _set(TIMES, 10.0, unit="seconds", allowed=(0.0, DAY_S),
        text="How long an operation may take before the scheduler logs which worker holds it up, "
             "and where its program is; again after twice that time, and so on. 0 turns it off.")
    connect_timeout_s: float = _set(TIMES, 10.0, unit="seconds", allowed=(0.1, DAY_S),
        text="How long one connection may take to be made.")
    handshake_timeout_s: float = _set(TIMES, 10.0, unit="seconds", allowed=(0.1, DAY_S),
        text="How long a new connection may take to prove that it knows the token.")
    op_timeout_s: float = _set(TIMES, 300.0, unit="seconds", allowed=(0.1, 7 * DAY_S),
        text="How long an operation may take while every peer is alive.")
    shutdown_timeout_s: float = _set(TIMES, 10.0, unit="seconds", allowed=(0.1, DAY_S),
        text="How long shutdown() waits for threads and peers.")
    heartbeat_s: float = _set(TIMES, 0.0, unit="seconds", allowed=(0.0, 60.0),
        text="Time between two heartbeats. 0 chooses: a sixth of lease_s, at most 0.5.")
    lease_s: float = _set(TIMES, 1.0, unit="seconds", allowed=(0.2, 3600.0),
        text="A process without a heartbeat for this time counts as lost; at least twice "
             "heartbeat_s. Raise it where processes are stopped by a debugger, a suspend or the "
             "like.")
    linger_s: float = _set(TIMES, 10.0, unit="seconds", allowed=(0.0, DAY_S),
        text="How long scheduler and servers stay after the last worker left, for a new init().")
    tcp_user_timeout_s: float = _set(TIMES, 30.0, unit="seconds", allowed=(1.0, 3600.0),
        text="Time after which a data connection with unacknowledged bytes is closed.")
    trace_on: bool = _set(TRACING, False, "BYTEPS_TRACE_ON",
        Derived("BLUEFOG_TIMELINE: on", bluefog.if_traced(True)),
        text="Write a timeline of every stage; see docs/timeline.md.")
    trace_start_step: int = _set(TRACING, 10, "BYTEPS_TRACE_START_STEP",
        Derived("BLUEFOG_TIMELINE: from 1", bluefog.if_traced(1)), unit="operations",
        allowed=(0, MAX_VERSION),
        text="The first operation on a tensor that is traced, counted for each tensor from 1.")
    trace_end_step: int = _set(TRACING, 20, "BYTEPS_TRACE_END_STEP",
        Derived("BLUEFOG_TIMELINE: to 0", bluefog.if_traced(0)), unit="operations",
        allowed=(0, MAX_VERSION), text="The last one; 0 goes on to the end.")
    trace_dir: str = _set(TRACING, "./trace", "BYTEPS_TRACE_DIR", "BLUEFOG_TIMELINE",
        parse=as_path,
        text="Directory of the traces of processes; the last process that ends makes "
             "timeline.json there.")
    status: bool = _set(TRACING, True,
        text="Answer `fastps top` and fastps-run over a Unix socket, for the same user only.")
    metrics_port: int = _set(TRACING, 0, allowed=(0, 65000),
        text="Serve /metrics and /status.json at this port plus the local rank; 0 turns it off.")
    metrics_host: str = _set(TRACING, "127.0.0.1",
        text="Address at which they are served; any but the loopback needs a token.")
    metrics_token_file: str = _set(TRACING, "", parse=as_path,
        text="File of mode 0600 with the bearer token of requests; not the job's token.")
    metrics_cert_file: str = _set(TRACING, "", parse=as_path,
        text="PEM file with a certificate, its chain and its key: they are served by TLS then.")
    trace_file: str = _set(TRACING, "", parse=as_path,
        text="Timeline that fastps-run makes of the traces of this job; set by fastps-run.")
    telemetry_on: bool = _set(TRACING, True, "BYTEPS_TELEMETRY_ON",
        text="Measure what get_pushpull_speed() returns.")
    enable_gdb: bool = _set(TRACING, False, "BYTEPS_ENABLE_GDB",
        text="Let fastps-run start workers under gdb, which shows where one crashed.")
    log_level: str = _set(DEBUGGING, "WARNING", "BYTEPS_LOG_LEVEL", "BLUEFOG_LOG_LEVEL",
        parse=as_log_level, allowed=LOG_LEVELS,
        text="Least serious level that is logged, in upper or lower case.")
    fault: str = _set(DEBUGGING, "",
        text="Fault to inject for tests, as point@n:action; empty: none.")
    banner: bool = _set(DEBUGGING, True,
        text="Let rank 0 write two lines to stderr: which job it has joined, and which transport "
             "its bytes take.")
    # fmt: on

    @property
    def goes_on(self) -> bool:
        """Whether the job goes on without lost workers."""
        return self.on_loss == "reweight"

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on in a new view when members are lost."""
        return self.elastic_min > 0

    @property
    def n_programs(self) -> int:
        """Number of processes that run the user's program: workers, then validators."""
        return self.size + self.num_validators

    def token_bytes(self) -> bytes:
        """Return the job token from `token`, else from `token_file`.

        Raises ConfigError when there is none and `insecure` is off, when it is too short, or when
        the file may be read by others.
        """
        return read_token(self.token, self.token_file, is_needed=not self.insecure)


_PARSERS = {"str": as_text, "int": as_integer, "int | None": as_integer, "float": as_seconds,
            "bool": as_boolean}  # fmt: skip


def _setting_of(described: Field[Any]) -> Setting:
    section, parse, *rest = described.metadata["row"]
    return Setting(section, described.name, parse or _PARSERS[str(described.type)], *rest)


SETTINGS: tuple[Setting, ...] = tuple(map(_setting_of, fields(Config)))
_BY_FIELD = {setting.field: setting for setting in SETTINGS}
_KNOWN_NAMES = frozenset(
    {setting.name for setting in SETTINGS}
    | {a for setting in SETTINGS for a in setting.aliases if isinstance(a, str)}
    | set(BUILD_NAMES)
    | byteps.UNDERSTOOD.keys()
)


# ---- reading


def load(
    overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Read all settings: keyword, FASTPS_ name, alias names in listed order, default.

    An override of None counts as not given. Raises ConfigError for an unknown keyword, or for a
    value that cannot be read or is out of bounds. Warns of unknown FASTPS_ variables.
    """
    environ = os.environ if environ is None else environ
    overrides = {} if overrides is None else overrides
    _check_keywords(overrides)
    _warn_unknown(environ)
    config = Config(**{name: value for name, (value, _) in _found(overrides, environ).items()})
    _check_together(config)
    return config


def explain(
    overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """List (FASTPS_ name, value, where it came from) of every setting; secrets are hidden."""
    environ = os.environ if environ is None else environ
    _warn_unknown(environ)
    found = _found(overrides or {}, environ)
    lines = []
    for setting in SETTINGS:
        value, source = found[setting.field]
        shown = "(hidden)" if setting.is_secret and value else format_value(value)
        lines.append((setting.name, shown, source))
    return lines


def _found(overrides: Mapping[str, object], environ: Environ) -> dict[str, tuple[Any, str]]:
    """Return every value with its source, by field."""
    values: dict[str, Any] = {}
    found: dict[str, tuple[Any, str]] = {}
    for setting in SETTINGS:
        value, source = _resolve(setting, overrides, environ, values)
        values[setting.field] = value
        found[setting.field] = value, source
    if found["machine"][1] == bluefog.NODES_PER_MACHINE:  # launchers counted other machines
        found["local_rank"] = found["local_size"] = None, bluefog.NODES_PER_MACHINE
    return found


def child_environment(settings: Config | Mapping[str, object]) -> dict[str, str]:
    """Return settings as FASTPS_ variables for a child process; None is left out.

    Of a mapping only the given fields are written; each is checked as `load` checks it. `load` in
    the child returns the same values.
    """
    given = asdict(settings) if isinstance(settings, Config) else settings
    _check_keywords(given)
    return {
        _BY_FIELD[name].name: format_value(_parse(_BY_FIELD[name], value, name))
        for name, value in given.items()
        if value is not None
    }


def process_environment() -> dict[str, str]:
    """Copy the environment of this process, for launchers that hand it on."""
    return dict(os.environ)


def cache_dir() -> Path:
    """Return the directory of compiled kernels; the caller makes it, with mode 0700."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "fastps"
    try:
        return Path.home() / ".cache" / "fastps"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(os.environ.get("TMPDIR", "/tmp")) / f"fastps-{os.geteuid()}"


def _resolve(
    setting: Setting, overrides: Mapping[str, object], environ: Environ, values: Values
) -> tuple[Any, str]:
    """Find one value and the name of its source."""
    if overrides.get(setting.field) is not None:
        return _parse(setting, overrides[setting.field], setting.field), "keyword"
    text = environ.get(setting.name)
    if text is not None and (text.strip() or (setting.parse is as_text and not setting.allowed)):
        return _parse(setting, text, setting.name), setting.name
    for alias in setting.aliases:
        label, value = _look_up(alias, environ, values)
        if value is not None:
            return _parse(setting, value, label), label
    return setting.default, "default"


def _look_up(alias: str | Derived, environ: Environ, values: Values) -> tuple[str, object | None]:
    """Read an alias; an empty variable of another system counts as unset."""
    if isinstance(alias, Derived):
        return alias.label, alias.rule(environ, values)
    return alias, environ.get(alias, "").strip() or None


def _parse(setting: Setting, value: object, source: str) -> Any:
    """Return a given value, parsed and checked. Raises ConfigError."""
    try:
        parsed = setting.parse(value)
    except ValueError as error:
        raise _refusal(setting, value, source, str(error)) from None
    if not _is_allowed(setting, parsed):
        raise _refusal(setting, value, source, setting.bounds)
    return parsed


def _is_allowed(setting: Setting, value: Any) -> bool:
    if not setting.allowed:
        return True
    if isinstance(value, str):
        return value in setting.allowed
    low, high = setting.allowed
    return bool(low <= value <= high)


def _refusal(setting: Setting, value: object, source: str, expected: str) -> ConfigError:
    shown = "(hidden)" if setting.is_secret else repr(value)
    return ConfigError(f"{source}={shown} is not {expected}; example: {setting.example}")


def format_value(value: object) -> str:
    """Write a value as the environment holds it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(value)
    return str(value)


def _check_keywords(names: Mapping[str, object]) -> None:
    for name in names:
        if name not in _BY_FIELD:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, _BY_FIELD)}")


def _warn_unknown(environ: Environ) -> None:
    """Warn of variables that nothing reads; only the first worker of a machine does."""
    for name in environ if environ.get("FASTPS_LOCAL_RANK") in (None, "", "0") else ():
        if name in _KNOWN_NAMES:
            continue
        if name in bluefog.INSTEAD:
            _warn_once(f"{name} is BlueFog's and is ignored: {bluefog.INSTEAD[name]}")
        elif name in byteps.INSTEAD:
            if environ[name].strip():
                _warn_once(f"{name} of BytePS does nothing{byteps.answer(name)}")
        elif name.startswith((PREFIX, *byteps.PREFIXES)):
            start = name[: name.index("_") + 1]
            known = [k for k in (*_KNOWN_NAMES, *byteps.INSTEAD) if k.startswith(start)]
            hint = nearest(name, known)
            _warn_once(f"{name} is unknown and ignored{hint}")


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("environment variable %s", text)


def role_given(environ: Environ | None = None) -> str | None:
    """Return the role that the environment names, or None; ConfigError if it is wrong."""
    setting = _BY_FIELD["role"]
    role, source = _resolve(setting, {}, os.environ if environ is None else environ, {})
    return None if source == "default" else str(role)


def nearest(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Suggest names that look alike."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _check_together(config: Config) -> None:
    """Check settings against each other."""
    is_counted = config.role == "worker" and config.rank is not None and not config.elastic_join
    if is_counted and (config.rank or 0) >= config.size:
        raise ConfigError(
            f"FASTPS_RANK={config.rank} needs FASTPS_SIZE above it, but FASTPS_SIZE={config.size}"
        )
    if config.role == "validator" and 0 < config.num_validators <= (config.rank or 0):
        raise ConfigError(
            f"FASTPS_RANK={config.rank} of a validator needs FASTPS_NUM_VALIDATORS above it, but "
            f"FASTPS_NUM_VALIDATORS={config.num_validators}"
        )
    if config.goes_on and config.colocate == "on" and not config.num_validators:
        raise ConfigError(
            "FASTPS_ON_LOSS=reweight and FASTPS_COLOCATE=on: a server in a worker's process is "
            "lost with that worker; leave FASTPS_COLOCATE unset"
        )
    if config.is_elastic and (config.goes_on or config.num_validators):
        raise ConfigError(
            f"FASTPS_ELASTIC_MIN={config.elastic_min} goes neither with FASTPS_ON_LOSS=reweight "
            "nor with validators, which have their own rules for lost workers; unset one of them"
        )
    if config.is_elastic and config.autotune:
        raise ConfigError(
            f"FASTPS_ELASTIC_MIN={config.elastic_min} does not go with FASTPS_AUTOTUNE=1, whose "
            "measurements a loss would mix; unset one of them"
        )
    if config.elastic_min > config.size > 1 and not config.elastic_join:
        raise ConfigError(
            f"FASTPS_ELASTIC_MIN={config.elastic_min} must be 0 to FASTPS_SIZE={config.size}"
        )
    if 0 < config.elastic_max < config.size or (config.elastic_max and not config.is_elastic):
        raise ConfigError(
            f"FASTPS_ELASTIC_MAX={config.elastic_max} must be 0, or FASTPS_SIZE={config.size} or "
            f"more with FASTPS_ELASTIC_MIN above 0, which is {config.elastic_min}"
        )
    if 0 < config.chunk_bytes < MIN_CHUNK_BYTES:
        raise ConfigError(
            f"FASTPS_CHUNK_BYTES={config.chunk_bytes} must be 0 or at least {MIN_CHUNK_BYTES}"
        )
    if 0 < config.trace_end_step < config.trace_start_step:
        raise ConfigError(
            f"FASTPS_TRACE_END_STEP={config.trace_end_step} must be 0 or at least "
            f"FASTPS_TRACE_START_STEP={config.trace_start_step}"
        )
    if 0 < config.heartbeat_s < MIN_PULSE_S:
        raise ConfigError(
            f"FASTPS_HEARTBEAT_S={format_value(config.heartbeat_s)} must be 0 or at least "
            f"{MIN_PULSE_S}"
        )
    if config.lease_s < 2 * config.heartbeat_s:
        raise ConfigError(
            f"FASTPS_LEASE_S={format_value(config.lease_s)} must be at least twice "
            f"FASTPS_HEARTBEAT_S={format_value(config.heartbeat_s)}"
        )
