# SPDX-License-Identifier: Apache-2.0
"""Ciphers: the vectors of NIST and of RFC 5869, 7748 and 8439, and what must not open."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.errors import AuthError, ConfigError, ProtocolError
from fastps.security import _cipher
from fastps.security.ciphers import (
    SECRET_BYTES,
    Kind,
    Opener,
    Sealer,
    derive,
    has_aes,
    load,
)

REKEY_RECORDS = 1 << 20
SECRET = bytes(range(SECRET_BYTES))
KINDS = list(Kind)
TAG = 16
# (kind, key, nonce, plain, head, cipher, tag). NIST SP 800-38D's test cases 4 and 16 (McGrew and
# Viega, "The Galois/Counter Mode of Operation", appendix B), and RFC 8439, section 2.8.2.
GCM_PLAIN = (
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
)
GCM_HEAD = "feedfacedeadbeeffeedfacedeadbeefabaddad2"
VECTORS = [
    (
        Kind.AES_128_GCM, "feffe9928665731c6d6a8f9467308308", "cafebabefacedbaddecaf888",
        GCM_PLAIN, GCM_HEAD,
        "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e"
        "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091",
        "5bc94fbc3221a5db94fae95ae7121a47",
    ),
    (
        Kind.AES_256_GCM, "feffe9928665731c6d6a8f9467308308" * 2, "cafebabefacedbaddecaf888",
        GCM_PLAIN, GCM_HEAD,
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662",
        "76fc6ece0f4e1768cddf8853bb2d551b",
    ),
    (
        Kind.CHACHA20_POLY1305, bytes(range(0x80, 0xA0)).hex(), "070000004041424344454647",
        (
            b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
            b"future, sunscreen would be it."
        ).hex(),
        "50515253c0c1c2c3c4c5c6c7",
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d6"
        "3dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36"
        "92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b6116",
        "1ae10b594f09e26a7e902ecbd0600691",
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def loaded() -> str:
    """Every test needs the library."""
    return load()


def test_the_newest_library_is_found(loaded):
    assert loaded.startswith("OpenSSL ") or "SSL" in loaded
    assert load() == loaded


@pytest.mark.parametrize(("kind", "key", "nonce", "plain", "head", "cipher", "tag"), VECTORS)
def test_vectors(kind, key, nonce, plain, head, cipher, tag):
    """A nonce is the salt and the number of the record, so a vector is one record of a stream."""
    raw = bytes.fromhex(nonce)
    secret = bytes.fromhex(key).ljust(32, b"\0") + raw[:4]
    assert int.from_bytes(raw[4:], "little") % REKEY_RECORDS, "no other key begins there"
    sealer, opener = Sealer(kind, secret), Opener(kind, secret)
    for one in (sealer, opener):
        one.skip_to(int.from_bytes(raw[4:], "little"))
    made = bytes(sealer.seal(bytes.fromhex(plain), bytes.fromhex(head)))
    assert (made[TAG:].hex(), made[:TAG].hex()) == (cipher, tag)
    assert opener.open(made, bytes.fromhex(head)).hex() == plain


def test_x25519():
    """RFC 7748, sections 5.2 and 6.1."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    public = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert _cipher.public_key(bob).hex() == public
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert _cipher.shared_secret(alice, bytes.fromhex(public)).hex() == shared
    assert _cipher.shared_secret(bob, _cipher.public_key(alice)).hex() == shared


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31)])
def test_keys_of_small_order_are_refused(public):
    with pytest.raises(AuthError, match="no secret"):
        _cipher.shared_secret(bytes(range(32)), public)


def test_hkdf():
    """RFC 5869, appendix A.1."""
    found = derive(bytes(range(13)), b"\x0b" * 22, bytes(range(0xF0, 0xFA)), 42)
    assert found.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=st.lists(st.integers(0, 300), min_size=2, max_size=5))
@settings(max_examples=25, deadline=None)
def test_nothing_else_opens(kind, hides, data, sizes):
    sealer = Sealer(kind, SECRET, hides=hides)
    plains = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    made = [bytes(sealer.seal(one, b"head")) for one in plains]
    opener = Opener(kind, SECRET, hides=hides)
    assert [bytes(opener.open(one, b"head")) for one in made] == plains
    place = data.draw(st.integers(0, len(made) - 1))
    what = data.draw(st.sampled_from(["flip", "cut", "longer", "head", "repeat", "skip", "key"]))
    secret, wrong, head = SECRET, made[place], b"head"
    if what == "flip":
        bit = data.draw(st.integers(0, 8 * len(wrong) - 1))
        changed = bytearray(wrong)
        changed[bit // 8] ^= 1 << bit % 8
        wrong = bytes(changed)
    elif what == "cut":
        wrong = wrong[: data.draw(st.integers(0, len(wrong) - 1))]
    elif what == "longer":
        wrong += b"\0"
    elif what == "head":
        head = data.draw(st.sampled_from([b"", b"heae", b"head\0"]))
    elif what == "key":
        secret = bytes([SECRET[0] ^ 1]) + SECRET[1:]
    elif what == "repeat":
        place += 1
    else:
        wrong = made[(place + 1) % len(made)]
    opener = Opener(kind, secret, hides=hides)
    opener.skip_to(place)
    with pytest.raises(ProtocolError, match="sealed message"):
        opener.open(wrong, head)
    assert opener.number == place + (len(wrong) >= TAG), "a number is used once, also in vain"


@pytest.mark.parametrize("kind", KINDS)
def test_integrity_leaves_data_readable(kind):
    made = Sealer(kind, SECRET, hides=False).seal(b"to be read")
    assert made[TAG:] == b"to be read"


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_replaced(kind):
    """Records around the last one of a key: each end goes on, and the old key opens none."""
    sealer, opener, late = Sealer(kind, SECRET), Opener(kind, SECRET), Opener(kind, SECRET)
    made = []
    for one in (sealer, opener):
        one.skip_to(REKEY_RECORDS - 2)
    for i in range(4):
        made.append(bytes(sealer.seal(b"%d" % i)))
        assert opener.open(made[-1]) == b"%d" % i
    late.skip_to(REKEY_RECORDS + 1)
    with pytest.raises(ProtocolError):
        late.open(made[-1])


def test_a_wiped_key_seals_nothing():
    sealer, opener = Sealer(Kind.AES_128_GCM, SECRET), Opener(Kind.AES_128_GCM, SECRET)
    made = bytes(sealer.seal(b"x"))
    for one in (sealer, opener):
        one.wipe()
        one.wipe()
    with pytest.raises(AuthError):
        sealer.seal(b"y")
    with pytest.raises(ProtocolError):
        opener.open(made)


def test_a_number_is_used_once():
    sealer = Sealer(Kind.AES_128_GCM, SECRET)
    sealer.skip_to(7)
    with pytest.raises(ValueError, match="number 6 was used already"):
        sealer.skip_to(6)


def test_without_a_library_the_error_says_how_to_get_one():
    program = (
        "from fastps.security import _cipher\n"
        "try: _cipher.load([b'libno-such-thing.so.1', b'libm.so.6'])\n"
        "except Exception as error: print([type(error).__name__, str(error)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    name, text = ast.literal_eval(done.stdout.decode())
    assert name == ConfigError.__name__
    assert "libcrypto of OpenSSL 1.1.1 or later" in text
    assert "apt install" in text


def test_the_processor_s_instructions_are_read(tmp_path: Path):
    table = tmp_path / "cpuinfo"
    for text, expected in (
        ("flags : fpu aes pclmulqdq", True),
        ("Features : aes pmull crc32", True),
        ("flags : fpu vaes", False),
        ("Features : aes", False),
    ):
        table.write_text(text)
        has_aes.cache_clear()
        assert has_aes(table) is expected
    has_aes.cache_clear()
    assert has_aes(tmp_path / "none") is False
    has_aes.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_measured(kind):
    assert _cipher.measure(kind) > 1e6
