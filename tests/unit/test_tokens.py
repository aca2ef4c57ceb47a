# SPDX-License-Identifier: Apache-2.0
"""Tokens of members' own: who has one proves that place alone, and finds the keys of its links."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.errors import AuthError, ConfigError, ProtocolError
from fastps.launch.secrets import main as command
from fastps.security.handshake import ClientHandshake, Purpose, ServerHandshake
from fastps.security.tokens import (
    ROLES,
    Token,
    make_keys,
    parse,
    sealed_keys,
    unseal_keys,
    whose,
    wipe,
    wipe_text,
)

JOB = Token(b"9f3a61c07be2d584")


@given(st.sampled_from(ROLES), st.integers(0, 1 << 16))
def test_what_is_written_is_read(role, rank):
    own = JOB.own(role, rank)
    assert parse(own.text().encode()) == own
    assert own.own("validator", 0) is own, "a member makes no other's"
    assert whose(JOB, own.lane, rank) == own


def test_each_place_has_another_token_and_key():
    tokens = [JOB, *(JOB.own(role, rank) for role in ROLES for rank in range(3))]
    assert len({one.secret for one in tokens}) == len(tokens)
    assert len({one.key("control", job) for one in tokens for job in "xy"}) == 2 * len(tokens)
    assert whose(JOB, 0, 5) == JOB
    with pytest.raises(AuthError, match="no role 9"):
        whose(JOB, 9, 0)


def test_of_several_own_tokens_each_member_takes_its_own():
    text = "\n".join(JOB.own("worker", rank).text() for rank in range(3)).encode()
    assert parse(text, "worker", 2).rank == 2
    assert parse(text, "server", 1).rank == 0
    assert parse(JOB.secret, "worker", 2) == JOB


@pytest.mark.parametrize("change", ["", "x", "0", ":"])
def test_a_changed_token_is_none(change):
    text = JOB.own("worker", 1).text()
    with pytest.raises(ConfigError, match="cut or changed"):
        parse((text + change if change else text[:-2]).encode())


def test_a_token_that_is_no_text_is_none():
    with pytest.raises(ConfigError, match="cut or changed"):
        parse(b"fastps-own:\xff")


@pytest.mark.parametrize("nbytes", [0, 1, 31, 33])
def test_keys_that_the_scheduler_cut_are_an_error(nbytes):
    with pytest.raises(ProtocolError, match=f"sent {nbytes} bytes of keys"):
        unseal_keys(JOB.own("worker", 0), "job", bytes(nbytes))


@given(st.integers(2, 9))
def test_two_members_find_the_same_key_and_nobody_else_does(n):
    own = [JOB.own("worker", rank) for rank in range(n)]
    sealed = [sealed_keys(JOB, one, "job", me=i, machine=i % 2, n=n) for i, one in enumerate(own)]
    found = [unseal_keys(one, "job", text) for one, text in zip(own, sealed, strict=True)]
    for one, other in itertools.combinations(range(n), 2):
        assert (
            found[one].of(other) == found[other].of(one) == make_keys(JOB, "job", one, 0).of(other)
        )
        assert (found[one].memory == found[other].memory) == (one % 2 == other % 2)
    assert len({found[0].of(peer) for peer in range(n)}) == n
    assert unseal_keys(own[0], "job", sealed[1]).of(0) != found[1].of(0)
    with pytest.raises(AuthError, match=f"no member {n}"):
        found[0].of(n)


def test_own_tokens_are_made_by_command(tmp_path, monkeypatch, capsys):
    file = tmp_path / "job.token"
    file.write_bytes(JOB.secret)
    file.chmod(0o600)
    monkeypatch.setenv("FASTPS_TOKEN_FILE", str(file))
    assert command(["worker", "3"]) == 0
    assert capsys.readouterr().out == JOB.own("worker", 3).text() + "\n"
    assert command(["scheduler", "0"]) == 2
    assert "FASTPS_TOKEN_FILE" in capsys.readouterr().err


@pytest.mark.parametrize("is_own", [False, True])
def test_a_child_can_forget_what_it_has_no_use_for(is_own):
    job = Token(bytes(range(1, 33)))
    own = job.own("worker", 1)
    if is_own:
        keys = unseal_keys(own, "job", sealed_keys(job, own, "job", me=1, machine=0, n=3))
    else:
        own, keys = job, make_keys(job, "job", 1, 0)
    wipe(own, keys)
    assert own.secret == keys.memory == bytes(32)
    if is_own:
        assert all(keys.of(peer) == bytes(32) for peer in range(3))
    with pytest.raises(AuthError, match="was overwritten"):
        own.key("data", "job")
    hello = ClientHandshake(keys.memory, purpose=Purpose.MEMORY, sender=0).hello()
    with pytest.raises(AuthError, match="was overwritten"):
        ServerHandshake(keys.memory).challenge(hello)
    wipe(Token(b""), None)


def test_a_text_is_overwritten_where_it_lies():
    secret = b"9f3a61c07be2d584".decode()
    other = b"Gr\xc3\xbc\xc3\x9fe".decode()
    for text in (secret, other, ""):
        wipe_text(text)
    assert (secret, other) == ("0" * 16, "Gr\u00fc\u00dfe")
