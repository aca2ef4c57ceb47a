# SPDX-License-Identifier: Apache-2.0
"""Settings that BytePS, ps-lite and ZenoPS spread over several variables, or count otherwise.

Each rule gets the environment and the settings that stand earlier in the table; None means that
the variables it needs are not there. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastps.errors import ConfigError

Environ = Mapping[str, str]
Values = Mapping[str, Any]


def _number(environ: Environ, name: str) -> int | None:
    """Read an integer variable of another system; ConfigError if it is not one."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text, 10)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not an integer; example: {name}=1") from None


def size_of_machines(environ: Environ, values: Values) -> int | None:
    """BytePS counts machines; we count processes."""
    machines = _number(environ, "DMLC_NUM_WORKER")
    return None if machines is None else machines * (values["local_size"] or 1)


def role_of_zenops(environ: Environ, values: Values) -> str | None:
    """ZenoPS's validators are a kind of worker."""
    is_worker = environ.get("DMLC_ROLE", "").strip() in ("", "worker")
    kind = environ.get("DMLC_WORKER_TYPE", "").strip()
    return "validator" if is_worker and kind == "validator" else None


def rank_of_validator(environ: Environ, values: Values) -> int | None:
    """ZenoPS numbers validators apart from workers."""
    return _number(environ, "DMLC_VALIDATOR_ID") if values["role"] == "validator" else None


def rank_of_machine(environ: Environ, values: Values) -> int | None:
    """BytePS numbers machines, and processes within each."""
    machine = _number(environ, "DMLC_WORKER_ID")
    if machine is None and _number(environ, "DMLC_NUM_WORKER") == 1:
        return values["local_rank"]  # type: ignore[no-any-return]
    if machine is None:
        return None
    return machine * (values["local_size"] or 1) + (values["local_rank"] or 0)


def mixed_mode(environ: Environ, values: Values) -> str | None:
    """BytePS's mixed mode has servers both on worker machines and apart."""
    wanted = _number(environ, "BYTEPS_ENABLE_MIXED_MODE")
    return None if wanted is None else ("on" if wanted else "auto")


def rdma(environ: Environ, values: Values) -> str | None:
    """BytePS switches RDMA on by 1 or the name of its library; a wrong word is refused later."""
    word = environ.get("DMLC_ENABLE_RDMA", "").strip()
    return {"": None, "0": None, "zmq": None, "1": "rdma", "ibverbs": "rdma"}.get(word, word)


def credit_in_partitions(environ: Environ, values: Values) -> int | None:
    """BytePS counts credit in partitions."""
    credit = _number(environ, "BYTEPS_SCHEDULING_CREDIT")
    return None if credit is None else credit * int(values["partition_bytes"])


def cpus_of_local_rank(environ: Environ, values: Values) -> str | None:
    """BytePS lists the CPUs of every local rank, divided by colons."""
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
