# SPDX-License-Identifier: Apache-2.0
"""What a team's driver and its workers say to each other: Python objects over a pair of sockets.

Objects are pickled, which nothing else in this library is: the pair is made by the driver before
it starts the worker, whose descriptor the worker inherits, so nobody else can ever write to it.
Functions of notebooks and of scripts travel by value with cloudpickle, `fastps[notebook]`.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import socket
import struct
import sys
import traceback
from typing import Any

from fastps.errors import ConfigError

_LENGTH = struct.Struct("<Q")


def pack(words: Any) -> bytes:
    """Pickle an object, by value what only this process knows; ConfigError says what cannot."""
    try:
        dumps = importlib.import_module("cloudpickle").dumps
    except ImportError:
        dumps = None
    if dumps is None and any(_is_of_main(one) for one in _parts(words)):
        raise ConfigError(
            "a function that is defined in a notebook or a script is sent to other processes by "
            "cloudpickle, which is not there: pip install 'fastps[notebook]'; or define it in a "
            "module"
        )
    body: bytes = (dumps or pickle.dumps)(words)
    return _LENGTH.pack(len(body)) + body


def pack_result(value: Any) -> bytes:
    """Pack what a call returned; TypeError for what cannot be pickled."""
    try:
        return pack((True, pack(value), _kind_of(value), ""))
    except Exception as error:  # whatever its parts raise when they are pickled
        raise TypeError(
            f"the result, of type {_kind_of(value)}, cannot be pickled ({words_of(error)}): "
            "return plain values or arrays"
        ) from error


def pack_failure(error: BaseException) -> bytes:
    """Pack what a call raised, with its text and traceback, which arrive whatever it is.

    An exception that would end its receiver, as that of sys.exit() does, becomes a RuntimeError.
    """
    trace, body = "".join(traceback.format_exception(error)), b""
    if isinstance(error, SystemExit):
        error = RuntimeError(
            f"sys.exit({error.code!r}) was called; return a value, or raise an exception"
        )
    if isinstance(error, Exception | KeyboardInterrupt):
        with contextlib.suppress(Exception):  # whatever its parts raise when they are pickled
            body = pack(error)
    return pack((False, body, words_of(error), trace))


def unpack_answer(body: bytes | bytearray, rank: int) -> tuple[bool, Any]:
    """Return whether a worker's call went well, and what it returned or raised.

    What cannot be unpickled here is a RuntimeError that says so. An exception has the worker's
    traceback as a note.
    """
    is_well, packed, words, trace = unpack(body)
    try:
        found = unpack(packed[_LENGTH.size :])
        if is_well:
            return True, found
    except Exception as error:  # whatever its parts raise when they are unpickled
        found = None
        if is_well:
            words = f"the result, of type {words}, cannot be unpickled: {words_of(error)}"
            trace = "".join(traceback.format_exception(error))
    raised = found if isinstance(found, BaseException) else RuntimeError(words)
    raised.add_note(f"worker {rank}:\n{trace.rstrip()}")
    return False, raised


def words_of(error: BaseException) -> str:
    """Return the class and the text of an exception, also where its text raises another."""
    return traceback.format_exception_only(error)[-1].strip()


def _kind_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _parts(words: Any) -> list[Any]:
    return list(words) if isinstance(words, tuple) else [words]


def _is_of_main(one: Any) -> bool:
    return getattr(one, "__module__", "") == "__main__" and "__main__" in sys.modules


def unpack(body: bytes | bytearray) -> Any:
    """Return the object; raises what its parts raise, ImportError where a module is missing."""
    return pickle.loads(body)


def hear(sock: socket.socket) -> bytearray:
    """Wait for a packed object, as long as the other end lives; EOFError when it does not."""
    (nbytes,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    return _read(sock, nbytes)


def _read(sock: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data
