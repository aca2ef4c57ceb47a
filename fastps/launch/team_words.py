# SPDX-License-Identifier: Apache-2.0
"""What a team's driver and its workers say to each other: Python objects over a pair of sockets.

Objects are pickled, which nothing else in this library is: the pair is made by the driver before
it starts the worker, whose descriptor the worker inherits, so nobody else can ever write to it.
Functions of notebooks and of scripts travel by value with cloudpickle, `fastps[notebook]`.
"""

from __future__ import annotations

import importlib
import pickle
import socket
import struct
import sys
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


def _parts(words: Any) -> list[Any]:
    return list(words) if isinstance(words, tuple) else [words]


def _is_of_main(one: Any) -> bool:
    return getattr(one, "__module__", "") == "__main__" and "__main__" in sys.modules


def unpack(body: bytes | bytearray) -> Any:
    """Give the object; raises what its parts raise, ImportError where a module is missing."""
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
