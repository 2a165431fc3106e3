"""Partial rollout on the virtual clock: park at the close, resume the same HTTP call, protect, wait, seal."""

from __future__ import annotations

import math
import re

import pytest
import trio
from builders_runtime import LIMITS, answer, make_tasks, open_work, user

from relax_trio.agent.fake import AgentExit
from relax_trio.backend.base import WeightSource
from relax_trio.backend.fake import FakeBackend
from relax_trio.runtime.evaluate import EvalDataset, Evaluation

FAST, SLOW = 3, 21
"""Seconds, and tokens, of a turn: "ok" and its stop, or 20 letters and theirs."""


def row_of(attempt):
    """The row that an attempt's opening names: `<user>qN<assistant>`."""
    text = bytes(t - 1 for t in attempt.token_ids if t).decode()
    return int(re.search(r"<user>q(\d+)", text).group(1))


def lengths(slow_rows):
    """A backend that answers slow rows with 20 letters, at one token a second."""
    return FakeBackend(
        lambda attempt: answer("x" * (SLOW - 1) if row_of(attempt) in slow_rows else "ok"), tokens_per_s=1.0
    )


async def ask(agent):
    """One turn about the row, reward 1."""
    await agent.client.chat(agent, user(agent.session_input["messages"][0]["content"]))
    agent.write_output({"reward": 1.0})


def open_partial(agent=ask, *, slow=(), backend=None, **fields):
    """Two Groups of one Session a step, three at work."""
    sizes = {"n_samples_per_prompt": 1, "partial_rollout": True, "over_sampling_batch_size": 3}
    return open_work(agent, backend=backend or lengths(slow), **{**sizes, **fields})


def calls(work, name):
    return [(call.at, call.what) for call in work.shared.backend.calls if call.name == name]


async def test_a_close_parks_what_is_unfinished_and_the_next_step_resumes_the_same_call(autojump_clock, events):
    async with open_partial(slow={2}) as work:
        first = await work.run_step(0)
        assert trio.current_time() == FAST
        (resident,) = work.residents.leased
        (session,) = resident.group.sessions
        (call,) = session.calls
        assert (resident.group.id, call.waiting_for, session.n_aborted) == ("G2", "gate", 1)
        assert (session.budget.is_running, session.is_interrupted) == (False, True)
        await trio.sleep(100)  # the optimizer works, weights change
        second = await work.run_step(1)

    assert [group.id for group in first.groups] == ["G0", "G1"]
    assert [group.id for group in second.groups] == ["G3", "G4"]
    parked = [attempt for attempt in work.shared.backend.attempts if attempt.rid.startswith("G2/0-0.r1")]
    assert [(a.rid, len(a.token_ids) - a.response_start, a.sampling.max_new_tokens) for a in parked] == [
        ("G2/0-0.r1.1", 0, 64),
        ("G2/0-0.r1.2", 3, 61),
    ]
    assert calls(work, "abort") == [(3.0, "G2/0-0.r1.1"), (106.0, "G2/0-0.r1.2")]
    assert [e.name for e in events if e.fields.get("group") == "G2" and e.name == "group.dropped"] == ["group.dropped"]


async def test_a_resumed_turn_is_whole_and_its_spans_name_both_versions(autojump_clock):
    """3 tokens under version 0, 18 under version 1; protected since step 3, the Group pays step 4."""
    async with open_partial(slow={2}) as work:
        await work.run_step(0)
        await work.shared.backend.update_weights("1", WeightSource(tensors={}))
        results = [await work.run_step(step) for step in (1, 2, 3, 4)]

    (sample,) = [s for result in results for s in result.samples if s.row == 2]
    assert sample.response == "x" * 20
    assert next((span.version, span.n_tokens) for span in sample.weight_versions) == ("0", 3)
    assert sum(span.n_tokens for span in sample.weight_versions) == SLOW
    assert sum(sample.loss_mask) == len(sample.rollout_log_probs) == SLOW


async def test_the_active_budget_stops_between_steps(autojump_clock):
    """23 s of active time are enough for a turn of 21 s that is parked for 1000 s in the middle."""
    async with open_partial(slow={2}, shared_fields={"agent_timeout_s": 23.0}) as work:
        results = []
        for step in range(6):
            results.append(await work.run_step(step))
            await trio.sleep(1000)

    assert 2 in [s.row for result in results for s in result.samples]
    assert sum(result.n_failed_sessions for result in results) == 0


async def test_an_agent_that_works_between_requests_is_not_disturbed(autojump_clock):
    """Its tool runs over the pause; the request it makes there waits at the gate, with 3 s of its turn to come."""

    async def agent(agent):
        if agent.session_input["metadata"]["row"] != 2:
            await ask(agent)
            return
        reply = await agent.client.chat(agent, user("q2"))
        await trio.sleep(10)
        await agent.client.chat(agent, user("q2"), reply, user("again"))
        agent.write_output({"reward": 1.0})

    async with open_partial(agent) as work:
        first = await work.run_step(0)
        assert [s.row for s in first.samples] == [0, 1]
        await trio.sleep(50)
        (session,) = next(r for r in work.residents.leased if r.group.id == "G2").group.sessions
        assert [call.waiting_for for call in session.calls if not call.done.is_set()] == ["gate"]
        second = await work.run_step(1)
        assert trio.current_time() == 3 + 50 + 3
        await trio.sleep(1)  # the third one ended in the moment of the close: it is surplus
        rows = [s.row for s in second.samples] + [group.task.row for group in work.ledger.surplus]
        assert sorted(rows) == [2, 3, 4]


async def test_a_turn_aborted_at_its_last_token_is_complete_and_committed(autojump_clock):
    """The abort acts when the 21st token, a stop token, is there: nothing goes round again."""
    backend = lengths({2})
    backend._abort_delay_s = SLOW - FAST - 1e-9  # acts just before the turn's own end: all tokens exist by then
    async with open_partial(backend=backend, shared_fields={"abort_grace_s": 60.0}) as work:
        await work.run_step(0)
        await trio.sleep(1)
        assert [group.id for group in work.ledger.surplus] == ["G2"]
        second = await work.run_step(1)

    assert next(group.id for group in second.groups) == "G2"
    assert [a.rid for a in work.shared.backend.attempts if a.rid.startswith("G2/")] == ["G2/0-0.r1.1"]


async def test_an_attempt_that_does_not_come_back_is_given_up_and_asked_for_anew(autojump_clock, events):
    backend = lengths({2})
    backend._abort_delay_s = math.inf
    async with open_partial(backend=backend, shared_fields={"abort_grace_s": 7.0}) as work:
        await work.run_step(0)
        assert trio.current_time() == FAST + 7.0
        backend._abort_delay_s = 0.0
        await work.run_step(1)

    (event,) = [e for e in events if e.name == "attempt.abort_timeout"]
    assert event.fields["rid"] == "G2/0-0.r1.1"
    again = next(a for a in backend.attempts if a.rid == "G2/0-0.r1.2")
    assert len(again.token_ids) == again.response_start, "its tokens are lost, so the turn begins anew"


async def test_surplus_waits_for_the_next_partition_and_pays_first(autojump_clock):
    """The third Group ends during the pause; it pays step 1 before that has leased anything."""

    async def agent(agent):
        await agent.client.chat(agent, user("q1"))
        await trio.sleep(agent.session_input["metadata"]["row"] / 10)
        agent.write_output({"reward": 1.0})

    async with open_partial(agent) as work:
        first = await work.run_step(0)
        await trio.sleep(10)
        assert [group.id for group in work.ledger.surplus] == ["G2"]
        second = await work.run_step(1)

    assert [group.id for group in first.groups] == ["G0", "G1"]
    assert [group.id for group in second.groups] == ["G2", "G3"]


async def test_a_session_aborted_too_often_is_protected_and_the_close_waits_for_it(autojump_clock, events):
    """Aborted at 3 and 6, protected from the resume at 6 on; step 2 has its Groups at 9 and closes at 21."""
    async with open_partial(slow={2}, partial_rollout_max_aborted_count=2) as work:
        for step in (0, 1):
            await work.run_step(step)
        assert trio.current_time() == 6.0
        (session,) = next(r for r in work.residents.leased if r.group.id == "G2").group.sessions
        assert (session.n_aborted, session.is_protected) == (2, False)
        third = await work.run_step(2)
        assert session.is_protected
        assert trio.current_time() == SLOW
        fourth = await work.run_step(3)

    assert "G2" not in [group.id for group in third.groups]
    assert "G2" in [group.id for group in fourth.groups]
    assert [e.fields["protected"] for e in events if e.name == "step.waiting"] == ["G2"]
    assert [what for _, what in calls(work, "abort") if what.startswith("G2/")] == ["G2/0-0.r1.1", "G2/0-0.r1.2"]


async def test_a_protected_session_spends_its_budget_while_the_close_waits(autojump_clock):
    """Two pauses of 100 s cost nothing; protected, it runs out of 15 s of active time while the close waits."""
    async with open_partial(
        slow={2}, partial_rollout_max_aborted_count=2, shared_fields={"agent_timeout_s": 15.0}
    ) as work:
        for step in (0, 1):
            await work.run_step(step)
            await trio.sleep(100)
        assert trio.current_time() == 206.0
        result = await work.run_step(2)

    assert trio.current_time() == 206.0 + 9.0, "6 s were spent before"
    assert result.n_failed_sessions == 1


async def test_the_siblings_of_a_protected_session_run_until_its_group_is_done(autojump_clock):
    """Place 1 of the protected Group has turns left: they are not parked, because the close waits for the Group."""

    async def agent(agent):
        if agent.session_input["metadata"]["row"] != 2:
            await ask(agent)
            return
        if agent.spec.place.endswith("/0"):
            await ask(agent)
            return
        history = [user("q9")]
        for _ in range(4):
            history += [await agent.client.chat(agent, *history), user("go on")]
            await trio.sleep(6)
        agent.write_output({"reward": 1.0})

    async with open_partial(agent, slow={2}, n_samples_per_prompt=2, partial_rollout_max_aborted_count=1) as work:
        await work.run_step(0)
        await work.run_step(1)
        assert trio.current_time() == 36.0
        await trio.sleep(1)  # its reward is not waited for
        assert [group.id for group in work.ledger.surplus] == ["G2"]


async def test_a_dynamic_close_takes_the_complete_surplus(autojump_clock, events):
    """Four at work, two needed: all four are complete at 3, so the step trains on four."""
    async with open_partial(over_sampling_batch_size=4, use_dynamic_global_batch_size=True) as work:
        result = await work.run_step(0)

    assert len(result.groups) == 4
    (sealed,) = [e.fields for e in events if e.name == "partition.sealed"]
    assert (sealed["partition"], sealed["groups"], sealed["surplus"]) == ("train_0", 4, 2)


@pytest.mark.parametrize(("size", "n_groups"), [(1, 5), (2, 4), (3, 3), (4, 4), (8, 2)])
async def test_a_dynamic_close_keeps_the_rows_a_multiple_of_the_data_parallel_size(autojump_clock, size, n_groups):
    async with open_partial(over_sampling_batch_size=5, use_dynamic_global_batch_size=True) as work:
        work.data_parallel_size = size
        result = await work.run_step(0)
        assert (len(result.groups), len(work.ledger.surplus)) == (n_groups, 5 - n_groups)


async def test_the_last_step_drops_what_is_left_and_every_row_is_accounted_for(autojump_clock):
    async with open_partial(slow={2}) as work:
        work.n_steps = 2
        results = [await work.run_step(step) for step in range(2)]
        assert not work.residents.all
    rows = work.rows
    n_trained = sum(len(result.groups) for result in results)
    assert rows.n_taken == n_trained + rows.n_given_back


async def test_eval_runs_while_train_sessions_are_parked(autojump_clock):
    async with open_partial(slow={2}) as work:
        await work.run_step(0)
        dataset = EvalDataset(name="held", tasks=make_tasks(2), n_samples=1, concurrency=2)
        result = await Evaluation(dataset=dataset, shared=work.shared, limits=LIMITS, scorer=work.scorer).run()
        assert result.seconds == FAST
        (session,) = work.residents.leased[0].group.sessions
        assert session.is_interrupted


async def test_a_session_that_fails_while_it_is_parked_drops_its_group(autojump_clock):
    """Its agent's own client gives up in the pause and the agent exits; the Group is dropped, its row comes back."""

    async def agent(agent):
        if agent.session_input["metadata"]["row"] == 2:
            with trio.move_on_after(30):
                await ask(agent)
                return
            raise AgentExit(1)
        await ask(agent)

    async with open_partial(agent, slow={2}) as work:
        await work.run_step(0)
        await trio.sleep(60)
        assert not work.residents.leased
        second = await work.run_step(1)

    assert second.n_failed_sessions == 1
