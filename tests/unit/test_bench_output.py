# SPDX-License-Identifier: Apache-2.0
"""fastps-bench's tables, comparison and pictures, from made-up results."""

from __future__ import annotations

import importlib
import io
import re
import sys

import msgspec.structs
import pytest
from bench_results import make_floor, make_result, make_row, make_times
from hypothesis import given
from hypothesis import strategies as st

from fastps.bench import BenchError, figures, main, plot, screen
from fastps.bench.conditions import conditions, headline

FACTORS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.2e-6, "4.20 µs"), (99.99e-6, "100 µs"), (0.9996e-3, "1.00 ms"), (0.0123, "12.3 ms"),
     (1.5, "1.50 s"), (432.1, "432 s")],
)  # fmt: skip
def test_times_have_a_fitting_unit(seconds, text):
    assert screen.format_time(seconds) == text


@given(st.floats(1e-6, 1e3))
def test_a_written_time_is_near_its_value(seconds):
    number, unit = screen.format_time(seconds).split()
    assert float(number) * FACTORS[unit] == pytest.approx(seconds, rel=6e-3)
    assert len(number) <= 4


def test_a_table_has_a_line_per_mode_and_floor():
    row = msgspec.structs.replace(make_row("1M", 1 << 20, "apart", 2e-3), floor_percent=None)
    lines = screen.cells_of([row], [make_floor()])
    assert [len(line) for line in lines] == [len(screen.HEADS)] * 2
    assert lines[0][:3] == ("1M", "apart", "2.00 ms")
    assert lines[0][-1] == ""
    assert lines[1][:3] == ("1M", "floor: memory", "500 µs")


def test_a_plain_table_is_aligned():
    lines = screen.cells_of(list(make_result().rows), [])
    shown = screen.plain_table(screen.HEADS, lines).splitlines()
    assert len(shown) == len(lines) + 1
    ends = {re.search(r"GB/s +bus", shown[0]).start() + 4}
    for line, cells in zip(shown[1:], lines, strict=True):
        assert line.split() == " ".join(cells).split()
        ends.add(line.rindex(cells[6], 0, max(ends)) + len(cells[6]))
    assert len(ends) == 1


def test_a_plain_screen_shows_text_and_a_tenth_at_a_time():
    out, err = io.StringIO(), io.StringIO()
    shown = screen.make_screen(out, err)
    assert type(shown) is screen.PlainScreen
    with shown.progress(40) as step:
        for number in range(40):
            step(f"work {number}")
    shown.table(("a", "b"), [[("1", "2")], [("3", "4"), ("5", "6")]])
    shown.write("end")
    assert out.getvalue() == "a  b\n\n1  2\n\n3  4\n5  6\nend\n"
    lines = err.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "1 of 40: work 0"
    assert lines[-1] == "40 of 40: work 39"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_rich_table(monkeypatch):
    pytest.importorskip("rich")
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    shown = screen.make_screen()
    assert isinstance(shown, screen.RichScreen)
    with shown.progress(2) as step:
        step("4K apart")
        step("4K links apart")
    assert "4K links apart" in out.getvalue()
    assert "2/2" in out.getvalue()
    lines = screen.cells_of(list(make_result().rows[:4]), [make_floor()])
    shown.table(screen.HEADS, [lines])
    shown.write("not [b]markup[/b]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for line in lines:
        assert any(" ".join(cell for cell in line if cell) == " ".join(shown.split())
                   for shown in text.splitlines())  # fmt: skip
    assert "not [b]markup[/b]" in text


def test_a_terminal_without_rich_has_plain_text(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert type(screen.make_screen()) is screen.PlainScreen


# ---- comparison


def test_ratios_of_two_results():
    groups = screen.compare(make_result(), make_result(slower=2.0, modes=("private", "apart")))
    assert [len(group) for group in groups] == [2, 2, 2]
    table = {(line[0], line[1]): line for group in groups for line in group}
    # the modes' times are 1, 2, 3, 4 units in A, and private and apart 2 and 4 in B
    assert table["1M", "private"][4:6] == ("1.00", "1.00")
    assert table["10x4K", "apart"][4] == "1.00"
    assert {len(line) for line in table.values()} == {len(screen.COMPARED)}


def test_what_differs_is_said():
    a = make_result()
    changed = {**a.conditions, "kernel": "6.2", "began": "later", "settings": {"FASTPS_CPUS": "1"}}
    b = msgspec.structs.replace(a, conditions=changed, options={**a.options, "tcp": True})
    assert screen.differences(a, b) == [
        "kernel: 6.1 -> 6.2",
        "option tcp: False -> True",
        "FASTPS_CPUS: none -> 1",
    ]
    assert screen.differences(a, a) == []


def test_the_command_compares(tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    figures.write(paths[0], make_result())
    figures.write(paths[1], make_result(slower=3.0))
    assert main.main(["--compare", *map(str, paths)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == " ".join(screen.COMPARED).split()
    assert next(line for line in shown if line.startswith("16M")).split()[:7] == [
        "16M", "registered", "1.68", "ms", "5.03", "ms", "3.00",
    ]  # fmt: skip
    figures.write(paths[1], make_result(modes=()))
    assert main.main(["--compare", *map(str, paths)]) == 1
    assert "in common" in capsys.readouterr().err
    assert main.main(["--compare", str(paths[0]), str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err


# ---- pictures


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_is_drawn(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"a{suffix}"
    plot.draw(make_result(), path)
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 5000


def test_a_picture_shows_modes_floors_and_conditions(tmp_path):
    pytest.importorskip("matplotlib")
    settings = importlib.import_module("matplotlib").rc_context({"svg.fonttype": "none"})
    with settings:
        plot.draw(make_result(), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for word in ("registered", "private", "colocated", "apart", "floor: memory", "1M", "16M",
                 "a processor", "GB/s", "ms"):  # fmt: skip
        assert word in text
    assert "10x4K" not in text  # calls with many tensors are no size


def test_a_floor_is_drawn_at_its_best_round():
    floor = make_floor(times=make_times(5e-4, (4e-4, 2e-4, 9e-4)))
    assert plot._seconds(floor) == 2e-4
    assert plot._seconds(make_row("1M", 1 << 20, "apart", 3e-4)) == 3e-4


def test_a_picture_of_nothing_is_still_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw(make_result(modes=()), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(BenchError, match="cannot write"):
        plot.draw(make_result(), tmp_path / "missing" / "a.png")


def test_without_matplotlib_the_cure_is_named_before_anything_is_measured(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main.main(["--plot", str(tmp_path / "a.png")]) == 1
    assert "pip install 'fastps[bench]'" in capsys.readouterr().err


def test_conditions_describe_the_machine(monkeypatch):
    monkeypatch.setenv("FASTPS_CHUNK_BYTES", "8192")
    monkeypatch.setenv("FASTPS_TOKEN", "9f3a61c07be2d584-secret")
    found = conditions()
    assert found["settings"]["FASTPS_CHUNK_BYTES"] == "8192"
    assert "secret" not in str(found)
    assert found["cpus"] >= 1
    assert found["numa_nodes"] >= 1
    assert found["versions"]["numpy"] == importlib.import_module("numpy").__version__
    assert found["kernel"] in headline(found)
