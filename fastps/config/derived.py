# SPDX-License-Identifier: Apache-2.0
"""Settings that BytePS, ps-lite and ZenoPS spread over several variables, or count otherwise.

Each rule gets the environment and the settings earlier in the table, and returns None where the
variables that it needs are not set. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastps.errors import ConfigError

Environ = Mapping[str, str]
Values = Mapping[str, Any]


def _number(environ: Environ, name: str) -> int | None:
    """Return an integer variable of another system, None if unset. Raises ConfigError."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text, 10)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not an integer; example: {name}=1") from None


def size_of_machines(environ: Environ, values: Values) -> int | None:
    """Return the number of processes; BytePS counts machines."""
    machines = _number(environ, "DMLC_NUM_WORKER")
    return None if machines is None else machines * (values["local_size"] or 1)


def role_of_zenops(environ: Environ, values: Values) -> str | None:
    """Return the role of a validator, which is a kind of worker in ZenoPS."""
    is_worker = environ.get("DMLC_ROLE", "").strip() in ("", "worker")
    kind = environ.get("DMLC_WORKER_TYPE", "").strip()
    return "validator" if is_worker and kind == "validator" else None


def rank_of_validator(environ: Environ, values: Values) -> int | None:
    """Return the rank of a validator; ZenoPS numbers validators apart from workers."""
    return _number(environ, "DMLC_VALIDATOR_ID") if values["role"] == "validator" else None


def rank_of_machine(environ: Environ, values: Values) -> int | None:
    """Return the rank of a worker; BytePS numbers machines, and processes within each."""
    machine = _number(environ, "DMLC_WORKER_ID")
    if machine is None and _number(environ, "DMLC_NUM_WORKER") == 1:
        return values["local_rank"]  # type: ignore[no-any-return]
    if machine is None:
        return None
    return machine * (values["local_size"] or 1) + (values["local_rank"] or 0)


def mixed_mode(environ: Environ, values: Values) -> str | None:
    """Return colocate for BytePS's mixed mode: servers on worker machines and on others."""
    wanted = _number(environ, "BYTEPS_ENABLE_MIXED_MODE")
    return None if wanted is None else ("on" if wanted else "auto")


def rdma(environ: Environ, values: Values) -> str | None:
    """Return the transport: BytePS turns RDMA on by 1 or ibverbs; others are refused later."""
    word = environ.get("DMLC_ENABLE_RDMA", "").strip()
    return {"": None, "0": None, "zmq": None, "1": "rdma", "ibverbs": "rdma"}.get(word, word)


def credit_in_partitions(environ: Environ, values: Values) -> int | None:
    """Return the credit in bytes; BytePS counts it in partitions."""
    credit = _number(environ, "BYTEPS_SCHEDULING_CREDIT")
    return None if credit is None else credit * int(values["partition_bytes"])


def cpus_of_local_rank(environ: Environ, values: Values) -> str | None:
    """Return the CPUs of this local rank; BytePS lists those of all, separated by colons."""
    text = environ.get("BYTEPS_VISIBLE_CPU_CORES", "").strip()
    if not text:
        return None
    parts = text.split(":")
    if len(parts) == 1:
        return text
    local_rank = values["local_rank"] or 0
    if local_rank >= len(parts):
        raise ConfigError(
            f"BYTEPS_VISIBLE_CPU_CORES={text!r} has {len(parts)} parts "
            f"but this is local rank {local_rank}; give one part to each local rank"
        )
    return parts[local_rank]
