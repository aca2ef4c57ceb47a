# SPDX-License-Identifier: Apache-2.0
"""Handshakes that agree on keys: who gets which, and who gets none."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.errors import AuthError, ProtocolError
from fastps.security import ciphers, handshake
from fastps.security.ciphers import Kind, Sealing
from fastps.security.handshake import (
    ClientHandshake,
    EncryptionError,
    NoPlaceError,
    Option,
    Purpose,
    ServerHandshake,
    Steps,
    agree,
)

N_DAMAGES = int(os.environ.get("TEST_DAMAGES", "3000"))
TAG_BYTES = 16
KEY = bytes(range(32))
FAR = Option.AUTO | Option.LEAVES
ON, INTEGRITY = Option.ON, Option.INTEGRITY
MODES = {"off": Option.NONE, "auto": FAR, "integrity": INTEGRITY, "on": ON}


def ends(
    ours: Option, theirs: Option, key: bytes = KEY, other: bytes = KEY
) -> tuple[ClientHandshake, ServerHandshake]:
    client = ClientHandshake(key, purpose=Purpose.DATA, sender=3, lane=7, options=ours)
    return client, ServerHandshake(other, options=theirs)


def advance(steps: Steps[object], data: bytes | None) -> tuple[bytes, int]:
    """Take one step; at the end, return the result and nothing to read."""
    try:
        return next(steps) if data is None else steps.send(data)
    except StopIteration as end:
        return end.value or b"", 0


def talk(
    client: ClientHandshake,
    server: ServerHandshake,
    change: Callable[[int, bytes], bytes] = lambda step, data: data,
) -> None:
    """Run both sides, and check that each reads what the other sends."""
    ours, theirs = client.steps(), server.steps()
    (hello, n_challenge), (_, n_hello) = advance(ours, None), advance(theirs, None)
    assert len(hello) == n_hello
    challenge, n_answer = advance(theirs, change(0, hello))
    assert len(challenge) == n_challenge
    answer, n_accept = advance(ours, change(1, challenge))
    assert len(answer) == n_answer
    accept, _ = advance(theirs, change(2, answer))
    assert len(accept) == n_accept
    advance(ours, change(3, accept))


def sealed(
    ours: Option = ON, theirs: Option = ON, *, purpose: Purpose = Purpose.DATA, lane: int = 7
) -> tuple[Sealing, Sealing]:
    client = ClientHandshake(KEY, purpose=purpose, sender=3, lane=lane, options=ours)
    server = ServerHandshake(KEY, options=theirs)
    talk(client, server)
    assert client.sealing is not None
    assert server.sealing is not None
    return client.sealing, server.sealing


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "hides"),
    [
        (ON, ON, Kind.AES_128_GCM, True),
        (INTEGRITY, INTEGRITY, Kind.AES_128_GCM, False),
        (FAR, FAR, Kind.AES_128_GCM, True),
        (FAR, Option.AUTO, Kind.AES_128_GCM, True),
        (ON, ON | Option.NO_AES, Kind.CHACHA20_POLY1305, True),
    ],
)
def test_both_ends_have_the_same_keys(ours, theirs, kind, hides):
    client, server = sealed(ours, theirs)
    assert (client.to_send, client.to_receive) == (server.to_receive, server.to_send)
    assert client.to_send != client.to_receive
    assert client[:2] == server[:2] == (kind, hides)
    message = bytes(client.sealer().seal(b"a gradient"))
    assert server.opener().open(message) == b"a gradient"
    with pytest.raises(ProtocolError):
        client.opener().open(message)  # reflected


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Option.NONE, Option.NONE),
        (Option.AUTO, Option.AUTO),
        (FAR | Option.NO_LIBRARY, FAR),
        (FAR, FAR | Option.NO_LIBRARY),
    ],
)
def test_what_is_not_sealed(ours, theirs):
    client, server = ends(ours, theirs)
    talk(client, server)
    assert client.sealing is server.sealing is None


@pytest.mark.parametrize("mode", [ON, INTEGRITY])
def test_no_record_opens_in_another_place(mode):
    """Records changed, or of another lane, connection, direction, view or purpose: all refused.

    TEST_DAMAGES=1000000 tries as many. Each takes the place of the right record, which the same
    opener opens before and after some of them: what it refuses is refused for the change.
    """
    client, server = sealed(mode, mode)
    others = {
        "another connection": sealed(mode, mode)[0],
        "another lane": sealed(mode, mode, lane=8)[0],
        "another view": sealed(mode, mode, lane=7 | 1 << 8)[0],
        "another purpose": sealed(mode, mode, purpose=Purpose.PEER)[0],
        "the other direction": server,
    }
    sealers = {name: one.sealer() for name, one in others.items()}
    sealer, opener = client.sealer(), server.opener()
    generator = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    kinds = [*others, "flip", "cut", "longer", "repeat", "reorder", "no tag", "head"]
    tried, refused = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    data, before = bytes(range(64)), b"\0" * (TAG_BYTES + 64)
    for number in range(N_DAMAGES):
        place = opener.number
        sealer.skip_to(place)
        right, head = bytes(sealer.seal(data, b"head")), b"head"
        if number % 100 == 0:
            assert opener.open(right, head) == data
            continue
        what = kinds[number % len(kinds)]
        wrong = right
        if what in sealers:
            sealers[what].skip_to(place)
            wrong = bytes(sealers[what].seal(data, head))
        elif what == "flip":
            changed, bit = bytearray(right), generator.randrange(8 * len(right))
            changed[bit // 8] ^= 1 << bit % 8
            wrong = bytes(changed)
        elif what == "cut":
            wrong = right[: generator.randrange(TAG_BYTES, len(right))]
        elif what == "longer":
            wrong = right + generator.randbytes(generator.randrange(1, 9))
        elif what == "repeat":
            wrong = before
        elif what == "reorder":
            wrong = bytes(sealer.seal(data, head))
        elif what == "no tag":
            wrong = bytes(TAG_BYTES) + right[TAG_BYTES:]
        else:
            head = b"heap"
        for one in (wrong, right) if what == "reorder" else (wrong,):
            tried[what] += 1
            try:
                opener.open(one, head)
            except ProtocolError:
                refused[what] += 1
        before = right
    print("refused", sum(refused.values()), "of", sum(tried.values()), refused)
    assert refused == tried


def test_each_connection_has_its_own_keys():
    found = [one for _ in range(20) for one in sealed()[0][2:]]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("ours", MODES)
@pytest.mark.parametrize("theirs", MODES)
def test_other_modes_are_refused_with_words_on_both_sides(ours, theirs):
    client, server = ends(MODES[ours], MODES[theirs])
    if ours == theirs:
        talk(client, server)
        return
    with pytest.raises(EncryptionError, match=f"is {theirs} here and {ours} at the peer"):
        server.challenge(client.hello())
    with pytest.raises(EncryptionError, match=f"is {ours} here and {theirs} at the peer; set"):
        client.answer(server.refusal)
    assert client.sealing is server.sealing is None


@pytest.mark.parametrize("place", [0, 1])
def test_without_a_library_nothing_is_sent_in_clear(place):
    options = [ON, ON]
    options[place] |= Option.NO_LIBRARY
    with pytest.raises(EncryptionError, match="needs libcrypto, and"):
        talk(*ends(*options))


def test_a_client_with_another_mode_never_proves_anything():
    """A server that claims the client's own mode in a refusal gets nowhere."""
    client, _ = ends(ON, ON)
    client.hello()
    with pytest.raises(ProtocolError, match="wrong_mode"):
        client.answer(handshake._challenge_refusal(handshake.Status.WRONG_MODE, ON))


@given(
    step=st.integers(0, 3),
    place=st.integers(0, 1 << 16),
    mode=st.sampled_from([FAR, ON, INTEGRITY]),
)
@settings(max_examples=300, deadline=None)
def test_no_changed_bit_passes(step, place, mode):
    """One bit of one message, so also of options: nobody turns encryption off on the way."""
    client, server = ends(mode, mode)

    def change(number: int, data: bytes) -> bytes:
        if number != step:
            return data
        changed, bit = bytearray(data), place % (8 * len(data))
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    with pytest.raises((AuthError, ProtocolError, NoPlaceError, AssertionError)):
        talk(client, server, change)
    assert client.sealing is None, "the client sends nothing"


def test_the_option_that_seals_cannot_be_cleared():
    client, server = ends(Option.AUTO, FAR)

    def change(number: int, data: bytes) -> bytes:
        return data[:7] + bytes([data[7] & ~Option.LEAVES]) + data[8:] if number == 1 else data

    with pytest.raises(AuthError, match="does not know the job token"):
        talk(client, server, change)


def test_a_wrong_token_is_told():
    client, server = ends(ON, ON, other=KEY[::-1])
    client_hello = client.hello()
    with pytest.raises(AuthError, match="does not know the job token"):
        client.answer(server.challenge(client_hello))
    client, server = ends(ON, ON)
    client.answer(server.challenge(client.hello()))
    with pytest.raises(AuthError):
        server.accept(bytes(64))
    assert server.sealing is None
    with pytest.raises(AuthError, match="wrong job token"):
        client.finish(server.refusal)


def test_a_refusal_after_the_proof_is_proven():
    client, server = ends(ON, ON)
    server.accept(client.answer(server.challenge(client.hello())))
    with pytest.raises(NoPlaceError):
        client.finish(server.refusal)


def test_nothing_is_computed_for_who_does_not_know_the_token(monkeypatch):
    """A flood of clients without the token costs a server hashes alone."""
    computed = []
    compute = ciphers.public_key
    monkeypatch.setattr(ciphers, "public_key", lambda one: computed.append(1) or compute(one))
    for answer in (bytes(64), bytes(32), b""):
        client, server = ends(ON, ON)
        server.challenge(client.hello())
        with pytest.raises(AuthError):
            server.accept(answer)
    assert not computed
    talk(*ends(ON, ON))
    assert len(computed) == 2


def test_the_cipher_is_no_matter_of_who_connects():
    for ours in (ON, ON | Option.NO_AES):
        for theirs in (ON, ON | Option.NO_AES):
            assert agree(ours, theirs) == agree(theirs, ours)
