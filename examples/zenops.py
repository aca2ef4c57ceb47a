# SPDX-License-Identifier: Apache-2.0
"""Repeat ZenoPS's experiments at a small size: rules under attacks, with a validator.

    fastps-run -np 8 -s 1 -v 1 python examples/zenops.py --json runs.jsonl
    fastps-run -np 8 -s 1 -v 1 python examples/zenops.py --asynchronous --json runs.jsonl
    fastps-run -np 8 -s 1 -v 1 python examples/zenops.py --participation 0.5 --json runs.jsonl
    fastps-run -np 8 -s 2 -v 2 python examples/zenops.py --json runs.jsonl
    fastps-run -np 8 -s 2 -v 2 python examples/zenops.py --asynchronous --json runs.jsonl
    python examples/zenops.py --report runs.jsonl --plot runs.png

The classifier and the digits are those of byzantine.py, cut into nine parts. Each of eight workers
trains with one part, and the validator has the last. A worker skips a tensor with a probability of
0.2; the skipped change stays in its model and leaves later. A worker that sits a round out
(--participation) does the same. Each worker's update of a tensor is wrong with a probability of
0.2, or six of eight workers always send wrong updates.

Synchronous runs have 40 rounds of 8 steps. Asynchronous runs have 62 updates of each worker; steps
are drawn back to the model that they began from, and the rate is divided by the root of nine, as
in ZenoPS. A worker starts its next update when about as many updates were judged as had come
before its last one.

Each run adds a line to the file. --report prints a table, and its exit code is 1 if a threshold is
missed. The thresholds are those of CHECKS, over the means of all seeds in the file. They were
written down before the first of these seeds was run, and come from a simulation with other seeds.
The last one, on flipped labels, comes from one that was missed before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from byzantine import HIDDEN, Array, Data, accuracy, gradient, unpacked

import fastps
from fastps import byzantine as bz
from fastps.byzantine import attacks

STEPS, BATCH, RATE, MOMENTUM, DECAY = 8, 16, 0.05, 0.9, 1e-4
ROUNDS, UPDATES = 40, 62
SKIPPED, LYING, BACK = 0.2, 0.2, 0.2  # probabilities; how far a step is drawn back
FIRST_SEED, ALPHA = 400, 0.4
SHAPES = {"w1": (64, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, 10), "b2": (10,)}
SWEEP = (0.1, 0.01, 0.001, 0.0, -0.01, -0.1)  # of Zeno's eta; -0.001 is its own
MOST = "6 of 8 negative 1"
LIES: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "negative 6": lambda u, _: attacks.negative(u, scale=6.0),
    "negative 2": lambda u, _: attacks.negative(u, scale=2.0),
    "random 1": lambda u, rng: attacks.random(u, rng, scale=1.0),
    "scaled 8": lambda u, rng: attacks.scaled_random(u, rng, scale=8.0),
    MOST: lambda u, _: attacks.negative(u, scale=1.0),
}


class Case(NamedTuple):
    """A run: a rule under an attack; control: what is done to the validator's data."""

    name: str
    rule: Any
    attack: str
    control: str = ""


def cases(is_asynchronous: bool, is_short: bool = False) -> list[Case]:
    """List the runs of a seed; short: those of ZenoPS's figures 3 and 4 alone."""
    if is_asynchronous:
        judges = {"FedAsync": bz.FedAsync(ALPHA), "Zeno++": bz.ZenoPlusPlus(alpha=ALPHA)}
        lies = ("none", "negative 2", "random 1", "scaled 8")
        return [Case(name, rule, lie) for name, rule in judges.items() for lie in lies]
    rules = {
        "mean": "average", "trimmed mean": bz.TrimmedMean(share=0.2),
        "Phocas": bz.Phocas(share=0.2), "Zeno": bz.Zeno(),
    }  # fmt: skip
    lies = ("none", "negative 6", "random 1", "scaled 8")
    figure = [Case(name, rule, lie) for name, rule in rules.items() for lie in lies]
    if is_short:
        return figure
    most = {"mean": "average", "median": "median", "Krum": bz.Krum(2), "Zeno": bz.Zeno()}
    return [
        *figure,
        *(Case(name, rule, MOST) for name, rule in most.items()),
        *(Case(f"Zeno, eta {eta:g}", bz.Zeno(eta=eta), "random 1") for eta in SWEEP),
        Case("Zeno", bz.Zeno(), "none", "its labels flipped"),
        Case("Zeno", bz.Zeno(), "none", "no steps of its own"),
    ]


# ---- training ----


def flat(arrays: Sequence[Array]) -> Array:
    """Make one array of a model's."""
    return np.concatenate([one.ravel() for one in arrays]).astype(np.float64)


def split(model: Array) -> list[Array]:
    """Make a model's arrays of one."""
    return [np.array(one, np.float32) for one in unpacked(model)]


def first_model(seed: int) -> list[Array]:
    """Draw the weights that all begin with."""
    random = np.random.default_rng(seed)
    scales = {"w1": np.sqrt(2 / 64), "w2": np.sqrt(2 / HIDDEN)}
    return [
        (random.normal(0, 1, shape) * scales.get(name, 0)).astype(np.float32)
        for name, shape in SHAPES.items()
    ]


class Trainer:
    """Steps with one part of the data; momentum goes on from round to round."""

    def __init__(
        self, part: tuple[Array, Array], seed: int, rank: int, rounds: int, rate: float = RATE
    ) -> None:
        self.x, self.y = part
        self.rate = rate
        self.random = np.random.default_rng([seed, rank])
        self.speed = np.zeros(sum(int(np.prod(shape)) for shape in SHAPES.values()))
        self.rounds, self.number = rounds, 0

    def steps(self, model: Array, count: int = STEPS, back: float = 0.0) -> None:
        """Change a model in place by one round's steps."""
        begun = model.copy()
        rate = self.rate * 0.1 ** sum(self.number >= share * self.rounds for share in (0.5, 0.75))
        self.number += 1
        for _ in range(count):
            chosen = self.random.choice(len(self.x), BATCH, replace=False)
            slope = gradient(model, self.x[chosen], self.y[chosen]) + DECAY * model
            self.speed = MOMENTUM * self.speed - rate * slope
            model += self.speed
            model += back * (begun - model)


def rate_of(options: argparse.Namespace) -> float:
    """Give the rate of each step: what is added one by one moves the model further than a mean."""
    return RATE / float(np.sqrt(fastps.size() + 1)) if options.asynchronous else RATE


def liars_of(case: Case, seed: int) -> attacks.Liars:
    """Say who lies in a run, and where."""
    if case.attack == "none":
        return attacks.Liars()
    fixed = frozenset(range(6)) if case.attack == MOST else frozenset[int]()
    return attacks.Liars(fixed, 0.0 if fixed else LYING, seed)


class Worker:
    """What a worker does in one run."""

    def __init__(
        self, held: fastps.HeldParameters, case: Case, trainer: Trainer, seed: int, share: float
    ) -> None:
        self.held, self.attack, self.trainer, self.rank = held, case.attack, trainer, fastps.rank()
        self.share = share  # of the rounds that the worker takes part in
        self.liars = liars_of(case, seed)
        self.rest = np.zeros_like(trainer.speed)  # the skipped changes

    def push(self, back: float) -> None:
        """Train from the model that was pulled, and push what it changed by."""
        begun = flat(self.held.arrays)
        model = begun + self.rest
        with np.errstate(all="ignore"):
            self.trainer.steps(model, back=back)
            changes = split(model - begun)
        is_skipped = self.trainer.random.random(len(changes)) < SKIPPED
        if self.share < 1:  # without a random draw if all take part
            is_skipped |= self.trainer.random.random() >= self.share
        self.rest = flat([one * skip for one, skip in zip(changes, is_skipped, strict=True)])
        self.held.push(
            [
                None if is_skipped[block] else self.told(one, block)
                for block, one in enumerate(changes)
            ]
        )

    def told(self, change: Array, block: int) -> Array:
        """Give what the worker says of a tensor."""
        step = self.trainer.number
        if not self.liars.lies(self.rank, step, block):
            return change
        rng = self.liars.generator(self.rank, step, block)
        rng.random()  # the draw that made it Byzantine
        with np.errstate(all="ignore"):
            return LIES[self.attack](change, rng)


# ---- runs ----


class Mistakes:
    """What a validator refused though it was honest, and accepted though it was a lie."""

    def __init__(self, liars: attacks.Liars) -> None:
        self.liars = liars
        self.steps: Counter[int] = Counter()  # of each worker
        self.blocks: Counter[tuple[bool, bool]] = Counter()  # by (is Byzantine, is accepted)

    def count(self, judged: fastps.Judged) -> None:
        """Compare what came of each worker's next update with what it was."""
        for worker, verdicts in zip(judged.workers, judged.verdicts, strict=True):
            self.steps[worker] += 1
            for block, verdict in enumerate(verdicts):
                if verdict is not None:
                    lies = self.liars.lies(worker, self.steps[worker], block)
                    self.blocks[lies, verdict.is_accepted] += 1

    def rates(self) -> dict[str, float]:
        """Give false positives, of honest blocks, and false negatives, of lies; 0 of none."""
        honest, lies = (self.blocks[is_lie, True] + self.blocks[is_lie, False]
                        for is_lie in (False, True))  # fmt: skip
        return {
            "false_positives": self.blocks[False, False] / max(honest, 1),
            "false_negatives": self.blocks[True, True] / max(lies, 1),
        }


class Judge:
    """A validator with its data; the rule and the steps are those of the run."""

    def __init__(self, options: argparse.Namespace, data: Data) -> None:
        self.options, self.data, self.curve = options, data, list[float]()
        self.train: Callable[[list[Array]], object] = lambda _: None
        self.validator = fastps.Validator(
            dict(zip(SHAPES, first_model(0), strict=True)), "average",
            lambda arrays: self.train(arrays), asynchronous=options.asynchronous,
        )  # fmt: skip

    def begin(self, case: Case, seed: int) -> None:
        """Set the model back, and get ready for a run."""
        held, start = self.validator.held, first_model(seed)
        if self.options.asynchronous:  # changes add up: one validator sets back for all
            held.pull()
            if fastps.validator_rank() == 0:
                held.push([new - old for new, old in zip(start, held.arrays, strict=True)])
        else:
            held.push(start, round=held.stamp + 1)
        x, y = self.data.parts[-1]
        y = attacks.label_flip(y, 10) if "labels" in case.control else y
        trainer = Trainer((x, y), seed, fastps.size(), self.options.rounds, rate_of(self.options))
        wants = hasattr(case.rule, "score") and "no steps" not in case.control
        back = BACK if self.options.asynchronous else 0.0

        def train(arrays: list[Array]) -> None:
            if not wants:
                return
            model = flat(arrays)
            trainer.steps(model, back=back)
            for one, new in zip(arrays, split(model), strict=True):
                one[...] = new

        self.train, self.validator.rule, self.curve = train, case.rule, []

    def run(self, case: Case, seed: int) -> dict[str, Any]:
        """Judge a run's updates; give what came of it."""
        judge, rounds = self.validator, self.options.rounds
        accepted = judged = 0
        mistakes = Mistakes(liars_of(case, seed))
        for number in range(rounds):
            for _ in range(len(judge.workers) if self.options.asynchronous else 1):
                found = judge.judge() if self.options.asynchronous else judge.round()
                assert found is not None
                mistakes.count(found)
                accepted, judged = accepted + found.accepted, judged + sum(found[1:3])
            if self.options.asynchronous and number + 1 in (rounds // 2, rounds * 3 // 4):
                judge.rule = replace(judge.rule, alpha=judge.rule.alpha / 2)
            self.curve.append(accuracy(flat(judge.arrays), self.data))
        ended = {"curve": self.curve, "accuracy": self.curve[-1], "accepted": accepted / judged}
        return ended | mistakes.rates()


def alone(data: Data, seed: int, rounds: int) -> list[float]:
    """Train with the validator's data alone, as many steps as all workers do."""
    trainer, curve = Trainer(data.parts[-1], seed, 99, rounds), []
    model = flat(first_model(seed))
    for _ in range(rounds):
        trainer.steps(model, STEPS * fastps.size())
        curve.append(accuracy(model, data))
    return curve


def run_all(options: argparse.Namespace) -> None:
    """Do all runs of all seeds in one job."""
    fastps.init()
    data = Data(fastps.size() + 1)
    is_judge = fastps.role() == "validator"
    judge = Judge(options, data) if is_judge else None
    held = judge.validator.held if judge else fastps.HeldParameters(
        dict(zip(SHAPES, first_model(0), strict=True)), asynchronous=options.asynchronous
    )  # fmt: skip
    mode = "at their pace" if options.asynchronous else "in step"
    mode += f", p {options.participation:g}" if options.participation < 1 else ""
    common = {"mode": mode, "validators": fastps.validator_size()}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for case in cases(options.asynchronous, is_short(options)):
            if options.only and case.name not in options.only:
                continue
            found = run(options, case, seed, held, judge, data)
            note(options, common | {"seed": seed} | found, case)
        if judge and not options.asynchronous and not options.only and not is_short(options):
            curve = alone(data, seed, options.rounds)
            line = {"seed": seed, "curve": curve, "accuracy": curve[-1], "accepted": 0.0}
            note(options, common | line, Case("validator alone", None, "none"))
    if judge:
        judge.validator.close()
    fastps.barrier()
    fastps.shutdown()


def is_short(options: argparse.Namespace) -> bool:
    """Tell whether only the runs of a figure are wanted."""
    return bool(options.participation < 1 or fastps.validator_size() > 1)


def run(
    options: argparse.Namespace, case: Case, seed: int, held: fastps.HeldParameters,
    judge: Judge | None, data: Data,
) -> dict[str, Any]:  # fmt: skip
    """Take part in one run; a validator gives what came of it."""
    fastps.barrier()
    if judge:
        judge.begin(case, seed)
        fastps.barrier()
        judge.validator.held.pull()
        fastps.barrier()
        return judge.run(case, seed)
    fastps.barrier()
    held.pull(stamp=0 if options.asynchronous else held.stamp + 1)
    fastps.barrier()
    began = held.stamp
    trainer = Trainer(
        data.parts[fastps.rank()], seed, fastps.rank(), options.rounds, rate_of(options)
    )
    worker = Worker(held, case, trainer, seed, options.participation)
    for number in range(options.rounds):
        worker.push(BACK if options.asynchronous else 0.0)
        if options.asynchronous:  # wait for about as many updates as came before
            held.pull(stamp=began + fastps.size() * number + fastps.rank() + 1)
        else:
            held.pull(stamp=held.stamp + 1)
    return {}


def note(options: argparse.Namespace, found: dict[str, Any], case: Case) -> None:
    """Write a run down, and say how it ended."""
    if "curve" not in found or fastps.validator_rank() != 0:
        return
    line = found | {"rule": case.name, "attack": case.attack, "control": case.control}
    wrong = "".join(
        f", {name.replace('_', ' ')} {line[name]:.2f}"
        for name in ("false_positives", "false_negatives") if name in line
    )  # fmt: skip
    print(f"seed {line['seed']} {case.name:16} {case.attack:18} {case.control:20} "
          f"{line['accuracy']:.3f}  accepted {line['accepted']:.2f}{wrong}",
          flush=True)  # fmt: skip
    if options.json:
        with Path(options.json).open("a") as file:
            file.write(json.dumps(line) + "\n")


# ---- the report ----

Found = dict[tuple[str, int, str, str, str], dict[int, dict[str, Any]]]


def read(path: str) -> Found:
    """Read runs: by mode, validators, rule, attack and control, then by seed."""
    found: Found = {}
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        key = tuple(line[word] for word in ("mode", "validators", "rule", "attack", "control"))
        found.setdefault(key, {})[line["seed"]] = line  # type: ignore[arg-type]
    return found


class Ends:
    """Accuracies at the end, means over seeds."""

    def __init__(self, found: Found) -> None:
        self.found = found

    def __call__(
        self, rule: str, attack: str, control: str = "", mode: str = "in step", v: int = 1
    ) -> float:
        """Give the mean; NaN where nothing was run."""
        runs = self.found.get((mode, v, rule, attack, control), {}).values()
        return statistics.fmean(one["accuracy"] for one in runs) if runs else float("nan")


SOMETIMES = ("negative 6", "random 1", "scaled 8")
PACE, HALF = "at their pace", "in step, p 0.5"
CHECKS: dict[str, Callable[[Ends], bool]] = {
    "without liars Zeno is within 0.01 of the mean": lambda e: (
        abs(e("Zeno", "none") - e("mean", "none")) <= 0.01
    ),
    "negative 6 and random 1: mean < 0.6, Zeno > 0.94": lambda e: all(
        e("mean", one) < 0.6 and e("Zeno", one) > 0.94 for one in SOMETIMES[:2]
    ),
    "six of eight: mean, median, Krum < 0.2, Zeno > validator alone": lambda e: (
        max(e(one, MOST) for one in ("mean", "median", "Krum")) < 0.2
        and e("Zeno", MOST) > e("validator alone", "none")
    ),
    "two of ten: Zeno > validator alone + 0.015": lambda e: all(
        e("Zeno", one) > e("validator alone", "none") + 0.015 for one in SOMETIMES
    ),
    "eta moves Zeno by less than 0.02": lambda e: (
        max(swept := [e(f"Zeno, eta {eta:g}", "random 1") for eta in SWEEP]) - min(swept) < 0.02
    ),
    "at their pace, random 1: FedAsync < 0.7, Zeno++ > 0.94": lambda e: (
        e("FedAsync", "random 1", mode=PACE) < 0.7 and e("Zeno++", "random 1", mode=PACE) > 0.94
    ),
    "two validators are within 0.015 of one": lambda e: all(
        abs(e("Zeno", one, v=2) - e("Zeno", one)) <= 0.015 for one in ("none", *SOMETIMES)
    ),
    "half sit out: Zeno within 0.015 of the mean without liars": lambda e: (
        abs(e("Zeno", "none", mode=HALF) - e("mean", "none", mode=HALF)) <= 0.015
    ),
    "half sit out, negative 6 and random 1: mean < 0.6, Zeno > 0.93": lambda e: all(
        e("mean", one, mode=HALF) < 0.6 and e("Zeno", one, mode=HALF) > 0.93
        for one in SOMETIMES[:2]
    ),
    "two validators at their pace, random 1: FedAsync < 0.7, Zeno++ > 0.94": lambda e: (
        e("FedAsync", "random 1", mode=PACE, v=2) < 0.7
        and e("Zeno++", "random 1", mode=PACE, v=2) > 0.94
    ),
    "no steps of its own leave Zeno below 0.5": lambda e: (
        e("Zeno", "none", "no steps of its own") < 0.5
    ),
    "flipped labels leave Zeno 0.1 below honest ones, and below the validator alone": lambda e: (
        min(e("Zeno", "none"), e("validator alone", "none"))
        - e("Zeno", "none", "its labels flipped")
        >= 0.1
    ),
}


def report(path: str, picture: str) -> int:
    """Print the table and what was missed; draw curves."""
    found = read(path)
    for (mode, v, rule, attack, control), runs in found.items():
        ends = [one["accuracy"] for one in runs.values()]
        rate = statistics.fmean(one["accepted"] for one in runs.values())
        print(f"{mode:14} V={v} {rule:16} {attack:18} {control:20} {statistics.fmean(ends):.3f} "
              f"({min(ends):.3f} to {max(ends):.3f}), accepted {rate:.2f}, "
              f"{len(ends)} seeds")  # fmt: skip
    verdicts = {name: check(Ends(found)) for name, check in CHECKS.items()}
    for name, is_met in verdicts.items():
        print(f"{'met' if is_met else 'MISSED':7} {name}")
    if picture:
        plot(picture, found)
    return 0 if all(verdicts.values()) else 1


def plot(path: str, found: Found) -> None:
    """Draw accuracy against rounds, means over seeds, a panel for each attack."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    chosen = {
        key: runs
        for key, runs in found.items()
        if not key[4] and "eta" not in key[2] and key[0] != HALF
    }
    titles = list(dict.fromkeys((key[0], key[3]) for key in chosen if key[1] == 1))
    figure, panels = pyplot.subplots(2, -(-len(titles) // 2), sharey=True, figsize=(15, 6))
    for (mode, attack), panel in zip(titles, panels.flat, strict=False):
        for key, runs in chosen.items():
            if key[:2] == (mode, 1) and key[3] == attack:
                curves = [one["curve"] for one in runs.values()]
                panel.plot(np.mean(curves, axis=0), label=key[2])
        panel.set_title(f"{attack}, {mode}", fontsize=9)
        panel.legend(fontsize=7)
    panels[0][0].set_ylabel("accuracy on what was held out")
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Run, or report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--asynchronous", action="store_true", help="train asynchronously")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--rounds", type=int, default=0, help="number of updates of each worker")
    parser.add_argument("--participation", type=float, default=1.0,
                        help="how probably a worker takes part in a round")  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="RULE", help="run only these rules")
    parser.add_argument("--json", metavar="FILE", default="", help="add a line for each run")
    parser.add_argument("--report", metavar="FILE", default="", help="print a table of these runs")
    parser.add_argument("--plot", metavar="FILE", default="")
    options = parser.parse_args()
    names = {case.name for case in cases(options.asynchronous)}
    if unknown := set(options.only or ()) - names:
        parser.error(f"no rule is called {sorted(unknown)}; there are {sorted(names)}")
    if not 0 < options.participation <= 1:
        parser.error("--participation is above 0 and at most 1")
    if options.report and not Path(options.report).is_file():
        parser.error(f"--report: there is no file {options.report}")
    options.rounds = options.rounds or (UPDATES if options.asynchronous else ROUNDS)
    if options.report:
        return report(options.report, options.plot)
    run_all(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
