# SPDX-License-Identifier: Apache-2.0
"""The command line of fastps-bench: words to a frozen `Options`, and the help that teaches.

Decides what a user may ask for; starts nothing and reads no environment.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fastps.bench.modes import MODES

SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MAX_BYTES = 1 << 40
DTYPES = ("float32", "float64", "float16", "int32", "int64")
ITEM_BYTES = 8  # sizes are multiples of the largest element
PLOT_SUFFIXES = (".png", ".svg")
MAX_WORKERS = 1024

EPILOG = """\
examples:
  fastps-bench
      two processes on this machine, 4 KB to 64 MB, every mode, about two minutes
  fastps-bench --modes registered,private --sizes 1M,64M --runs 9
      shared memory only, more rounds
  fastps-bench --np 4 --modes colocated,apart --tcp
      four processes that pretend to be four machines, over loopback TCP
  fastps-bench --json now.json --plot now.svg
      keep every figure with its conditions, and draw time and bandwidth
  fastps-bench --compare before.json now.json
      ratios of two results; measures nothing
  fastps-run -np 4 -s 2 fastps-bench --sizes 4M,64M
      inside a job that you start, on one machine or many: worker 0 prints

modes:
{modes}
  Inside a job that you started the links are that job's own; registered and private then say
  where the tensors live.

columns:
  p50 p90 p99 min   time of one push_pull at worker 0, over all rounds
  alg GB/s          bytes of the tensor / p50
  bus GB/s          alg x 2(n-1)/n: comparable for any number n of workers
  CPU s/GB          processor time of all processes of the job, per GB of tensor
  memory MB         what those processes hold, shared pages counted once (PSS); the most seen
  floor %           time that plain copies or plain sockets need for the least bytes, measured
                    in the same rounds, over our time: 100 is perfect, and more than that
                    means that the machine was busy, or has cores that the floor left idle
  Sums are checked in every round, and the modes take turns within a round, because machines are
  noisy: compare within one run, and close other programs before it.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one push_pull call moves: count tensors of nbytes each."""

    nbytes: int
    count: int = 1

    @property
    def total(self) -> int:
        """Bytes of all tensors of the call."""
        return self.nbytes * self.count

    @property
    def label(self) -> str:
        """Name of the work, as 64M or 100x4K."""
        size = format_size(self.nbytes)
        return size if self.count == 1 else f"{self.count}x{size}"


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What one run of fastps-bench was asked to do; docs at the options of `make_parser`."""

    works: tuple[Work, ...] = ()
    modes: tuple[str, ...] = ()  # none: all that make sense
    workers: int = 2
    servers: int | None = None
    runs: int = 5
    turn_s: float = 0.2
    dtype: str = "float32"
    is_average: bool = False
    is_tcp: bool = False
    json_path: Path | None = None
    plot_path: Path | None = None
    compare: tuple[Path, Path] | None = None
    obey: str = ""


def parse(arguments: Sequence[str]) -> Options:
    """Make Options of the words after `fastps-bench`; SystemExit(2) with the reason if wrong."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    works = (*found.sizes, *found.many)
    if not works:
        parser.error("nothing to measure; give --sizes or --many")
    return Options(
        works=tuple(dict.fromkeys(works)),
        modes=found.modes,
        workers=found.workers,
        servers=found.servers,
        runs=found.runs,
        turn_s=found.turn,
        dtype=found.dtype,
        is_average=found.average,
        is_tcp=found.tcp,
        json_path=found.json,
        plot_path=found.plot,
        compare=tuple(found.compare) if found.compare else None,
        obey=found.obey,
    )


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; its help is the manual of the command."""
    modes = "\n".join(f"  {mode.name:<11} {mode.sentence}" for mode in MODES.values())
    parser = argparse.ArgumentParser(
        prog="fastps-bench",
        usage="fastps-bench [options]   or   fastps-run ... fastps-bench [options]",
        description="Measure how fast gradients are summed on this machine, beside what its "
        "memory and sockets can do at best.",
        epilog=EPILOG.format(modes=modes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_work(parser.add_argument_group("what"))
    _add_method(parser.add_argument_group("how"))
    _add_output(parser.add_argument_group("output"))
    parser.add_argument("--obey", default="", help=argparse.SUPPRESS)
    return parser


def _add_work(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sizes", type=parse_sizes, default="4K,64K,1M,4M,16M,64M", metavar="LIST",
        help="bytes of one tensor, with K, M or G (default 4K,64K,1M,4M,16M,64M)",
    )  # fmt: skip
    group.add_argument(
        "--many", type=parse_many, default="", metavar="LIST",
        help="many tensors in one call, as 100x4K (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--modes", type=_modes, default="", metavar="LIST",
        help=f"some of {','.join(MODES)} (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--dtype", choices=DTYPES, default="float32", metavar="TYPE",
        help=f"element type: {', '.join(DTYPES)} (default float32)",
    )  # fmt: skip
    group.add_argument("--average", action="store_true", help="average instead of summing")


def _add_method(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-np", "--np", dest="workers", type=_Count(2, MAX_WORKERS), default=2, metavar="N",
        help="worker processes to start (default 2)",
    )  # fmt: skip
    group.add_argument(
        "-s", "--servers", type=_Count(1, MAX_WORKERS), default=None, metavar="N",
        help="servers of the mode apart (default: as many as workers)",
    )  # fmt: skip
    group.add_argument(
        "--runs", type=_Count(1, 10000), default=5, metavar="N",
        help="rounds, after one to warm up (default 5)",
    )  # fmt: skip
    group.add_argument(
        "--turn", type=_seconds, default=0.2, metavar="S",
        help="seconds of one turn, at least 3 and at most 2000 calls (default 0.2)",
    )  # fmt: skip
    group.add_argument(
        "--tcp", action="store_true",
        help="TCP between the processes of this machine, where Unix sockets are the default",
    )  # fmt: skip


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", type=Path, default=None, metavar="FILE",
        help="write all figures and conditions to FILE",
    )  # fmt: skip
    group.add_argument(
        "--plot", type=_plot_path, default=None, metavar="FILE",
        help="draw time and bandwidth into FILE.png or FILE.svg; needs matplotlib",
    )  # fmt: skip
    group.add_argument(
        "--compare", type=Path, nargs=2, default=None, metavar=("A", "B"),
        help="print the ratios of two files written by --json, and stop",
    )  # fmt: skip


def parse_size(text: str) -> int:
    """Read 4K or 64M as bytes; a multiple of 8, so that every element type fits."""
    number, suffix = text[:-1], text[-1:].upper()
    if suffix not in SUFFIXES:
        number, suffix = text, ""
    if not number.isascii() or not number.isdecimal() or len(number) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; examples: 4096, 64K, 16M")
    nbytes = int(number) * SUFFIXES.get(suffix, 1)
    if not 0 < nbytes <= MAX_BYTES or nbytes % ITEM_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a multiple of {ITEM_BYTES} bytes between {ITEM_BYTES} and 1024G"
        )
    return nbytes


def format_size(nbytes: int) -> str:
    """Write bytes as `parse_size` reads them, as shortly as possible."""
    for suffix, unit in reversed(SUFFIXES.items()):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{suffix}"
    return str(nbytes)


def parse_sizes(text: str) -> tuple[Work, ...]:
    """Read a list as 4K,64M."""
    return tuple(Work(parse_size(part)) for part in _parts(text))


def parse_many(text: str) -> tuple[Work, ...]:
    """Read a list as 100x4K,10x1M."""
    works = []
    for part in _parts(text):
        count, is_many, size = part.partition("x")
        if not is_many:
            raise argparse.ArgumentTypeError(f"{part!r} is not COUNTxSIZE; example: 100x4K")
        works.append(Work(parse_size(size), _Count(2, 65536)(count)))
    return tuple(works)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _modes(text: str) -> tuple[str, ...]:
    names = dict.fromkeys(_parts(text))
    for name in names:
        if name not in MODES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(MODES)}")
    return tuple(names)


def _plot_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(PLOT_SUFFIXES)}")
    return path


class _Count:
    """Parse a whole number within bounds."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def __call__(self, text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) < 10
        if not is_number or not self._least <= int(text) <= self._most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {self._least} to {self._most}"
            )
        return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to 600")
    return value
