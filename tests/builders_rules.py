"""Timetables: everything that happens to Groups and attempts of a run, with exact times.

A timetable is the same under every schedule: what happens in one moment is sorted, so only times and ids count.
"""

from __future__ import annotations

from types import SimpleNamespace

import trio

from relax_trio.events import event_sink
from relax_trio.testing import Bench, prompt_of, run_virtual

ABOUT = {
    "group.started": "group",
    "group.prepared": "group",
    "group.leased": "group",
    "group.scored": "group",
    "group.dropped": "group",
    "group.filtered": "group",
    "session.retried": "place",
    "row.set_aside": "source",
    "step.waiting": "protected",
    "step.credited": "debt",
    "partition.sealed": "surplus",
    "accounting_start": "rollout",
    "accounting_end": "rollout",
    "eval.started": "dataset",
    "eval.completed": "dataset",
}
"""Events of a timetable, by the field that names what they are about."""

TOLD = {name: name.rpartition(".")[2] for name in ABOUT} | {
    "accounting_start": "open",
    "accounting_end": "close",
    "eval.started": "eval",
    "eval.completed": "evaluated",
    "session.retried": "retry",
    "row.set_aside": "aside",
}
CALLED = {"generate": "run", "abort": "abort", "update_weights": "weights", "pause": "pause", "resume": "resume"}
"""How a timetable calls events, and calls of the backend."""


HOOKS = __name__
"""Module of the hooks below, for the flags that name one."""


def timetable(main, seed):
    """Run `main(bench)` on the virtual clock; what happened as `{time: "what, …"}`, each moment sorted."""
    bench, moments = Bench(), {}

    def note(event):
        if event.name in TOLD:
            moments.setdefault(event.at, []).append(f"{TOLD[event.name]} {event.fields[ABOUT[event.name]]}")

    async def stamped(bench):
        with event_sink(note, trio.current_time):
            await main(bench)

    run_virtual(stamped, bench, seed=seed)
    for call in bench.backend.calls:
        if call.name != "close_session":
            moments.setdefault(call.at, []).append(f"{CALLED[call.name]} {call.what}".rstrip())
    return {at: ", ".join(sorted(moments[at])) for at in sorted(moments)}


# --- hooks and an agent ------------------------------------------------------------------------------------------


async def odd_rows(args, samples):
    """A dynamic filter."""
    return SimpleNamespace(keep=samples[0].metadata["row"] % 2 == 1, reason="even")


async def late_for_group_one(args, sample):
    """A reward hook that takes 30 s for G1."""
    await trio.sleep(30 if sample.group_index == 1 else 0)
    return 1.0


async def without_reward(agent):
    """One turn, whose reward the hook gives."""
    await agent.client.chat(agent, prompt_of(agent))
