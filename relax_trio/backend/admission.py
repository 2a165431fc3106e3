"""Program-aware admission: an attempt begins once the servers' KV pools have room for all that it is expected to hold.

One ledger of reserved tokens and one line, in this process. It fails open: what it can't judge passes. It never chooses
a server and never touches an attempt that runs. Not covered: where readings come from (sglang/readings.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

import trio
from attrs import define, field, frozen

from relax_trio.backend.capacity import Capacity, Snapshot
from relax_trio.events import emit

Scope = Literal["train", "all"]
Decision = Literal["admit", "protected", "degraded", "aged", "recalled"]
"""How an attempt left admission: with a lease, by one of the three bypasses, or sent away from the line."""

CapacitySource = Callable[[Capacity], Awaitable[None]]
"""Keeps readings coming until it is cancelled."""


@frozen(kw_only=True)
class AdmissionOptions:
    """The rules.

    Attributes:
      headroom: share of all pools that may be reserved.
      pressure_threshold: nothing is admitted while the worst server's token usage is this or more.
      expected_decode_cap: most new tokens that an attempt is expected to make; None: all it may.
      max_wait_s: who waited so long passes.
      scope: whether evaluation passes untouched.
    """

    headroom: float = 0.90
    pressure_threshold: float = 0.92
    expected_decode_cap: int | None = None
    max_wait_s: float = 30.0
    scope: Scope = "train"


@frozen(kw_only=True)
class Reservation:
    """What an attempt asks for.

    Attributes:
      session: name of its Session.
      n_prefix: tokens that it begins with.
      n_new: most tokens that it may make.
      is_train: not of an evaluation.
      is_protected: of a Session that is never held up.
    """

    session: str
    n_prefix: int
    n_new: int
    is_train: bool = True
    is_protected: bool = False


@define(eq=False, kw_only=True)
class _Ticket:
    session: str
    n_tokens: int
    since_s: float = field(factory=trio.current_time)
    has_waited: bool = False
    decision: Decision | None = None
    decided: trio.Event = field(factory=trio.Event)


@define
class _Tally:
    """What happened since the last `take_metrics`; numbers of a moment by their peaks."""

    counts: Counter[str] = field(factory=Counter)
    n_waited: int = 0
    waited_s: float = 0.0
    n_waiting: int = 0
    n_reserved: int = 0
    utilization: float = 0.0


class Admission:
    """The ledger and the line.

    Args:
      source: keeps `capacity` up to date while `run` is under way.
    """

    def __init__(self, options: AdmissionOptions, source: CapacitySource) -> None:
        self.capacity = Capacity()
        self._options = options
        self._source = source
        self._line: OrderedDict[_Ticket, None] = OrderedDict()
        self._n_reserved = 0
        self._is_known = False
        self._tally = _Tally()

    @property
    def n_reserved(self) -> int:
        """Tokens under lease."""
        return self._n_reserved

    @property
    def n_waiting(self) -> int:
        """Attempts in the line."""
        return len(self._line)

    @property
    def ceiling(self) -> int | None:
        """Most tokens under lease; None while the pools are not known."""
        return self._ceiling(self.capacity.snapshot)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take readings and act on them until cancelled; a service of the engine.

        Cancellation: nobody who waits is told; the work has ended before.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._source, self.capacity, name="KV pool readings")
            task_status.started()
            while True:
                with trio.CancelScope(deadline=self.capacity.stale_at_s):
                    await self.capacity.wait_changed()
                self._serve_line()

    @asynccontextmanager
    async def admit(self, wanted: Reservation) -> AsyncIterator[bool]:
        """Hold the tokens of an attempt for the length of the block, after waiting in the line for them.

        In this order: out of scope, protected, or pools not known: passes. Somebody waits already, a server is under
        pressure, or the ledger would go over the ceiling: waits. Waited `max_wait_s`: passes. What passes is not in the
        ledger; the rest is, until the block is left.

        Yields:
          Whether the attempt may begin; False after `recall`.

        Cancellation: safe at any time; whoever waits leaves the line, a lease is returned.
        """
        if self._options.scope == "train" and not wanted.is_train:
            await trio.lowlevel.checkpoint()
            yield True
            return
        ticket = self._arrive(wanted)
        try:
            with trio.CancelScope(deadline=ticket.since_s + self._options.max_wait_s):
                await ticket.decided.wait()
            if ticket.decision is None:
                self._decide(ticket, "aged")
                self._serve_line()
            yield ticket.decision != "recalled"
        finally:
            self._leave(ticket)

    def recall(self, session: str) -> None:
        """Send a Session's attempts away from the line: they may not begin now. Plain."""
        for ticket in [ticket for ticket in self._line if ticket.session == session]:
            self._decide(ticket, "recalled")
        self._serve_line()

    def take_metrics(self) -> dict[str, float | None]:
        """The numbers since the last call, as `agentic_kv/admission/*` and `agentic_kv/budget/*`.

        Counts are of this time. `waiting`, `reserved` and `reserved_utilization` are the highest in it; `degraded` is 1
        if something passed because pools were not known, or they are not known now; token usage is over all readings
        of all servers. None where there is nothing to tell.
        """
        snapshot = self._look()
        tally, usage, ceiling = self._tally, self.capacity.take_usage(), self._ceiling(snapshot)
        bypasses = {f"bypass_{why}": tally.counts[why] for why in ("protected", "degraded", "aged")}
        admission: dict[str, float] = {
            "admit": tally.counts["admit"],
            "bypass": sum(bypasses.values()),
            **bypasses,
            "wait": tally.counts["wait"],
            "waiting": tally.n_waiting,
            "cancelled": tally.counts["cancelled"],
            "wait_seconds_mean": tally.waited_s / tally.n_waited if tally.n_waited else 0.0,
        }
        budget: dict[str, float | None] = {
            "ceiling": ceiling,
            "reserved": tally.n_reserved,
            "reserved_utilization": tally.utilization,
            "kv_token_usage_mean": None if usage is None else usage[0],
            "kv_token_usage_max": None if usage is None else usage[1],
            "degraded": int(snapshot is None or bypasses["bypass_degraded"] > 0),
        }
        self._tally = _Tally()
        self._note(ceiling)
        return {
            **{f"agentic_kv/admission/{name}": value for name, value in admission.items()},
            **{f"agentic_kv/budget/{name}": value for name, value in budget.items()},
        }

    # --- the rules --------------------------------------------------------------------------------------------

    def _arrive(self, wanted: Reservation) -> _Ticket:
        cap = self._options.expected_decode_cap
        n_new = wanted.n_new if cap is None else min(wanted.n_new, cap)
        ticket = _Ticket(session=wanted.session, n_tokens=wanted.n_prefix + n_new)
        if wanted.is_protected:
            self._decide(ticket, "protected")
            return ticket
        self._line[ticket] = None
        self._serve_line()
        if ticket.decision is None:
            ticket.has_waited = True
            self._tally.counts["wait"] += 1
            self._note(self.ceiling)
        return ticket

    def _serve_line(self) -> None:
        """Let pass who may, in order; the first who may not holds up the others."""
        snapshot = self._look()
        ceiling = self._ceiling(snapshot)
        while self._line:
            first = next(iter(self._line))
            if snapshot is None or ceiling is None:
                self._decide(first, "degraded")
            elif snapshot.pressure >= self._options.pressure_threshold or self._n_reserved + first.n_tokens > ceiling:
                return
            else:
                self._decide(first, "admit")
                self._n_reserved += first.n_tokens
                self._note(ceiling)

    def _decide(self, ticket: _Ticket, decision: Decision) -> None:
        """Say, once, what becomes of an attempt."""
        assert ticket.decision is None, "an attempt is decided on once"
        self._line.pop(ticket, None)
        ticket.decision = decision
        ticket.decided.set()
        self._tally.counts["cancelled" if decision == "recalled" else decision] += 1
        if ticket.has_waited and decision != "recalled":
            self._tally.n_waited += 1
            self._tally.waited_s += trio.current_time() - ticket.since_s

    def _leave(self, ticket: _Ticket) -> None:
        """Its attempt has ended, or will not begin."""
        if ticket.decision == "admit":
            self._n_reserved -= ticket.n_tokens
            assert self._n_reserved >= 0, "a lease is returned once"
        elif ticket.decision is None:
            del self._line[ticket]
            self._tally.counts["cancelled"] += 1
        else:
            return
        self._serve_line()

    def _look(self) -> Snapshot | None:
        """The pools as they are known now; tells when that begins and ends."""
        snapshot = self.capacity.snapshot
        if (snapshot is not None) != self._is_known:
            self._is_known = snapshot is not None
            if snapshot is None:
                emit("pools.lost", waiting=len(self._line), reserved=self._n_reserved)
            else:
                emit("pools.learned", tokens=snapshot.n_total_tokens)
        return snapshot

    def _ceiling(self, snapshot: Snapshot | None) -> int | None:
        return None if snapshot is None else int(snapshot.n_total_tokens * self._options.headroom)

    def _note(self, ceiling: int | None) -> None:
        """Keep the peaks."""
        tally = self._tally
        tally.n_waiting = max(tally.n_waiting, len(self._line))
        tally.n_reserved = max(tally.n_reserved, self._n_reserved)
        if ceiling:
            tally.utilization = max(tally.utilization, self._n_reserved / ceiling)
