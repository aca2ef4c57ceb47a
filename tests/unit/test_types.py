# SPDX-License-Identifier: Apache-2.0
"""The two tables of floor 0: errors by status code, element types by wire code."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fastps import errors
from fastps.errors import STATUS_ERRORS, FastPSError, error_of
from fastps.types import DType, dtype_of

CORE = (Path(errors.__file__).parent / "_core.pxd").read_text(encoding="utf-8")


def c_statuses() -> dict[str, int]:
    """Read the Status enum of _core.pxd."""
    body = CORE.split("cdef enum Status:")[1].split("\n\n")[0]
    return {name: int(value) for name, value in re.findall(r"^    (\w+) = (-?\d+)", body, re.M)}


def test_status_codes_are_those_of_c():
    codes = c_statuses()
    named = {f"E_{status.name}" if status else "OK": int(status) for status in errors.Status}
    assert codes == named
    assert codes.pop("OK") == 0
    assert set(codes.values()) == set(STATUS_ERRORS)
    expected = {
        "E_TIMEOUT": errors.StallError,
        "E_SHUTDOWN": errors.ShutdownError,
        "E_PEER_LOST": errors.PeerLostError,
        "E_PROTOCOL": errors.ProtocolError,
        "E_MISMATCH": errors.MismatchError,
        "E_NOMEM": errors.FastPSError,
        "E_SYS": errors.TransportError,
        "E_LINK_TIMEOUT": errors.TransportTimeout,
    }
    assert {name: STATUS_ERRORS[code] for name, code in codes.items()} == expected


@pytest.mark.parametrize("status", [*STATUS_ERRORS, -99])
def test_error_of_keeps_the_message(status):
    error = error_of(status, "what happened")
    assert type(error) is STATUS_ERRORS.get(status, FastPSError)
    assert str(error) == "what happened"


def test_all_errors_have_one_base_and_a_sentence():
    found = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and value is not errors.Status
    ]
    assert len(found) >= 10
    for error in found:
        assert issubclass(error, FastPSError)
        assert error.__doc__.rstrip().endswith(".")
        assert error.__name__ in errors.__doc__
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.PeerLostError, errors.TransportError)


@pytest.mark.parametrize("code", DType)
def test_dtype_table_against_numpy(code):
    name = code.name.lower()
    dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    assert dtype_of(dtype) is code
    assert code.itemsize == dtype.itemsize
    assert 0 < code < 256


def test_wire_codes_do_not_move():
    """Numbers that travel stay; add new ones at the end."""
    assert [code.name for code in DType][:4] == ["FLOAT32", "FLOAT64", "FLOAT16", "BFLOAT16"]
    assert [code.name for code in DType][4:8] == ["INT8", "INT16", "INT32", "INT64"]
    assert [code.name for code in DType][8:] == ["UINT8", "BOOL", "UINT16"]
    assert [code.value for code in DType] == list(range(1, len(DType) + 1))


@pytest.mark.parametrize("name", ["complex64", "uint64", "S4", "O", "M8[s]", ">f4", "longdouble"])
def test_other_dtypes_are_refused(name):
    with pytest.raises(TypeError, match="not supported; use one of float32"):
        dtype_of(np.dtype(name))
