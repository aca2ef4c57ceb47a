# SPDX-License-Identifier: Apache-2.0
"""Training with workers that may lie: rules, scores by trusted data, and attacks to try them.

Decides how updates are combined, and which of them are whole, new and in order. Must never know
how they travel. Threads: the caller's.

rules.py          the values of rule=: the parameters of each rule, with its paper
reference.py      each rule in NumPy
scores.py         rules that compare with a trusted update: FLTrust, Zeno, Zeno++, FedAsync, Kardam
judges.py         both kinds of rules on updates in blocks, with kernels, for validators
model_judge.py    rules for whole tensors, where these are several blocks
updates.py        which updates are whole, in order and new, and statistics of refusals
update_codecs.py  updates that travel encoded
attacks.py        what liars send

docs/byzantine.md says which rule is for what.
"""

from fastps.byzantine import attacks
from fastps.byzantine.rules import (
    ARC,
    CAF,
    MDA,
    NNM,
    SMEA,
    Average,
    Bucketing,
    Bulyan,
    CenteredClipping,
    Clipping,
    GeometricMedian,
    Krum,
    MeanAroundMedian,
    Median,
    MultiKrum,
    NormClipping,
    Own,
    Phocas,
    SignMajority,
    TrimmedMean,
    combine,
    rule_of,
)
from fastps.byzantine.scores import (
    FedAsync,
    FLTrust,
    Kardam,
    Verdict,
    Zeno,
    ZenoDescent,
    ZenoPlusPlus,
    ZenoPlusPlusDescent,
    is_sound,
)
from fastps.contract.rule import Choice

__all__ = [
    "ARC",
    "CAF",
    "MDA",
    "NNM",
    "SMEA",
    "Average",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "Choice",
    "Clipping",
    "FLTrust",
    "FedAsync",
    "GeometricMedian",
    "Kardam",
    "Krum",
    "MeanAroundMedian",
    "Median",
    "MultiKrum",
    "NormClipping",
    "Own",
    "Phocas",
    "SignMajority",
    "TrimmedMean",
    "Verdict",
    "Zeno",
    "ZenoDescent",
    "ZenoPlusPlus",
    "ZenoPlusPlusDescent",
    "attacks",
    "combine",
    "is_sound",
    "rule_of",
]
