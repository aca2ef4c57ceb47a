# SPDX-License-Identifier: Apache-2.0
"""Compare rules by their worst attack: rule x mixing before it x attack x f x heterogeneity.

    python examples/byzantine.py --grid
    python examples/byzantine.py --grid --plot worst.png --seeds 300 301 302
    python examples/byzantine.py --grid --compare byzfl --alphas 0.1 --liars 2 --seeds 300

A simulation in one process, with the kernels of servers. Ten workers train a linear classifier of
scikit-learn's digits and send momenta; f of them are Byzantine. Classes are dealt out to the
honest ones by a Dirichlet distribution of alpha: with 0.1 few workers have a class, with 10 all
have all. The attacks know all honest updates, and the "best" ones try the rule in use. A worst
case is the least held-out accuracy over all attacks, seed by seed.

The table shows the mean over seeds of the worst case, and which attack it most often was. --plot
FILE draws it as a heat map (needs matplotlib). --compare byzfl trains also by the rules of the
package byzfl, where it is installed, from the same data under the same attacks.

CHECKS are thresholds for seeds 300 and up, of which all attacks are run. They were written down
before, with the figures of seed 0 alone, and the exit code is 1 if one of them is missed. Spent
seeds: 0 to 2, 100 to 109 and 200 to 204.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

from fastps import byzantine as bz
from fastps.byzantine import attacks
from fastps.reduce._partition import Combiner
from fastps.types import DType

N, STEPS, BATCH, RATE, MOMENTUM, HELD_OUT = 10, 100, 16, 1.0, 0.9, 360
SEEDS, LIARS, ALPHAS = (300, 301, 302, 303), (1, 2), (0.1, 1.0)
Array = np.ndarray
Combine = Callable[[list[Array]], Array]

RULES: dict[str, Callable[[int], Any]] = {
    "average": lambda f: bz.Average(),
    "trimmed mean": bz.TrimmedMean,
    "median": lambda f: bz.Median(),
    "Krum": bz.Krum,
    "geometric median": lambda f: bz.GeometricMedian(),
    "CAF": bz.CAF,
    "SMEA": bz.SMEA,
}
BEFORE: dict[str, Callable[[Any, int], Any]] = {
    "": lambda rule, f: rule,
    "NNM": bz.NNM,
    "ARC": bz.ARC,
}
CONTROL = "none"  # no worker lies
Lie = Callable[["Round"], Array]


class Round(NamedTuple):
    """What liars know: honest updates, those of the first round, and the rule in use.

    flipped: what a liar finds with wrong labels.
    """

    honest: list[Array]
    first: list[Array]
    flipped: list[Array]
    f: int
    combine: Combine


ATTACKS: dict[str, Lie] = {
    "label flip": lambda r: r.flipped[0],
    "sign flip": lambda r: attacks.sign_flip(r.honest),
    "inner product": lambda r: attacks.inner_product(r.honest, scale=2.0),
    "ALIE": lambda r: attacks.alie(r.honest, N, r.f),
    "best inner product": lambda r: attacks.optimal_inner_product(r.honest, r.f, r.combine),
    "best ALIE": lambda r: attacks.optimal_alie(r.honest, r.f, r.combine),
    "mimic": lambda r: attacks.mimic(r.honest, r.first),
    "infinity": lambda r: attacks.infinite(r.honest[0]),
    "min-max": lambda r: attacks.min_max(r.honest),
    "spectral": lambda r: attacks.spectral(r.honest),
}


class Cell(NamedTuple):
    """One training; library: whose rule."""

    rule: str
    before: str
    attack: str
    f: int
    alpha: float
    seed: int
    library: str = "fastps"


# ---- training ----


class Data:
    """The digits, dealt out to the honest workers by class; liars have the last one's."""

    def __init__(self, seed: int, alpha: float, honest: int) -> None:
        raw, random = load_digits(), np.random.default_rng([seed, honest, int(1000 * alpha)])
        order = random.permutation(len(raw.target))
        x, y = raw.data[order].astype(np.float32) / 16, raw.target[order]
        self.test = x[:HELD_OUT], y[:HELD_OUT]
        self.x, self.y = x[HELD_OUT:], y[HELD_OUT:]
        self.parts: list[Array] = []
        while min((len(part) for part in self.parts), default=0) < BATCH:
            shares = random.dirichlet([alpha] * honest, 10)
            ends = (np.cumsum(shares, axis=1) * np.bincount(self.y)[:, None]).astype(int)
            classes = [np.flatnonzero(self.y == one) for one in range(10)]
            cut = [np.split(who, end[:-1]) for who, end in zip(classes, ends, strict=True)]
            self.parts = [np.concatenate(part) for part in zip(*cut, strict=True)]


def gradients(model: Array, x: Array, y: Array) -> Array:
    """Return each worker's gradient of the cross entropy, [workers, 650]."""
    weights, bias = model[:640].reshape(64, 10), model[640:]
    scores = x @ weights + bias
    error = np.exp(scores - scores.max(axis=2, keepdims=True))
    error /= error.sum(axis=2, keepdims=True)
    np.put_along_axis(error, y[..., None], np.take_along_axis(error, y[..., None], 2) - 1, 2)
    error /= y.shape[1]
    slopes = x.transpose(0, 2, 1) @ error
    return np.concatenate([slopes.reshape(len(x), -1), error.sum(axis=1)], axis=1)


def train(cell: Cell) -> float:
    """Return the held-out accuracy after training; 0.1 of a model that is not finite."""
    f = 0 if cell.attack == CONTROL else cell.f
    honest = N - f
    data = Data(cell.seed, cell.alpha, honest)
    random = np.random.default_rng([cell.seed, 1])
    combine = combiner_of(cell)
    model, momenta = np.zeros(650, np.float32), np.zeros((honest + 1, 650), np.float32)
    first: list[Array] = []
    for _ in range(STEPS):
        chosen = [random.choice(part, BATCH) for part in (*data.parts, data.parts[-1])]
        x, y = np.stack([data.x[one] for one in chosen]), np.stack([data.y[one] for one in chosen])
        y[-1] = attacks.label_flip(y[-1], 10)
        momenta = MOMENTUM * momenta + (1 - MOMENTUM) * gradients(model, x, y)
        updates = list(momenta[:honest])
        first = first or updates
        if f:
            known = Round(updates, first, [momenta[-1]], f, combine)
            updates = [*updates, *[ATTACKS[cell.attack](known).astype(np.float32)] * f]
        model = model - RATE * combine(updates)
    if not np.isfinite(model).all():
        return 0.1
    found = (data.test[0] @ model[:640].reshape(64, 10) + model[640:]).argmax(axis=1)
    return float((found == data.test[1]).mean())


def combiner_of(cell: Cell) -> Combine:
    """Return the rule as a function of updates."""
    if cell.library == "byzfl":
        return byzfl_combiner(cell)
    rule = BEFORE[cell.before](RULES[cell.rule](cell.f), cell.f)
    combiner = Combiner(rule, DType.FLOAT32, n=N, count=650)
    return lambda updates: combiner.combine(updates)[0]


def byzfl_combiner(cell: Cell) -> Combine:
    """Return the rule of the package byzfl. It does not refuse infinity, so that is done here."""
    import byzfl  # noqa: PLC0415

    f = cell.f
    rules = {
        "average": byzfl.Average, "trimmed mean": lambda: byzfl.TrMean(f),
        "median": byzfl.Median, "Krum": lambda: byzfl.Krum(f),
        "geometric median": byzfl.GeometricMedian, "CAF": lambda: byzfl.CAF(f),
        "SMEA": lambda: byzfl.SMEA(f),
    }  # fmt: skip
    before = {"NNM": byzfl.NNM, "ARC": byzfl.ARC}
    steps = [before[cell.before](f)] if cell.before else []
    steps.append(rules[cell.rule]())

    def combine(updates: list[Array]) -> Array:
        table = np.stack([one for one in updates if np.isfinite(one).all()])
        for step in steps:
            table = step(table)
        return table

    np.random.seed(cell.seed)  # its power methods begin from a random vector
    return combine


# ---- report ----

Worst = dict[tuple[str, str, int, float, str], list[tuple[float, str]]]


def worst_of(found: dict[Cell, float]) -> Worst:
    """Return the least accuracy over all attacks, and that attack, of each seed in order."""
    worst: Worst = {}
    for one, cells in itertools.groupby(
        sorted(found, key=lambda c: (_place(c), c.seed)), key=lambda c: (_place(c), c.seed)
    ):
        attacked = [(found[cell], cell.attack) for cell in cells if cell.attack != CONTROL]
        if attacked:
            worst.setdefault(one[0], []).append(min(attacked))
    return worst


def _place(cell: Cell) -> tuple[str, str, int, float, str]:
    return cell.rule, cell.before, cell.f, cell.alpha, cell.library


def label(rule: str, before: str, library: str) -> str:
    """Return what a row of the table is called."""
    text = f"{before}, {rule}" if before else rule
    return text if library == "fastps" else f"{library}: {text}"


def table_of(worst: Worst) -> tuple[list[str], list[str], Array, list[list[str]]]:
    """Return names of rows and columns, means of worst cases, and the commonest worst attack."""
    rows = list(dict.fromkeys((rule, before, library) for rule, before, _, _, library in worst))
    rows.sort(key=lambda r: (list(BEFORE).index(r[1]), list(RULES).index(r[0]), r[2] != "fastps"))
    columns = sorted({(alpha, f) for _, _, f, alpha, _ in worst})
    cells = [
        [worst[rule, before, f, alpha, library] for alpha, f in columns]
        for rule, before, library in rows
    ]
    means = np.array([[statistics.mean(v for v, _ in cell) for cell in row] for row in cells])
    names = [[Counter(a for _, a in cell).most_common(1)[0][0] for cell in row] for row in cells]
    return [label(*row) for row in rows], [f"{a:g}, {f}" for a, f in columns], means, names


def show(worst: Worst) -> None:
    """Print the table, a row for each rule; stars: the best of a column."""
    rows, columns, means, names = table_of(worst)
    width = 27
    print("mean worst case over attacks; columns: alpha, f of 10")
    print(" " * 26 + "".join(f"{one:<{width}}" for one in columns))
    best = means.max(axis=0)
    for row, values, attacked in zip(rows, means, names, strict=True):
        texts = [
            f"{value:.3f}{'*' if value == top else ' '} {attack}"
            for value, top, attack in zip(values, best, attacked, strict=True)
        ]
        print(f"{row:<26}" + "".join(f"{one:<{width}}" for one in texts).rstrip())


def plot(path: str, worst: Worst) -> None:
    """Draw the table as a heat map."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    rows, columns, means, names = table_of(worst)
    figure, panel = pyplot.subplots(figsize=(2 + 1.3 * len(columns), 1.5 + 0.36 * len(rows)))
    drawn = panel.imshow(means, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    panel.set_xticks(range(len(columns)), columns)
    panel.set_yticks(range(len(rows)), rows)
    panel.set_xlabel("Dirichlet alpha, Byzantine workers of 10")
    panel.set_title("held-out accuracy under the worst attack")
    for i, j in itertools.product(range(len(rows)), range(len(columns))):
        panel.text(
            j, i, f"{means[i, j]:.2f}\n{names[i][j]}", ha="center", va="center", fontsize=5.5,
            color="black" if means[i, j] > 0.6 else "white",
        )  # fmt: skip
    figure.colorbar(drawn)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


# ---- thresholds ----


class Check(NamedTuple):
    """A threshold: of a mean over seeds of a worst case, less another one if there is one."""

    text: str
    more: tuple[str, str, int, float]
    less: tuple[str, str, int, float] | None
    least: float
    most: float = math.inf


def _rise(more: str, less: str, least: float, most: float, alpha: float, f: int) -> Check:
    """Return the check that one row is this much above another in a column."""
    found = [tuple(reversed(one.split(", "))) for one in (more, less)]
    pair = [(one[0], one[1] if len(one) > 1 else "", f, alpha) for one in found]
    bounds = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
    text = f"alpha {alpha:g}, f={f}: {more} above {less} by {bounds}"
    return Check(text, pair[0], pair[1], least, most)


CHECKS = [
    *(
        Check(f"alpha {alpha:g}, f={f}: an average fails, below 0.3",
              ("average", "", f, alpha), None, 0, 0.3)
        for alpha in (0.1, 1.0) for f in (1, 2)
    ),
    *(
        Check(f"alpha 1, f=2: {rule} holds, above 0.8", (rule, "", 2, 1.0), None, 0.8)
        for rule in ("trimmed mean", "geometric median", "CAF")
    ),
    _rise("NNM, trimmed mean", "trimmed mean", 0.05, math.inf, 0.1, 2),
    _rise("CAF", "trimmed mean", 0.2, math.inf, 0.1, 2),
    _rise("geometric median", "trimmed mean", 0.2, math.inf, 0.1, 2),
    _rise("NNM, trimmed mean", "trimmed mean", -0.1, 0.03, 1.0, 1),
]  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval by Student's t; infinity of one value."""
    if len(values) < 2:
        return values[0], math.inf
    from scipy import stats  # noqa: PLC0415

    spread = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), float(stats.t.ppf(0.975, len(values) - 1)) * spread


def missed(worst: Worst) -> list[str]:
    """Print each check whose cells were run, with its interval; return those that are missed."""
    out = []
    for check in CHECKS:
        cells = [worst.get((*one, "fastps")) for one in (check.more, check.less) if one]
        if not all(cells):
            continue
        values = [value for value, _ in cells[0] or []]
        if check.less:
            values = [v - less for v, (less, _) in zip(values, cells[1] or [], strict=True)]
        mean, half = interval(values)
        is_met = check.least <= mean <= check.most
        print(f"{'met   ' if is_met else 'MISSED'} {check.text}: {mean:.3f} +- {half:.3f}")
        out += [] if is_met else [check.text]
    return out


def main() -> int:
    """Train all cells of the grid, and show the worst cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--grid", action="store_true", help="this comparison")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--before", nargs="+", choices=BEFORE, default=list(BEFORE))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--liars", nargs="+", type=int, default=LIARS, help="f of 10 workers")
    parser.add_argument("--alphas", nargs="+", type=float, default=ALPHAS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--compare", choices=["byzfl"], help="a package to run beside")
    parser.add_argument("--plot", metavar="FILE", default="", help="draw the heat map into it")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    libraries = ["fastps"]
    if options.compare:
        try:
            import byzfl  # noqa: F401, PLC0415

            libraries.append("byzfl")
        except ImportError as error:
            print(f"byzfl is not compared, as it cannot be imported ({error}): pip install byzfl")
    cells = [
        Cell(*one)
        for one in itertools.product(
            options.rules, options.before, [CONTROL, *options.attacks], options.liars,
            options.alphas, options.seeds, libraries,
        )
        if not (one[0] == "average" and one[1])
    ]  # fmt: skip
    with multiprocessing.Pool(options.processes) as pool:
        found = dict(zip(cells, pool.imap(train, cells, chunksize=4), strict=True))
    worst = worst_of(found)
    show(worst)
    calm = [value for cell, value in found.items() if cell.attack == CONTROL]
    print(f"no attack: {min(calm):.3f} to {max(calm):.3f}")
    if options.plot:
        plot(options.plot, worst)
    is_all = set(options.attacks) == set(ATTACKS)
    return 1 if is_all and missed(worst) else 0


if __name__ == "__main__":
    sys.exit(main())
