# SPDX-License-Identifier: Apache-2.0
"""What a job of one worker without servers does with tensors: everything, at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastps.arrays import describe
from fastps.byzantine import rules
from fastps.control.protocol import TensorSpec
from fastps.errors import MismatchError
from fastps.types import DType
from fastps.worker.handle import Array


def declare(known: dict[str, TensorSpec], wanted: Sequence[TensorSpec]) -> None:
    """Note what is declared. Raises MismatchError where it was declared differently."""
    for spec in wanted:
        before = known.setdefault(spec.name, spec)
        if before != spec:
            raise MismatchError(
                f"tensor {spec.name!r} was declared as "
                f"{describe(before.dtype, before.shape)} ({before.rule}) and is now "
                f"{describe(spec.dtype, spec.shape)} ({spec.rule}); use another name"
            )


def finish(specs: Sequence[TensorSpec], arrays: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Give each output what comes of the only worker's array."""
    for spec, array, output in zip(specs, arrays, outputs, strict=True):
        if output is not array:
            np.copyto(output, array)
        rules.apply_alone(spec.rule, output, DType(spec.dtype))
