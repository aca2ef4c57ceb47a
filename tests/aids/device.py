# SPDX-License-Identifier: Apache-2.0
"""Build and load the device of device.cpp, "testdev:0" and "testdev:1" to torch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".cpp")
FOLDER = Path(__file__).resolve().parents[2] / "out"


def build_or_skip() -> Path:
    """Return the library, or skip the test where it cannot be built."""
    import torch  # noqa: PLC0415

    if not _compiler():
        pytest.skip("the test device needs a C++ compiler")
    if not (Path(torch.__file__).parent / "include" / "torch" / "library.h").exists():
        pytest.skip("the test device needs the headers of torch")
    return build()


@functools.cache
def load() -> ctypes.CDLL:
    """Make the device known to torch in this process, and return its library."""
    import torch  # noqa: PLC0415

    library = ctypes.CDLL(str(build()))
    torch.utils.rename_privateuse1_backend("testdev")
    library.begin()
    module = types.ModuleType("torch.testdev")
    module.__dict__.update(
        _lazy_init=lambda: None, _is_in_bad_fork=lambda: False, is_available=lambda: True,
        device_count=lambda: 2, manual_seed_all=lambda seed: None,
    )  # fmt: skip
    torch._register_device_module("testdev", module)
    return library


def build() -> Path:
    """Compile the device for this torch, unless that was done before; return the library."""
    import torch  # noqa: PLC0415

    root = Path(torch.__file__).parent
    text = f"{torch.__version__} {root} {SOURCE.read_text(encoding='utf-8')}"
    found = FOLDER / f"device-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if found.exists():
        return found
    FOLDER.mkdir(exist_ok=True)
    made = found.with_suffix(f".{os.getpid()}")
    folders = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    command = [
        _compiler(), "-std=c++17", "-O0", "-fPIC", "-shared", f"{SOURCE}", "-o", f"{made}",
        *[option for folder in folders for option in ("-isystem", f"{folder}")],
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    made.replace(found)
    return found


def _compiler() -> str:
    return shutil.which(os.environ.get("CXX", "c++")) or ""
