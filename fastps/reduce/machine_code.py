# SPDX-License-Identifier: Apache-2.0
"""Machine code without a compiler: an object file becomes bytes that can be mapped and called.

What LLVM makes of a kernel is a section of code and some of constants that it reads, relative to
where it stands. So `link()` puts these side by side and fills in the distances: a page-aligned
copy of that runs anywhere. Whatever else an object may ask for (other symbols, data that is
written, absolute addresses, another machine) is refused by CannotLink. Format: System V ABI,
AMD64 supplement, sections 4.1 to 4.4. Knows no kernel and no Numba.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import struct
from typing import NamedTuple

import numpy as np

MAGIC = b"fastps code 1\n\0\0"
_HEAD = struct.Struct("<16s32sQ")  # magic, digest of what follows, entry; then the code
_ELF_HEAD = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_ELF64_LITTLE, _AMD64 = b"\x7fELF\x02\x01", 62
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4
_WRITE, _ALLOC = 1, 2
_PC32, _PLT32 = 2, 4
_UNWIND = b".eh_frame"  # who comes by in an exception or a debugger; kernels raise nothing


class CannotLink(Exception):
    """An object asks for more than its own code and constants."""


class Code(NamedTuple):
    """Machine code of one kernel, and where in it the kernel begins."""

    text: bytes
    entry: int

    def pack(self) -> bytes:
        """Return the bytes of a file."""
        body = struct.pack("<Q", self.entry) + self.text
        return _HEAD.pack(MAGIC, hashlib.sha256(body).digest(), self.entry) + self.text

    @classmethod
    def unpack(cls, data: bytes) -> Code:
        """Read what pack() gave; ValueError when it is something else or damaged."""
        if len(data) < _HEAD.size:
            raise ValueError("too short for machine code")
        magic, digest, entry = _HEAD.unpack_from(data)
        text = data[_HEAD.size :]
        body = struct.pack("<Q", entry) + text
        if magic != MAGIC or hashlib.sha256(body).digest() != digest or entry >= len(text):
            raise ValueError("damaged machine code")
        return cls(text, entry)


class Loaded:
    """Code in memory that can be run and not be written; its address is valid while this lives."""

    def __init__(self, code: Code) -> None:
        """Map a copy of it; OSError where the system lets nobody do that."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, len(code.text), flags, mmap.PROT_READ | mmap.PROT_WRITE)
        self._map[:] = code.text
        place = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(len(code.text))
        if libc.mprotect(ctypes.c_void_p(place), size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "cannot map machine code")
        self.address: int = place + code.entry


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


def link(data: bytes, entry: str) -> Code:
    """Link an object file into code that begins at the symbol `entry`; CannotLink."""
    head = _ELF_HEAD.unpack_from(data)
    if head[0][:6] != _ELF64_LITTLE or head[2] != _AMD64:
        raise CannotLink("not an object of AMD64")
    sections = [
        _Section._make(_SECTION.unpack_from(data, head[6] + number * _SECTION.size))
        for number in range(head[12])
    ]
    text, places = _lay_out(data, sections, sections[head[13]])
    begin = None
    for section in sections:
        if section.kind == _RELA and section.info in places:
            _relocate(text, data, section, sections, places)
    for table in (section for section in sections if section.kind == _SYMTAB):
        names = sections[table.link]
        for symbol in _symbols(data, table):
            if _name(data, names, symbol.name) == entry.encode() and symbol.section in places:
                begin = places[symbol.section] + symbol.value
    if begin is None:
        raise CannotLink(f"no {entry}")
    return Code(bytes(text), begin)


def _lay_out(
    data: bytes, sections: list[_Section], names: _Section
) -> tuple[bytearray, dict[int, int]]:
    """Put all that is loaded side by side; give that, and where each section begins."""
    text, places = bytearray(), {}
    for number, section in enumerate(sections):
        if not section.flags & _ALLOC or _name(data, names, section.name) == _UNWIND:
            continue
        if section.kind != _PROGBITS or section.flags & _WRITE:
            raise CannotLink(f"section {_name(data, names, section.name)!r}")
        text += bytes(-len(text) % max(section.alignment, 1))
        places[number] = len(text)
        text += data[section.offset : section.offset + section.size]
    return text, places


def _relocate(
    text: bytearray,
    data: bytes,
    table: _Section,
    sections: list[_Section],
    places: dict[int, int],
) -> None:
    """Fill in the distances that one section asks for."""
    symbols = _symbols(data, sections[table.link])
    for number in range(table.size // _RELOCATION.size):
        offset, info, addend = _RELOCATION.unpack_from(
            data, table.offset + number * _RELOCATION.size
        )
        symbol, kind = symbols[info >> 32], info & 0xFFFFFFFF
        if kind not in (_PC32, _PLT32) or symbol.section not in places:
            name = _name(data, sections[sections[table.link].link], symbol.name)
            raise CannotLink(f"relocation {kind} to {name!r}")
        place = places[table.info] + offset
        target = places[symbol.section] + symbol.value
        struct.pack_into("<i", text, place, target + addend - place)


def _symbols(data: bytes, table: _Section) -> list[_Symbol]:
    count = table.size // _SYMBOL.size
    return [
        _Symbol._make(_SYMBOL.unpack_from(data, table.offset + number * _SYMBOL.size))
        for number in range(count)
    ]


def _name(data: bytes, names: _Section, offset: int) -> bytes:
    begin = names.offset + offset
    return data[begin : data.index(b"\0", begin)]
