# SPDX-License-Identifier: Apache-2.0
"""The modes and the command line of fastps-bench: pure."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastps.bench import gloo
from fastps.bench.gloo import GLOO
from fastps.config.versions import ShowVersion
from fastps.config.words import add_words, count, number, word

SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MAX_BYTES = 1 << 40
SIZES = "4K,64K,1M,4M,16M,64M"
ITEM_BYTES = 8  # sizes are multiples of the largest element
DTYPES = ("float32", "float64", "float16", "int32", "int64")
HERE = ("registered", "private")  # modes that can be measured inside the user's job


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """One way to sum: where the tensors are, which processes a job has, and its floor."""

    floor: str
    sentence: str
    settings: Mapping[str, object]  # of the mode's job; they override the user's
    is_registered: bool = False  # tensors come from fastps.empty
    has_servers: bool = False


MEMORY, COLOCATED_LINKS, APART_LINKS = "memory", "links colocated", "links apart"
FLOORS = {MEMORY: 1, COLOCATED_LINKS: 1, APART_LINKS: 2}  # processes of each per worker
NETWORK = "network"  # between the machines of a job; floors of one machine are in FLOORS
ONE_MACHINE, MACHINES = {"shared_memory": True}, {"shared_memory": False}
FLOOR_JOB = Mode("", "its workers measure the floors of one machine", ONE_MACHINE)
MODES = {
    "registered": Mode(
        MEMORY, "shared memory; tensors are allocated there (fastps.empty)", ONE_MACHINE,
        is_registered=True),
    "private": Mode(MEMORY, "shared memory; tensors are ordinary NumPy arrays", ONE_MACHINE),
    "colocated": Mode(
        COLOCATED_LINKS, "sockets; every worker serves a share of the bytes",
        {**MACHINES, "colocate": "auto"}),
    "apart": Mode(
        APART_LINKS, "sockets; servers are processes of their own",
        {**MACHINES, "colocate": "off"}, has_servers=True),
    GLOO: Mode(
        "", "torch.distributed's all_reduce over TCP, for comparison; needs PyTorch",
        ONE_MACHINE),
}  # fmt: skip

EPILOG = """\
examples:
  fastps-bench
      two processes on this machine, 4 KB to 64 MB, every mode, about two minutes
  fastps-bench --modes registered,private --sizes 1M,64M --runs 9
      shared memory only, more rounds
  fastps-bench --np 4 --modes colocated,apart --tcp
      four processes that act as four machines, over loopback TCP
  fastps-bench --json now.json --plot now.svg
      also write all figures with their conditions, and plot time and bandwidth
  fastps-bench --compare before.json now.json
      print the ratios of two results, without measuring
  fastps-run -np 4 -s 2 fastps-bench --sizes 4M,64M
      measure inside a job that you start, on one machine or many; worker 0 prints

modes:
{modes}
  Inside a job that you started, the transport is that of the job; registered and private then
  only say where the tensors are.

columns:
  p50 p90 p99 min   time of one push_pull at worker 0, over all rounds
  alg GB/s          bytes of the tensor / p50
  bus GB/s          alg x 2(n-1)/n: comparable for any number n of workers
  CPU s/GB          processor time of all processes of the job, per GB of tensor
  memory MB         largest memory of these processes, shared pages counted once (PSS)
  floor %           time of plain copies or plain sockets for the least bytes, measured in the
                    same rounds, divided by our time: 100 is perfect; more means that the
                    machine was busy, or that the floor left cores idle
  Sums are checked in every round. The modes take turns within a round, because machines are
  noisy: compare figures of one run, and close other programs before it.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The tensors of one push_pull call: `count` tensors of `nbytes` each."""

    nbytes: int
    count: int = 1

    @property
    def total(self) -> int:
        """Bytes of all tensors of the call."""
        return self.nbytes * self.count

    @property
    def label(self) -> str:
        """Name of the work, as 64M or 100x4K."""
        return f"{self.count}x{format_size(self.nbytes)}".removeprefix("1x")


def parse_size(text: str) -> int:
    """Parse 4K or 64M as bytes; a multiple of 8, so that every element type fits."""
    unit = SUFFIXES.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isascii() or not number.isdecimal() or len(number) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 64K or 16M")
    nbytes = int(number) * unit
    if not 0 < nbytes <= MAX_BYTES or nbytes % ITEM_BYTES:
        raise argparse.ArgumentTypeError(
            f"a size must be a multiple of {ITEM_BYTES} bytes, {ITEM_BYTES} to 1024G, got {text!r}"
        )
    return nbytes


def format_size(nbytes: int) -> str:
    """Return the shortest text that `parse_size` parses as so many bytes."""
    for suffix, unit in reversed(SUFFIXES.items()):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{suffix}"
    return str(nbytes)


def parse_sizes(text: str) -> tuple[Work, ...]:
    """Parse a list such as 4K,64M."""
    return tuple(Work(parse_size(part)) for part in _parts(text))


def parse_many(text: str) -> tuple[Work, ...]:
    """Parse a list such as 100x4K,10x1M."""
    parts = [part.partition("x") for part in _parts(text)]
    if not all(is_many for _, is_many, _ in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not COUNTxSIZE; write 100x4K,10x1M")
    return tuple(Work(parse_size(size), count(2, 65536)(many)) for many, _, size in parts)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _modes(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_parts(text)))
    if unknown := [name for name in names if name not in MODES]:
        raise argparse.ArgumentTypeError(
            f"unknown mode {unknown[0]!r}; choose among {', '.join(MODES)}"
        )
    return names


def _plot_path(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png or .svg")
    return Path(text)


# fmt: off
@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one run of fastps-bench."""

    sizes: tuple[Work, ...] = word("what", "--sizes", parse_sizes(SIZES), parse_sizes, "LIST",
        f"bytes of one tensor, with K, M or G (default {SIZES})")
    many: tuple[Work, ...] = word("what", "--many", (), parse_many, "LIST",
        "many tensors in one call, such as 100x4K (default: none)")
    modes: tuple[str, ...] = word("what", "--modes", (), _modes, "LIST",
        f"some of {','.join(MODES)} (default: all that are available)")
    dtype: str = word("what", "--dtype", "float32", str, "TYPE",
        f"element type: {', '.join(DTYPES)} (default float32)", choices=DTYPES)
    is_average: bool = word("what", "--average", False, bool, "", "average instead of summing")
    workers: int = word("how", "-np --np", 2, count(2, 1024), "N",
        "worker processes to start (default 2)")
    servers: int | None = word("how", "-s --servers", None, count(1, 1024), "N",
        "servers of the mode apart (default: as many as workers)")
    runs: int = word("how", "--runs", 5, count(1, 10000), "N",
        "rounds, after one warm-up round (default 5)")
    turn_s: float = word("how", "--turn", 0.2, number("a number of seconds", float, 1e-6, 600),
        "S", "seconds of one turn, with at least 3 and at most 2000 calls (default 0.2)")
    is_tcp: bool = word("how", "--tcp", False, bool, "",
        "use TCP between the processes of this machine, instead of Unix sockets")
    json_path: Path | None = word("output", "--json", None, Path, "FILE",  # noqa: RUF009
        "write all figures and conditions to FILE")
    plot_path: Path | None = word("output", "--plot", None, _plot_path, "FILE",  # noqa: RUF009
        "plot time and bandwidth into FILE.png or FILE.svg; needs matplotlib")
    compare: Sequence[Path] = word("output", "--compare", (), Path, ("A", "B"),
        "print the ratios of two files written by --json, and exit", nargs=2)
    obey: str = word("output", "--obey", "", str, "NAME", argparse.SUPPRESS)
    # fmt: on

    @property
    def works(self) -> tuple[Work, ...]:
        """Every work once, in the order of the options."""
        return tuple(dict.fromkeys(self.sizes + self.many))


def jobs_of(options: Options) -> list[tuple[list[str], Mode, int]]:
    """List the jobs to start: the names of its runners, its mode, and its number of workers."""
    modes = options.modes or tuple(name for name in MODES if name != GLOO or gloo.is_there())
    needed = {MODES[name].floor for name in modes}
    floors = [name for name in FLOORS if name in needed]
    workers = options.workers * max((FLOORS[name] for name in floors), default=0)
    jobs = [([name], MODES[name], options.workers) for name in modes]
    return [(floors, FLOOR_JOB, workers), *jobs] if floors else jobs


def parse(arguments: Sequence[str]) -> Options:
    """Parse the arguments of `fastps-bench`; SystemExit(2) with the reason if they are wrong."""
    parser = make_parser()
    options = Options(**vars(parser.parse_args(arguments)))
    if not options.works:
        parser.error("nothing to measure; give --sizes or --many")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the manual of the command."""
    modes = "\n".join(f"  {name:<11} {mode.sentence}" for name, mode in MODES.items())
    parser = argparse.ArgumentParser(
        prog="fastps-bench",
        usage="fastps-bench [options]   or   fastps-run ... fastps-bench [options]",
        description="Measure how fast gradients are summed on this machine, compared with the "
        "limits of its memory and sockets.",
        epilog=EPILOG.format(modes=modes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion)
    add_words(parser, Options)
    return parser
