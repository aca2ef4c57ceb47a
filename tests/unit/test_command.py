# SPDX-License-Identifier: Apache-2.0
"""The command `fastps`: help, examples, wrong names, older names, start-up, and completion."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fastps import __main__ as command

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "fastps"]


def entry_points() -> dict[str, str]:
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    lines = parsed["options.entry_points"]["console_scripts"].split("\n")
    return dict(line.split(" = ") for line in lines if line)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_all_commands_with_examples(words, capsys):
    assert command.main(words) == 0
    shown = capsys.readouterr().out
    for name, one in command.COMMANDS.items():
        assert f"\n  {name} " in shown
        assert one.text in shown
    assert "fastps run -np 4 python train.py" in shown


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_has_a_help_with_examples(name, capsys):
    with pytest.raises(SystemExit) as end:
        command.main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ")
    older = command.COMMANDS[name].older
    assert f"  {older or 'fastps'} " in shown or f"$ {older or 'fastps'} " in shown


def examples() -> list[str]:
    lines = [line for one in command.COMMANDS.values() for line in one.examples]
    lines += [line.partition("   ")[0] for line in command.EXAMPLES.replace("  fastps", "fastps")
              .splitlines() if line.startswith("fastps")]  # fmt: skip
    return [line for line in lines if line]


@pytest.mark.parametrize("line", examples())
def test_examples_can_be_parsed(line):
    for mark in ('eval "$(', ')"', " | source"):
        line = line.replace(mark, "")
    words = shlex.split(line.partition(" | ")[0])
    words = words[words.index("fastps") + 1 :]
    assert command.make_parser(words[0]).parse_args(words[1:])


@pytest.mark.parametrize(
    ("word", "hint"),
    [("tpo", "did you mean top?"), ("benhc", "did you mean bench?"), ("zzz", "'zzz'. ")],
)
def test_an_unknown_command_names_the_nearest(word, hint, capsys):
    assert command.main([word]) == command.EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"fastps: unknown command '{word}'")
    assert hint in said
    assert "`fastps --help`" in said


def test_older_commands_run_the_same_functions():
    points = entry_points()
    assert points.pop("fastps") == "fastps.__main__:main"
    older = {one.older: one.module for one in command.COMMANDS.values() if one.older}
    assert {name for name in points if name.startswith("fastps-")} == older.keys()
    for name, module in older.items():
        assert points[name] == f"fastps.{module}:main"


@pytest.mark.parametrize("one", command.COMMANDS.values(), ids=command.COMMANDS)
def test_a_command_has_what_its_kind_needs(one):
    module = import_module(f"fastps.{one.module}")
    if one.older:
        assert callable(module.main)
        assert import_module(f"fastps.{one.parser}").make_parser()
    else:
        assert one.examples
        assert callable(module.add_options)
        assert callable(module.run)


def test_the_help_imports_no_subcommand():
    program = (
        "import sys, fastps; before = set(sys.modules); from fastps.__main__ import main\n"
        "main(sys.argv[1:]); print(*(set(sys.modules) - before), file=sys.stderr)"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run([*words, "--help"], capture_output=True, text=True, check=True)
    added = {name for name in done.stderr.split() if name.startswith("fastps")}
    assert added <= {"fastps.__main__", "fastps.config.closed_pipe", "fastps.config.versions"}
    done = subprocess.run([*words, "config"], capture_output=True, text=True, check=True)
    assert not [name for name in done.stderr.split() if "launch" in name or "server" in name]


def test_options_of_a_job_reach_it():
    words = [*COMMAND, "run", "-np", "3", "--dry-run", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.count("# worker") == 3


def completions(line: str) -> list[str]:
    """Ask as argcomplete's shell functions do: the answer comes by file descriptor 8."""
    script = (
        f"export IFS=$'\\013' COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} _ARGCOMPLETE=1;"
        f" {shlex.join(COMMAND)} 8>&1 9>/dev/null >/dev/null"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.replace("\013", " ").split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fastps t", ["top", "timeline"]),
        ("fastps run --timel", ["--timeline"]),
        ("fastps graph hy", ["hypercube"]),
        ("fastps server --role v", ["validator"]),
        ("fastps bench --pl", ["--plot"]),
    ],
)
def test_a_shell_completes(line, found):
    pytest.importorskip("argcomplete")
    assert set(found) <= set(completions(line))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_for_shells_are_of_their_language(shell):
    pytest.importorskip("argcomplete")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    lines = subprocess.run([*COMMAND, "completion", shell], capture_output=True, check=True)
    check = {"fish": ["fish", "--no-execute"]}.get(shell, [shell, "-n"])
    assert subprocess.run(check, input=lines.stdout, check=True, env=os.environ)


def test_completion_without_its_library_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert command.main(["completion", "bash"]) == command.EXIT_USAGE
    assert "pip install 'fastps[cli]'" in capsys.readouterr().err
