# SPDX-License-Identifier: Apache-2.0
"""The scheduler and its clients over real sockets: the work of a good day, and how it ends."""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from control_cluster import (
    MEMBER_PROGRAM,
    WAIT_S,
    Member,
    Process,
    SchedulerThread,
    make_settings,
    scheduler_process,
    seconds_since,
    started_job,
)
from harness import slowed

from aids.faces import threads_alive
from fastps.config import load
from fastps.control.client import GRACE_S, NOTICE_S, ControlClient
from fastps.control.protocol import (
    MAX_BLOB_BYTES,
    DeclareKeys,
    Event,
    JobOver,
    KeysReady,
    Layout,
    NewGeneration,
    PeerLeft,
    PeerLost,
    TensorPoisoned,
    TensorSpec,
    pack_to_scheduler,
)
from fastps.errors import (
    ConfigError,
    FastPSError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ShutdownError,
    StallError,
)


def make_specs(count: int, extent: int = 10) -> list[TensorSpec]:
    layout = Layout(1, (extent,), extent * 4, 4096, 4096)
    return [TensorSpec(f"t{i}", layout) for i in range(count)]


class TestWork:
    def test_job_of_two_workers_and_two_servers(self) -> None:
        with started_job() as (_, workers, servers):
            everybody = [*workers, *servers]
            assert [member.client.job.me for member in everybody] == [0, 1, 2, 3]
            job = workers[0].client.job
            assert (job.size, job.generation, job.job_id) == (2, 1, "job")
            assert [(member.host, member.port) for member in job.servers] == [("127.0.0.1", 1)] * 2
            assert {member.pid for member in job.workers} == {os.getpid()}
            assert (workers[1].client.job.local_rank, job.local_size) == (1, 2)
            assert workers[0].client.local_address == "127.0.0.1"
            for one, other in itertools.combinations(everybody, 2):
                here, there = one.client, other.client
                assert here.keys.of(there.job.me) == there.keys.of(here.job.me)
            assert len({member.client.keys.of(0) for member in everybody[1:]}) == 3

    def test_a_server_that_is_sending_answers_all_the_same(self) -> None:
        """What the reader tells meanwhile is sent after it, and keeps nobody: it was dropped."""
        with (
            started_job(size=1, num_servers=1) as (_, workers, servers),
            ThreadPoolExecutor(1) as pool,
        ):
            client = servers[0].client
            with client._send_lock:  # as a thread whose bytes the scheduler does not read
                declared = pool.submit(workers[0].client.declare, make_specs(1), timeout_s=WAIT_S)
                servers[0].told.wait_for(DeclareKeys)
                began = time.monotonic()
                client.report_lost(7, "nobody has that number")
                assert seconds_since(began) < NOTICE_S / 2
                assert not declared.done()
            client._write(pack_to_scheduler(KeysReady(99)), time.monotonic() + WAIT_S, epoch=0)
            assert len(declared.result(WAIT_S)) == 1

    def test_declare_200_tensors_at_once(self) -> None:
        with started_job() as (_, workers, servers):
            specs = make_specs(200)
            with ThreadPoolExecutor(2) as pool:
                futures = [pool.submit(w.client.declare, specs, timeout_s=WAIT_S) for w in workers]
            declared = futures[0].result()
            assert declared == futures[1].result()
            assert [tensor.tensor_id for tensor in declared] == list(range(200))
            owned = [owner for tensor in declared for _, owner in tensor.pieces]
            assert owned.count(2) == owned.count(3) == 100
            announced = [e for e in servers[0].told.events if isinstance(e, DeclareKeys)]
            assert [len(event.tensors) for event in announced] == [200]
            assert workers[0].client.declare([], timeout_s=1) == []

    def test_mismatch_reaches_both_workers(self) -> None:
        with started_job() as (_, workers, _):
            workers[0].client.declare(make_specs(1, 10), timeout_s=WAIT_S)
            with pytest.raises(MismatchError, match=r"'t0'.*worker 1.*\(11,\).*worker 0.*\(10,\)"):
                workers[1].client.declare(make_specs(1, 11), timeout_s=WAIT_S)
            event = workers[0].told.wait_for(TensorPoisoned)
            assert isinstance(event, TensorPoisoned)
            assert event.name == "t0"
            with pytest.raises(MismatchError):
                workers[0].client.declare(make_specs(1, 10), timeout_s=WAIT_S)

    def test_barrier(self) -> None:
        with started_job(num_servers=0) as (_, workers, _):
            passed = threading.Event()

            def first() -> None:
                workers[0].client.barrier("b", timeout_s=WAIT_S)
                passed.set()

            thread = threading.Thread(target=first)
            thread.start()
            assert not passed.wait(0.1)
            workers[1].client.barrier("b", timeout_s=WAIT_S)
            assert passed.wait(WAIT_S)
            thread.join(WAIT_S)

    def test_barrier_names_the_missing(self) -> None:
        with (
            started_job(num_servers=0) as (_, workers, _),
            pytest.raises(StallError, match="missing: worker 1"),
        ):
            workers[0].client.barrier("b", timeout_s=0.1)

    @pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, MAX_BLOB_BYTES])
    def test_blob(self, nbytes: int) -> None:
        data = os.urandom(min(nbytes, 1 << 20)) * max(nbytes >> 20, 1)
        with started_job(num_servers=0) as (_, workers, _), ThreadPoolExecutor(1) as pool:
            give = pool.submit(workers[1].client.blob, "o", 1, data, timeout_s=WAIT_S)
            assert workers[0].client.blob("o", 1, None, timeout_s=WAIT_S) == data
            assert give.result() == data

    def test_blob_too_large(self) -> None:
        with started_job(size=1, num_servers=0) as (_, workers, _):
            with pytest.raises(ConfigError, match="as arrays"):
                workers[0].client.blob("o", 0, bytes(MAX_BLOB_BYTES + 1), timeout_s=1)
            assert workers[0].client.blob("o", 0, b"x", timeout_s=WAIT_S) == b"x"

    def test_two_threads_of_one_worker(self) -> None:
        with started_job(num_servers=0) as (_, workers, _), ThreadPoolExecutor(8) as pool:

            def pass_barriers(place: tuple[Member, int]) -> None:
                member, lane = place
                for _ in range(50):
                    member.client.barrier(f"lane {lane}", timeout_s=WAIT_S)

            list(pool.map(pass_barriers, [(w, lane) for w in workers for lane in range(4)]))

    def test_ipv6(self) -> None:
        if not Path("/proc/net/if_inet6").exists():
            pytest.skip("no IPv6")
        with started_job(scheduler_host="::1", size=1, num_servers=0) as (scheduler, workers, _):
            assert scheduler.scheduler.address[0] == "::1"
            assert workers[0].client.local_address == "::1"
            workers[0].client.barrier("b", timeout_s=WAIT_S)

    def test_name_with_two_addresses(self) -> None:
        with SchedulerThread(scheduler_host="localhost", size=1, num_servers=0) as scheduler:
            member = Member(scheduler.config(scheduler_host="localhost"))
            member.client.leave(timeout_s=WAIT_S)

    def test_connections_have_the_options_and_end_at_exec(self) -> None:
        with started_job(size=1, num_servers=0) as (_, workers, _):
            sock = workers[0].client._sock
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            assert not os.get_inheritable(sock.fileno())

    def test_idle_job_uses_no_cpu(self) -> None:
        with started_job(heartbeat_s=0.5):
            began, used = time.monotonic(), time.process_time()
            threading.Event().wait(2.0)
            share = (time.process_time() - used) / seconds_since(began)
        assert share < 0.02  # scheduler and four members together


class TestHandlers:
    def test_handler_that_raises_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with started_job(num_servers=1) as (_, workers, servers):
            servers[0].client._on_event = _raise
            with caplog.at_level(logging.ERROR), pytest.raises(StallError, match="server 0"):
                workers[0].client.declare(make_specs(1), timeout_s=0.2)
            assert "the handler of DeclareKeys failed" in caplog.text
            servers[0].client._on_event = servers[0].told
            workers[0].client.declare(make_specs(2)[1:], timeout_s=WAIT_S)

    def test_handler_must_not_wait(self) -> None:
        failures: list[FastPSError] = []
        done = threading.Event()
        with started_job(num_servers=0) as (_, workers, _):

            def wait_inside(event: Event) -> None:
                try:
                    workers[0].client.barrier("b", timeout_s=WAIT_S)
                except FastPSError as error:
                    failures.append(error)
                done.set()

            workers[0].client._on_event = wait_inside
            workers[1].client.leave(timeout_s=WAIT_S)
            assert done.wait(WAIT_S)
        assert "must not wait" in str(failures[0])

    def test_handler_may_close(self) -> None:
        with started_job(num_servers=0) as (_, workers, _):
            done = threading.Event()

            def close(event: Event) -> None:
                workers[0].client.close()
                done.set()

            workers[0].client._on_event = close
            workers[1].client.leave(timeout_s=WAIT_S)
            assert done.wait(WAIT_S)


def _raise(event: Event) -> None:
    raise ValueError("a handler's own bug")


class TestLeaving:
    def test_others_are_told(self) -> None:
        with started_job() as (_, workers, servers):
            workers[1].client.leave(timeout_s=WAIT_S)
            for member in [workers[0], *servers]:
                assert member.told.wait_for(PeerLeft) == PeerLeft(1)
            assert not [e for e in workers[1].told.events if isinstance(e, PeerLost)]
            with pytest.raises(ShutdownError):
                workers[1].client.barrier("b", timeout_s=1)
            workers[1].client.leave(timeout_s=1)
            workers[1].client.close()

    def test_rejoin_is_a_new_generation(self) -> None:
        with started_job() as (scheduler, workers, servers):
            workers[0].client.declare(make_specs(1, 10), timeout_s=WAIT_S)
            for generation in (2, 3):
                for worker in workers:
                    worker.client.leave(timeout_s=WAIT_S)
                with ThreadPoolExecutor(2) as pool:
                    workers = list(pool.map(Member, [scheduler.config()] * 2))
                assert {w.client.job.generation for w in workers} == {generation}
                workers[0].client.declare(make_specs(1, 10 + generation), timeout_s=WAIT_S)
            assert servers[0].told.wait_for(NewGeneration) == NewGeneration(2)
            for worker in workers:
                worker.client.close()

    def test_job_ends_by_itself(self) -> None:
        with started_job(linger_s=0.05) as (scheduler, workers, servers):
            for worker in workers:
                worker.client.leave(timeout_s=WAIT_S)
            for server in servers:
                server.told.wait_for(JobOver)
                server.client.leave(timeout_s=WAIT_S)
            scheduler.thread.join(WAIT_S)
            assert scheduler.code == 0
            assert not [e for e in servers[0].told.events if isinstance(e, PeerLost)]

    def test_close_ends_waits(self) -> None:
        with started_job(num_servers=0) as (_, workers, _), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(workers[0].client.barrier, "b", timeout_s=WAIT_S)
            with pytest.raises(StallError):  # the other one has arrived when this returns
                workers[1].client.barrier("c", timeout_s=0.2)
            workers[0].client.close()
            with pytest.raises(ShutdownError):
                waiting.result(WAIT_S)

    def test_many_cycles_leave_nothing(self) -> None:
        with SchedulerThread(size=1, num_servers=0) as scheduler:
            config = scheduler.config()
            Member(config).client.leave(timeout_s=WAIT_S)
            descriptors = len(os.listdir("/proc/self/fd"))
            threads = (threading.active_count(), threads_alive())
            for cycle in range(100):
                member = Member(config)
                assert member.client.job.generation == cycle + 2
                member.client.leave(timeout_s=WAIT_S)
            assert (threading.active_count(), threads_alive()) == threads
            # The scheduler's side of the last connections closes a moment later.
            deadline = time.monotonic() + WAIT_S
            while len(os.listdir("/proc/self/fd")) > descriptors:
                assert time.monotonic() < deadline, os.listdir("/proc/self/fd")
                time.sleep(0.002)


class TestDeath:
    @pytest.mark.parametrize("role", ["worker", "server"])
    def test_killed_member_is_seen_by_all(self, role: str) -> None:
        with SchedulerThread(size=2, num_servers=1) as scheduler, ThreadPoolExecutor(3) as pool:
            config = scheduler.config()
            others = ["worker", "server" if role == "worker" else "worker"]
            futures = [pool.submit(Member, config, other) for other in others]
            with Process(MEMBER_PROGRAM, _settings_of(scheduler), role) as process:
                members = [future.result() for future in futures]
                assert process.read_line().startswith("joined")
                worker = members[0]
                waiting = pool.submit(worker.client.barrier, "b", timeout_s=WAIT_S)
                process.popen.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                for member in members:
                    lost = member.told.wait_for(PeerLost)
                    assert seconds_since(killed) < 2.0
                    assert isinstance(lost, PeerLost)
                    assert (lost.role, lost.pid) == (role, process.popen.pid)
                    assert "killed" in (member.client.verdict(0) or "")
                with pytest.raises(PeerLostError, match=f"pid {process.popen.pid}"):
                    waiting.result(WAIT_S)
                with pytest.raises(PeerLostError):
                    worker.client.barrier("late", timeout_s=1)
            for member in members:
                member.client.close()

    def test_stopped_member_loses_its_lease(self) -> None:
        quick = {"lease_s": 0.6, "heartbeat_s": 0.1}
        with SchedulerThread(size=2, num_servers=0, **quick) as scheduler:
            settings = _settings_of(scheduler)
            with (
                ThreadPoolExecutor(1) as pool,
                Process(MEMBER_PROGRAM, settings, "worker") as process,
            ):
                member = pool.submit(Member, scheduler.config()).result()
                assert process.read_line().startswith("joined")
                process.popen.send_signal(signal.SIGSTOP)
                stopped = time.monotonic()
                lost = member.told.wait_for(PeerLost)
                assert seconds_since(stopped) < 0.6 + 2.0
                assert isinstance(lost, PeerLost)
                assert lost.pid == process.popen.pid
                assert "lease" in lost.cause
                process.popen.send_signal(signal.SIGCONT)
                assert "is lost" in process.read_line()  # it learns that it is out
            member.client.close()

    def test_busy_interpreter_keeps_its_lease(self) -> None:
        settings = make_settings(size=2, num_servers=0, lease_s=0.8, heartbeat_s=0.1)
        with scheduler_process(settings) as (config, _), ThreadPoolExecutor(2) as pool:
            members = list(pool.map(Member, [config, config]))
            ctypes.PyDLL(None).usleep(1_600_000)  # keeps the GIL all the time
            with pytest.raises(StallError, match="missing: worker"):
                members[0].client.barrier("b", timeout_s=0.1)
            for member in members:
                member.client.close()

    def test_stopped_scheduler_blames_nobody(self) -> None:
        settings = make_settings(size=1, num_servers=0, lease_s=2 * GRACE_S)
        with scheduler_process(settings) as (config, process):
            member = Member(config)
            process.popen.send_signal(signal.SIGSTOP)
            with pytest.raises(StallError, match="scheduler did not answer"):
                member.client.barrier("b", timeout_s=0.1)
            process.popen.send_signal(signal.SIGCONT)
            member.client.barrier("c", timeout_s=WAIT_S)
            member.client.leave(timeout_s=WAIT_S)

    def test_a_scheduler_that_is_stopped_for_the_lease_is_lost(self) -> None:
        settings = make_settings(size=2, num_servers=0, lease_s=0.9)
        with scheduler_process(settings) as (config, process), ThreadPoolExecutor(2) as pool:
            members = list(pool.map(Member, [config, config]))
            process.popen.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            with pytest.raises(PeerLostError, match=r"silent for .* without power"):
                members[0].client.barrier("b", timeout_s=WAIT_S)
            assert 0.5 < seconds_since(stopped) < slowed(1.1)
            lost = members[1].told.wait_for(PeerLost)
            assert isinstance(lost, PeerLost)
            assert lost.role == "scheduler"
            assert str(config.scheduler_port) in lost.host
            process.popen.send_signal(signal.SIGCONT)
            for member in members:
                member.client.close()

    def test_leaving_waits_for_no_scheduler_that_is_silent(self) -> None:
        settings = make_settings(size=1, num_servers=0, lease_s=100)
        with scheduler_process(settings) as (config, process):
            member = Member(config)
            assert member.client.begin_probe()()
            process.popen.send_signal(signal.SIGSTOP)
            asked = time.monotonic()
            assert not member.client.begin_probe()()
            assert seconds_since(asked) < 2 * GRACE_S
            member.client.leave(timeout_s=10 * WAIT_S)
            assert seconds_since(asked) < WAIT_S
            process.popen.send_signal(signal.SIGCONT)

    def test_a_scheduler_that_answers_again_is_not_silent(self) -> None:
        settings = make_settings(size=1, num_servers=0, lease_s=100)
        with scheduler_process(settings) as (config, process):
            member = Member(config)
            process.popen.send_signal(signal.SIGSTOP)
            assert not member.client.begin_probe()()
            process.popen.send_signal(signal.SIGCONT)
            assert member.client.begin_probe()()
            member.client.leave(timeout_s=WAIT_S)

    def test_broken_data_link_waits_for_the_better_cause(self) -> None:
        with started_job() as (_, workers, servers):
            workers[0].client.report_lost(2, "connection reset by peer", is_owner=True)
            servers[0].client.close()  # as a death does: no leave
            lost = workers[1].told.wait_for(PeerLost)
            assert isinstance(lost, PeerLost)
            assert (lost.role, lost.rank) == ("server", 0)
            assert "connection reset by peer" in (workers[0].client.verdict(WAIT_S) or "")

    def test_broken_data_link_between_the_living(self) -> None:
        with started_job() as (_, workers, _):
            reported = time.monotonic()
            workers[0].client.report_lost(3, "no route to host", is_owner=True)
            lost = workers[1].told.wait_for(PeerLost)
            assert seconds_since(reported) < 2.0
            assert isinstance(lost, PeerLost)
            assert (lost.role, lost.rank) == ("server", 1)

    def test_verdict_of_a_healthy_job(self) -> None:
        with started_job(size=1, num_servers=0) as (_, workers, _):
            assert workers[0].client.verdict(0.01) is None
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(workers[0].client.verdict, WAIT_S)
                workers[0].client.close()
                assert waiting.result(WAIT_S / 2) is None

    def test_verdict_is_not_waited_for_once_an_event_explains_enough(self) -> None:
        with started_job(size=2, num_servers=0) as (_, workers, _):
            client, told = workers[0].client, workers[0].told
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(client.verdict, WAIT_S, unless=lambda: told.events != [])
                workers[1].client.leave(timeout_s=1)
                assert waiting.result(WAIT_S / 2) is None

    def test_dead_scheduler(self) -> None:
        with scheduler_process(make_settings(size=1, num_servers=0)) as (config, process):
            member = Member(config)
            process.popen.send_signal(signal.SIGKILL)
            lost = member.told.wait_for(PeerLost)
            assert isinstance(lost, PeerLost)
            assert lost.role == "scheduler"
            with pytest.raises(PeerLostError, match="scheduler"):
                member.client.barrier("b", timeout_s=1)
            member.client.leave(timeout_s=1)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_signal_ends_the_scheduler_in_order(self, number: int) -> None:
        with scheduler_process(make_settings(size=1, num_servers=0)) as (config, process):
            member = Member(config)
            process.popen.send_signal(number)
            over = member.told.wait_for(JobOver)
            assert isinstance(over, JobOver)
            assert "SIG" in over.reason
            member.client.leave(timeout_s=WAIT_S)
            assert process.popen.wait(WAIT_S) == 0


class TestFork:
    def test_child_is_no_member(self) -> None:
        with started_job(num_servers=0) as (_, workers, _):
            client = workers[0].client
            sockets = _socket_count()
            pid = os.fork()
            if pid == 0:
                os._exit(_check_child(client, sockets))
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            with pytest.raises(StallError, match="missing: worker 1"):
                client.barrier("b", timeout_s=0.1)

    def test_death_of_the_parent_is_seen_though_its_child_lives(self) -> None:
        program = MEMBER_PROGRAM.replace(
            "sys.stdin.read()",
            "import os, time\nif os.fork() == 0: time.sleep(60)\n"
            "print('forked', flush=True)\nsys.stdin.read()",
        )
        with SchedulerThread(size=2, num_servers=0) as scheduler, ThreadPoolExecutor(1) as pool:
            future = pool.submit(Member, scheduler.config())
            with Process(program, _settings_of(scheduler), "worker") as process:
                member = future.result()
                assert process.read_line().startswith("joined")
                assert process.read_line() == "forked"
                children = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children")
                child = int(children.read_text("ascii").split()[0])
                try:
                    process.popen.send_signal(signal.SIGKILL)
                    killed = time.monotonic()
                    member.told.wait_for(PeerLost)
                    assert seconds_since(killed) < 2.0
                finally:
                    os.kill(child, signal.SIGKILL)
            member.client.close()

    def test_death_of_a_scheduler_is_seen_though_a_child_of_its_process_lives(self) -> None:
        """A worker that hosts it has a data loader, say."""
        program = """
import json, os, sys, time
from fastps.config import load
from fastps.control.scheduler_thread import HostedScheduler
hosted = HostedScheduler(load(json.loads(sys.argv[1]), {}))
hosted.start()
print(hosted.address[1], flush=True)
sys.stdin.readline()
if child := os.fork():
    print(child, flush=True)
time.sleep(60)
"""
        settings = make_settings(size=1, num_servers=0, lease_s=30.0, heartbeat_s=1.0)
        with Process(program, json.dumps(settings)) as process:
            port = int(process.read_line())
            member = Member(load(settings | {"scheduler_port": port}, {}))
            assert process.popen.stdin is not None
            process.popen.stdin.write("fork\n")
            process.popen.stdin.flush()
            child = int(process.read_line())
            try:
                process.popen.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                lost = member.told.wait_for(PeerLost)
                assert isinstance(lost, PeerLost)
                assert lost.role == "scheduler"
                assert seconds_since(killed) < 2.0
            finally:
                os.kill(child, signal.SIGKILL)
            member.client.leave(timeout_s=1)


def _check_child(client: ControlClient, sockets: int) -> int:
    """Check, in a forked child, that nothing of the parent's job is left."""
    try:
        client.barrier("b", timeout_s=1)
    except NotInitializedError:
        client.close()
        client.leave(timeout_s=1)
        if client._token.secret.strip(b"\0") or client.keys.memory.strip(b"\0"):
            return 4
        if client._config.token.strip("0"):
            return 5
        return 0 if _socket_count() < sockets else 3
    except BaseException:
        return 2
    return 1


def _socket_count() -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")
        except OSError:
            continue
    return count


def _settings_of(scheduler: SchedulerThread) -> str:
    address = {"scheduler_port": scheduler.scheduler.address[1]}
    return json.dumps(scheduler.settings | address)
