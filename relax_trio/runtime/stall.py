"""Nothing waits unseen: long waits are told with the chain of their owners and what each waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio
from attrs import frozen

from relax_trio.events import emit
from relax_trio.runtime.call import Call
from relax_trio.runtime.group import Group
from relax_trio.runtime.session import Session


@frozen(kw_only=True)
class Wait:
    """One long wait.

    Attributes:
      chain: names of the owners, the innermost last: step or evaluation, Group, Session, request, attempt, as far down
        as it goes.
      waits_for: what the innermost waits for.
      seconds: since when.
    """

    chain: tuple[str, ...]
    waits_for: str
    seconds: float


async def watch_stalls(waits: Callable[[], Iterable[Wait]], interval_s: float) -> None:
    """Tell every `interval_s` seconds of what `waits` finds; runs until it is cancelled."""
    while True:
        await trio.sleep(interval_s)
        for wait in waits():
            chain = " > ".join(wait.chain)
            emit("wait.stalled", chain=chain, waits_for=wait.waits_for, seconds=round(wait.seconds))


def long_waits(owner: str, group: Group, seconds: float) -> list[Wait]:
    """What a Group has waited for longer than `seconds`; its reward, once its last process is gone.

    Args:
      owner: whose Group it is: the head of every chain, e.g. "step 3".
    """
    name = f"{group.id} ({'leased' if group.lease.is_set() else 'in Prepare'})"
    if not group.sessions:
        since = trio.current_time() - group.completed_s if group.completed_s is not None else 0.0
        return [Wait(chain=(owner, name), waits_for="reward", seconds=since)] if since >= seconds else []
    waits = [wait for session in group.sessions for wait in _session_waits(session, seconds)]
    return [Wait(chain=(owner, name, *wait.chain), waits_for=wait.waits_for, seconds=wait.seconds) for wait in waits]


def _session_waits(session: Session, seconds: float) -> list[Wait]:
    """Long waits of live requests; of the agent itself where it has none."""
    now, name = trio.current_time(), session.name
    live = [call for call in session.calls if not call.done.is_set()]
    if not live:
        since = now - max((call.settled_s or 0.0 for call in session.calls), default=session.started_s)
        what = "its agent's next model call" if session.calls else "its agent's first model call"
        return [Wait(chain=(name,), waits_for=what, seconds=since)] if since >= seconds else []
    return [_request_wait(name, call, now) for call in live if now - call.accepted_s >= seconds]


def _request_wait(session: str, call: Call, now: float) -> Wait:
    chain = (session, str(call.request_id)) if call.flight is None else (session, str(call.request_id), call.flight.rid)
    what = {
        "gate": "the generation gate",
        "admission": "admission to the servers' KV pools",
        "permit": "an attempt permit",
        "paused": "the next step, its attempt paused",
        "lease": "the lease of its Group",
    }
    return Wait(chain=chain, waits_for=what.get(call.waiting_for, call.waiting_for), seconds=now - call.accepted_s)
