"""What must hold between any two task steps of a run, and at its end, whatever was cancelled or failed in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attrs import define, field

from relax_trio.events import Event
from relax_trio.ids import GroupId, Rid
from relax_trio.runtime.ledger import Partition
from relax_trio.runtime.residents import Resident
from relax_trio.runtime.session import Session
from relax_trio.runtime.shared import Shared
from relax_trio.runtime.work import Work
from relax_trio.testing.bench import Bench


@define
class _GroupLife:
    """What the events told of one train Group."""

    n_leases: int = 0
    n_ends: int = 0
    is_scored: bool = False


@define(eq=False)
class Invariants:
    """The invariants of one run.

    * A Group is leased at most once and ends exactly once, scored or dropped; what was scored may be dropped as stale.
      No lease goes beyond margin and debt, or to a Group of which a place has no live request.
    * The permits taken are those of the Groups with processes, and for a moment one that is on its way to a new Group.
    * Rows taken = handed over + filtered + given back + set aside + at work or waiting in the ledger.
    * A barrier counts the places with a live request. An attempt runs only for a leased Session, with a permit, was
      begun only while it was allowed to, and is known to its request. Weights change while no attempt runs that is not
      paused. Attempts are paused only while the gate is shut, and none is at the end.
    * Admission holds tokens only while a request is on its way from it to the end of its attempt, and in its line
      stand only requests that wait for it; at the end, none of either.
    * While the gate is shut, no active time is spent but by protected Sessions.
    * A handed-over row has a logprob for each generated token and nowhere else, and a version for each.
    * At the end: no agent, no open Session, no unsettled Call, no exchange, no attempt and no permit is left, the
      backend was told of the end of each Session and remembers none, and no clean-up ran out of time.
    (Rehearsal adds: no file is left open, and what was ended is gone in time.)
    """

    _bench: Bench
    _lives: dict[str, _GroupLife] = field(factory=dict, init=False)
    _found: list[str] = field(factory=list, init=False)
    _partitions: list[Partition] = field(factory=list, init=False)
    _residents: dict[GroupId, Resident] = field(factory=dict, init=False)
    _n_set_aside: int = field(default=0, init=False)
    _sessions: list[Session] = field(factory=list, init=False)
    _n_seen: int = field(default=0, init=False)
    _attempts: set[Rid] = field(factory=set, init=False)
    _n_calls: int = field(default=0, init=False)
    _shut_since_s: float | None = field(default=None, init=False)
    _spare_since_s: float | None = field(default=None, init=False)

    def on_event(self, event: Event) -> None:
        """Take note of an event; what is wrong with it comes out of the next check."""
        group = event.fields.get("group")
        if event.name == "cleanup.timed_out":
            self._found.append(f"the clean-up of {event.fields['what']} ran out of time")
        elif event.name == "row.set_aside":
            self._n_set_aside += 1
        elif event.name == "group.started":
            if group in self._lives:
                self._found.append(f"{group} started twice")
            self._lives[str(group)] = _GroupLife()
        elif group in self._lives:
            self._on_group(event.name, str(group), self._lives[str(group)])

    def _on_group(self, name: str, group: str, life: _GroupLife) -> None:
        work = self._bench.work
        if name == "group.leased":
            life.n_leases += 1
            if life.n_leases > 1 or life.n_ends:
                self._found.append(f"{group} was leased twice or after its end")
            if work is not None and len(work.residents.leased) > work.residents.margin + work.ledger.debt:
                self._found.append(f"the lease of {group} goes beyond margin and debt")
            if work is not None and not any(r.group.id == group and r.group.may_be_leased for r in work.residents.all):
                self._found.append(f"{group} was leased while a place had no live request, or after it was dropped")
        elif name == "group.scored":
            life.n_ends += 1
            life.is_scored = True
            if life.n_ends > 1:
                self._found.append(f"{group} ended twice")
        elif name == "group.dropped":
            if life.n_ends and not life.is_scored:
                self._found.append(f"{group} ended twice")
            life.n_ends += not life.is_scored
            life.is_scored = False  # a scored Group that is dropped as stale, and that only once

    def check(self, now_s: float) -> list[str]:
        """What is wrong between two task steps. Called after each step that may have changed something."""
        found, self._found = self._found, []
        work = self._bench.work
        if work is not None:
            self._take_note(work)
            if not self._bench.is_work_closed:
                found += self._groups(work)
                found += self._permits(work, now_s)
                found += self._barriers(work)
                found += self._clocks(work, now_s)
            found += self._rows(work)
        found += self._requests()
        return found

    def check_end(self, now_s: float) -> list[str]:
        """What is wrong, or left, when the run is over."""
        bench, found = self._bench, self.check(now_s)
        found += [f"{group} never ended" for group, life in self._lives.items() if not life.n_ends]
        if bench.work is not None:
            if not bench.is_work_closed:
                found.append("the work was not closed")
            if bench.work.residents.all or bench.work.residents.n_permits_used:
                found.append("a Group or its permit is left")
            found += self._samples(bench.work)
        for session in bench.sessions.seen:
            found += [f"{session.name}.{call.request_id} is not settled" for call in session.calls if not call.result]
        if bench.sessions.open or bench.client.live:
            found.append("a Session or an exchange is left")
        if bench.shared is not None and bench.shared.attempt_permits.borrowed_tokens:
            found.append("an attempt's permit is left")
        admission = None if bench.shared is None else bench.shared.admission
        if admission is not None and (admission.n_reserved or admission.n_waiting):
            found.append(f"{admission.n_reserved} tokens are leased, {admission.n_waiting} attempts wait for some")
        if bench.launcher is not None and len(bench.launcher.started) != len(bench.launcher.ended):
            found.append(f"agents are left: {bench.launcher.live}")
        if bench.backend is not None:
            if bench.backend.is_paused:
                found.append("the backend is left paused")
            if bench.backend.running or bench.backend.remembered:
                found.append(f"the backend has {bench.backend.running}, remembers {sorted(bench.backend.remembered)}")
            closed = sorted(call.what for call in bench.backend.calls if call.name == "close_session")
            if closed != sorted(session.name for session in bench.sessions.seen):
                found.append("the backend was not told once of the end of each Session")
        return found

    # --- parts ------------------------------------------------------------------------------------------------

    def _groups(self, work: Work) -> Iterator[str]:
        alive = {resident.group.id for resident in work.residents.all}
        told = {group for group, life in self._lives.items() if not life.n_ends}
        if alive != told:
            yield f"resident are {sorted(alive)}, started and not ended {sorted(told)}"

    def _permits(self, work: Work, now_s: float) -> Iterator[str]:
        n_used = work.residents.n_permits_used
        n_held = sum(not resident.vacated.is_set() for resident in work.residents.all)
        if n_used == n_held:
            self._spare_since_s = None
        elif self._spare_since_s is None:
            self._spare_since_s = now_s
        lasts = self._spare_since_s is not None and now_s > self._spare_since_s
        if not n_held <= n_used <= n_held + 1 or lasts:
            yield f"{n_used} Group permits are taken for {n_held} Groups with processes"
        if n_used > work.config.n_resident_groups:
            yield f"{n_used} Group permits are taken of {work.config.n_resident_groups}"

    def _barriers(self, work: Work) -> Iterator[str]:
        n_full = 0
        for resident in work.residents.all:
            group = resident.group
            present = {s.index for s in group.sessions if any(not call.done.is_set() for call in s.calls)}
            if group.barrier.n_present != len(present):
                yield f"the barrier of {group.id} counts {group.barrier.n_present}, present are {sorted(present)}"
            n_full += group.barrier.is_full and not group.lease.is_set()
        if work.residents.desk.n_ready > n_full:
            yield f"{work.residents.desk.n_ready} Groups stand in line, {n_full} may"

    def _clocks(self, work: Work, now_s: float) -> Iterator[str]:
        if work.residents.generation.is_open:
            if self._bench.backend is not None and self._bench.backend.is_paused:
                yield "attempts are paused at an open gate"
            self._shut_since_s = None
            return
        if self._shut_since_s is None:
            self._shut_since_s = now_s
        if now_s > self._shut_since_s:
            for session in (s for resident in work.residents.leased for s in resident.group.sessions):
                if session.budget.is_running and not session.is_protected:
                    yield f"{session.name} spends active time at a shut gate"

    def _take_note(self, work: Work) -> None:
        """Remember what will not be reachable any more when it has ended."""
        self._residents.update({resident.group.id: resident for resident in work.residents.all})
        known = set(map(id, self._partitions))
        self._partitions += [partition for partition in work.ledger.partitions if id(partition) not in known]

    def _rows(self, work: Work) -> Iterator[str]:
        """A partition that is not open any more was handed over; what the others have goes back at the end."""
        n_handed = sum(len(partition.groups) for partition in self._handed_over(work))
        ended = [resident for resident in self._residents.values() if resident.ended.is_set()]
        n_filtered = sum(resident.filtered is not None for resident in ended)
        n_open = 0 if self._bench.is_work_closed else len(work.unfinished())
        rows = work.rows
        if rows.n_taken != n_handed + n_filtered + rows.n_given_back + self._n_set_aside + n_open:
            yield (
                f"{rows.n_taken} rows taken, {n_handed} handed over, {n_filtered} filtered, {rows.n_given_back} given "
                f"back, {self._n_set_aside} set aside, {n_open} at work"
            )

    def _handed_over(self, work: Work) -> list[Partition]:
        return [partition for partition in self._partitions if partition not in work.ledger.partitions]

    def _samples(self, work: Work) -> Iterator[str]:
        groups = [group for partition in self._handed_over(work) for group in partition.groups]
        for sample in (sample for group in groups for sample in group.samples):
            n_generated = sum(sample.turn_lens)
            has_logprob = bytes(logprob != 0.0 for logprob in sample.rollout_log_probs)
            if has_logprob != bytes(sample.loss_mask) or sum(sample.loss_mask) != n_generated:
                yield f"{sample.place}: logprobs, loss mask and turns of {n_generated} tokens do not fit each other"
            if sum(span.n_tokens for span in sample.weight_versions) != n_generated:
                yield f"{sample.place}: {sample.weight_versions} for {n_generated} generated tokens"

    def _admission(self, shared: Shared) -> Iterator[str]:
        admission = shared.admission
        if admission is None:
            return
        states = Counter(c.waiting_for for s in self._sessions for c in s.calls if not c.done.is_set())
        if admission.n_waiting > states["admission"]:
            yield f"{admission.n_waiting} attempts stand in the line of admission, {states['admission']} requests wait"
        if admission.n_reserved and not any(states[at] for at in ("admission", "permit", "backend", "paused")):
            yield f"{admission.n_reserved} tokens are leased to nobody"

    def _requests(self) -> Iterator[str]:
        bench = self._bench
        if bench.backend is None or bench.shared is None:
            return
        self._sessions += bench.sessions.seen[self._n_seen :]
        self._n_seen = len(bench.sessions.seen)
        flights: set[Rid] = set()
        yield from self._admission(bench.shared)
        for session in self._sessions:
            for call in session.calls:
                if call.flight is None:
                    continue
                rid = call.flight.rid
                flights.add(rid)
                if rid not in self._attempts:
                    self._attempts.add(rid)
                    if not session.lease.is_set() or not session.may_generate:
                        yield f"attempt {rid} began without lease or at a shut gate"
        if len(flights) > bench.shared.attempt_permits.borrowed_tokens:
            yield f"{len(flights)} attempts have {bench.shared.attempt_permits.borrowed_tokens} permits"
        if not flights.issuperset(bench.backend.running):
            yield f"attempts without a request run: {sorted(set(bench.backend.running) - flights)}"
        self._sessions = [
            s for s in self._sessions if s in bench.sessions.open or any(not call.done.is_set() for call in s.calls)
        ]
        for made in bench.backend.calls[self._n_calls :]:
            if made.name == "update_weights" and bench.backend.running and not bench.backend.is_paused:
                yield f"weights {made.what} came while attempts ran: {bench.backend.running}"
        self._n_calls = len(bench.backend.calls)
