"""A Session and its requests on the virtual clock."""

from __future__ import annotations

import pytest
import trio
from builders_runtime import LIMITS, answer, make_request, make_tasks, open_shared, user

from relax_trio.backend.fake import FakeBackend
from relax_trio.errors import (
    AgentExecutionError,
    AgentOutputError,
    AgentTimeout,
    BackendUnavailable,
    ContextLengthExceeded,
    InternalError,
    NoCommittedResponse,
    SessionDiscarded,
)
from relax_trio.ids import GroupId, PlaceId
from relax_trio.runtime.outcome import Completed, Failed
from relax_trio.runtime.session import Session
from relax_trio.sync.barrier import PresenceBarrier


def make_session(shared, *, leased=True, **fields):
    lease = trio.Event()
    if leased:
        lease.set()
    return Session(
        place=PlaceId("G0/0"),
        group=GroupId("G0"),
        index=0,
        mode="train",
        task=make_tasks(1)[0],
        limits=fields.pop("limits", LIMITS),
        shared=shared,
        lease=lease,
        **fields,
    )


async def test_a_session_ends_with_its_agent_and_exports_what_was_generated(autojump_clock):
    async def agent(agent):
        first = await agent.client.chat(agent, user("hi"))
        await trio.sleep(10)
        await agent.client.chat(agent, user("hi"), first, user("more"))
        agent.write_output({"reward": 0.5, "metadata": {"turns": 2}})

    async with open_shared(agent) as shared:
        result = await make_session(shared).run()

    assert isinstance(result, Completed)
    (context,) = result.contexts
    assert trio.current_time() == pytest.approx(3 + 10 + 3)  # "ok" and the stop token, at a token a second
    assert context.reward == 0.5
    assert context.turn_lens == (3, 3)
    trained = [t for t, m in zip(context.tokens[context.prompt_len :], context.loss_mask, strict=True) if m]
    assert trained == answer("ok") * 2
    assert [m.content for m in context.messages] == ["hi", "ok", "more", "ok"]


@pytest.mark.parametrize(
    ("agent_fn", "error"),
    [
        ("exit", AgentExecutionError),
        ("garbage", AgentOutputError),
        ("silent", NoCommittedResponse),
    ],
)
async def test_an_agents_failure_is_a_value(autojump_clock, agent_fn, error):
    from relax_trio.agent.fake import AgentExit

    async def agent(agent):
        if agent_fn == "exit":
            await agent.client.chat(agent, user("hi"))
            raise AgentExit(3)
        if agent_fn == "garbage":
            await agent.client.chat(agent, user("hi"))
            agent.output = b"[1, 2"

    async with open_shared(agent) as shared:
        result = await make_session(shared).run()

    assert isinstance(result, Failed)
    assert isinstance(result.error, error)
    assert shared.launcher.ended[0].has_failed


async def test_active_time_runs_from_the_lease_and_ends_the_agent(autojump_clock):
    async def agent(agent):
        await trio.sleep_forever()

    async with open_shared(agent, agent_timeout_s=30.0) as shared:
        session = make_session(shared, leased=False)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def lease_later():
                await trio.sleep(1000)
                session.lease.set()
                session.budget.resume()

            result = await session.run()

    assert trio.current_time() == 1030.0
    assert isinstance(result, Failed)
    assert isinstance(result.error, AgentTimeout)


async def test_a_request_is_held_until_the_lease(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared, leased=False)
        async with session.open():
            call = session.submit(make_request(user("hi")))
            await trio.sleep(100)
            assert not call.done.is_set()
            session.lease.set()
            completion = await call.wait_done()

    assert trio.current_time() == 103.0
    assert completion.finish == "stop"
    assert completion.usage.completion_tokens == 3


async def test_an_aborted_attempt_goes_round_again_with_what_is_left(autojump_clock):
    backend = FakeBackend([answer("abcdefgh")], tokens_per_s=1.0)
    async with open_shared(backend=backend) as shared:
        session = make_session(shared)
        async with session.open():
            call = session.submit(make_request(user("hi")))
            await trio.sleep(4.5)
            session.generation.shut("step closed")
            await backend.abort(call.attempts[0].rid)
            await trio.sleep(100)
            assert call.waiting_for == "gate"
            assert call.attempts[0].n_tokens == 4
            session.generation.open()
            completion = await call.wait_done()
        (first, second) = backend.attempts

    assert completion.message.content == "abcdefgh"
    assert second.sampling.max_new_tokens == first.sampling.max_new_tokens - 4
    assert list(second.token_ids[first.response_start :]) == answer("abcd")[:-1]
    assert trio.current_time() == pytest.approx(104.5 + 5)


async def test_the_grace_of_a_client_that_left_ends_its_request_only(autojump_clock):
    backend = FakeBackend(lambda attempt: answer("x" * 30), tokens_per_s=1.0)
    async with open_shared(backend=backend, retry_grace_s=5.0) as shared:
        session = make_session(shared)
        async with session.open():
            left, stays = session.submit(make_request(user("a"))), session.submit(make_request(user("b")))
            await trio.sleep(3)
            left.detach()
            with pytest.raises(InternalError):
                await left.wait_done()
            assert trio.current_time() == 8.0
            await stays.wait_done()
            assert trio.current_time() == 31.0
        assert len(session.forest.nodes) == 3  # root, one observation, one response


async def test_a_marked_retry_joins_the_call_in_flight(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared)
        async with session.open():
            first = session.submit(make_request(user("a"), digest=b"d"))
            await trio.sleep(1)
            first.detach()
            again = session.submit(make_request(user("a"), digest=b"d", retry=True))
            unmarked = session.submit(make_request(user("a"), digest=b"d"))
            assert again is first
            assert unmarked is not first
            await first.wait_done()
        assert len(shared.backend.attempts) == 2


async def test_a_marked_retry_gets_the_reply_that_was_never_delivered(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared)
        async with session.open():
            first = session.submit(make_request(user("a"), digest=b"d"))
            await first.wait_done()
            first.detach()
            assert session.submit(make_request(user("a"), digest=b"d", retry=True)) is first
            first.delivered()
            assert session.submit(make_request(user("a"), digest=b"d", retry=True)) is not first


async def test_an_undelivered_reply_is_kept_until_something_builds_on_its_parent(autojump_clock):
    backend = FakeBackend(lambda attempt: answer(f"say {len(backend.attempts)}"), tokens_per_s=1.0)
    async with open_shared(backend=backend) as shared:
        session = make_session(shared)
        async with session.open():
            lost = session.submit(make_request(user("a"), digest=b"d"))
            await lost.wait_done()
            lost.detach()
            other = session.submit(make_request(user("a"), digest=b"other"))
            await other.wait_done()
            assert session.submit(make_request(user("a"), digest=b"d", retry=True)) is not lost


async def test_a_reply_that_equals_a_delivered_one_is_still_kept(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared)
        async with session.open():
            received = session.submit(make_request(user("a"), digest=b"first"))
            await received.wait_done()
            received.delivered()
            lost = session.submit(make_request(user("a"), digest=b"second"))
            await lost.wait_done()
            lost.detach()
            assert lost.node is received.node
            assert session.submit(make_request(user("a"), digest=b"second", retry=True)) is lost


async def test_a_request_that_comes_after_the_end_is_discarded(autojump_clock):
    """The front half may have found the Session before it ended, and read a long body meanwhile."""
    barrier = PresenceBarrier(1)
    async with open_shared() as shared:
        session = make_session(shared, barrier=barrier)
        async with session.open():
            pass
        with pytest.raises(SessionDiscarded):
            session.submit(make_request(user("a")))
    assert barrier.n_present == 0
    assert session.calls == []


async def test_an_export_error_ends_with_the_agents_last_words(autojump_clock):
    async def agent(agent):
        agent.print("ValueError: no such tool")

    async with open_shared(agent) as shared:
        result = await make_session(shared).run()

    assert isinstance(result.error, NoCommittedResponse)
    assert "session G0/0" in str(result.error)
    assert "ValueError: no such tool" in str(result.error)


async def test_requests_left_at_the_end_are_discarded(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared, leased=False)
        async with session.open():
            call = session.submit(make_request(user("a")))
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(SessionDiscarded):
            await call.wait_done()
        assert shared.sessions.find(session.credential) is None


async def test_a_context_that_is_full_is_refused_and_leaves_no_trace(autojump_clock):
    async with open_shared() as shared:
        session = make_session(shared)
        async with session.open():
            call = session.submit(make_request(user("x" * 2000)))
            with pytest.raises(ContextLengthExceeded) as caught:
                await call.wait_done()
        assert caught.value.max_context_len == LIMITS.max_context_len
        assert len(session.forest.nodes) == 1


async def test_an_engine_failure_ends_the_session_as_the_engines(autojump_clock):
    backend = FakeBackend(lambda attempt: answer("ok"))
    backend.fail_next(BackendUnavailable("gone"))

    async def agent(agent):
        await agent.client.chat(agent, user("hi"))

    async with open_shared(agent, backend=backend) as shared:
        result = await make_session(shared).run()

    assert isinstance(result, Failed)
    assert isinstance(result.error, BackendUnavailable)


@pytest.mark.parametrize("how", ["delivered", "detach"])
async def test_the_export_waits_for_the_fate_of_the_last_reply(autojump_clock, how):
    """The agent may be reaped before the task that wrote its last byte runs again."""
    last = []

    async def agent(agent):
        first = await agent.client.chat(agent, user("hi"))
        call = agent.client.submit(agent, make_request(user("hi"), first, user("more")))
        await call.wait_done()
        last.append(call)
        agent.write_output({"reward": 1.0})

    async with open_shared(agent) as shared, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def finish_writing():
            await trio.sleep(7)
            getattr(last[0], how)()

        result = await make_session(shared).run()

    assert trio.current_time() == 7.0
    assert len(result.contexts[0].turn_lens) == (2 if how == "delivered" else 1)
