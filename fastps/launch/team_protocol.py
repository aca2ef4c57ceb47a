# SPDX-License-Identifier: Apache-2.0
"""Messages between a team's driver and its workers: Python objects over a pair of sockets.

Objects are pickled, as nowhere else in this library. That is safe here: the driver makes the pair
before it starts the worker, which inherits its end, so no other process can write to it. Functions
of notebooks and scripts are sent by value with cloudpickle, `fastps[notebook]`.
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
    """Pickle an object, by value what is defined in __main__. Raises ConfigError."""
    try:
        dumps = importlib.import_module("cloudpickle").dumps
    except ImportError:
        dumps = None
    if dumps is None and any(_is_of_main(one) for one in _parts(words)):
        raise ConfigError(
            "sending a function of a notebook or script to other processes needs cloudpickle, "
            "which is not installed: pip install 'fastps[notebook]', or define the function in a "
            "module"
        )
    body: bytes = (dumps or pickle.dumps)(words)
    return _LENGTH.pack(len(body)) + body


def pack_result(value: Any) -> bytes:
    """Pack the result of a call; TypeError if it cannot be pickled."""
    try:
        return pack((True, pack(value), _kind_of(value), ""))
    except Exception as error:  # whatever its parts raise when they are pickled
        raise TypeError(
            f"the result, of type {_kind_of(value)}, cannot be pickled ({words_of(error)}); "
            "return plain values or arrays"
        ) from error


def pack_failure(error: BaseException) -> bytes:
    """Pack the exception of a call with its text and traceback, which always arrive.

    An exception that would end the receiver, such as that of sys.exit(), becomes a RuntimeError.
    """
    trace, body = "".join(traceback.format_exception(error)), b""
    if isinstance(error, SystemExit):
        error = RuntimeError(
            f"the worker called sys.exit({error.code!r}); return a value or raise an exception"
        )
    if isinstance(error, Exception | KeyboardInterrupt):
        with contextlib.suppress(Exception):  # whatever its parts raise when they are pickled
            body = pack(error)
    return pack((False, body, words_of(error), trace))


def unpack_answer(body: bytes | bytearray, rank: int) -> tuple[bool, Any]:
    """Return whether a worker's call succeeded, and its result or exception.

    A value that cannot be unpickled here becomes a RuntimeError. An exception has the worker's
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
    """Return the class and the text of an exception, even if making its text raises another."""
    return traceback.format_exception_only(error)[-1].strip()


def _kind_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _parts(words: Any) -> list[Any]:
    return list(words) if isinstance(words, tuple) else [words]


def _is_of_main(one: Any) -> bool:
    return getattr(one, "__module__", "") == "__main__" and "__main__" in sys.modules


def unpack(body: bytes | bytearray) -> Any:
    """Return the object. Raises whatever its parts raise, ImportError if a module is missing."""
    return pickle.loads(body)


def receive(sock: socket.socket) -> bytearray:
    """Wait for a packed object. Raises EOFError when the other end has closed."""
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
