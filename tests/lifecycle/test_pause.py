"""Partial rollout by pauses on the virtual clock: attempts stay in the backend from a close to the next opening."""

from __future__ import annotations

import pytest
import trio
from builders_rules import timetable
from builders_runtime import LIMITS, answer, make_tasks, open_work, user
from scenarios import SLOW, ask, model, row_of
from scenarios_loop import training

from relax_trio.agent.fake import AgentExit
from relax_trio.backend.admission import Admission, AdmissionOptions
from relax_trio.backend.base import WeightSource
from relax_trio.backend.capacity import Reading
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import Config, EvalConfig, RolloutConfig
from relax_trio.errors import BackendUnavailable
from relax_trio.observe.dump import session_facts
from relax_trio.observe.sample_json import sample_to_json
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.runtime.stall import long_waits
from relax_trio.testing import prompt_of
from relax_trio.train.fake import FakeTrainer

WAYS = ["abort", "retract", "in_place"]
TURN_S = 21
"""Seconds, and tokens, of a turn about row 1; others take 3."""


def backend_of(slow=(1,)):
    def says(attempt):
        text = bytes(t - 1 for t in attempt.token_ids if t).decode()
        return answer("x" * (TURN_S - 1) if any(f"<user>q{row}<" in text for row in slow) else "ok")

    return FakeBackend(says, tokens_per_s=1.0)


async def one_turn(agent):
    await agent.client.chat(agent, user(agent.session_input["messages"][0]["content"]))
    agent.write_output({"reward": 1.0})


def open_paused(agent=one_turn, *, slow=(1,), **fields):
    """One Group of one Session a step, two at work, attempts paused."""
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "over_sampling_batch_size": 2, "partial_rollout": True}
    return open_work(agent, backend=backend_of(slow), **{**sizes, "partial_rollout_pause": "retract", **fields})


def calls(work):
    """Calls of the backend that are about attempts under way."""
    told = ("pause", "resume", "abort", "update_weights")
    return [(call.at, f"{call.name} {call.what}".rstrip()) for call in work.shared.backend.calls if call.name in told]


def slow_session(work):
    (resident,) = [resident for resident in work.residents.leased if resident.group.task.row == 1]
    return resident.group.sessions[0]


# --- the same as with abort and resume ----------------------------------------------------------------------------


def test_steps_and_samples_are_those_of_abort_and_resume(schedule_seed):
    """Tokens, logprobs, versions, status, limits, times, how often it was interrupted, and when it is protected."""

    def told_by(way):
        told = []

        async def agent(agent):
            first = await agent.client.chat(agent, prompt_of(agent), max_tokens=12 + row_of(agent))
            await agent.client.chat(agent, prompt_of(agent), first, user("more"))
            agent.write_output({"reward": 1.0})

        async def main(bench):
            config = RolloutConfig(
                rollout_batch_size=2,
                n_samples_per_prompt=2,
                partial_rollout=True,
                over_sampling_batch_size=4,
                partial_rollout_max_aborted_count=2,
                partial_rollout_pause=way,
            )
            backend = model({1: SLOW, 2: "is", 3: SLOW, 5: SLOW, 6: "well"})
            async with bench.engine(agent, backend=backend), bench.open_work(config, n_steps=7) as work:
                for step in range(7):
                    result = await work.run_step(step, may_pause=True)
                    reports = [report for group in result.groups for report in group.reports]
                    samples = [sample_to_json(sample) for sample in result.samples]
                    facts = [session_facts(report, result.samples).abort_count for report in reports]
                    interrupted = [(report.place, report.n_aborted, report.oldest_version) for report in reports]
                    protected = sorted(session.name for session in bench.sessions.seen if session.is_protected)
                    told.append((trio.current_time(), samples, facts, interrupted, protected))
                    await trio.sleep(10)
                    await bench.backend.update_weights(str(step + 1), WeightSource(tensors={}))

        timetable(main, schedule_seed)
        return told

    by_abort = told_by("abort")
    assert sum(n for _, _, facts, _, _ in by_abort for n in facts) > 4
    assert any(protected for *_, protected in by_abort)
    assert told_by("retract") == by_abort
    assert told_by("in_place") == by_abort


def test_attempts_are_paused_at_a_close_weights_change_under_them_and_they_go_on(schedule_seed):
    """As by abort in test_rules_retained: G1 is interrupted at 3 and at 16, protected from 26 on; step 2 waits for it,
    so that nothing is left to pause, and G1 pays step 3. The last step is closed without a pause."""
    spans, attempts = [], []

    async def main(bench):
        config = RolloutConfig(
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            partial_rollout=True,
            over_sampling_batch_size=2,
            partial_rollout_max_aborted_count=2,
            partial_rollout_pause="in_place",
        )
        async with bench.engine(ask, backend=model({1: "x" * 20})), bench.open_work(config, n_steps=5) as work:
            for step in range(5):
                result = await work.run_step(step, may_pause=True)
                spans.append([(s.place, [(v.version, v.n_tokens) for v in s.weight_versions]) for s in result.samples])
                await trio.sleep(10)
                await bench.backend.update_weights(str(step + 1), WeightSource(tensors={}))
        attempts.extend(a.rid for a in bench.backend.attempts if a.rid.startswith("G1/"))

    assert timetable(main, schedule_seed) == {
        0.0: "leased G0, leased G1, open 0, prepared G0, prepared G1, run G0/0-0.r1.1, run G1/0-0.r1.1, "
        "started G0, started G1",
        3.0: "close 0, pause, scored G0",
        13.0: "leased G2, open 1, prepared G2, resume, run G2/0-0.r1.1, started G2, weights 1",
        16.0: "close 1, pause, scored G2",
        26.0: "leased G3, open 2, prepared G3, resume, run G3/0-0.r1.1, started G3, weights 2",
        29.0: "scored G3, waiting G1",
        41.0: "close 2, pause, scored G1",
        51.0: "close 3, open 3, weights 3",
        61.0: "leased G4, leased G5, open 4, prepared G4, prepared G5, resume, run G4/0-0.r1.1, run G5/0-0.r1.1, "
        "started G4, started G5, weights 4",
        64.0: "close 4, scored G4, scored G5",
        74.0: "weights 5",
    }
    assert attempts == ["G1/0-0.r1.1"]
    assert spans[3] == [("G1/0", [("0", 3), ("1", 3), ("2", 15)])]


async def test_the_active_budget_stops_while_attempts_are_paused(autojump_clock):
    """23 s of active time are enough for a turn of 21 s that is paused for 1000 s each time."""
    async with open_paused(shared_fields={"agent_timeout_s": 23.0}) as work:
        results = []
        for step in range(6):
            results.append(await work.run_step(step, may_pause=True))
            assert not any(session.budget.is_running for r in work.residents.leased for session in r.group.sessions)
            await trio.sleep(1000)

    assert 1 in [s.row for result in results for s in result.samples]
    assert sum(result.n_failed_sessions for result in results) == 0


async def test_a_dynamic_close_pauses_before_it_takes_the_complete_surplus(autojump_clock):
    """Three of four are complete at 3; the slow one is paused, and goes on in the next step."""
    async with open_paused(over_sampling_batch_size=4, use_dynamic_global_batch_size=True) as work:
        result = await work.run_step(0, may_pause=True)
        assert sorted(sample.row for sample in result.samples) == [0, 2, 3]
        await trio.sleep(10)
        await work.run_step(1, may_pause=True)
        assert calls(work)[:3] == [(3.0, "pause"), (13.0, "resume"), (16.0, "pause")]


# --- when it is not done ------------------------------------------------------------------------------------------


async def test_attempts_are_aborted_where_something_has_to_be_generated_before_the_next_step(autojump_clock):
    async with open_paused() as work:
        await work.run_step(0)
        dataset = EvalDataset(name="held", tasks=make_tasks(2), n_samples=1, concurrency=2)
        result = await Evaluation(dataset=dataset, shared=work.shared, limits=LIMITS, scorer=work.scorer).run()
        assert result.seconds == TURN_S, "row 1 is slow here too"
        assert calls(work) == [(3.0, "abort G1/0-0.r1.1")]


def test_the_loop_aborts_at_a_close_that_an_evaluation_follows_and_pauses_at_others(schedule_seed):
    """Evaluated before the first step and after the second, the trainer takes 2 s: at 6 the close pauses, at 11 it
    aborts, and the evaluation from 13 to 16 finds the backend generating."""

    async def main(bench):
        config = Config(
            rollout=RolloutConfig(
                rollout_batch_size=1,
                n_samples_per_prompt=1,
                partial_rollout=True,
                partial_rollout_pause="retract",
                over_sampling_batch_size=2,
            ),
            eval=EvalConfig(eval_interval=2),
        )
        backend = model({1: "x" * 40})
        async with training(bench, config, n_steps=4, backend=backend, trainer=FakeTrainer(step_s=2.0)) as loop:
            await loop.run()

    told = timetable(main, schedule_seed)
    words = [(at, word) for at, what in told.items() for word in what.split(", ")]
    assert [(at, word) for at, word in words if word.split()[0] in ("pause", "resume", "abort", "eval", "close")] == [
        (0.0, "eval held"),
        (6.0, "close 0"),
        (6.0, "pause"),
        (8.0, "resume"),
        (11.0, "abort G1/0-0.r1.1"),
        (11.0, "close 1"),
        (13.0, "eval held"),
        (19.0, "close 2"),
        (19.0, "pause"),
        (21.0, "resume"),
        (24.0, "close 3"),
        (26.0, "eval held"),
    ]


async def test_the_last_step_drops_what_is_left_with_the_backend_generating(autojump_clock):
    async with open_paused() as work:
        work.n_steps = 2
        await work.run_step(0, may_pause=True)
        await work.run_step(1, may_pause=True)
        assert calls(work) == [(3.0, "pause"), (3.0, "resume")]
        assert not work.residents.all
        assert not work.shared.backend.is_paused


async def test_a_step_that_surplus_pays_leaves_the_pause_on_and_counts_it_once(autojump_clock):
    """Three at work: one ends behind the close, pays step 1, and that step opens and closes at 10."""

    async def agent(agent):
        await one_turn(agent)
        await trio.sleep(row_of(agent) / 10)

    async with open_paused(agent, over_sampling_batch_size=3) as work:
        await work.run_step(0, may_pause=True)
        await trio.sleep(7)
        session = slow_session(work)
        assert (trio.current_time(), session.n_aborted) == (10.0, 1)
        await work.run_step(1, may_pause=True)
        assert (trio.current_time(), session.n_aborted) == (10.0, 1)
        await work.run_step(2, may_pause=True)
        assert calls(work) == [(3.0, "pause"), (10.0, "resume"), (13.3, "pause")]
        assert session.n_aborted == 2


async def test_a_step_that_surplus_pays_and_that_may_not_pause_aborts_what_is_paused(autojump_clock):
    """The backend goes on so that the abort reaches it; the attempt was interrupted once."""

    async def agent(agent):
        await one_turn(agent)
        await trio.sleep(row_of(agent) / 10)

    async with open_paused(agent, over_sampling_batch_size=3) as work:
        await work.run_step(0, may_pause=True)
        await trio.sleep(7)
        await work.run_step(1, may_pause=False)
        session = slow_session(work)
        assert calls(work) == [(3.0, "pause"), (10.0, "resume"), (10.0, "abort G1/0-0.r1.1")]
        assert (session.n_aborted, session.calls[0].waiting_for, session.is_interrupted) == (1, "gate", True)
        await work.run_step(2, may_pause=True)
        parked = [a for a in work.shared.backend.attempts if a.rid.startswith("G1/")]
        assert [(a.rid, len(a.token_ids) - a.response_start) for a in parked] == [
            ("G1/0-0.r1.1", 0),
            ("G1/0-0.r1.2", 3),
        ]


# --- in the pause -------------------------------------------------------------------------------------------------


async def test_a_paused_attempt_is_shown_and_told_as_such(autojump_clock):
    async with open_paused() as work:
        await work.run_step(0, may_pause=True)
        await trio.sleep(100)
        (resident,) = work.residents.leased
        (session,) = resident.group.sessions
        state = session.debug_state(forest=False)
        assert (state["requests"][0]["state"], state["parked"], state["n_aborted"]) == ("paused", True, 1)
        (wait,) = long_waits("between steps", resident.group, 60.0)
        assert wait.waits_for == "the next step, its attempt paused"
        assert wait.chain == ("between steps", "G1 (leased)", "G1/0-0", "r1", "G1/0-0.r1.1")
        assert not session.is_interrupted, "a close on credit counts what no engine holds"
        await work.run_step(1, may_pause=True)
        assert session.calls[0].to_json()["attempts"][0]["n_pauses"] == 1


async def test_an_attempt_that_had_ended_comes_back_in_the_pause_and_was_not_interrupted(autojump_clock):
    """Its last token came at 3 as that of the other did; its request is done, and the agent's next one waits."""

    async def agent(agent):
        reply = await agent.client.chat(agent, user("q0"))
        if row_of(agent) == 1:
            await trio.sleep(1)
            await agent.client.chat(agent, user("q0"), reply, user("more"))
        agent.write_output({"reward": 1.0})

    async with open_paused(agent) as work:
        await work.run_step(0, may_pause=True)
        await trio.sleep(10)
        session = slow_session(work)
        assert [call.to_json()["state"] for call in session.calls] == ["done", "gate"]
        assert session.n_aborted == 0


async def test_a_session_that_ends_in_the_pause_leaves_nothing_in_the_backend(autojump_clock):
    """Its agent gives up; the Group is dropped at once, its row comes back, and the step after it is complete."""

    async def agent(agent):
        if row_of(agent) == 1:
            with trio.move_on_after(30):
                await one_turn(agent)
                return
            raise AgentExit(1)
        await one_turn(agent)

    async with open_paused(agent) as work:
        await work.run_step(0, may_pause=True)
        await trio.sleep(60)
        assert not work.residents.leased
        assert not work.shared.backend.running
        second = await work.run_step(1, may_pause=True)
    assert second.n_failed_sessions == 1
    assert work.rows.n_given_back >= 1


async def test_an_attempt_that_the_engine_loses_in_the_pause_costs_its_session_and_no_group(autojump_clock, events):
    """The new Session at its place asks again, and waits at the gate until the next step opens."""
    async with open_paused() as work:
        await work.run_step(0, may_pause=True)
        work.shared.backend.fail("G1/0-0.r1.1", BackendUnavailable("its server died"))
        await trio.sleep(50)
        session = slow_session(work)
        assert (session.name, session.calls[0].waiting_for, session.budget.is_running) == ("G1/0-1", "gate", False)
        await work.run_step(1, may_pause=True)
        assert session.calls[0].waiting_for == "paused"
    assert [e.fields["fault"] for e in events if e.name == "session.retried"] == ["engine"]


async def test_work_that_is_stopped_in_the_pause_lets_the_backend_go_on(autojump_clock):
    with trio.move_on_at(50):
        async with open_paused() as work:
            await work.run_step(0, may_pause=True)
            await trio.sleep_forever()
    assert trio.current_time() == 50
    assert calls(work) == [(3.0, "pause"), (50.0, "resume")]
    assert not work.shared.backend.is_paused
    assert not work.shared.backend.running


async def test_a_failure_between_steps_lets_the_backend_go_on(autojump_clock):
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with open_paused() as work:
            await work.run_step(0, may_pause=True)
            raise ZeroDivisionError("the trainer")
    assert not work.shared.backend.is_paused


async def test_a_backend_that_does_not_go_on_holds_up_the_end_of_the_work_for_ten_seconds(autojump_clock, events):
    async with open_paused() as work:
        await work.run_step(0, may_pause=True)
        work.shared.backend.resume = trio.sleep_forever
    assert trio.current_time() == 3 + 10
    assert [e.fields["what"] for e in events if e.name == "cleanup.timed_out"] == ["the pause of the attempts"]


async def test_a_paused_attempt_keeps_its_tokens_in_the_ledger_of_admission(autojump_clock):
    async def steady(capacity):
        capacity.follow("server")
        while True:
            capacity.read("server", Reading(n_total_tokens=10_000, n_used_tokens=0, token_usage=0.0))
            await trio.sleep(2)

    admission = Admission(AdmissionOptions(), steady)
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        async with open_paused(shared_fields={"admission": admission}) as work:
            await work.run_step(0, may_pause=True)
            assert admission.n_reserved > 64
            await work.run_step(1, may_pause=False)
            assert admission.n_reserved == 0, "an aborted one gives them back"
        nursery.cancel_scope.cancel()
