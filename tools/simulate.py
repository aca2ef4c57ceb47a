#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Simulate what a training step, or one tensor, costs on a cluster that you do not have.

    python tools/simulate.py step --model bert-large --workers 256 --local 8 --rate 100gbit \\
        --servers 0,8,16,32
    python tools/simulate.py tensor --hosts 4 --servers 4 --rate 200mbit --bytes 64M
    python tools/simulate.py figure --plot bert.png
    python tools/simulate.py check shaped.jsonl

step    one training step of a known model: backward makes gradients layer by layer, they are
        summed over the machines, and the next forward waits for them. Prints ring all-reduce and
        parameter servers with k machines that only serve, for each k of --servers.
        efficiency: computation alone over the whole step.
tensor  the sum of one tensor that all machines have at once. bound: time over the least that any
        placement can need; ring: time over 2(n-1)M/(nB).
figure  efficiency over the number of workers, for rings and for k = 0, n/4, n/2 and n machines;
        without overlap, which shows communication best.
check   read the lines that `tools/bench/shaped.py --json FILE` wrote, simulate the same cases,
        and compare; exit status 1 if one is off by more than 10 %.

Machines have one card each, full duplex; a switch joins them that never blocks. Partitions,
owners, weights, frame size, credit and the queue that gives the most urgent frame are the
library's own. --turns and --rule say who sends when: "tcp" and "urgent" is what the library does;
with "weighted" the servers' shares are met (docs/simulator.md).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))  # the queue's face is there

from fastps.config.closed_pipe import ends_quietly
from fastps.errors import FastPSError
from tools.bench._common import format_table, positive
from tools.bench.push_pull import parse_size
from tools.netlab import PAYLOAD_SHARE, parse_rate
from tools.simulator import cases, models, ring
from tools.simulator.plan import (
    LIBRARY_RULE,
    LIBRARY_TURNS,
    RULES,
    TURNS,
    Cluster,
    Network,
)

FIGURE_WORKERS = "8,16,32,64,128,256"
FIGURE_SHARES = (("k = 0", 0.0), ("k = n/4", 0.25), ("k = n/2", 0.5), ("k = n", 1.0))
PLOT_CURE = "needs matplotlib; install it with `pip install matplotlib`, or leave --plot out"

Row = dict[str, Any]


def parse_numbers(text: str) -> list[int]:
    """Read 0,8,16 as whole numbers."""
    numbers = [int(word) for word in text.split(",") if word]
    if not numbers or min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0,8,16")
    return numbers


def make_network(options: argparse.Namespace) -> Network:
    """Make the links that the options describe."""
    return Network(
        parse_rate(options.rate),
        payload_share=options.payload_share,
        latency_s=options.latency_us * 1e-6,
        queue_s=options.queue_ms * 1e-3,
        bus_bytes_per_s=parse_rate(options.bus) / 8,
    )


def make_cluster(options: argparse.Namespace, machines: int, servers: int) -> Cluster:
    """Make the cluster that the options describe."""
    if options.apart and not servers:
        raise ValueError("with --apart there are servers on machines of their own alone: not 0")
    return Cluster(
        machines,
        servers,
        local=options.local,
        is_colocated=not options.apart,
        chunk_bytes=options.chunk,
        **({"credit_bytes": options.credit} if options.credit else {}),
        turns=options.turns,
        credit_rule=options.rule,
        has_priority=not options.fifo,
    )


def machines_of(workers: int, local: int) -> int:
    """Give the number of machines of some workers; ValueError if the last is not full."""
    if workers % local:
        raise ValueError(f"{workers} workers do not fill machines of {local}")
    return workers // local


def step_rows(
    options: argparse.Namespace, machines: int, servers: Sequence[int], *, has_ring: bool = True
) -> list[Row]:
    """Simulate a step over rings and over servers."""
    model = models.make(options.model)
    plan = models.schedule(
        model,
        compute_s=(options.compute_ms or model.compute_ms) / 1e3,
        element_bytes=options.element_bytes or model.element_bytes,
        overlap=options.overlap,
    )
    network = make_network(options)
    how = {"overlap": options.overlap}
    rows = []
    if has_ring:
        cluster = Cluster(machines, 0, local=options.local)
        bucket = parse_size(options.bucket)
        rows.append(cases.ring_row(plan, cluster, network, bucket_bytes=bucket, **how))
    for count in servers:
        cluster = make_cluster(options, machines, count)
        rows.append(cases.step_row(plan, cluster, network, mode=options.mode, **how))
    if options.peer:
        cluster = Cluster(machines, 0, local=options.local)
        rows.append(cases.peer_row(plan, cluster, network, **how))
    return rows


def run_step(options: argparse.Namespace) -> int:
    """Show one training step."""
    machines = machines_of(options.workers, options.local)
    rows = step_rows(options, machines, options.servers)
    names = [
        row["system"].split(" all")[0] if row["servers"] == "" else f"k = {row['servers']}"
        for row in rows
    ]
    if options.plot:
        draw_bars(names, [row["efficiency"] for row in rows], headline(options), options.plot)
    show(rows, options, headline(options))
    return 0


def run_tensor(options: argparse.Namespace) -> int:
    """Show the sum of one tensor."""
    network = make_network(options)
    rows = [
        cases.tensor_row(
            nbytes, make_cluster(options, options.hosts, count), network, mode=options.mode
        )
        for nbytes in map(parse_size, options.bytes.split(","))
        for count in options.servers
    ]
    show(
        rows,
        options,
        f"one tensor, {options.rate}, turns: {options.turns}, credit: {options.rule}",
    )
    return 0


def run_figure(options: argparse.Namespace) -> int:
    """Show efficiency over the number of workers."""
    rows: list[Row] = []
    for workers in options.workers:
        machines = machines_of(workers, options.local)
        servers = [round(machines * share) for _, share in FIGURE_SHARES]
        found = step_rows(options, machines, servers)
        names = ["ring", *(name for name, _ in FIGURE_SHARES), *["one peer"] * options.peer]
        efficiency = {name: row["efficiency"] for name, row in zip(names, found, strict=True)}
        rows.append({"workers": workers, "machines": machines, **efficiency})
    if options.plot:
        draw_lines(rows, headline(options), options.plot)
    show(rows, options, headline(options))
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Compare simulations with measurements."""
    rows = list(cases.check_rows(cases.read_lines(options.file)))
    if not rows:
        raise ValueError(f"{options.file} has no line of tools/bench/shaped.py but gloo's")
    far = sum(not row["is_near"] for row in rows)
    shown = [{**row, "is_near": "yes" if row["is_near"] else "NO"} for row in rows]
    headline = f"simulated over measured; {far} of {len(rows)} off by more than 10 %"
    show(rows if options.json else shown, options, headline)
    return 1 if far else 0


def headline(options: argparse.Namespace) -> str:
    """Describe a step in one paragraph."""
    model = models.make(options.model)
    compute_ms = options.compute_ms or model.compute_ms
    nbytes = model.parameters * (options.element_bytes or model.element_bytes)
    source = "given" if options.compute_ms else model.source
    return (
        f"{model.name}: {model.parameters / 1e6:.1f} M parameters, {nbytes / 1e6:.0f} MB of "
        f"gradients, {compute_ms:.0f} ms of computation ({source});\n"
        f"{options.local} workers on a machine, {options.rate}, overlap: {options.overlap}, "
        f"turns: {options.turns}, credit: {options.rule}"
    )


def show(rows: Sequence[Row], options: argparse.Namespace, title: str) -> None:
    """Print rows as a table, or as JSON lines."""
    if options.json:
        print(*(json.dumps(row) for row in rows), sep="\n")
        return
    print(title)
    print(format_table(rows))


# ---- plots


def load_pyplot() -> Any:
    """Load matplotlib without a display; ValueError says how to get it."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ValueError(f"--plot {PLOT_CURE}") from error


def draw(fill: Callable[[Any], None], title: str, path: Path) -> None:
    """Draw a plot of efficiency, and write it as its suffix says."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    fill(axes)
    axes.set_ylabel("scaling efficiency")
    axes.set_ylim(0, 1.02)
    axes.set_title(title, fontsize=7)
    axes.grid(axis="y", alpha=0.4)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_bars(names: Sequence[str], values: Sequence[float], title: str, path: Path) -> None:
    """Draw a bar for each system."""
    draw(lambda axes: axes.bar(names, values), title, path)


def draw_lines(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw a line for each system, over the number of workers."""

    def fill(axes: Any) -> None:
        workers = [row["workers"] for row in rows]
        for name in ("one peer", "k = n", "k = n/2", "k = n/4", "k = 0", "ring"):
            if name not in rows[0]:
                continue
            axes.plot(workers, [row[name] for row in rows], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, [str(count) for count in workers])
        axes.set_xlabel("workers")
        axes.legend()

    draw(fill, title, path)


# ---- the command


def add_network(parser: argparse.ArgumentParser, *, rate: str, latency_us: float) -> None:
    """Add the options of links and of the schedule."""
    group = parser.add_argument_group("links")
    group.add_argument("--rate", default=rate, help=f"of every card, each way (default {rate})")
    group.add_argument(
        "--payload-share", type=float, default=PAYLOAD_SHARE, metavar="P",
        help=f"what headers leave of the rate (default {PAYLOAD_SHARE:.3f}, TCP on Ethernet)",
    )  # fmt: skip
    group.add_argument("--latency-us", type=float, default=latency_us, metavar="US")
    group.add_argument(
        "--queue-ms", type=float, default=0.0, metavar="MS",
        help="queues before the cards that TCP fills, as tools/netlab.py has; 0: none (default)",
    )  # fmt: skip
    group.add_argument(
        "--bus", default="800gbit", metavar="RATE",
        help="how fast a machine sums among its own workers (default 800gbit)",
    )  # fmt: skip
    group = parser.add_argument_group("schedule")
    group.add_argument("--chunk", type=parse_size, default=0, help="bytes of a frame")
    group.add_argument("--credit", type=parse_size, default=0, help="bytes of a link's credit")
    group.add_argument("--fifo", action="store_true", help="no priority: first ready, first sent")
    group.add_argument(
        "--apart", action="store_true", help="servers on machines of their own alone, no others"
    )
    group.add_argument(
        "--mode", choices=cases.MODES, default="auto",
        help="exact: every frame; symmetric: one machine for all; auto: by the work",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def add_credit(parser: argparse.ArgumentParser, *, turns: str, rule: str) -> None:
    """Add the options that say who sends when."""
    parser.add_argument("--turns", choices=TURNS, default=turns, help=f"default {turns}")
    parser.add_argument("--rule", choices=RULES, default=rule, help=f"default {rule}")


def add_model(parser: argparse.ArgumentParser, *, overlap: str) -> None:
    """Add the options of a training step."""
    parser.add_argument("--model", choices=sorted(models.MODELS), default="bert-large")
    parser.add_argument("--local", type=positive, default=8, help="workers on a machine")
    parser.add_argument(
        "--compute-ms", type=float, default=0.0, metavar="MS",
        help="forward and backward of a step, 1 to 2 (default: the model's on a V100)",
    )  # fmt: skip
    parser.add_argument("--element-bytes", type=int, default=0, choices=(0, 2, 4))
    parser.add_argument(
        "--overlap", choices=models.OVERLAPS, default=overlap,
        help="full: sums overlap with backward and the next forward; backward: only with it; "
        f"none: they follow it (default {overlap})",
    )  # fmt: skip
    parser.add_argument(
        "--bucket", default=str(ring.BUCKET_BYTES), help="bytes that rings sum at once"
    )
    parser.add_argument(
        "--peer", action="store_true",
        help="show also what an average with one other machine costs (docs/decentralized.md)",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it as PNG, SVG or PDF")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    step = verbs.add_parser("step", help="one training step of a model")
    step.add_argument("--workers", type=positive, default=256)
    step.add_argument("--servers", type=parse_numbers, default=[0], help="k, e.g. 0,8,16,32")
    step.set_defaults(run=run_step)
    figure = verbs.add_parser("figure", help="efficiency over the number of workers")
    figure.add_argument("--workers", type=parse_numbers, default=parse_numbers(FIGURE_WORKERS))
    figure.set_defaults(run=run_figure)
    for sub, overlap in ((step, "full"), (figure, "none")):
        add_model(sub, overlap=overlap)
        add_network(sub, rate="100gbit", latency_us=20.0)
        add_credit(sub, turns="weighted", rule=LIBRARY_RULE)
    tensor = verbs.add_parser("tensor", help="the sum of one tensor")
    tensor.add_argument("--hosts", type=positive, default=4, help="machines with a worker")
    tensor.add_argument("--servers", type=parse_numbers, default=[4], help="k, e.g. 0,1,2,4")
    tensor.add_argument("--bytes", default="64M", help="e.g. 1M,64M")
    tensor.set_defaults(run=run_tensor, local=1)
    add_network(tensor, rate="1gbit", latency_us=60.0)
    add_credit(tensor, turns=LIBRARY_TURNS, rule=LIBRARY_RULE)
    check = verbs.add_parser("check", help="compare with measurements")
    check.add_argument("file", type=Path, help="JSON lines of tools/bench/shaped.py")
    check.add_argument("--json", action="store_true", help="print JSON lines")
    check.set_defaults(run=run_check)
    return parser


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:
        raise
    except (FastPSError, ValueError, OSError) as error:
        sys.stderr.write(f"simulate: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
