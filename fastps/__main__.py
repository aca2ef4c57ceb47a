# SPDX-License-Identifier: Apache-2.0
"""The command `fastps`, and `python -m fastps`: its subcommands, their help, and completion.

Only the module of the subcommand is imported. A module that has a main() also has a command of
its own, such as fastps-run; the others have add_options() and run(). Threads: none.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastps.config import nearest, process_environment, versions
from fastps.config.closed_pipe import ends_quietly
from fastps.errors import FastPSError, guide_of

EXIT_USAGE = 2
_COMPLETES = "_ARGCOMPLETE"  # the variable by which a shell asks for completions
_LINE = "  {:<11} {}\n"


@dataclass(frozen=True)
class Command:
    """A subcommand: the module that does it, what its help says, and the older name of it."""

    title: str  # of its part of the help
    module: str
    text: str
    examples: tuple[str, ...] = ()
    older: str = ""  # a command that runs the same main()
    parser: str = ""  # the module whose make_parser() makes its options


_JOBS, _WATCH, _HERE = "start a job", "see what a job does, or did", "this machine, and plans"
COMMANDS = {
    "run": Command(
        _JOBS, "launch.run", "start the workers and servers of a job, here or on many machines",
        older="fastps-run", parser="launch.options"),
    "server": Command(
        _JOBS, "server.main", "be one server of a job, or its scheduler, started by hand",
        older="fastps-server", parser="server.main"),
    "top": Command(
        _WATCH, "launch.top", "show what the processes of a running job do",
        ("fastps top", "fastps top --job ID --once")),
    "timeline": Command(
        _WATCH, "launch.timeline",
        "sum up where the time of a job went; merge the traces of its processes",
        ("fastps timeline job.json", "fastps timeline job.json.parts job.json")),
    "report": Command(
        _WATCH, "launch.report", "make a page of a run: steps, waits, links, faults",
        ("fastps report job.json", "fastps report job.json --logs logs -o run.html")),
    "doctor": Command(
        _HERE, "launch.doctor",
        "show what this machine offers to a job, and run two small test jobs",
        ("fastps doctor", "fastps doctor --no-trial")),
    "bench": Command(
        _HERE, "bench.main", "measure how fast gradients are summed here",
        older="fastps-bench", parser="bench.options"),
    "config": Command(
        _HERE, "config.__main__", "show all settings and their values here",
        ("fastps config", "FASTPS_LEASE_S=5 fastps config | grep LEASE")),
    "graph": Command(
        _HERE, "launch.graph", "print and draw the properties of a graph of workers",
        ("fastps graph ring -n 8", "fastps graph exp2 -n 16 --png graph.png")),
    "completion": Command(
        _HERE, "launch.completion", "print the lines by which a shell completes `fastps`",
        ('eval "$(fastps completion bash)"', "fastps completion fish | source")),
}  # fmt: skip
EXAMPLES = """\
examples:
  fastps doctor                                  does fastps work here?
  fastps run -np 4 python train.py               four workers on this machine
  fastps run -H a:4,b:4 python train.py          eight workers on two machines, over ssh
  fastps run -np 4 --timeline job.json python train.py
                                                 record where the time of each step goes
  fastps top                                     what do my jobs do now?
  fastps bench --sizes 4K,1M                     how fast are sums here?
"""


def help_text() -> str:
    """Return the help of the command."""
    parts = ["usage: fastps COMMAND [options]\n\nTrain one neural network in many processes.\n"]
    for title in dict.fromkeys(one.title for one in COMMANDS.values()):
        parts.append(f"\n{title}:\n")
        for name, command in COMMANDS.items():
            if command.title == title:
                older = f" ({command.older})" if command.older else ""
                parts.append(_LINE.format(name, command.text + older))
    parts.append("\noptions:\n")
    parts.append(_LINE.format("-h, --help", "print this text; after a COMMAND: its options"))
    parts.append(_LINE.format("--version", "print the versions and exit"))
    return "".join([*parts, "\n", EXAMPLES])


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status of the subcommand, or 2 for wrong arguments."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and _COMPLETES in process_environment():
        _complete()
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(help_text())
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"{versions.describe()}\n")
        return 0
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or "."
        sys.stderr.write(
            f"fastps: unknown command {name!r}{hint} `fastps --help` lists the commands\n"
        )
        return EXIT_USAGE
    module = _module(COMMANDS[name].module)
    if COMMANDS[name].older:
        return int(module.main(words[1:]) or 0)
    parsed = make_parser(name).parse_args(words[1:])
    try:
        return int(module.run(parsed) or 0)
    except FastPSError as error:
        kind = type(error).__name__
        sys.stderr.write(f"fastps: {kind}: {error}; see {guide_of(kind)}\n")
        return EXIT_USAGE


def _module(name: str) -> Any:
    return importlib.import_module(f"fastps.{name}")


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand."""
    command = COMMANDS[name]
    if command.parser:
        parser: argparse.ArgumentParser = _module(command.parser).make_parser()
        return parser
    text = command.text[:1].upper() + command.text[1:] + "."
    parser = argparse.ArgumentParser(
        prog=f"fastps {name}", description=text, epilog="\n".join(_examples(command)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _module(command.module).add_options(parser)
    return parser


def _examples(command: Command) -> Iterator[str]:
    yield "examples:"
    yield from (f"  {example}" for example in command.examples)


def _complete() -> None:
    """Answer a shell that completes a line, and exit; return where argcomplete is missing."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        return
    parser = argparse.ArgumentParser(prog="fastps")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    typed = process_environment().get("COMP_LINE", "").split()
    for name, command in COMMANDS.items():
        # argcomplete needs the options of the typed subcommand, and the names of the others
        parents = [make_parser(name)] if name in typed[1:2] else []
        commands.add_parser(name, help=command.text, parents=parents, conflict_handler="resolve")
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    sys.exit(main())
