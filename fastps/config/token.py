# SPDX-License-Identifier: Apache-2.0
"""Where the job's token comes from, and how the environment hides it.

Knows no other setting. No error and no log line contains a token. Threads: any.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fastps.errors import ConfigError
from fastps.files import read_file

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None)
_libc.getenv.restype = ctypes.c_void_p
_held: set[int] = set()  # descriptors of hold_token()

MAX_FILE_BYTES = 4096
MIN_BYTES = 16  # shorter tokens can be guessed from one recorded handshake
MIN_BITS = 24  # by information_bits(), of which 16 random digits have 25 or more
TOKEN_RECIPE = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > job.token)"


def read_token(token: str, path: str, *, is_needed: bool) -> bytes:
    """Return a token, else that of a file; empty if there is none and none is needed."""
    secret = token.encode().strip() or read_secret(path, "FASTPS_TOKEN_FILE")
    if not secret and is_needed:
        raise ConfigError(
            "this job has no token; start it with fastps-run, or set FASTPS_TOKEN_FILE to a "
            "file of mode 0600 that every process of the job can read, "
            "or FASTPS_INSECURE=1 on a network that no other program can reach"
        )
    if not secret:
        log.warning("FASTPS_INSECURE is on: any process that reaches our ports can join this job")
    elif len(secret) < MIN_BYTES:
        raise ConfigError(
            f"the job token has {len(secret)} bytes and can be guessed; FASTPS_TOKEN or "
            f"FASTPS_TOKEN_FILE must hold at least {MIN_BYTES}: {TOKEN_RECIPE}"
        )
    elif information_bits(secret) < MIN_BITS:
        raise ConfigError(
            "the job token repeats or counts, and can be guessed; FASTPS_TOKEN or "
            f"FASTPS_TOKEN_FILE must hold random characters: {TOKEN_RECIPE}"
        )
    return secret


def information_bits(secret: bytes) -> float:
    """Return a bound of the information in a token: in its bytes, and in their differences.

    Of a token that repeats a part, the part counts. No dictionary: words pass.
    """
    part = secret[: (secret + secret).index(secret, 1)] if secret else b""
    return min(_entropy(part), _entropy(b - a for a, b in itertools.pairwise(part)))


def _entropy(symbols: Iterable[int]) -> float:
    """Return the bits of symbols that are drawn as often as they occur (Shannon 1948)."""
    counts = Counter(symbols).values()
    return -sum(n * math.log2(n / sum(counts)) for n in counts)


def read_secret(path: str, setting: str) -> bytes:
    """Return the secret in the private file that a setting names; empty without a path."""
    if not path:
        return b""
    try:
        with read_file(Path(path)) as file:
            _check_private(path, setting, os.fstat(file.fileno()))
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}={path!r} cannot be read: {error}") from error
    secret = text.strip()
    is_utf8 = secret.decode(errors="ignore").encode() == secret
    if not secret or len(text) > MAX_FILE_BYTES or not is_utf8:
        raise ConfigError(
            f"{setting}={path!r} must hold {MIN_BYTES} to {MAX_FILE_BYTES} bytes of UTF-8"
        )
    return secret


def _check_private(path: str, setting: str, status: os.stat_result) -> None:
    """Raise ConfigError for a file that others may read, or that another user owns."""
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o177:
        raise ConfigError(
            f"{setting}={path!r} has mode {mode:04o}: others may use it; run `chmod 600 {path}`"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{setting}={path!r} belongs to user {status.st_uid}; it must be a file of user "
            f"{os.geteuid()} or root"
        )


def hold_token(token: str) -> tuple[str, str]:
    """Store a token in memory; return a variable, and its value, by which children can read it.

    The variable names a file of this process, private to this user, that ends with the process.
    Where the kernel has no such files, it holds the token itself.
    """
    try:
        descriptor = os.memfd_create("fastps-token", os.MFD_CLOEXEC)
    except OSError:
        return "FASTPS_TOKEN", token
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, os.fsencode(token))
    _held.add(descriptor)
    return "FASTPS_TOKEN_FILE", f"/proc/{os.getpid()}/fd/{descriptor}"


def drop_token(path: str) -> None:
    """Close a file of hold_token(); another path, and one of another process, stays as it is."""
    ours = f"/proc/{os.getpid()}/fd/"
    descriptor = int(path.removeprefix(ours)) if path.startswith(ours) else -1
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def _drop_tokens_in_child() -> None:
    """Let tokens end with their owner: the name of a file leads to its descriptor."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_tokens_in_child)


def hide_token() -> None:
    """Remove the token from this process's environment, which children inherit and show.

    Also overwrite it in the memory that /proc/PID/environ shows. `load` still finds it, by the
    variable that replaces it.
    """
    at = _libc.getenv(b"FASTPS_TOKEN")
    token = os.environ.get("FASTPS_TOKEN", "")
    if at and token:
        ctypes.memset(at, ord("0"), len(ctypes.string_at(at)))
    os.environ.pop("FASTPS_TOKEN", None)
    if token:
        name, value = hold_token(token)
        os.environ[name] = value


def enter_environment(variables: Mapping[str, str]) -> None:
    """Add settings that came in a message to the environment, where `load` finds them."""
    os.environ.update(variables)
    hide_token()


def leave_environment(names: Sequence[str]) -> None:
    """Remove the settings of enter_environment() by name, and the token."""
    drop_token(os.environ.pop("FASTPS_TOKEN_FILE", ""))
    for name in names:
        os.environ.pop(name, None)
