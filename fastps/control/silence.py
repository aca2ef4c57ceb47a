# SPDX-License-Identifier: Apache-2.0
"""When a silent member is dead: leases, looks at its process, and questions to other members.

A part of the Membership. A process of the scheduler's machine can be seen. One that is stopped is
dead when its lease ends. One that waits for a processor or a disk may be silent for longer. About
all others, other members are asked before the lease ends. If they reach such a member, only its
path to the scheduler is cut. Where the process cannot be seen, its machine may be as busy as the
scheduler's, so its lease is longer by the time in which the scheduler got no processor itself. A
machine that acknowledges no bytes is not only busy.
Members that fell silent together are lost together. Pure, as the Membership is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from fastps.config import Config
from fastps.control.actions import Action, Phase
from fastps.control.admission import Peer
from fastps.control.blame import (
    MAX_ASKED,
    MAX_DISPUTED,
    MIN_MEMBERS,
    VOTES,
    Inquest,
    confirm_s,
    cut_off_text,
    deaf_text,
    life_text,
    machine_text,
    pulse_s,
    silence_text,
    stopped_text,
    unreached_text,
)
from fastps.control.newcomers import Newcomers
from fastps.control.protocol import Confirm, Confirmed, Join, PeerLost, ToMember, Unheard

log = logging.getLogger(__name__)

STARVED_S = 10.0  # beyond its lease, for a process of this machine that gets no processor
# The kernel's letters for the state of a thread.
STOPPED = ("T", "t", "Z", "X")
WAITING = ("R", "D")  # for a processor or a disk
SLEEPING = "S"  # until its next heartbeat
UNREACHED = "-"  # on another machine, which acknowledges nothing any more


class SilenceMixin:
    """The silences of members, for the Membership."""

    phase: Phase
    _config: Config
    _peers: dict[int, Peer]
    _newcomers: Newcomers
    _state_of: Callable[[int, Join], str]
    _slept: tuple[float, float]
    _goes_on: bool
    is_changing: bool

    def _send(self, peer: int, message: ToMember) -> None:
        raise NotImplementedError

    def _drop(self, peer: int, cause: str, now: float) -> None:
        raise NotImplementedError

    def _ends_without(self, dead: Sequence[Peer]) -> bool:
        raise NotImplementedError

    def _fail_job(self, cause: PeerLost) -> None:
        raise NotImplementedError

    def _drain(self, now: float) -> list[Action]:
        raise NotImplementedError

    @property
    def _is_starting(self) -> bool:
        raise NotImplementedError

    def _leaving(self) -> list[Peer]:
        raise NotImplementedError

    def _dismiss(self, leaving: list[Peer]) -> None:
        raise NotImplementedError

    def pulse(self, peer: int, now: float) -> bool:
        """Renew a lease; return False if the peer is not a member."""
        member = self._peers.get(peer) or self._newcomers.get(peer)
        if member is None:
            return False
        self._renew(member, now)
        member.unheard_s = 0.0
        member.disputed.clear()
        return True

    def probes_of(self, peer: int) -> tuple[str, int, bytes] | None:
        """Return where a member takes datagrams, and the scheduler's beat for it, if it does."""
        join = (self._newcomers.get(peer) or self._peers[peer]).join
        half = len(join.cookie) // 2
        return (join.probe_host, join.probe_port, join.cookie[half:]) if half else None

    def delayed(self, seconds: float) -> None:
        """Note a time in which the scheduler got no processor: other machines may be as busy."""
        for member in self._all_heard():
            member.late_s += seconds

    def slept(self, now: float, seconds: float) -> list[Action]:
        """Note that the scheduler itself was stopped: others may have been, and go on after it."""
        self._slept = now, seconds
        for member in self._all_heard():
            member.late_s = max(member.late_s, now + self._config.lease_s - member.lease_until)
            member.inquest = None
        return self._drain(now)

    def _all_heard(self) -> list[Peer]:
        """List all that have a lease: the members, and those that wait to join."""
        return [*self._peers.values(), *self._newcomers.all]

    def _renew(self, member: Peer, now: float) -> None:
        """Begin a lease."""
        member.lease_until = now + self._config.lease_s
        member.judge_at = member.lease_until - confirm_s(self._config.lease_s)
        member.inquest, member.late_s = None, 0.0
        member.seen, member.starved_until = "", 0.0

    def _judge_silences(self, now: float) -> None:
        """Lose the silent members that are dead now."""
        due = [item for item in self._peers.values() if item.judge_at <= now]
        self._lose_silent([item for item in due if self._is_dead(item, now)], now)

    def _is_dead(self, member: Peer, now: float) -> bool:
        """Return whether a silent member is dead; if that is open, set when to look again."""
        seen = self._state_of(member.peer, member.join)
        if seen != member.seen:
            member.seen, member.seen_since = seen, now
        if not seen:
            member.lease_until, member.late_s = member.lease_until + member.late_s, 0.0
            ask_at = member.lease_until - confirm_s(self._config.lease_s)
            if member.inquest is None and now < ask_at:
                member.judge_at = ask_at
                return False
        if seen in STOPPED:  # with this process, perhaps: then others go on a moment after it
            member.judge_at = max(member.lease_until, self._seen_again_at(member))
            return member.judge_at <= now
        if seen in WAITING:
            member.starved_until = member.starved_until or max(now, member.lease_until) + STARVED_S
            if now < member.starved_until:
                member.judge_at = max(member.lease_until, now + pulse_s(self._config))
                return False
        return self._is_unreached(member, now)

    def _seen_again_at(self, member: Peer) -> float:
        """Return when a process has been seen in its state for the time between two heartbeats."""
        return member.seen_since + pulse_s(self._config)

    def _is_unreached(self, member: Peer, now: float) -> bool:
        """Return whether others do not reach a silent member either; ask them first.

        If its thread sleeps, it has sent a heartbeat just now, which is read before the next look.
        What reaches its machine again is acknowledged before that, too.
        """
        if member.inquest is None:
            member.inquest = self._begin_inquest(member, now)
        is_alive = member.inquest.is_alive(now)
        if sum(one.is_denied_by_most for one in member.disputed) >= MAX_DISPUTED:
            is_alive = False
        if is_alive:
            log.log(
                logging.INFO if member.is_cut else logging.WARNING,
                "heartbeats of %s do not arrive, but others reach it: its path to the scheduler "
                "is cut, or it gets no processor in time", member.full_name,
            )  # fmt: skip
            member.unheard_s = self._unheard_s(member, now)
            member.disputed = [*member.disputed, member.inquest][-MAX_DISPUTED:]
            self._renew(member, now)
            member.is_cut = True
            return False
        until = now if is_alive is False else member.inquest.until
        if member.seen in (SLEEPING, UNREACHED):
            until = max(until, self._seen_again_at(member))
        member.judge_at = max(member.lease_until, until)
        return is_alive is False and member.judge_at <= now

    def _lose_silent(self, dead: Sequence[Peer], now: float) -> None:
        """Lose dead members, once the leases of those that fell silent with them have ended."""
        if not dead:
            return
        last = min(item.lease_until for item in dead) + self._spread_s
        open_until = [
            min(item.judge_at, last) for item in self._peers.values()
            if item not in dead and item.lease_until <= last
            and item.seen not in (*WAITING, SLEEPING)
        ]  # fmt: skip
        until = max(open_until, default=now)
        if until > now:
            for item in dead:
                item.judge_at = until
            return
        texts = [(item.peer, self._silence_text(item, now)) for item in dead]
        if (text := self._cut_off_text(dead, now)) and self._ends_without(dead):
            self._fail_job(self._scheduler_lost(text))
        for peer, text in texts:
            self._drop(peer, text, now)

    @property
    def _spread_s(self) -> float:
        """How far apart the leases end of members that fall silent together."""
        return min(2 * pulse_s(self._config), self._config.lease_s / 3)

    def _begin_inquest(self, member: Peer, now: float, *, apart_from: int = 0) -> Inquest:
        """Ask others, apart from one, whether they reach a member, if there are any to ask."""
        heard = [
            item for item in self._peers.values()
            if item.peer != apart_from and self._silent_s(item, now) < self._config.lease_s / 2
        ]  # fmt: skip
        return self._ask(member, heard, now)

    def _ask(self, member: Peer, some: Sequence[Peer], now: float) -> Inquest:
        """Ask members whether they reach another; first those that did, and on other machines."""
        heard = [item for item in some if item is not member]
        if (
            self.phase is not Phase.RUNNING
            or len(self._peers) < MIN_MEMBERS
            or len(heard) < VOTES
            or not member.join.cookie
        ):
            return Inquest([], now)
        heard.sort(
            key=lambda item: (
                item.peer not in member.reached_by, item.join.hostname == member.join.hostname
            )
        )  # fmt: skip
        join, seconds = member.join, confirm_s(self._config.lease_s)
        question = Confirm(member.peer, join.probe_host, join.probe_port, join.cookie, seconds)
        for item in heard[:MAX_ASKED]:
            self._send(item.peer, question)
        return Inquest([item.peer for item in heard[:MAX_ASKED]], now + seconds)

    def _take_answer(self, member: Peer, message: Confirmed, now: float) -> None:
        suspect = self._peers.get(message.suspect)
        if suspect is None:
            return
        is_reached = message.reached_ms is not None
        asked = (suspect.inquest, suspect.hearing, suspect.first_look, *suspect.disputed)
        for inquest in asked:
            if inquest is not None and inquest.add(member.peer, is_reached=is_reached):
                suspect.reached_by.update([member.peer] * is_reached)
        if suspect.inquest is not None:
            suspect.judge_at = min(suspect.judge_at, now)  # once all that has arrived was read

    def _cut_off_text(self, dead: Sequence[Peer], now: float) -> str:
        """Return why the scheduler is to blame for the silence of members; empty if it is not."""
        silent_s = self._config.lease_s / 2
        return cut_off_text(
            (
                item.join.hostname,
                item not in dead
                and (item.seen in WAITING or self._silent_s(item, now) < silent_s),
            )
            for item in self._peers.values()
        )

    def _silence_text(self, member: Peer, now: float) -> str:
        """Return how a member was silent, alone or with its machine, and who confirms that."""
        host = member.join.hostname
        there = [item for item in self._peers.values() if item.join.hostname == host]
        text = silence_text(self._config.lease_s)
        is_silent = [self._silent_s(item, now) > self._config.lease_s / 2 for item in there]
        if len(there) > 1 and all(is_silent) and len(there) < len(self._peers):
            text = f"{machine_text(host, len(there))}; {text}"
        denied = member.inquest.denied_by() if member.inquest else []
        return text + unreached_text([self._peers[p].name for p in denied if p in self._peers])

    def _silent_s(self, member: Peer, now: float) -> float:
        """Return for how long a member's lease has run."""
        return now - member.lease_until + self._config.lease_s

    def _unheard_s(self, member: Peer, now: float) -> float:
        """Return for how long a member has been silent, though others may reach it."""
        return member.unheard_s + self._silent_s(member, now)

    def _life_text(self, peer: int, now: float) -> str:
        """Return the text about a suspect's heartbeats."""
        member = self._peers.get(peer)
        silent_s = self._unheard_s(member, now) if member else 0.0
        return life_text(silent_s, beat_s=pulse_s(self._config))

    def _give_up(self, member: Peer, message: Unheard, now: float) -> None:
        """Lose a member that has given up the scheduler, or the scheduler if that was stopped."""
        until, slept_s = self._slept
        if until <= now - self._config.lease_s or slept_s <= self._config.lease_s / 2:
            slept_s = 0.0
        if slept_s and self._is_awaited([member]) and not self._goes_on:
            self._fail_job(self._scheduler_lost(stopped_text(slept_s, member.full_name)))
            self._dismiss([item for item in self._leaving() if item is not member])
        self._drop(member.peer, deaf_text(message.seconds, slept_s), now)

    def _scheduler_lost(self, text: str) -> PeerLost:
        return PeerLost("scheduler", 0, self._config.scheduler_host, 0, text)

    def _is_awaited(self, without: Sequence[Peer]) -> bool:
        """Return whether the job runs, or others than some members await its start."""
        others = (item for item in self._peers.values() if item not in without)
        is_start = self._is_starting and any(item.start_request for item in others)
        return is_start or self.phase is Phase.RUNNING or self.is_changing
