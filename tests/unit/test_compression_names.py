# SPDX-License-Identifier: Apache-2.0
"""What users may say of compression: functions, BytePS's dictionaries, its byteps_ keywords."""

from __future__ import annotations

import pytest

from fastps import Compression, ConfigError
from fastps.config import load
from fastps.contract.codec import PLAIN, Codec, Coding, Option
from fastps.contract.compression import coding_of
from fastps.contract.contract import Policy
from fastps.control.declarations import Declarations
from fastps.control.protocol import Declare, Failed, Layout, TensorSpec
from fastps.session.tensor_spec import make_layout
from fastps.types import DType

ONEBIT = Compression.onebit(scaling=True, ef="vanilla", momentum="nesterov", mu=0.9)
SAME = {
    "params": {"compressor": "onebit", "scaling": True, "ef": "vanilla",
               "momentum": "nesterov", "mu": 0.9},
    "keywords": {"byteps_compressor_type": "onebit", "byteps_compressor_onebit_scaling": "True",
                 "byteps_ef_type": "vanilla", "byteps_momentum_type": "nesterov",
                 "byteps_momentum_mu": "0.9"},
    "without prefix": {"compressor_type": "onebit", "compressor_onebit_scaling": "true",
                       "ef_type": "vanilla", "momentum_type": "nesterov", "momentum_mu": 0.9},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("onebit", ()), ("topk", (3,)), ("randomk", (3,)), ("dithering", (3,)), ("fp16", ()),
     ("bf16", ()), ("int8", ()), ("int4", ()), ("sparse", ())],
)  # fmt: skip
def test_momentum_is_0_9_and_only_if_it_is_asked_for(name, arguments):
    make = getattr(Compression, name)
    assert make(*arguments).mu == 0
    assert make(*arguments, ef="vanilla", momentum="nesterov").mu == 0.9


@pytest.mark.parametrize("said", SAME.values(), ids=list(SAME))
def test_names_of_byteps(said):
    assert coding_of(said) == ONEBIT
    assert Coding(Codec.ONEBIT, 0, Option.SCALING | Option.FEEDBACK, 0.9) == ONEBIT


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"compressor": "topk", "k": 3}, Compression.topk(3)),
        ({"compressor": "onebit"}, Compression.onebit(scaling=False)),
        ({"compressor": "randomk", "k": "5", "seed": "7"}, Compression.randomk(5, seed=7)),
        ({"compressor": "dithering", "k": 4, "partition": "natural", "normalize": "l2"},
         Compression.dithering(4, partition="natural", normalize="l2")),
        ({"byteps_compressor_type": "dithering", "byteps_compressor_k": "2",
          "byteps_dithering_partition": "1", "byteps_dithering_normalize": "0",
          "byteps_seed": "3"}, Compression.dithering(2, partition="natural", seed=3)),
        ({"fp16": True}, Compression.fp16()),
        ({"fp16": True, "compressor": "onebit", "scaling": 1}, Compression.onebit()),
        ({}, PLAIN), ({"compressor": None}, PLAIN), (None, None), (Compression.none, PLAIN),
        (Compression.int8, Compression.int8()), (Compression.onebit, Compression.onebit()),
        (lambda name: Compression.int4() if name == "w" else None, Compression.int4()),
        (lambda name: None, PLAIN), (lambda name: {"compressor": name * 0 + "fp16"},
                                     Compression.fp16()),
    ],
)  # fmt: skip
def test_other_ways_to_say_it(said, meant):
    assert coding_of(said, "w") == meant


@pytest.mark.parametrize(
    "said",
    [
        {"compressor": "gzip"}, {"compressor": "topk"}, {"compressor": "topk", "k": 0},
        {"compressor": "onebit", "level": 3}, {"compressor": "onebit", "ef": "sparse"},
        {"compressor": "onebit", "momentum": "heavy"}, {"compressor": "__class__"},
        {"compressor": "dithering", "k": 2, "partition": "log"},
        {"compressor": "onebit", "momentum": "nesterov", "mu": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_means_nothing(said):
    with pytest.raises(ConfigError):
        coding_of(said)


def test_what_is_no_compression():
    with pytest.raises(TypeError, match="Compression"):
        coding_of("onebit")  # type: ignore[arg-type]


def test_the_scheduler_refuses_what_means_nothing():
    declarations = Declarations(load({}), owners={})
    layout = Layout(DType.FLOAT32, (64,), 256, 4096, 4096, coding=Coding(Codec.TOPK, 0.0))
    asked = Declare.of(1, [TensorSpec("t", layout)], 5.0)
    ((_, answer),) = declarations.declare(0, 7, asked, now=0.0)
    assert isinstance(answer, Failed)
    assert "k=0" in answer.message


def test_no_codec_where_what_is_pushed_stays():
    terms = {"is_sent": True, "policy": Policy.ACCUMULATE}
    spec = make_layout(load({}, {}), 4096, "w", (100000,), DType.FLOAT32, coding=PLAIN, **terms)
    assert spec.coding == PLAIN
    for shape in ((100000,), (1,)):
        with pytest.raises(ConfigError, match=r"'w' is compressed by onebit\(.*ACCUMULATE"):
            make_layout(load({}, {}), 4096, "w", shape, DType.FLOAT32, coding=ONEBIT, **terms)


@pytest.mark.parametrize("policy", [Policy.SUM, Policy.DEADLINE_ROUNDS])
def test_sums_take_any_codec(policy):
    made = make_layout(
        load({}, {}), 4096, "w", (100000,), DType.FLOAT32, coding=ONEBIT, is_sent=True,
        policy=policy,
    )  # fmt: skip
    assert made.coding == ONEBIT
