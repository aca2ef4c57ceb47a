# SPDX-License-Identifier: Apache-2.0
"""Compression: the codecs as users choose them, and BytePS's names of their parameters.

Decides what names and dictionaries mean; codec.py has the layouts. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fastps.contract.codec import PLAIN, Codec, Coding, Option
from fastps.errors import ConfigError

MOST_LEVELS_OF_INT4 = 15


class Compression:
    """The compressions to choose from; docs/compression.md has formulas and when each pays.

    ef: "vanilla" adds what a round lost to the next one, on workers and servers; None does not.
    momentum: "nesterov" with mu on the worker, before; the optimizer has none of its own then.
    seed: of the random numbers, the same on all workers. layout: "byteps" for BytePS's bytes and
    random numbers, to compare with it; slower. Raises ConfigError for a value out of bounds.
    """

    none = PLAIN

    @staticmethod
    def onebit(
        scaling: bool = True, *, layout: str | None = None, ef: str | None = None,
        momentum: str | None = None, mu: float = 0.9,
    ) -> Coding:  # fmt: skip
        """Send signs, and with scaling the mean absolute value; 1/32 of the bytes."""
        options = (Option.SCALING if scaling else 0) | _layout(layout)
        return _make(Codec.ONEBIT, 0, options, ef=ef, momentum=momentum, mu=mu)

    @staticmethod
    def topk(
        k: float, *, layout: str | None = None, ef: str | None = None,
        momentum: str | None = None, mu: float = 0.9,
    ) -> Coding:  # fmt: skip
        """Send the k largest elements of each partition, or below 1 that share; 8 bytes each."""
        return _make(Codec.TOPK, k, _layout(layout), ef=ef, momentum=momentum, mu=mu)

    @staticmethod
    def randomk(
        k: float, *, unbiased: bool = False, seed: int = 0, layout: str | None = None,
        ef: str | None = None, momentum: str | None = None, mu: float = 0.9,
    ) -> Coding:  # fmt: skip
        """Send k random elements of each partition, or below 1 that share; 4 bytes each.

        unbiased: scale them by what they stand for, so that the mean stays; not with ef.
        """
        options = (Option.UNBIASED if unbiased else 0) | _layout(layout)
        return _make(Codec.RANDOMK, k, options, seed=seed, ef=ef, momentum=momentum, mu=mu)

    @staticmethod
    def dithering(
        k: int, *, partition: str = "linear", normalize: str = "max", seed: int = 0,
        layout: str | None = None, ef: str | None = None, momentum: str | None = None,
        mu: float = 0.9,
    ) -> Coding:  # fmt: skip
        """Round at random to one of k levels, linear or natural, of the norm max or l2.

        2, 4 or 8 bits an element, as k is 1, at most 7, or more.
        """
        options = _choice("partition", partition, {"linear": 0, "natural": Option.NATURAL})
        options |= _choice("normalize", normalize, {"max": 0, "l2": Option.L2}) | _layout(layout)
        return _make(Codec.DITHERING, k, options, seed=seed, ef=ef, momentum=momentum, mu=mu)

    @staticmethod
    def fp16(*, ef: str | None = None, momentum: str | None = None, mu: float = 0.9) -> Coding:
        """Send float16."""
        return _make(Codec.FP16, 0, 0, ef=ef, momentum=momentum, mu=mu)

    @staticmethod
    def bf16(*, ef: str | None = None, momentum: str | None = None, mu: float = 0.9) -> Coding:
        """Send bfloat16."""
        return _make(Codec.BF16, 0, 0, ef=ef, momentum=momentum, mu=mu)

    @staticmethod
    def int8(*, ef: str | None = None, momentum: str | None = None, mu: float = 0.9) -> Coding:
        """Send 8 bits each, with a scale for each 256 elements."""
        return _make(Codec.INT8, 0, 0, ef=ef, momentum=momentum, mu=mu)

    @staticmethod
    def int4(
        levels: int = 15, *, ef: str | None = None, momentum: str | None = None, mu: float = 0.9
    ) -> Coding:
        """Send 4 bits each, with a scale for each 256 elements.

        levels: 11 sends 3.5 bits each, and a scale of 16 bits for each 64: 3.75 in all.
        """
        k = 0 if levels == MOST_LEVELS_OF_INT4 else levels
        return _make(Codec.INT4, k, 0, ef=ef, momentum=momentum, mu=mu)

    @staticmethod
    def sparse(
        k: int = 64, *, ef: str | None = None, decay: float = 1.0, momentum: str | None = None,
        mu: float = 0.9,
    ) -> Coding:  # fmt: skip
        """Send the k largest of each 4096 elements as one of 4 levels; 84 bytes for 64 of them.

        decay: what error feedback on workers is multiplied by in each round. With 0.95 it takes
        the place of an outer momentum (SparseLoCo).
        """
        return _make(Codec.SPARSE, k, 0, ef=ef, momentum=momentum, mu=mu, decay=decay)


# What users give as a compression: None is as declared before, or none. A function of Compression
# is called without arguments, any other function with the tensor's name.
Choice: TypeAlias = Coding | Mapping[str, Any] | Callable[..., Any] | None

_OWN = tuple(
    getattr(Compression, name) for name in ("onebit", "fp16", "bf16", "int8", "int4", "sparse")
)
# BytePS's names of compressor parameters, without "byteps_", and what is meant.
_NAMES = {
    "compressor_type": "compressor",
    "compressor_onebit_scaling": "scaling",
    "compressor_k": "k",
    "ef_type": "ef",
    "momentum_type": "momentum",
    "momentum_mu": "mu",
    "dithering_partition": "partition",
    "dithering_normalize": "normalize",
}
_PARTITIONS = {"0": "linear", "1": "natural"}
_NORMS = {"0": "max", "1": "l2"}
_TAKEN = {
    "onebit": ("scaling", "layout"),
    "topk": ("k", "layout"),
    "randomk": ("k", "seed", "layout"),
    "dithering": ("k", "seed", "partition", "normalize", "layout"),
}
_ALL = ("ef", "momentum", "mu")
_KNOWN = {*_ALL, "scaling", *_TAKEN["dithering"]}


def is_own(function: Any) -> bool:
    """Return whether a function is one of Compression, which take no tensor's name."""
    return function in _OWN


def coding_of(choice: Choice, name: str = "") -> Coding | None:
    """Return the codec of a choice for a tensor; None: as declared.

    Raises ConfigError, TypeError.
    """
    if callable(choice):
        choice = choice() if is_own(choice) else choice(name)
        return PLAIN if choice is None else coding_of(choice, name)
    if choice is None or isinstance(choice, Coding):
        return choice
    if isinstance(choice, Mapping):
        return _from_names(choice)
    raise TypeError(
        f"compression must be one of fastps.Compression, a mapping or a function, got {choice!r}"
    )


def _from_names(given: Mapping[str, Any]) -> Coding:
    """Read BytePS's compression_params, or its byteps_ keywords."""
    plain = {name.removeprefix("byteps_"): value for name, value in given.items()}
    found = {_NAMES.get(name, name): value for name, value in plain.items() if value is not None}
    is_half = _truth(found.pop("fp16", False))
    kind = str(found.pop("compressor", "fp16" if is_half else "none")).lower()
    if kind == "none":
        return PLAIN
    make = getattr(Compression, kind, None)
    if make is None or kind.startswith("_"):
        raise ConfigError(f"compressor must be one of {', '.join(sorted(_TAKEN))}, got {kind!r}")
    taken = (*_TAKEN.get(kind, ()), *_ALL)
    unknown = sorted(found.keys() - _KNOWN)
    if unknown:
        raise ConfigError(
            f"compression has no parameter {unknown[0]!r}; use {', '.join(sorted(_KNOWN))}"
        )
    wanted = {name: _value(name, found[name]) for name in taken if name in found}
    if "k" in taken and "k" not in wanted:
        raise ConfigError(f"compressor {kind!r} needs a parameter k: a count, a share or levels")
    if kind == "onebit":
        wanted.setdefault("scaling", False)  # as BytePS has it
    coding: Coding = make(**wanted)
    return coding


def _value(name: str, value: Any) -> Any:
    """Read a value, which may be text."""
    if name == "scaling":
        return _truth(value)
    if name in ("k", "mu"):
        return float(value)
    if name == "seed":
        return int(value)
    word = str(value).lower()
    return {"partition": _PARTITIONS, "normalize": _NORMS}.get(name, {}).get(word, word)


def _truth(value: Any) -> bool:
    return str(value).strip().lower() in ("1", "true", "yes", "on")


def _layout(layout: str | None) -> int:
    return 0 if layout is None else _choice("layout", layout, {"byteps": Option.BYTEPS})


def _choice(name: str, value: str, choices: Mapping[str, int]) -> int:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return choices[value]


def _make(
    codec: Codec, k: float, options: int, *, seed: int = 0, ef: str | None,
    momentum: str | None, mu: float, decay: float = 1.0,
) -> Coding:  # fmt: skip
    options |= 0 if ef is None else _choice("ef", ef, {"vanilla": Option.FEEDBACK})
    has_momentum = momentum is not None and _choice("momentum", momentum, {"nesterov": 1})
    coding = Coding(
        codec, float(k), int(options), float(mu) if has_momentum else 0.0, int(seed), float(decay)
    )
    try:
        coding.check()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return coding
