# SPDX-License-Identifier: Apache-2.0
"""The rules to choose from: each function returns a checked value for rule=. Pure.

f is the number of updates that may be anything at all; m is the number of updates that came, in
the order of workers. Where fewer come than there are workers, f goes down to what the rest can
stand. An update with NaN, infinity or a norm that overflows float64 is refused: it counts as if
it had not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from fastps.byzantine import reference
from fastps.contract.rule import SUMMED, Choice, Kind, Rule
from fastps.errors import ConfigError
from fastps.types import DType

Array: TypeAlias = np.ndarray[Any, Any]


def Average() -> Rule:
    """Average what is not refused: stands no liar that sends finite numbers."""
    return Rule(Kind.AVERAGE)


def TrimmedMean(f: int | None = None, *, share: float | None = None) -> Rule:
    """Average each element without its f largest and f smallest; 2f < m.

    share: in place of f, as ZenoPS has it: f = int(min((m - 2) // 2, share m)), and zeros
    where m <= 2. Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning:
    towards optimal statistical rates", ICML 2018.
    """
    return _made(Rule(Kind.TRIMMED_MEAN, **_trim(f, share)))


def Median() -> Rule:
    """Take the median of each element; of an even number the mean of the middle two. Yin et al."""
    return Rule(Kind.MEDIAN)


def Phocas(f: int | None = None, *, share: float | None = None) -> Rule:
    """Average, of each element, the m - f nearest to its trimmed mean; 2f < m.

    share: in place of f: f = int(max(1, share m)), and zeros where m <= 2. Of two as near the
    smaller counts. Xie, Koyejo and Gupta, "Phocas: dimensional Byzantine-resilient stochastic
    gradient descent", 2018.
    """
    return _made(Rule(Kind.PHOCAS, **_trim(f, share)))


def MeanAroundMedian(f: int) -> Rule:
    """Average, of each element, the m - f nearest to its median; 2f < m.

    Of two as near the smaller counts. Xie, Koyejo and Gupta, "Generalized Byzantine-tolerant
    SGD", 2018, section 3.3.
    """
    return _made(Rule(Kind.MEAN_AROUND_MEDIAN, f))


def Krum(f: int) -> Rule:
    """Take the update with the least sum of squared distances to its m - f - 2 nearest others.

    m >= 2f + 3. Of equal ones the lower rank's. Blanchard, El Mhamdi, Guerraoui and Stainer,
    "Machine learning with adversaries: Byzantine tolerant gradient descent", NeurIPS 2017.
    """
    return _made(Rule(Kind.KRUM, f))


def MultiKrum(f: int, *, keep: int | None = None) -> Rule:
    """Average the `keep` updates that Krum scores best; None: m - f. m >= 2f + 3. As Krum."""
    if keep is not None and keep < 1:
        raise ConfigError(f"keep={keep} must be at least 1, or None for m - f")
    return _made(Rule(Kind.MULTI_KRUM, f, keep=keep or 0))


def Bulyan(f: int) -> Rule:
    """Choose m - 2f updates by Krum, one after another; then average, of each element, m - 4f.

    Those nearest to the median of the chosen. m >= 4f + 3. El Mhamdi, Guerraoui and Rouault, "The
    hidden vulnerability of distributed learning in Byzantium", ICML 2018.
    """
    return _made(Rule(Kind.BULYAN, f))


def MDA(f: int) -> Rule:
    """Average the m - f updates whose largest distance from each other is least; 2f < m.

    Of as good subsets the first. Compares all subsets, at most 65536. El Mhamdi, Guerraoui,
    Guirguis and Rouault, "SGD: decentralized Byzantine resilience", 2019.
    """
    return _made(Rule(Kind.MDA, f))


def SMEA(f: int) -> Rule:
    """Average the m - f updates whose covariance has the least largest eigenvalue; 2f < m.

    Of as good subsets the first. Compares all subsets, at most 65536. Allouah, Guerraoui, Gupta,
    Pinot and Stephan, "On the privacy-robustness-utility trilemma in distributed learning", ICML
    2023.
    """
    return _made(Rule(Kind.SMEA, f))


def CAF(f: int) -> Rule:
    """Weigh updates less that lie far out along the direction in which all differ most; 2f < m.

    Weights c_i begin at 1. As long as they add up to more than m - 2f, c_i <- c_i (1 - tau_i /
    max tau), the maximum over those with c_i > 0. tau_i is the square of update i's distance from
    the weighted mean along v, the covariance's eigenvector of the largest eigenvalue. The result
    is the mean of the least largest eigenvalue. Allouah, Guerraoui and Stephan, "Towards
    trustworthy federated learning with untrusted participants", ICML 2025.
    """
    return _made(Rule(Kind.CAF, f))


def GeometricMedian(*, iterations: int = 64, nu: float = 1e-6) -> Rule:
    """Find the point with the least sum of distances, from the mean on, by smoothed Weiszfeld.

    z = sum w_i u_i / sum w_i with w_i = 1 / max(nu, |u_i - z|), so many times. Stands less than
    half. f very long lies take iterations: each divides what is left of them by (m - f) / f. They
    cost little here, for distances between updates are found once. Pillutla, Kakade and
    Harchaoui, "Robust aggregation for federated learning", 2022, algorithm 2.
    """
    if iterations < 1:
        raise ConfigError(f"iterations={iterations} must be at least 1")
    return _made(Rule(Kind.GEOMETRIC_MEDIAN, iterations=iterations, nu=nu))


def CenteredClipping(radius: float, *, iterations: int = 1) -> Rule:
    """Move from the last result towards the updates, each by at most radius / m.

    z <- z + (1/m) sum (u_i - z) min(1, radius / |u_i - z|), from zeros in the first round. Give
    it momenta rather than gradients. Karimireddy, He and Jaggi, "Learning from history for
    Byzantine robust optimization", ICML 2021.
    """
    if iterations < 1:
        raise ConfigError(f"iterations={iterations} must be at least 1")
    return _made(Rule(Kind.CENTERED_CLIPPING, radius=radius, iterations=iterations))


def NormClipping(radius: float) -> Rule:
    """Average updates of which none is longer than radius: (1/m) sum u_i min(1, radius / |u_i|).

    Sun, Kairouz, Suresh and McMahan, "Can you really backdoor federated learning?", 2019.
    """
    return _made(Rule(Kind.NORM_CLIPPING, radius=radius))


def SignMajority() -> Rule:
    """Return the majority's sign of each element: 1, -1, or 0 where as many are above 0 as below.

    Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with majority vote is communication
    efficient and fault tolerant", ICLR 2019.
    """
    return Rule(Kind.SIGN_MAJORITY)


def Bucketing(rule: Rule, *, size: int = 2, seed: int = 0) -> Rule:
    """Average buckets of updates, drawn anew in every round, before a rule sees them.

    Where workers' data differ; the rule's f still counts updates, of which each may spoil one
    bucket. Karimireddy, He and Jaggi, "Byzantine-robust learning on heterogeneous datasets via
    bucketing", ICLR 2022.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"rule={rule!r}: buckets are for a rule, for example Median()")
    if size < 2:
        raise ConfigError(f"size={size} must be at least 2 updates a bucket")
    if rule.bucket:
        raise ConfigError(f"rule={rule} has buckets already: give the rule without them")
    return _made(rule._replace(bucket=size, seed=seed))


def NNM(rule: Rule, f: int | None = None) -> Rule:
    """Replace each update by the mean of its m - f nearest, itself included, before a rule.

    f: None for that of the rule. 2f < m. The rule then looks at whole tensors. Allouah,
    Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, "Fixing by mixing: a recipe for optimal
    Byzantine ML under heterogeneity", AISTATS 2023.
    """
    found = _before(rule, f, "NNM")
    return _made(rule._replace(nnm=found))


def ARC(rule: Rule, f: int | None = None) -> Rule:
    """Clip the floor(2 (f / m) (m - f)) longest updates to the length of the next, before a rule.

    f: None for that of the rule. 2f < m. Goes around NNM, as it comes before: ARC(NNM(rule)).
    Allouah, Guerraoui, Gupta, Jellouli, Rizk and Stephan, "Adaptive gradient clipping for robust
    federated learning", 2024.
    """
    found = _before(rule, f, "ARC")
    return _made(rule._replace(arc=found))


def Clipping(rule: Rule, radius: float) -> Rule:
    """Clip updates that are longer than radius to it, before a rule.

    In the place of ARC, which finds a radius in each round: Clipping(NNM(rule), radius).
    """
    _check_order(rule, "Clipping")
    if not radius:
        raise ConfigError(f"radius={radius}: Clipping needs a length above 0")
    return _made(rule._replace(clip=radius))


def _check_order(rule: Rule, name: str) -> None:
    if not isinstance(rule, Rule):
        raise TypeError(f"rule={rule!r}: {name} goes before a rule, for example TrimmedMean(2)")
    if rule.bucket or rule.arc or rule.clip or (rule.nnm and name == "NNM"):
        raise ConfigError(
            f"{name} before {rule}: the order is Bucketing(ARC(NNM(rule))), each at most once, "
            "with Clipping or ARC"
        )


def _before(rule: Rule, f: int | None, name: str) -> int:
    _check_order(rule, name)
    found = (rule.nnm or rule.f) if f is None else f
    if not found:
        raise ConfigError(f"f={f}: {name} needs the number of updates that may be lies, 1 or more")
    return found


def Own(place: str | Callable[..., Any]) -> Rule:
    """Take a rule of your own: a function of arrays [m, d] that returns [d], by module:name.

    Servers import it by that name if their FASTPS_RULES lists it: no code comes from workers. It
    gets the updates that are not refused, in rank order, and must be deterministic. Python runs
    on a server's threads for rules and takes the GIL there; a Numba cfunc with the signature of
    fastps.reduce does not.
    """
    if not isinstance(place, str):
        name = getattr(place, "__qualname__", type(place).__name__)
        place = f"{getattr(place, '__module__', '')}:{name}"
    if place.startswith(f"{__name__}:"):
        name = place.partition(":")[2]
        raise ConfigError(f"rule={name} has no parameters yet: give what {name}(...) returns")
    if place.startswith("__main__:"):
        raise ConfigError(f"rule {place!r}: servers do not have __main__; put it into a module")
    return _made(Rule(Kind.OWN, own=place))


_BY_NAME = {
    "average": Average,
    "median": Median,
    "sign_majority": SignMajority,
    "geometric_median": GeometricMedian,
}


def rule_of(choice: Choice) -> Rule | None:
    """Return the rule of a choice; None: as it was declared. Raises ConfigError, TypeError."""
    if choice is None or isinstance(choice, Rule):
        return choice
    if isinstance(choice, str):
        return _named(choice)
    if callable(choice):
        return Own(choice)
    raise TypeError(f"rule={choice!r}: give a rule of fastps.byzantine, a name or a function")


def _named(name: str) -> Rule:
    if ":" in name:
        return Own(name)
    if name == "none":
        return SUMMED
    make = _BY_NAME.get(name)
    if make is None:
        raise ConfigError(
            f"rule {name!r} is not one of {', '.join(_BY_NAME)}; rules with parameters are made "
            "by fastps.byzantine, for example TrimmedMean(f=2)"
        )
    return make()


def combine(
    rule: Choice,
    updates: Sequence[Array | None],
    *,
    version: int = 1,
    last: Array | None = None,
) -> Array:
    """Return what a rule makes of updates, in NumPy and float64; slow: the oracle of servers.

    updates: arrays of floats of one shape, read; None for one that was skipped, which is not the
    same as zeros. version: number of the round, which seeds the drawing of buckets. last: the
    last round's result, for centered clipping. Raises ValueError for rules that cannot be. Where
    fewer updates come than the rule needs, f goes down as said above.
    """
    found = rule_of(rule)
    if found is None or found.kind is Kind.NONE:
        raise ConfigError(f"rule={rule!r}: combine() needs a rule, for example 'median'")
    return reference.combine(found, updates, version=version, last=last)


def apply_alone(rule: Rule, update: Array, dtype: DType) -> None:
    """Apply a rule to the only worker's update in place, as servers would."""
    if not rule.has_meaning():
        return
    values = update
    if dtype is DType.BFLOAT16:
        import ml_dtypes  # noqa: PLC0415  (this type alone needs it)

        values = update.view(ml_dtypes.bfloat16)
    values[...] = reference.combine(rule, [values])


def check_sum(name: str, rule: Rule) -> None:
    """Raise ValueError for the sum of a tensor that has a rule."""
    if rule.has_meaning():
        raise ValueError(
            f"tensor {name!r} is combined by {rule} instead of its average, so there is no sum of "
            "it; give average=True, or use another name"
        )


def _trim(f: int | None, share: float | None) -> dict[str, Any]:
    if (f is None) == (share is None):
        raise ConfigError(f"f={f}, share={share}: give one of them, how many updates may be lies")
    if share is not None and not 0 < share < 0.5:
        raise ConfigError(f"share={share} must be between 0 and 0.5")
    return {"f": f} if share is None else {"share": float(share)}


def _made(rule: Rule) -> Rule:
    try:
        rule.check()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return rule
