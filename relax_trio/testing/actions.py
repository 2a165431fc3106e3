"""What the explorer may do to a run between two task steps: every owner's own way to end what it owns, and faults.

Each action is plain and does what happens in a real run: nothing here cancels a scope that its owner would not.

| action | who does it in a real run |
|---|---|
| disconnect CALL | a client's connection breaks; it comes back within the grace, with a marked retry |
| leave CALL | a client's connection breaks, and the grace is over when it comes back: the Call is cancelled |
| fail SESSION | the engine failed a Session, whose place then tries again |
| spend SESSION | its active time is over |
| drop GROUP | its owner drops it, also out of its reward |
| stop work | the first signal: the scope around the work is cancelled |
| stop engine | the outermost scope is cancelled |
| lose ATTEMPT | the engine fails an attempt, which may be tried again |
| refuse ATTEMPT | the engine refuses an attempt |
| die backend | the engine's own loop fails |
| kill AGENT | an agent exits by a signal |
| launch next | the next launch of an agent fails |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import trio
from attrs import frozen

from relax_trio.agent.fake import FakeAgentLauncher
from relax_trio.backend.fake import FakeBackend
from relax_trio.errors import BackendRejected, BackendUnavailable
from relax_trio.runtime.session import Session
from relax_trio.testing.bench import Bench

KINDS = ("disconnect", "leave", "fail", "spend", "drop", "stop", "lose", "refuse", "die", "kill", "launch")
"""First words of all actions."""


@frozen(kw_only=True)
class Action:
    """One thing that may be done now.

    Attributes:
      name: kind and target, unique among the actions of a moment: "drop G1".
      do: does it. Plain.
      is_gone: whether what it ends has ended; None where nothing has to.
    """

    name: str
    do: Callable[[], None]
    is_gone: Callable[[], bool] | None = None

    @property
    def kind(self) -> str:
        """The first word of its name."""
        return self.name.partition(" ")[0]


def possible_actions(bench: Bench) -> Iterator[Action]:
    """Everything that may be done now, in an order that depends on the run alone."""
    yield Action(name="stop engine", do=partial(bench.engine_scope.cancel, reason="explorer: stop engine"))
    if bench.work is not None and not bench.is_work_closed:
        yield Action(name="stop work", do=bench.stop, is_gone=lambda: bench.is_work_closed)
        for resident in bench.work.residents.all:
            drop = partial(resident.drop, "explorer")
            yield Action(name=f"drop {resident.group.id}", do=drop, is_gone=resident.ended.is_set)
    yield from _clients(bench)
    for session in bench.sessions.open:
        yield from _session(bench, session)
    if bench.backend is not None and bench.launcher is not None:
        yield from _faults(bench, bench.backend, bench.launcher)


def _clients(bench: Bench) -> Iterator[Action]:
    for exchange in bench.client.live:
        call = exchange.call
        if call is None or exchange.ended.is_set():
            continue
        owner = next(session for session in bench.sessions.seen if call in session.calls)
        name = f"{owner.name}.{call.request_id}"
        yield Action(name=f"disconnect {name}", do=exchange.hang_up)
        yield Action(name=f"leave {name}", do=partial(exchange.hang_up, for_good=True), is_gone=call.done.is_set)


def _closed(bench: Bench, session: Session) -> Callable[[], bool]:
    """Whether a Session cannot be reached any more and none of its requests lives."""
    return lambda: session not in bench.sessions.open and all(call.done.is_set() for call in session.calls)


def _session(bench: Bench, session: Session) -> Iterator[Action]:
    is_gone = _closed(bench, session)

    def spend() -> None:
        session.budget.scope.deadline = trio.current_time()

    def is_spent() -> bool:
        return is_gone() or not session.budget.scope.cancel_called  # a pause in the same moment comes first

    error = BackendUnavailable("explorer: the engine failed the session")
    yield Action(name=f"fail {session.name}", do=partial(session.fail, error), is_gone=is_gone)
    if session.budget.is_running:
        yield Action(name=f"spend {session.name}", do=spend, is_gone=is_spent)


def _faults(bench: Bench, backend: FakeBackend, launcher: FakeAgentLauncher) -> Iterator[Action]:
    for rid in backend.running:
        yield Action(name=f"lose {rid}", do=partial(backend.fail, rid, BackendUnavailable("explorer: lost")))
        yield Action(name=f"refuse {rid}", do=partial(backend.fail, rid, BackendRejected("explorer: refused")))
    if backend.is_serving:
        yield Action(name="die backend", do=partial(backend.die, "explorer: the backend died"))
    for place in launcher.running:
        session = next(session for session in bench.sessions.open if session.place == place)
        yield Action(name=f"kill {place}", do=partial(launcher.kill, place), is_gone=_closed(bench, session))
    yield Action(name="launch next", do=partial(launcher.fail_next, "explorer: no memory"))
