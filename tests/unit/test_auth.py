# SPDX-License-Identifier: Apache-2.0
"""The handshake: who is let in, who is not, and what an attacker gains from listening."""

from __future__ import annotations

import ast
import hashlib
import hmac
import inspect
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aids import wire
from fastps.errors import AuthError, FastPSError, ProtocolError, TransportError
from fastps.security import handshake
from fastps.security.handshake import (
    Claim,
    ClientHandshake,
    Option,
    Purpose,
    ServerHandshake,
    Status,
    derive_key,
)

TOKEN = bytes(range(32))
KEY = derive_key(TOKEN, "control", "job")
OTHER = derive_key(TOKEN[:-1] + b"x", "control", "job")


def make_client(key: bytes = KEY, **more: object) -> ClientHandshake:
    arguments = {"purpose": Purpose.DATA, "sender": 3, "lane": 1} | more
    return ClientHandshake(key, **arguments)


def talk(client: ClientHandshake, server: ServerHandshake, change=lambda step, data: data) -> None:
    """Run a whole handshake; `change` sits on the wire."""
    challenge = server.challenge(change(0, client.hello()))
    proof = client.answer(change(1, challenge))
    accept = server.accept(change(2, proof))
    client.finish(change(3, accept))


@given(
    key=st.binary(max_size=64),
    purpose=st.sampled_from(Purpose),
    sender=st.integers(0, 2**32 - 1),
    lane=st.integers(0, 2**32 - 1),
)
def test_right_key_is_accepted(key, purpose, sender, lane):
    server = ServerHandshake(key)
    talk(ClientHandshake(key, purpose=purpose, sender=sender, lane=lane), server)
    assert (server.purpose, server.sender, server.lane) == (purpose, sender, lane)


@pytest.mark.parametrize("ours", [Option.NONE, Option.CHECK_PAYLOADS])
@pytest.mark.parametrize("theirs", [Option.NONE, Option.CHECK_PAYLOADS])
def test_an_option_holds_if_either_side_wants_it(ours, theirs):
    client, server = make_client(options=ours), ServerHandshake(KEY, options=theirs)
    talk(client, server)
    assert client.options == server.options == ours | theirs


@pytest.mark.parametrize("step", [0, 1])
def test_nobody_on_the_way_clears_an_option(step):
    """It is byte 7 of the hello and of the challenge; both proofs cover it."""
    options = Option.CHECK_PAYLOADS
    client, server = make_client(options=options), ServerHandshake(KEY, options=options)
    with pytest.raises(AuthError):
        talk(client, server, lambda i, data: data[:7] + b"\0" + data[8:] if i == step else data)


def test_steps_of_both_sides_fit_each_other():
    """Each side asks for what the other one says next."""
    server, client = ServerHandshake(KEY), make_client()
    sides = [client.steps(), server.steps()]
    said, wanted = [b"", b""], [0, 0]  # to be read by each side
    for side in (0, 1):
        said[1 - side], wanted[side] = next(sides[side])
    for side in (1, 0):
        assert len(said[side]) == wanted[side]
        said[1 - side], wanted[side] = sides[side].send(said[side])
    with pytest.raises(StopIteration) as end:
        sides[1].send(said[1])
    with pytest.raises(StopIteration):
        sides[0].send(end.value.value)
    assert (server.purpose, server.sender, server.lane) == (Purpose.DATA, 3, 1)


def test_a_key_that_is_not_known_yet_is_asked_for_again():
    claims = [None, None, Claim(KEY)]
    server, client = ServerHandshake(lambda *_: claims.pop(0)), make_client()
    steps = server.steps()
    assert next(steps)[0] == b""
    found = steps.send(client.hello())
    while found == (b"", 0):
        assert not server.refusal
        found = steps.send(b"")
    assert not claims
    with pytest.raises(StopIteration) as end:
        steps.send(client.answer(found[0]))
    client.finish(end.value.value)


def test_who_knows_the_token_is_told_that_there_is_no_place():
    client, server = make_client(), ServerHandshake(KEY)
    server.accept(client.answer(server.challenge(client.hello())))
    with pytest.raises(TransportError, match="no place"):
        client.finish(server.refusal)


def test_sizes_are_fixed():
    sizes = (
        handshake.HELLO_BYTES,
        handshake.CHALLENGE_BYTES,
        handshake.PROOF_BYTES,
        handshake.ACCEPT_BYTES,
    )
    assert sizes == (32, 56, 32, 40)
    client, server = make_client(), ServerHandshake(KEY)
    seen = []
    talk(client, server, lambda step, data: seen.append(len(data)) or data)
    assert tuple(seen) == sizes


def test_layout_of_the_hello():
    hello = make_client(sender=7, lane=2, random_bytes=lambda n: b"n" * n).hello()
    assert hello == b"FPSH" + struct.pack("<HBBII", 3, 3, 0, 7, 2) + b"n" * 16


def test_proofs_by_hand():
    """Compute all proofs from the formulas of the module's head."""
    hello = make_client(random_bytes=lambda n: b"c" * n).hello()
    server = ServerHandshake(KEY, random_bytes=lambda n: b"s" * n)
    challenge = server.challenge(hello)
    head = b"FPSH" + struct.pack("<HBB", 3, 0, 0) + b"s" * 16
    proof = hmac.new(KEY, b"server" + hello + head, hashlib.sha256).digest()
    assert challenge == head + proof
    answer = hmac.new(KEY, b"client" + hello + challenge, hashlib.sha256).digest()
    head = b"FPSH" + struct.pack("<HBB", 3, 0, 0)
    last = hmac.new(KEY, b"accept" + hello + challenge + answer + head, hashlib.sha256).digest()
    assert server.accept(answer) == head + last


def test_version_is_that_of_the_frames():
    assert handshake.PROTOCOL_VERSION == wire.PROTOCOL_VERSION
    assert struct.pack("<I", wire.MAGIC) != handshake.MAGIC


def test_client_notices_a_server_with_another_token():
    with pytest.raises(AuthError, match="FASTPS_TOKEN"):
        talk(make_client(), ServerHandshake(OTHER))


def test_server_notices_a_client_with_another_token():
    client, server = make_client(OTHER), ServerHandshake(KEY)
    server.challenge(client.hello())
    with pytest.raises(AuthError, match="FASTPS_TOKEN"):
        server.accept(handshake._prove(OTHER, b"client", client._hello, b""))
    client._step = "finish"
    with pytest.raises(AuthError, match="wrong job token"):
        client.finish(server.refusal)


def test_a_replayed_proof_is_refused():
    client, first = make_client(), ServerHandshake(KEY)
    hello = client.hello()
    proof = client.answer(first.challenge(hello))
    first.accept(proof)
    second = ServerHandshake(KEY)
    second.challenge(hello)
    with pytest.raises(AuthError):
        second.accept(proof)


def test_a_replayed_challenge_is_refused():
    challenge = ServerHandshake(KEY).challenge(make_client().hello())
    client = make_client()
    client.hello()
    with pytest.raises(AuthError):
        client.answer(challenge)


def test_a_proof_of_one_direction_never_works_in_the_other():
    """A client without the key sends the server's own proof back."""
    server = ServerHandshake(KEY)
    challenge = server.challenge(make_client(OTHER).hello())
    with pytest.raises(AuthError):
        server.accept(challenge[-handshake.PROOF_BYTES :])


def test_a_reflected_challenge_is_refused():
    """A false server makes a true one compute its answer for the client's hello."""
    victim = make_client()
    hello = victim.hello()
    oracle = ServerHandshake(KEY)
    honest = oracle.challenge(hello)
    false = honest[: -handshake.PROOF_BYTES] + handshake._prove(KEY, b"client", hello, honest)
    with pytest.raises(AuthError):
        victim.answer(false)


def test_a_proof_is_bound_to_purpose_sender_and_lane():
    def fixed(count: int) -> bytes:
        return b"r" * count

    proofs = set()
    for more in ({}, {"purpose": Purpose.PULSE}, {"sender": 4}, {"lane": 0}):
        client = make_client(random_bytes=fixed, **more)
        challenge = ServerHandshake(KEY, random_bytes=fixed).challenge(client.hello())
        proofs.add(client.answer(challenge))
    assert len(proofs) == 4


def test_a_second_guess_needs_a_new_connection():
    client, server = make_client(), ServerHandshake(KEY)
    proof = client.answer(server.challenge(client.hello()))
    with pytest.raises(AuthError):
        server.accept(bytes(32))
    with pytest.raises(ProtocolError):
        server.accept(proof)


def test_accept_before_challenge_is_refused():
    with pytest.raises(ProtocolError):
        ServerHandshake(KEY).accept(b"")
    with pytest.raises(ProtocolError):
        make_client().answer(bytes(handshake.CHALLENGE_BYTES))
    with pytest.raises(ProtocolError):
        make_client().finish(bytes(handshake.ACCEPT_BYTES))


def test_a_client_that_did_not_check_the_server_sends_no_second_hello():
    client = make_client()
    client.hello()
    with pytest.raises(ProtocolError):
        client.hello()


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("cut", [lambda b: b"", lambda b: b[:-1], lambda b: b + b"\0"])
def test_a_message_of_wrong_length_is_refused(step, cut):
    with pytest.raises((ProtocolError, AuthError)):
        talk(make_client(), ServerHandshake(KEY), lambda i, b: cut(b) if i == step else b)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_another_version_is_refused_by_name(step):
    def older(index: int, data: bytes) -> bytes:
        return data[:4] + struct.pack("<H", 1) + data[6:] if index == step else data

    with pytest.raises(ProtocolError, match="version 1, this process 3"):
        talk(make_client(), ServerHandshake(KEY), older)


def test_a_client_of_another_version_is_told():
    server = ServerHandshake(KEY)
    hello = make_client().hello()
    with pytest.raises(ProtocolError, match="version 9"):
        server.challenge(hello[:4] + struct.pack("<H", 9) + hello[6:])
    client = make_client()
    client.hello()
    with pytest.raises(ProtocolError, match="wrong_version"):
        client.answer(server.refusal)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_wrong_magic_is_refused(step):
    with pytest.raises(ProtocolError, match="check host and port"):
        talk(
            make_client(),
            ServerHandshake(KEY),
            lambda i, data: b"HTTP" + data[4:] if i == step else data,
        )


def test_a_port_scanner_gets_no_answer():
    server = ServerHandshake(KEY)
    with pytest.raises(ProtocolError):
        server.challenge(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"[:32])
    assert server.refusal == b""


def test_a_port_serves_only_its_purposes():
    server = ServerHandshake(KEY, purposes=(Purpose.CONTROL, Purpose.PULSE))
    client = make_client(purpose=Purpose.DATA)
    with pytest.raises(ProtocolError, match="not served"):
        server.challenge(client.hello())
    with pytest.raises(ProtocolError, match="wrong_purpose"):
        client.answer(server.refusal)


@pytest.mark.parametrize("purpose", [0, 6, 255])
def test_unknown_purpose(purpose):
    hello = bytearray(make_client().hello())
    hello[6] = purpose
    with pytest.raises(ProtocolError):
        ServerHandshake(KEY).challenge(bytes(hello))
    with pytest.raises(ValueError, match="Purpose"):
        make_client(purpose=purpose)


def test_unknown_status_is_refused():
    client = make_client()
    client.answer(ServerHandshake(KEY).challenge(client.hello()))
    with pytest.raises(ProtocolError, match="status 77"):
        client.finish(b"FPSH" + struct.pack("<HBB32s", handshake.PROTOCOL_VERSION, 77, 0, b""))


@given(st.integers(0, 3), st.integers(0), st.integers(1, 255))
def test_a_flipped_byte_is_never_accepted(step, place, mask):
    """Wherever the byte is, one side raises."""
    server, client = ServerHandshake(KEY), make_client()

    def flip(index: int, data: bytes) -> bytes:
        if index != step:
            return data
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]

    with pytest.raises(FastPSError):
        talk(client, server, flip)


@pytest.mark.parametrize("status", [Status.OK, Status.NO_PLACE])
def test_a_last_message_that_the_server_has_not_proven_is_refused(status):
    """It was believed, whoever had put it between."""
    client = make_client()
    client.answer(ServerHandshake(KEY).challenge(client.hello()))
    forged = b"FPSH" + struct.pack("<HBB32s", handshake.PROTOCOL_VERSION, status, 0, b"")
    with pytest.raises(AuthError, match="not proven"):
        client.finish(forged)


@given(st.binary(max_size=100))
def test_garbage_is_never_accepted(data):
    server = ServerHandshake(KEY)
    with pytest.raises(ProtocolError):
        server.challenge(data)
    client = make_client()
    client.hello()
    with pytest.raises((ProtocolError, AuthError)):
        client.answer(data)
    other = ServerHandshake(KEY)
    other.challenge(make_client().hello())
    with pytest.raises(AuthError):
        other.accept(data)


def test_nonces_are_fresh():
    assert make_client().hello() != make_client().hello()
    hello = make_client().hello()
    assert ServerHandshake(KEY).challenge(hello) != ServerHandshake(KEY).challenge(hello)


def test_the_token_is_never_on_the_wire():
    seen = []
    server = ServerHandshake(KEY)
    talk(make_client(), server, lambda step, data: seen.append(data) or data)
    assert TOKEN not in b"".join(seen)
    assert KEY not in b"".join(seen)


def test_keys_differ_by_token_purpose_and_job():
    keys = {
        derive_key(token, purpose, job)
        for token in (b"", b"a", TOKEN)
        for purpose, job in [("data", "x"), ("datax", ""), ("", "datax"), ("control", "x")]
    }
    assert len(keys) == 12
    assert {len(key) for key in keys} == {32}
    assert derive_key(TOKEN, "data", "x") == derive_key(TOKEN, "data", "x")


def test_secrets_are_compared_in_constant_time():
    """No proof is compared by == or !=; compare_digest does it on both sides."""
    tree = ast.parse(inspect.getsource(handshake))
    compared = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    assert not [text for text in compared if "proof" in text or "expected" in text.split("!=")[0]]
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert calls.count("hmac.compare_digest") == 3


def test_numbers_that_travel_do_not_move():
    assert {purpose.name: purpose.value for purpose in Purpose} == {
        "CONTROL": 1,
        "PULSE": 2,
        "DATA": 3,
        "MEMORY": 4,
        "PEER": 5,
    }
    assert [status.value for status in Status] == [0, 1, 2, 3, 4, 5]
    assert make_client(lane=0).hello()[12:16] == bytes(4)
    assert ClientHandshake(KEY, purpose=1, sender=0).hello()[12:16] == bytes(4)


def test_derived_key_by_hand():
    """Compute the key of processes of other versions, which must agree."""
    message = b"\x0a\0\0\0fastps key" + b"\x04\0\0\0data" + b"\x03\0\0\0job"
    assert derive_key(TOKEN, "data", "job") == hmac.new(TOKEN, message, hashlib.sha256).digest()
