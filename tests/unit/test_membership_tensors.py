# SPDX-License-Identifier: Apache-2.0
"""Declarations, barriers and blobs."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from control_driver import Driver, make_config, make_spec
from msgspec.structs import replace

from fastps.contract.codec import Codec, Coding
from fastps.contract.contract import Givers
from fastps.contract.partition import MAX_PIECES
from fastps.control.collectives import MAX_BARRIERS, MAX_HELD_BYTES
from fastps.control.declarations import MAX_VERSION, Declarations
from fastps.control.protocol import (
    LENGTH,
    MAX_BLOB_BYTES,
    Blob,
    BlobData,
    Declare,
    Declared,
    DeclareKeys,
    Dispute,
    Done,
    Dropped,
    Failed,
    Forget,
    ForgetKeys,
    KeysFailed,
    KeysReady,
    Malformed,
    Parts,
    TensorPoisoned,
    TensorSpec,
    pack,
    unpack_to_scheduler,
)
from fastps.types import DType


def announced(driver: Driver, server: int) -> DeclareKeys:
    event = driver.events(server, DeclareKeys)[-1]
    assert isinstance(event, DeclareKeys)
    return event


def make_ready(driver: Driver, servers: list[int]) -> None:
    for server in servers:
        driver.say(server, KeysReady(announced(driver, server).request_id))


class TestDeclaring:
    def test_answer_comes_when_all_servers_are_ready(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        specs = [make_spec("a", (5000,)), make_spec("b", ())]
        number = driver.declare(workers[0], *specs)
        keys = announced(driver, servers[0])
        assert keys == announced(driver, servers[1])
        assert [(key.tensor_id, key.name) for key in keys.keys] == [(0, "a"), (1, "b")]
        driver.say(servers[0], KeysReady(keys.request_id))
        assert not driver.events(workers[0], Declared)
        driver.say(servers[1], KeysReady(keys.request_id))
        answer = driver.last(workers[0])
        assert isinstance(answer, Declared)
        assert answer.request == number
        assert answer.tensors[0].pieces == next(keys.keys).pieces
        stripes = [(3328, 2)] * 3 + [(3392, 3)] * 2 + [(3232, 3)]
        assert list(answer.tensors[0].pieces) == stripes
        assert answer.tensors[1].pieces == ((4, 2),)

    def test_second_worker_gets_the_same_without_a_new_announcement(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec("a"), make_spec("b"))
        driver.declare(workers[1], make_spec("b"))
        assert len(driver.events(servers[0], DeclareKeys)) == 1
        make_ready(driver, servers)
        first, second = driver.last(workers[0]), driver.last(workers[1])
        assert isinstance(first, Declared)
        assert isinstance(second, Declared)
        assert second.tensors == first.tensors[1:]
        driver.declare(workers[1], make_spec("b"))
        again = driver.last(workers[1])
        assert isinstance(again, Declared)
        assert again.tensors == second.tensors

    def test_ready_of_one_server_counts_once(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec())
        batch = announced(driver, servers[0]).request_id
        driver.say(servers[0], KeysReady(batch))
        driver.say(servers[0], KeysReady(batch))
        driver.say(servers[1], KeysReady(batch + 1))
        driver.say(workers[1], KeysReady(batch))
        assert not driver.events(workers[0], Declared)

    def test_job_without_servers(self) -> None:
        driver = Driver(size=2, num_servers=0)
        workers, _ = driver.start()
        driver.declare(workers[0], make_spec())
        answer = driver.last(workers[0])
        assert isinstance(answer, Declared)
        assert answer.tensors[0].pieces == ((800, 0),)  # cut all the same

    def test_new_generation_begins_with_an_empty_table(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec("a"))
        make_ready(driver, servers)
        for peer in workers:
            driver.leave(peer)
        again = [driver.enter(), driver.enter()]
        driver.declare(again[0], make_spec("a", (3, 3)))
        make_ready(driver, servers)
        assert isinstance(driver.last(again[0]), Declared)

    @pytest.mark.parametrize(
        ("other", "parts"),
        [
            (make_spec("w", (10, 21)), ["(10, 20)", "(10, 21)"]),
            (make_spec("w", dtype=int(DType.INT32)), ["float32", "int32"]),
            (make_spec("w", partition_bytes=8192), ["at most 4096 bytes", "at most 8192 bytes"]),
            (make_spec("w", chunk_bytes=8192), ["chunks of 4096", "chunks of 8192"]),
            (make_spec("w", (1 << 40,)), ["(10, 20)", "(1099511627776,)"]),  # of too many pieces
        ],
    )
    def test_mismatch_reaches_all(self, other: TensorSpec, parts: list[str]) -> None:
        driver = Driver(size=3)
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec("w"))
        make_ready(driver, servers)
        driver.declare(workers[1], make_spec("fine"), other)
        failed = driver.last(workers[1])
        assert isinstance(failed, Failed)
        assert failed.kind == "mismatch"
        for part in ["'w'", "worker 0", "worker 1", *parts]:
            assert part in failed.message
        poisoned = driver.last(workers[0])
        assert poisoned == TensorPoisoned(0, "w", failed.message)
        driver.declare(workers[2], make_spec("w"))
        late = driver.last(workers[2])
        assert isinstance(late, Failed)
        assert late.message == failed.message
        assert not driver.events(servers[0], TensorPoisoned)

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            ((("a", 1, (3,)), ("b", 1, (5, 3))), "'b', of those that travel together, differs"),
            ((("a", 1, (3,)),), "worker 1 has no such tensor there, but worker 0 has float32"),
            ((), "'w', of those that travel together, differs between workers: worker 1 has"),
            ((("c", 1, (3,)), ("b", 1, (3, 5))), "worker 0 has 'a', float32 of shape (3,)"),
            ((("a", 1, (3,)), ("b", 3, (3, 5))), "worker 1 has float16 of shape (3, 5)"),
        ],
    )
    def test_what_travels_together_is_compared(self, other: Parts, words: str) -> None:
        parts = (("a", 1, (3,)), ("b", 1, (3, 5)))
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec("w", parts=parts))
        make_ready(driver, servers)
        driver.declare(workers[1], make_spec("w", parts=other))
        failed = driver.last(workers[1])
        assert isinstance(failed, Failed)
        assert words in failed.message
        assert driver.last(workers[0]) == TensorPoisoned(0, "w", failed.message)

    def test_mismatch_ends_a_declaration_that_waits(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        first = driver.declare(workers[0], make_spec("w"))
        second = driver.declare(workers[1], make_spec("w", (1,)))
        for peer, number in zip(workers, (first, second), strict=True):
            failed = driver.last(peer)
            assert isinstance(failed, Failed)
            assert (failed.request, failed.kind) == (number, "mismatch")

    def test_other_tensors_survive_a_mismatch(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec("w"), make_spec("v"))
        make_ready(driver, servers)
        driver.declare(workers[1], make_spec("w", (1,)))
        driver.declare(workers[1], make_spec("v"))
        assert isinstance(driver.last(workers[1]), Declared)

    def test_many_mismatches_stay_readable(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], *(make_spec(f"w{i}") for i in range(50)))
        make_ready(driver, servers)
        driver.declare(workers[1], *(make_spec(f"w{i}", (1,)) for i in range(50)))
        failed = driver.last(workers[1])
        assert isinstance(failed, Failed)
        assert "46 more tensors" in failed.message

    @pytest.mark.parametrize("field", ["partition_bytes", "chunk_bytes"])
    @pytest.mark.parametrize("value", [1, 64, 4095, 4097, (1 << 30) + 64])
    def test_the_wire_has_the_bounds_of_the_settings(self, field: str, value: int) -> None:
        """Or one spec could make 65 536 pieces of a few bytes each."""
        layout = replace(make_spec().layout, **{field: value})
        asked = Declare.of(3, [TensorSpec("w", layout)], 1.0)
        message = unpack_to_scheduler(bytes(pack(asked)[LENGTH.size :]))
        assert isinstance(message, Malformed)
        assert field in message.message

    def test_a_job_has_a_bound_on_its_pieces(self) -> None:
        driver = Driver(num_servers=0)
        workers, _ = driver.start()
        shape = (1024 * 60_000,)  # 60 000 pieces each
        many = [make_spec(f"w{i}", shape) for i in range(5)]
        driver.declare(workers[0], *many[:4])
        assert isinstance(driver.last(workers[0]), Declared)
        began = time.process_time()
        for _ in range(3):
            driver.declare(workers[0], *(make_spec(f"v{i}", shape) for i in range(200)))
            failed = driver.last(workers[0])
            assert isinstance(failed, Failed)
            assert failed.kind == "config"
            assert str(MAX_PIECES) in failed.message
            assert "FASTPS_PARTITION_BYTES" in failed.message
        assert time.process_time() - began < 1.0
        driver.declare(workers[1], *many)
        assert isinstance(driver.last(workers[1]), Declared)

    @pytest.mark.parametrize(("n_shapes", "most_bytes"), [(10, 300), (5000, 800)])
    def test_names_are_cheap(self, n_shapes: int, most_bytes: int) -> None:
        """Hundreds of thousands of them are ordinary, and most have the shape of others."""
        table = Declarations(make_config(), owners={2: 11, 3: 12})
        specs = tuple(
            make_spec(f"layers.{i}.weight", (1000 + i % n_shapes, 3), partition_bytes=1 << 20)
            for i in range(5000)
        )
        body = bytes(pack(Declare.of(1, specs, 60.0))[LENGTH.size :])
        tracemalloc.start()
        for rank in range(2):
            asked = unpack_to_scheduler(body)
            assert isinstance(asked, Declare)
            table.declare(rank, rank, asked, 0.0)
        del asked
        answers = table.keys_ready(2, 0) + table.keys_ready(3, 0)
        assert [type(message) for _, message in answers] == [Declared] * 2
        del answers
        nbytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert nbytes / len(specs) < most_bytes

    def test_server_that_cannot_hold_the_keys(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec("w"))
        batch = announced(driver, servers[1]).request_id
        driver.say(servers[1], KeysFailed(batch, "out of memory"))
        failed = driver.events(workers[0], Failed)[-1]
        assert isinstance(failed, Failed)
        assert failed.kind == "error"
        assert "server 1" in failed.message
        assert "out of memory" in failed.message

    def test_timeout_names_the_servers(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec("w"), timeout_s=3.0)
        driver.say(servers[0], KeysReady(announced(driver, servers[0]).request_id))
        driver.keep_alive()
        driver.advance(3)
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert failed.kind == "stall"
        assert "not ready: server 1;" in failed.message

    @pytest.mark.parametrize(
        "spec",
        [
            make_spec(dtype=99, nbytes=8),
            make_spec(nbytes=799),
            make_spec(shape=(1 << 40,), partition_bytes=4096),
            make_spec(coding=Coding(Codec.TOPK, k=1.5)),
            make_spec(updates=Coding(mu=1.0)),
        ],
    )
    def test_impossible_tensors_change_nothing(self, spec: TensorSpec) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.declare(workers[0], make_spec("fine"), spec)
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert failed.kind == "config"
        assert "'w'" in failed.message
        assert not driver.events(servers[0], DeclareKeys)

    def test_servers_cannot_declare(self) -> None:
        driver = Driver()
        _, servers = driver.start()
        driver.declare(servers[0], make_spec())
        failed = driver.last(servers[0])
        assert isinstance(failed, Failed)
        assert failed.kind == "protocol"


class TestBarriers:
    def test_opens_for_all_at_once_and_again(self) -> None:
        driver = Driver(size=3)
        workers, _ = driver.start()
        for _ in range(2):
            numbers = [driver.barrier(peer) for peer in workers[:2]]
            assert not isinstance(driver.last(workers[0]), Done) or numbers[0] > 10
            numbers.append(driver.barrier(workers[2]))
            assert [driver.last(peer) for peer in workers] == [Done(n) for n in numbers]

    def test_timeout_names_the_missing_and_where_they_are(self) -> None:
        driver = Driver(size=3)
        workers, _ = driver.start()
        driver.barrier(workers[0], "epoch", timeout_s=5)
        driver.barrier(workers[2], "other", timeout_s=60)
        driver.keep_alive()
        driver.advance(5)
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert failed.kind == "stall"
        assert "missing: worker 1, worker 2" in failed.message
        assert "worker 2 waits in barrier 'other'" in failed.message
        assert not driver.events(workers[2], Failed)

    def test_one_that_gives_up_ends_it_for_all(self) -> None:
        driver = Driver(size=3)
        workers, _ = driver.start()
        driver.barrier(workers[0], timeout_s=60)
        driver.barrier(workers[1], timeout_s=1)
        driver.advance(1)
        for peer in workers[:2]:
            failed = driver.last(peer)
            assert isinstance(failed, Failed)
            assert "after 1 s of worker 1; missing: worker 2" in failed.message

    def test_same_worker_twice_is_in_two_barriers(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        first, second = [driver.barrier(workers[0]) for _ in range(2)]
        others = [driver.barrier(workers[1])]
        assert driver.last(workers[1]) == Done(others[0])
        assert driver.last(workers[0]) == Done(first)
        third = driver.barrier(workers[0])
        others += [driver.barrier(workers[1]) for _ in range(2)]
        said = [answer for answer in driver.sent[workers[0]] if isinstance(answer, Done)]
        assert said[-3:] == [Done(first), Done(second), Done(third)]
        assert not driver.machine.pending()

    def test_too_many_barriers_are_refused(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        numbers = [driver.barrier(workers[0]) for _ in range(MAX_BARRIERS + 1)]
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert (failed.request, failed.kind) == (numbers[-1], "error")
        assert f"is already waiting {MAX_BARRIERS} times in barrier 'b'" in failed.message
        for _ in range(MAX_BARRIERS):
            driver.barrier(workers[1])
        assert not driver.machine.pending()

    def test_who_is_lost_in_a_barrier_alone_leaves_nothing_of_it(self) -> None:
        driver = Driver(size=3, on_loss="reweight")
        for _ in range(driver.config.num_servers):
            driver.enter("server", goes_on=True)
        workers = [driver.enter("worker", goes_on=True) for _ in range(3)]
        driver.barrier(workers[2])
        driver.blob(workers[2], 2, b"abc")
        driver.do(driver.machine.closed(workers[2], "it crashed", driver.now))
        driver.machine.next_deadline()
        numbers = [driver.barrier(peer) for peer in workers[:2]]
        assert [driver.last(peer) for peer in workers[:2]] == [Done(one) for one in numbers]


class TestValidators:
    """Workers 0 and 1, validator 2, and a server; the peer of each is ten more."""

    def table(self) -> Declarations:
        self.refused: dict[str, int] = {}
        return Declarations(make_config(), owners={3: 13}, refused=self.refused)

    def declare(self, table: Declarations, rank: int, now: float = 0.0, **changes: object) -> list:
        fields = {"givers": Givers.VALIDATORS, **changes}
        asked = Declare.of(rank, [make_spec("w", **fields)], 60.0)
        return table.declare(rank, rank + 10, asked, now)

    def test_who_declares_before_them_waits_for_them(self) -> None:
        table = self.table()
        assert self.declare(table, 0) == []
        ((peer, keys),) = self.declare(table, 2)
        assert (peer, type(keys)) == (13, DeclareKeys)
        answers = table.keys_ready(3, keys.request_id)
        assert sorted((peer, type(one)) for peer, one in answers) == [
            (10, Declared),
            (12, Declared),
        ]
        ((peer, answer),) = self.declare(table, 1)
        assert (peer, type(answer)) == (11, Declared)

    def test_who_waits_longer_than_its_time_is_told_for_whom(self) -> None:
        table = self.table()
        self.declare(table, 0)
        assert table.next_deadline() == 60.0
        ((peer, failed),) = table.expire(60.0)
        assert (peer, failed.kind) == (10, "stall")
        assert "no validator has declared them" in failed.message

    def test_their_layout_holds_and_others_are_refused_and_counted(self) -> None:
        table = self.table()
        keys = self.declare(table, 2)[0][1]
        table.keys_ready(3, keys.request_id)
        ((peer, failed),) = self.declare(table, 1, shape=(20, 10))
        assert (peer, failed.kind) == (11, "mismatch")
        assert list(self.refused.values()) == [1]
        assert isinstance(self.declare(table, 1)[0][1], Declared)

    def test_a_name_of_workers_becomes_theirs(self) -> None:
        table = self.table()
        keys = self.declare(table, 0, givers=Givers.WORKERS)[0][1]
        table.keys_ready(3, keys.request_id)
        (peer, poisoned), (server, again) = self.declare(table, 2)
        assert (peer, type(poisoned)) == (10, TensorPoisoned)
        assert "belongs to the validators" in poisoned.message
        assert (server, type(again)) == (13, DeclareKeys)
        ((peer, answer),) = table.keys_ready(3, again.request_id)
        assert (peer, type(answer)) == (12, Declared)


def forget(
    driver: Driver, peer: int, *names: str, timeout_s: float = 10.0, version: int = 1
) -> int:
    number = driver.request()
    driver.say(peer, Forget(number, tuple((name, version) for name in names), timeout_s))
    return number


class TestForgetting:
    def declared(self, driver: Driver, workers: list[int], servers: list[int], name: str) -> int:
        """Let all workers declare a name; give its id."""
        for peer in workers:
            driver.declare(peer, make_spec(name, (5000,)))
        if servers:
            make_ready(driver, servers)
        answers = [driver.last(peer) for peer in workers]
        assert all(isinstance(answer, Declared) for answer in answers)
        return answers[0].tensors[0].tensor_id  # type: ignore[union-attr]

    def told(
        self, driver: Driver, workers: list[int], servers: list[int], *names: str, version: int = 1
    ) -> None:
        """Let all workers forget names, and be told so."""
        for peer in workers:
            forget(driver, peer, *names, version=version)
        for server in servers:
            event = driver.events(server, ForgetKeys)[-1]
            assert isinstance(event, ForgetKeys)
            driver.say(server, KeysReady(event.request_id))
        assert all(isinstance(driver.last(peer), Done) for peer in workers)

    def drop(self, driver: Driver, *workers: int) -> None:
        """Let workers carry out what they were told last."""
        for peer in workers:
            done = driver.events(peer, Done)[-1]
            assert isinstance(done, Done)
            driver.say(peer, Dropped(done.request))

    def forgotten(
        self, driver: Driver, workers: list[int], servers: list[int], *names: str, version: int = 1
    ) -> None:
        self.told(driver, workers, servers, *names, version=version)
        self.drop(driver, *workers)

    def test_it_waits_for_all_workers_and_all_servers(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        tensor_id = self.declared(driver, workers, servers, "w")
        forget(driver, workers[1], "w")
        assert not driver.events(servers[0], ForgetKeys)
        forget(driver, workers[0], "w")
        event = driver.last(servers[1])
        assert isinstance(event, ForgetKeys)
        assert event.tensor_ids == (tensor_id,)
        driver.say(servers[0], KeysReady(event.request_id))
        assert not driver.events(workers[0], Done)
        driver.say(servers[1], KeysReady(event.request_id))
        assert driver.events(workers[0], Done)
        assert driver.events(workers[1], Done)
        driver.declare(workers[0], make_spec("w", (3,)))  # another shape: it is a new tensor
        make_ready(driver, servers)
        assert isinstance(driver.last(workers[0]), Declared)

    def test_an_id_is_used_again_when_every_worker_has_dropped_it(self) -> None:
        """Whatever else its threads ask for meanwhile."""
        driver = Driver()
        workers, servers = driver.start()
        first = self.declared(driver, workers, servers, "a")
        self.told(driver, workers, servers, "a")
        assert self.declared(driver, workers, servers, "b") != first
        self.drop(driver, workers[0])
        assert self.declared(driver, workers, servers, "c") != first
        driver.say(servers[0], Dropped(driver.last(workers[1]).request))  # is no worker
        assert self.declared(driver, workers, servers, "d") != first
        self.drop(driver, workers[1])
        assert self.declared(driver, workers, servers, "e") == first

    def test_an_id_is_used_again_when_who_has_not_dropped_it_leaves(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        first = self.declared(driver, workers, servers, "a")
        self.told(driver, workers, servers, "a")
        self.drop(driver, workers[0])
        driver.leave(workers[1])
        assert self.declared(driver, workers[:1], servers, "b") == first

    def test_versions_go_on_where_an_id_is_used_again(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        first = self.declared(driver, workers, servers, "a")
        for peer, version in zip(workers, (3, 7), strict=True):
            forget(driver, peer, "a", version=version)
        event = driver.last(servers[0])
        assert isinstance(event, ForgetKeys)
        assert event.tensor_ids == (first,)
        for server in servers:
            driver.say(server, KeysReady(event.request_id))
        self.drop(driver, *workers)
        for version in (7, 12):  # the second time it was not used
            assert self.declared(driver, workers, servers, f"b{version}") == first
            answer = driver.last(workers[0])
            assert isinstance(answer, Declared)
            assert answer.tensors[0].version == version
            assert next(announced(driver, 2).keys).version == version
            self.forgotten(driver, workers, servers, f"b{version}", version=12)

    def test_an_id_whose_versions_run_out_is_not_used_again(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        first = self.declared(driver, workers, servers, "a")
        self.forgotten(driver, workers, servers, "a", version=MAX_VERSION)
        assert self.declared(driver, workers, servers, "b") != first

    def test_names_are_told_apart_whatever_they_hold(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        for name in ("a", "b", "a, b", "'a', 'b'"):
            self.declared(driver, workers, servers, name)
        forget(driver, workers[0], "a", "b", timeout_s=3.0)
        forget(driver, workers[1], "a, b", timeout_s=3.0)
        assert not driver.events(servers[0], ForgetKeys)
        driver.advance(3.0)
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert "missing: worker 1 (worker 1 waits in forget 'a, b')" in failed.message

    def test_a_name_that_is_being_forgotten_cannot_be_declared(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        self.declared(driver, workers, servers, "w")
        for peer in workers:
            forget(driver, peer, "w")
        driver.declare(workers[0], make_spec("w", (5000,)))
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert "'w': it is being forgotten" in failed.message

    def test_servers_have_as_much_time_as_the_workers_had(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        self.declared(driver, workers, servers, "w")
        forget(driver, workers[0], "w", timeout_s=3.0)
        driver.advance(2.5)
        forget(driver, workers[1], "w", timeout_s=3.0)
        driver.advance(2.5)
        assert isinstance(driver.last(workers[0]), Declared)
        for server in servers:
            event = driver.last(server)
            assert isinstance(event, ForgetKeys)
            driver.say(server, KeysReady(event.request_id))
        assert all(isinstance(driver.last(peer), Done) for peer in workers)

    @pytest.mark.parametrize("num_servers", [0, 2])
    def test_thousands_of_cycles_leave_nothing_behind(self, num_servers: int) -> None:
        driver = Driver(num_servers=num_servers)
        workers, servers = driver.start()
        self.declared(driver, workers, servers, "stays")
        table, used = driver.machine._declarations, set()
        loads = table._placement.loads
        for step in range(2000):
            used.add(self.declared(driver, workers, servers, f"nameless.{step}"))
            self.forgotten(driver, workers, servers, f"nameless.{step}")
            driver.sent.clear()
            if step == 1000:
                tracemalloc.start()
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert used == {1}
        assert grown < 20_000
        assert (len(table._tensors), table._n_pieces) == (1, 6 if num_servers else 5)
        assert len(table._unreleased) + len(table._leaving) < 8
        assert len(table._free_ids) == 1
        assert table._placement.loads == loads
        assert not driver.machine.pending()

    def test_who_is_missing_is_named_and_nothing_is_forgotten(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        self.declared(driver, workers, servers, "w")
        forget(driver, workers[0], "w", timeout_s=3.0)
        driver.advance(3.0)
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert failed.kind == "stall"
        assert "forget 'w'" in failed.message
        assert "worker 1" in failed.message
        assert not driver.events(servers[0], ForgetKeys)
        self.forgotten(driver, workers, servers, "w")

    def test_a_server_that_cannot_forget_keeps_the_ids(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        first = self.declared(driver, workers, servers, "w")
        for peer in workers:
            forget(driver, peer, "w")
        event = driver.last(servers[0])
        assert isinstance(event, ForgetKeys)
        driver.say(servers[0], KeysFailed(event.request_id, "still in use"))
        driver.say(servers[1], KeysReady(event.request_id))
        for peer in workers:
            failed = driver.last(peer)
            assert isinstance(failed, Failed)
            assert "server 0" in failed.message
            assert "still in use" in failed.message
            assert "cannot forget it" in failed.message
            poisoned = driver.events(peer, TensorPoisoned)[-1]
            assert isinstance(poisoned, TensorPoisoned)
            assert poisoned.message == failed.message
            assert driver.sent[peer].index(poisoned) < driver.sent[peer].index(failed)
        ids = {self.declared(driver, workers, servers, f"v{step}") for step in range(5)}
        assert first not in ids
        forget(driver, workers[0], "w")
        forget(driver, workers[1], "w")
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert "cannot be forgotten" in failed.message

    def test_a_server_that_is_silent_keeps_the_ids(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        first = self.declared(driver, workers, servers, "w")
        for peer in workers:
            forget(driver, peer, "w", timeout_s=3.0)
        driver.say(servers[1], KeysReady(driver.last(servers[1]).request_id))
        driver.advance(6.0)
        for peer in workers:
            assert driver.events(peer, TensorPoisoned)
            failed = driver.last(peer)
            assert isinstance(failed, Failed)
            assert "forgetting 'w' timed out" in failed.message
            assert "not ready: server 0;" in failed.message
        driver.keep_alive()
        ids = {self.declared(driver, workers, servers, f"v{step}") for step in range(5)}
        assert first not in ids

    def test_who_waits_longer_for_a_silent_server_hears_with_the_first(self) -> None:
        driver = Driver(lease_s=600)
        workers, servers = driver.start()
        self.declared(driver, workers, servers, "w")
        forget(driver, workers[0], "w", timeout_s=3.0)
        forget(driver, workers[1], "w", timeout_s=100.0)
        driver.advance(10.0)
        for peer in workers:
            failed = driver.last(peer)
            assert isinstance(failed, Failed)
            assert "forgetting 'w' timed out" in failed.message

    @pytest.mark.parametrize("names", [("never",), ("w", "never")])
    def test_what_cannot_be_forgotten(self, names: tuple[str, ...]) -> None:
        driver = Driver()
        workers, servers = driver.start()
        self.declared(driver, workers, servers, "w")
        for peer in workers:
            forget(driver, peer, *names)
        for peer in workers:
            failed = driver.last(peer)
            assert isinstance(failed, Failed)
            assert failed.kind == "config"
        self.forgotten(driver, workers, servers, "w")

    def test_a_worker_that_leaves_ends_the_wait(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        self.declared(driver, workers, servers, "w")
        forget(driver, workers[0], "w")
        driver.leave(workers[1])
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert failed.kind == "peer_lost"


class TestDispute:
    """Every worker hears the same: who started what."""

    SIDES = ("a sum", "an average", "a sum")

    def dispute(self, driver: Driver, peer: int, started: str, version: int = 1) -> int:
        number = driver.request()
        driver.say(peer, Dispute(number, "w", version, started, 2.0))
        return number

    def texts(self, driver: Driver, peers: list[int]) -> list[str]:
        failed = [driver.last(peer) for peer in peers]
        assert all(isinstance(item, Failed) and item.kind == "mismatch" for item in failed)
        return [item.message for item in failed if isinstance(item, Failed)]

    def test_all_hear_who_started_what(self) -> None:
        driver = Driver(size=3, num_servers=0)
        workers, _ = driver.start()
        for place in (2, 0, 1):
            assert not driver.events(workers[place], Failed)
            self.dispute(driver, workers[place], self.SIDES[place])
        texts = self.texts(driver, workers)
        assert len(set(texts)) == 1
        assert "worker 0, worker 2 started a sum; worker 1 started an average" in texts[0]
        assert "'w'" in texts[0]
        assert not driver.machine.pending()

    def test_who_comes_late_hears_what_the_others_heard(self) -> None:
        driver = Driver(size=3, num_servers=0)
        workers, _ = driver.start()
        for place in (0, 1):
            self.dispute(driver, workers[place], self.SIDES[place])
        driver.keep_alive()
        driver.advance(2.0)
        texts = self.texts(driver, workers[:2])
        assert "worker 2 did not say in time" in texts[0]
        self.dispute(driver, workers[2], self.SIDES[2])
        assert {*texts, *self.texts(driver, workers[2:])} == {texts[0]}
        assert not driver.machine._collectives._disputes
        self.dispute(driver, workers[2], "a sum", version=2)
        assert driver.machine.pending()

    def test_a_worker_that_leaves_does_not_hide_the_sides(self) -> None:
        driver = Driver(size=3, num_servers=0)
        workers, _ = driver.start()
        for place in (0, 1):
            self.dispute(driver, workers[place], self.SIDES[place])
        driver.leave(workers[2])
        texts = self.texts(driver, workers[:2])
        assert "worker 0 started a sum; worker 1 started an average. Make" in texts[0]
        assert not driver.machine._collectives._disputes


class TestBlobs:
    @pytest.mark.parametrize("root_first", [True, False])
    def test_root_gives_others_get(self, root_first: bool) -> None:
        driver = Driver()
        workers, _ = driver.start()
        order = (1, 0) if root_first else (0, 1)
        numbers = {r: driver.blob(workers[r], 1, b"x" if r == 1 else None) for r in order}
        assert driver.last(workers[0]) == BlobData(numbers[0], b"x")
        assert driver.last(workers[1]) == Done(numbers[1])

    def test_empty_object(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.blob(workers[0], 0, b"")
        number = driver.blob(workers[1], 0, None)
        assert driver.last(workers[1]) == BlobData(number, b"")

    def test_roots_that_differ(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.blob(workers[0], 0, b"x")
        driver.blob(workers[1], 1, b"y")
        for peer in workers:
            failed = driver.last(peer)
            assert isinstance(failed, Failed)
            assert failed.kind == "mismatch"
            assert "worker 0 gave root 0, worker 1 gave root 1" in failed.message

    @pytest.mark.parametrize(("root", "data"), [(0, None), (1, b"x"), (2, None)])
    def test_wrong_use(self, root: int, data: bytes | None) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.blob(workers[0], root, data)
        failed = driver.last(workers[0])
        assert isinstance(failed, Failed)
        assert failed.kind == "config"

    def test_memory_is_bounded(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        data = bytes(MAX_BLOB_BYTES)
        for index in range(MAX_HELD_BYTES // MAX_BLOB_BYTES):
            driver.say(workers[0], Blob(900 + index, f"o{index}", 0, data, 10.0))
        assert not driver.events(workers[0], Failed)
        driver.say(workers[0], Blob(999, "one too many", 0, b"x", 10.0))
        assert isinstance(driver.last(workers[0]), Failed)
        driver.say(workers[1], Blob(1000, "o0", 0, None, 10.0))
        driver.say(workers[0], Blob(1001, "fits again", 0, data, 10.0))
        assert len(driver.events(workers[0], Failed)) == 1
