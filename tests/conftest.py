# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: seeds are printed, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

CLEAN_FOLDERS = ("unit", "cluster", "conformance", "faults", "stress")
JOBS = ("frameworks", "cluster", "faults")  # few tests, each of many processes
LONG_FILES = ("test_wheel.py", "test_docs.py")  # minutes each, on one processor
SETTLE_S = 5.0  # threads that were told to end may need a moment on a loaded machine
SPARE_DESCRIPTORS = 8  # caches of libraries, such as an imported module's open file

settings.register_profile(
    "fastps",
    deadline=None,
    print_blob=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("fastps"), max_examples=2000)
# The same examples in each run, so that it tells of the change and of nothing else.
settings.register_profile("ci", settings.get_profile("fastps"), derandomize=True, database=None)
# For tools/mutate.py, which wants to know whether an example fails, and not the smallest one.
settings.register_profile(
    "mutate", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate), max_examples=20
)
settings.load_profile("fastps")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes long, so that no processor waits for it in the end.

    With -x the order is that of the command, where the quickest may come first.
    """
    if config.getoption("maxfail") == 1:
        return

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        folder, is_long = item.path.parent.name, item.path.name in LONG_FILES
        is_job = folder in JOBS or is_long
        return item.get_closest_marker("stress") is None, not is_job, folder == "house"

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Let the garbage collector, whom some tests call, pass over what collection has made."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Let children hear Ctrl-C where whoever starts the tests ignores it, without banners."""
    for name in ("FASTPS_BANNER", "FASTPS_START_WATCH_S"):  # tests compare what jobs write
        os.environ.setdefault(name, "0")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def own_threads() -> list[str]:
    """List the threads of this process that fastps named, in Python or in C."""
    names = [thread.name for thread in threading.enumerate()]
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            continue
    return sorted(name for name in names if name.startswith("fastps"))


def open_sockets() -> set[str]:
    """List the sockets of this process by inode."""
    targets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.add(os.readlink(entry))
        except OSError:
            continue
    return {target for target in targets if target.startswith("socket:")}


def count_descriptors() -> int:
    """Count the open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def new_leftovers(threads: list[str], sockets: set[str]) -> str:
    """Describe threads and sockets that were not there before."""
    more = list((Counter(own_threads()) - Counter(threads)).elements())
    fresh = open_sockets() - sockets
    parts = [f"threads {more}"] if more else []
    return ", ".join(parts + ([f"sockets {sorted(fresh)}"] if fresh else []))


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread of ours, a socket or many descriptors behind."""
    if Path(request.node.path).parent.name not in CLEAN_FOLDERS:
        yield
        return
    threads, sockets, descriptors = own_threads(), open_sockets(), count_descriptors()
    yield
    if not new_leftovers(threads, sockets) and count_descriptors() <= descriptors:
        return
    gc.collect()
    deadline = time.monotonic() + SETTLE_S
    while (left := new_leftovers(threads, sockets)) and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel gives no event for the end of a thread
    assert not left, f"the test left behind: {left}; close what it opened"
    grown = count_descriptors() - descriptors
    assert grown <= SPARE_DESCRIPTORS, f"the test left {grown} descriptors open"
