# SPDX-License-Identifier: Apache-2.0
"""What somebody handed in as a tensor: an array, or else a word about what to give instead.

Imports nothing of the library, since every face does. Threads: any.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def require_array(tensor: object, name: str | None = None) -> Array:
    """Return what is an array, or a scalar of one; TypeError says what else to give."""
    what = "the tensor" if name is None else f"tensor {name!r}"
    if not isinstance(tensor, np.ndarray | np.generic):
        raise TypeError(f"{what} is {not_an_array_text(tensor)}")
    refuse_masked(tensor, what)
    return tensor  # type: ignore[return-value]


def check_targets(tensor: Any) -> None:
    """Raise TypeError for what is neither an array to be written to nor several of them."""
    is_whole = isinstance(tensor, np.ndarray | np.generic | str)
    for one in tensor if isinstance(tensor, Collection) and not is_whole else (tensor,):
        if not isinstance(one, np.ndarray):
            raise TypeError(f"the tensor to write to is {not_an_array_text(one)}")
        refuse_masked(one, "a tensor to be written to")


def refuse_masked(tensor: object, what: str) -> None:
    """Raise TypeError for a masked array: what travels is its data, without the mask."""
    if type(tensor) is not np.ndarray and isinstance(tensor, np.ma.MaskedArray):
        raise TypeError(
            f"{what} is a masked array, and operations ignore masks; pass array.filled(value) or "
            "array.data"
        )


def readable(tensor: object, name: str | None = None) -> Array:
    """Return an array that can be read at one go; TypeError as check_kind()."""
    return np.asarray(require_array(tensor, name), order="C")


def not_an_array_text(tensor: object) -> str:
    """Return what somebody gave who did not give an array, and what to do about it."""
    home = type(tensor).__module__.partition(".")[0]
    face = {"torch": "torch", "jaxlib": "jax", "jax": "jax", "tensorflow": "tensorflow"}.get(home)
    cure = "pass np.asarray(...)"
    if face is not None:
        cure = f"import fastps.{face} in place of fastps, or pass np.asarray(...)"
    kind = type(tensor).__name__ if home == "builtins" else f"{home}.{type(tensor).__name__}"
    return f"of type {kind}, not a NumPy array: {cure}"


def check_output(what: str, array: Array, output: Array) -> None:
    """Refuse an output that is not like an input, element by element; what: names them."""
    refuse_masked(array, what)
    refuse_masked(output, what)
    if not array.flags.c_contiguous or not output.flags.c_contiguous:
        raise ValueError(f"{what} is not C-contiguous; pass np.ascontiguousarray(array)")
    if output is array:
        return
    if output.shape != array.shape or output.dtype != array.dtype:
        raise ValueError(
            f"{what}: out is {output.dtype} {output.shape}, but the input is "
            f"{array.dtype} {array.shape}; both must be alike"
        )
    if np.may_share_memory(array, output) and array.ctypes.data != output.ctypes.data:
        raise ValueError(
            f"{what}: input and out overlap; pass the same array, or two that are apart"
        )
