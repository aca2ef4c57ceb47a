# SPDX-License-Identifier: Apache-2.0
"""A board in PMIx, the key-value store of mpirun and srun --mpi=pmix.

Calls libpmix by ctypes; PMIx daemons carry a value only to processes of the same name space. See
the PMIx standard, version 4, chapters 5 and 6.
"""

from __future__ import annotations

import atexit
import ctypes
import threading

from fastps.errors import ConfigError, TransportTimeout

LIBRARY = "libpmix.so.2"
_KEY = b"fastps.meeting"
_SUCCESS, _STRING, _GLOBAL = 0, 3, 3
_NAME_BYTES = 256


class _Proc(ctypes.Structure):
    _fields_ = [("nspace", ctypes.c_char * _NAME_BYTES), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):
    """pmix_value_t: its union has 24 bytes, of which a text takes the first eight."""

    _fields_ = [
        ("type", ctypes.c_uint16),
        ("text", ctypes.c_char_p),
        ("rest", ctypes.c_uint64 * 6),
    ]


class PmixBoard:
    """Post and read a text by PMIx. Raises ConfigError if the library is missing or fails."""

    def __init__(self) -> None:
        try:
            self._pmix = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise ConfigError(f"PMIx cannot be used: {error}") from error
        self._me = _Proc()
        self._check("PMIx_Init", self._pmix.PMIx_Init(ctypes.byref(self._me), None, 0))
        atexit.register(self._pmix.PMIx_Finalize, None, 0)  # else mpirun reports an abort

    def post(self, text: str) -> None:
        """Post the text."""
        value = _Value(type=_STRING, text=text.encode())
        self._check("PMIx_Put", self._pmix.PMIx_Put(_GLOBAL, _KEY, ctypes.byref(value)))
        self._check("PMIx_Commit", self._pmix.PMIx_Commit())

    def read(self, *, timeout_s: float) -> str:
        """Wait for the text of rank 0, on a thread, since PMIx_Get has no timeout here."""
        found: list[str] = []
        thread = threading.Thread(target=self._get, args=[found], name="fastps:pmix", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not found:
            raise TransportTimeout(f"PMIx had no value of rank 0 within {timeout_s:.3g} s")
        return found[0]

    def clear(self) -> None:
        """Do nothing: PMIx drops the text with the job."""

    def _get(self, found: list[str]) -> None:
        root = _Proc(nspace=self._me.nspace, rank=0)
        value = ctypes.POINTER(_Value)()
        status = self._pmix.PMIx_Get(ctypes.byref(root), _KEY, None, 0, ctypes.byref(value))
        if status == _SUCCESS and value.contents.type == _STRING:
            found.append(value.contents.text.decode())

    def _check(self, what: str, status: int) -> None:
        if status != _SUCCESS:
            raise ConfigError(f"PMIx cannot be used: {what} returned {status}")
