# SPDX-License-Identifier: Apache-2.0
"""Machine code that was linked and loaded by ourselves, and what is refused."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import binding

from fastps.reduce.compiler import _machine
from fastps.reduce.machine_code import CannotLink, Code, Loaded, link

CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
# A table that is read by a computed place, a call within the object, and a constant.
PLAIN = """
@table = internal constant [4 x i64] [i64 3, i64 1, i64 4, i64 1]
define internal i64 @other(i64 %x) noinline { %y = mul i64 %x, 10  ret i64 %y }
define i64 @main(i64 %x) {
  %place = getelementptr [4 x i64], ptr @table, i64 0, i64 %x
  %found = load i64, ptr %place
  %more = call i64 @other(i64 %found)
  ret i64 %more
}
"""
REFUSED = {
    "a function of somebody else": "declare i64 @getpid()\ndefine i64 @main(i64 %x) "
    "{ %y = call i64 @getpid() ret i64 %y }",
    "data that is written": "@count = internal global i64 5\ndefine i64 @main(i64 %x) "
    "{ %y = load i64, ptr @count %z = add i64 %y, 1 store i64 %z, ptr @count ret i64 %z }",
    "no entry": "define i64 @another(i64 %x) { ret i64 %x }",
}


def compiled(text: str) -> bytes:
    """Compile LLVM's text to an object."""
    return _machine().emit_object(binding.parse_assembly(text))


def test_what_is_linked_runs():
    code = link(compiled(PLAIN), "main")
    loaded = [Loaded(Code.unpack(code.pack())) for _ in range(2)]
    for one in loaded:
        assert [CALL(one.address)(place) for place in range(4)] == [30, 10, 40, 10]
    assert loaded[0].address != loaded[1].address


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_itself_is_refused(name):
    with pytest.raises(CannotLink):
        link(compiled(REFUSED[name]), "main")


def test_an_object_of_another_machine_is_refused():
    data = bytearray(compiled(PLAIN))
    data[18:20] = (183).to_bytes(2, "little")  # AArch64
    with pytest.raises(CannotLink, match="AMD64"):
        link(bytes(data), "main")


@given(st.binary(min_size=1, max_size=300), st.integers(0, 299), st.data())
def test_damage_is_seen(text, entry, data):
    code = Code(text, entry % len(text))
    packed = bytearray(code.pack())
    assert Code.unpack(bytes(packed)) == code
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="machine code"):
        Code.unpack(bytes(packed))
    with pytest.raises(ValueError, match="machine code"):
        Code.unpack(bytes(packed[: data.draw(st.integers(0, len(packed) - 1))]))
