# SPDX-License-Identifier: Apache-2.0
"""Measure the tests: make one-line mistakes in fastps/, one at a time, and count the noticed ones.

    python tools/mutate.py --seed 1 --count 200 --log out/mutate-1.jsonl

mutations.py says what a mutation is. The seed decides which lines are mutated, and how: after an
edit elsewhere the same seed picks nearly the same ones. Each mutation gets the tests that
mutate.toml lists for its file, in a copy of the tree, until one fails. A timeout counts as killed,
for a test that hangs has noticed; but only if it comes twice, for the machine may be busy.
mutate.toml also names mutations that change no behaviour, with reasons; they count neither as
killed nor as survived. A log lets a run continue where it stopped. The last lines are the figures
and the survivors; --again runs the survivors in the log again, unless they are named so.

Kernels: the cache of machine code is keyed by the text of their sources (fastps/reduce/cache.py),
so a mutated kernel is compiled anew; each copy of the tree has a cache of its own.

Existing tools do not fit. mutmut 3 renames functions and chooses among them at each call, which
Numba cannot compile, and it draws no sample. mutatest 2 draws one by seed, but mutates compiled
files only, so the kernel cache would not notice. cosmic-ray 8 has one test command for all files,
and its sample has no seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from mutations import Mutation, pick

from fastps.config.closed_pipe import ends_quietly

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = (".git", ".venv", ".venvs", ".hypothesis", "build", "dist", "out", "*.c", "*.html")
PYTEST = ("-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-rfE", "-p", "no:cacheprovider",
          "-m", "not alone and not stress", "--hypothesis-profile=mutate",
          "-o", "timeout=60")  # fmt: skip
SPARE_S = 30.0  # of a time limit, besides three times what the tests take


class Tree:
    """A copy of the project with its compiled modules, in which one mutation at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastps"
        if cache.is_dir():
            shutil.copytree(cache, folder / "out/cache/fastps")
        self._environ = os.environ | {"PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"}
        self._environ["XDG_CACHE_HOME"] = str(folder / "out/cache")
        self._stamp = int(time.time())
        words = "-c", "import fastps; print(fastps.__file__)"
        found = self._python(subprocess.PIPE, *words).communicate()[0]
        if found.strip() != str(folder / "fastps/__init__.py"):
            raise SystemExit(f"the tests would run with {found.strip()}, not with {folder}")

    def run(self, one: Mutation, tests: str, limit_s: float) -> tuple[str, float, str]:
        """Run tests on a mutation; return the result, the seconds, and the output."""
        path = self.folder / one.path
        original, began = path.read_bytes(), time.monotonic()
        self._write(path, one.text)
        try:
            with tempfile.TemporaryFile("w+") as output:
                words = (f"tests/{one}" if ".py" in one else one for one in shlex.split(tests))
                process = self._python(output, *PYTEST, *words)
                try:
                    process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    return "timeout", limit_s, ""
                finally:
                    self._end_processes()
                    process.wait()
                output.seek(0)
                word = "survived" if process.returncode == 0 else "killed"
                return word, time.monotonic() - began, output.read()
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: bytes) -> None:
        """Write a file with a time of its own, for Python compares times of compiled files."""
        path.write_bytes(text)
        self._stamp += 10
        os.utime(path, (self._stamp, self._stamp))

    def _python(self, output: int | IO[str], *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words], cwd=self.folder, env=self._environ, text=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _end_processes(self) -> None:
        """Kill what still runs in this tree, jobs of tests too."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if Path(os.readlink(process / "cwd")).is_relative_to(self.folder):
                    os.kill(int(process.name), signal.SIGKILL)


class Run:
    """Mutations that wait for their tests, and the results so far, which the log keeps."""

    def __init__(self, table: Mapping[str, Any], log: Path, until: float, again: bool) -> None:
        self._tests = tests_of(table)
        self._log, self._until = log, until
        self._lock = threading.Lock()
        self._limits: dict[str, float] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.equivalent = {
            (one["file"], one["before"], one["after"]): one["reason"]
            for one in table.get("equivalent", ())
        }
        for line in log.read_text().splitlines() if log.exists() else ():
            entry = json.loads(line)
            if "tests" in entry:
                self._limits[entry["tests"]] = entry["limit_s"]
            elif not (again and entry["result"] == "survived" and not self._is_named(entry)):
                self.results[entry["key"]] = entry

    def _is_named(self, entry: Mapping[str, Any]) -> bool:
        """Return whether an entry is of a mutation that changes no behaviour."""
        path, _, before, after = json.loads(entry["key"])
        return (path, before, after) in self.equivalent

    def work(self, tree: Tree, waiting: list[Mutation]) -> None:
        """Take mutations until none waits, or until the time is over."""
        while time.monotonic() < self._until:
            with self._lock:
                if not waiting:
                    return
                one = waiting.pop(0)
            tests = self._tests[one.path]
            for _ in range(2):
                limit_s = min(self._limit(tree, one, tests), self._until - time.monotonic())
                result, seconds, output = tree.run(one, tests, max(limit_s, 0.0))
                if result != "timeout":
                    break
            if time.monotonic() < self._until:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                by = failed[1] if failed else ""
                entry = {"key": one.key, "line": one.line, "result": result, "kind": one.kind,
                         "seconds": round(seconds, 1), "by": by}  # fmt: skip
                self._keep(entry)
                self.results[one.key] = entry
                print(f"{result:9}{seconds:6.1f} s  {one}  {by}", flush=True)

    def _limit(self, tree: Tree, one: Mutation, tests: str) -> float:
        """Return the time limit of tests, which have to pass without a mutation.

        The file gets a comment instead: its kernels are compiled, as mutated ones are.
        """
        if tests not in self._limits:
            plain = one._replace(text=(ROOT / one.path).read_bytes() + b"# not mutated\n")
            result, seconds, output = tree.run(plain, tests, self._until - time.monotonic())
            if result == "killed" and time.monotonic() < self._until:
                self._until = 0.0  # for the other threads
                raise SystemExit(f"{output}\nthese tests fail without a mutation: {tests}")
            if result == "survived":
                self._limits[tests] = 3 * seconds + SPARE_S
                self._keep({"tests": tests, "limit_s": round(self._limits[tests])})
        return self._limits.get(tests, 0.0)

    def _keep(self, entry: Mapping[str, Any]) -> None:
        with self._lock, self._log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def report(self, chosen: Sequence[Mutation]) -> float:
        """Print the figures, survivors and equivalent mutations; return the share killed."""
        found = {one: self.results[one.key] for one in chosen if one.key in self.results}
        alike = {one: self.equivalent.get((one.path, one.before, one.after)) for one in found}
        counted = Counter(entry["result"] for one, entry in found.items() if not alike[one])
        for one, reason in alike.items():
            if reason and found[one]["result"] != "survived":
                print(f"equivalent, but {found[one]['result']}: {one}")
            elif reason:
                print(f"equivalent: {one}: {reason}")
        for one, entry in found.items():
            if entry["result"] == "survived" and not alike[one]:
                print(f"survived: {one}")
        total = counted.total()
        killed = total - counted["survived"]
        print(
            f"{len(found)} of {len(chosen)} mutations: {killed} killed, {counted['timeout']} of "
            f"them by time; {counted['survived']} survived; {len(found) - total} equivalent"
        )
        return killed / total if total else 1.0


def tests_of(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the tests of each file."""
    return {path: group["run"] for group in table["tests"] for path in group["files"]}


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where too few mutations are killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree that run at once")
    parser.add_argument("--log", type=Path, default=Path("out/mutate.jsonl"))
    parser.add_argument("--again", action="store_true", help="run logged survivors again")
    parser.add_argument("--for", type=float, default=1e6, dest="for_s", help="seconds to run for")
    parser.add_argument("--least", type=float, default=0.95, help="share that has to be killed")
    parser.add_argument("--list", action="store_true", help="show the mutations, and end")
    parser.add_argument("paths", nargs="*", help="only those in these files or folders")
    given = parser.parse_args(arguments)
    until = time.monotonic() + given.for_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    sources = {path: (ROOT / path).read_bytes() for path in tests_of(table)}
    chosen = [
        one
        for one in pick(sources, given.seed, given.count)
        if not given.paths or any(map(one.path.startswith, given.paths))
    ]
    if given.list:
        print("\n".join(map(str, chosen)))
        return 0
    given.log.parent.mkdir(parents=True, exist_ok=True)
    run = Run(table, given.log, until, given.again)
    waiting = [one for one in chosen if one.key not in run.results]
    jobs = min(given.jobs, len(waiting))
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        trees = [Tree(Path(folder) / str(number)) for number in range(jobs)]
        with ThreadPoolExecutor(jobs or 1) as pool:
            for ended in [pool.submit(run.work, tree, waiting) for tree in trees]:
                ended.result()
    is_good = run.report(chosen) >= given.least
    return 0 if is_good and all(one.key in run.results for one in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
