"""Counting a prompt that is not made into a request, and the warning of what was left out of one."""

from __future__ import annotations

import pytest
import trio
from builders_runtime import LIMITS, ByteCodec, answer, make_request, make_tasks, open_shared, user

from relax_trio.data.messages import Message
from relax_trio.errors import EngineUnavailable, SessionDiscarded
from relax_trio.forest.view import forest_json
from relax_trio.ids import GroupId, PlaceId
from relax_trio.runtime.session import Session


def make_session(shared, *, leased=True):
    lease = trio.Event()
    if leased:
        lease.set()
    return Session(
        place=PlaceId("G0/0"),
        group=GroupId("G0"),
        index=0,
        mode="train",
        task=make_tasks(1)[0],
        limits=LIMITS,
        shared=shared,
        lease=lease,
    )


OK = Message(role="assistant", content="ok")
HISTORIES = {
    "opening": (user("hello"),),
    "committed": (user("hi"),),
    "a turn that was generated": (user("hi"), OK),
    "a turn and what follows": (user("hi"), OK, user("more")),
    "part of an observation": (user("hi"), OK, user("a")),
    "an observation": (user("hi"), OK, user("a"), user("b")),
    "behind an observation": (user("hi"), OK, user("a"), user("b"), user("c")),
    "a turn of another": (user("hi"), Message(role="assistant", content="no")),
}


@pytest.mark.parametrize("messages", HISTORIES.values(), ids=HISTORIES)
async def test_a_count_is_what_the_engine_would_be_sent_and_leaves_no_trace(autojump_clock, messages):
    async with open_shared() as shared:
        session = make_session(shared)
        async with session.open():
            for history in (HISTORIES["committed"], HISTORIES["an observation"]):
                await session.submit(make_request(*history)).wait_done()
            before = forest_json(session.forest)

            counted = await session.count_tokens(make_request(*messages))

            assert forest_json(session.forest) == before
            assert len(session.calls) == 2
            if messages[-1].role == "assistant":
                recorded = ByteCodec().encode_opening(messages[:1], (), {})
                tail = answer("ok") if messages[-1] == OK else None
                opening = ByteCodec().encode_opening(messages, (), {})
                assert counted == (len(opening) if tail is None else len(recorded) + len(tail))
            else:
                call = session.submit(make_request(*messages))
                assert (await call.wait_done()).usage.prompt_tokens == counted


async def test_a_count_waits_for_no_lease(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared, leased=False)
        async with session.open():
            assert await session.count_tokens(make_request(user("hi"))) > 0

    assert trio.current_time() == 0.0


async def test_an_ended_session_counts_nothing(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared)
        async with session.open():
            pass
        with pytest.raises(SessionDiscarded):
            await session.count_tokens(make_request(user("hi")))


async def test_a_run_that_ends_counts_nothing(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared)
        async with session.open():
            shared.sessions._is_stopping = lambda: True
            with pytest.raises(EngineUnavailable):
                await session.count_tokens(make_request(user("hi")))


async def test_what_was_left_out_is_warned_of_once_in_a_session(autojump_clock, events):
    async with open_shared() as shared:
        session = make_session(shared)
        async with session.open():
            await session.submit(make_request(user("a"))).wait_done()
            assert not any(event.name == "items.skipped" for event in events)
            for kinds in (("document", "tool web_search"), ("document",), tuple(f"kind {i}" for i in range(100))):
                await session.submit(make_request(user("a"), skipped=kinds)).wait_done()
            state = session.debug_state(forest=False)

    (event,) = [event for event in events if event.name == "items.skipped"]
    assert event.fields == {"place": "G0/0", "request": "r2", "kinds": "document, tool web_search"}
    assert state["skipped"][:3] == ["document", "tool web_search", "kind 0"]
    assert len(state["skipped"]) == 32


async def test_statistics_count_what_is_alive(autojump_clock):
    async with open_shared() as shared:
        leased, held = make_session(shared), make_session(shared, leased=False)
        async with leased.open(), held.open():
            done = leased.submit(make_request(user("a")))
            await done.wait_done()
            running = leased.submit(make_request(user("b")))
            held.submit(make_request(user("c")))
            await trio.sleep(1)
            statistics = shared.sessions.statistics()
            await running.wait_done()

    assert (statistics.n_sessions, statistics.n_attempts) == (2, 1)
    assert dict(statistics.n_requests) == {"backend": 1, "lease": 1}
