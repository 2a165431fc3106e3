"""Admission in the runtime: where requests wait, what a close does to them, what a step tells, what it is good for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import scenarios
import trio
from attrs import evolve
from builders_admission import MeteredServer, PooledBackend, planned, steady
from builders_runtime import LIMITS, answer, make_tasks, open_work, user

from relax_trio.backend.admission import Admission, AdmissionOptions
from relax_trio.backend.base import BackendLoad
from relax_trio.backend.fake import FakeBackend
from relax_trio.backend.sglang.readings import follow_servers
from relax_trio.config.tree import Config, RewardConfig, RolloutConfig
from relax_trio.loop.evidence import Evidence
from relax_trio.observe.metrics import read_metrics
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.testing import explore

PROMPT = 19
"""Tokens of `<user>q0<assistant>`."""

TURN = PROMPT + LIMITS.max_response_len
"""Tokens that a first turn may hold."""


def make_admission(source, **options):
    return Admission(AdmissionOptions(**options), source)


def open_admitted(agent_fn, admission, **fields):
    """A work whose attempts need admission; the service is the caller's to run."""
    return open_work(agent_fn, shared_fields={"admission": admission}, **fields)


async def ask(agent):
    await agent.client.chat(agent, user(agent.session_input["messages"][0]["content"]))
    agent.write_output({"reward": 1.0})


def generated(work):
    return [call for call in work.shared.backend.calls if call.name == "generate"]


async def test_requests_wait_for_admission_before_their_permit_and_say_so(autojump_clock, events):
    """A pool for one turn: Sessions take turns of 70 s."""
    admission = make_admission(steady(100), max_wait_s=1000)
    backend = FakeBackend(lambda attempt: answer("x" * 69)[:70], tokens_per_s=1.0)
    limits = evolve(LIMITS, max_response_len=70)
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        async with open_admitted(ask, admission, backend=backend, rollout_batch_size=1, n_samples_per_prompt=2) as work:
            work.residents.limits = limits
            async with trio.open_nursery() as steps:
                steps.start_soon(work.run_step, 0)
                await trio.sleep(1)
                (resident,) = work.residents.all
                calls = {session.name: session.calls[0] for session in resident.group.sessions}
                states = {call.to_json()["state"]: name for name, call in calls.items()}
                assert set(states) == {"backend", "admission"}
                assert work.shared.attempt_permits.borrowed_tokens == 1, "who waits for admission has no permit"
                assert (admission.n_reserved, admission.n_waiting) == (PROMPT + 70, 1)
            assert sorted(call.at for call in generated(work)) == [0, 70]
        nursery.cancel_scope.cancel()
    chain = ("step 0 > G0 (leased) > " + states["admission"] + " > r1", "admission to the servers' KV pools")
    told = [(e.fields["chain"], e.fields["waits_for"]) for e in events if e.name == "wait.stalled"]
    assert chain in told
    assert admission.n_reserved == 0


async def test_the_reservation_is_the_prefix_and_what_is_left_of_the_turn(autojump_clock):
    """Of a second turn, and of a turn that was aborted after 10 tokens and resumed."""
    seen = []
    admission = make_admission(steady(10_000))
    admit = admission.admit
    admission.admit = lambda wanted: (seen.append((wanted.n_prefix, wanted.n_new, wanted.is_train)), admit(wanted))[1]

    async def agent(agent):
        first = await agent.client.chat(agent, user("q0"))
        await agent.client.chat(agent, user("q0"), first, user("more"))
        agent.write_output({"reward": 1.0})

    backend = FakeBackend(lambda attempt: answer("x" * 20), tokens_per_s=1.0)
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 1}
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        async with open_admitted(agent, admission, backend=backend, **sizes) as work:

            async def interrupt():
                await trio.sleep(10)
                await work.park("the test's")
                work.unpark()

            async with trio.open_nursery() as steps:
                steps.start_soon(interrupt)
                await work.run_step(0)
        nursery.cancel_scope.cancel()
    n_first = PROMPT + 21
    n_second = n_first + len("<user>more<assistant>")
    assert seen == [(PROMPT, 64, True), (PROMPT + 10, 54, True), (n_second, 64, True)]


async def test_a_close_sends_who_waits_back_to_the_gate_and_the_next_step_lets_it_go_on(autojump_clock):
    admission = make_admission(steady(100), max_wait_s=1000)
    backend = FakeBackend(lambda attempt: answer("ok" if attempt.rid.startswith("G0") else "x" * 20), tokens_per_s=1.0)
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "partial_rollout": True, "over_sampling_batch_size": 3}
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        async with open_admitted(ask, admission, backend=backend, **sizes) as work:
            await work.run_step(0)
            assert trio.current_time() == 3
            assert (admission.n_reserved, admission.n_waiting) == (0, 0)
            states = [call.waiting_for for r in work.residents.all for s in r.group.sessions for call in s.calls]
            assert states == ["gate", "gate"]
            await trio.sleep(100)
            assert len(generated(work)) == 2, "while the gate is shut nothing begins, whatever room there is"
            await work.run_step(1)
        nursery.cancel_scope.cancel()
    assert (admission.n_reserved, admission.n_waiting) == (0, 0)
    assert generated(work)[2].at == 103


async def test_under_pressure_a_close_empties_the_line_and_a_recall_alone_lets_nothing_begin(autojump_clock):
    admission = make_admission(planned((0, 0.0), (2, 0.99), (500, 0.0)), max_wait_s=1000)
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "partial_rollout": True, "over_sampling_batch_size": 3}
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        async with open_admitted(ask, admission, **sizes) as work:
            await work.run_step(0)
            states = [call.waiting_for for r in work.residents.all for s in r.group.sessions for call in s.calls]
            assert (trio.current_time(), states, admission.n_waiting) == (3, ["gate", "gate"], 0)
            async with trio.open_nursery() as steps:
                steps.start_soon(work.run_step, 1)
                await trio.sleep(1)
                assert admission.n_waiting == 3
                for resident in work.residents.all:
                    for session in resident.group.sessions:
                        admission.recall(session.name)
                await trio.sleep(1)
                assert (admission.n_waiting, len(generated(work))) == (3, 1), "the gate is open: they line up again"
            assert generated(work)[1].at == 500
        nursery.cancel_scope.cancel()


async def test_protected_sessions_pass_and_evaluation_does_under_scope_train(autojump_clock):
    admission = make_admission(planned((0, 0.0), (2, 0.99)), max_wait_s=1000)
    slow = FakeBackend(lambda attempt: answer("ok" if attempt.rid.startswith("G0") else "x" * 20), tokens_per_s=1.0)
    sizes = {
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 1,
        "partial_rollout": True,
        "over_sampling_batch_size": 2,
        "partial_rollout_max_aborted_count": 1,
    }
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        async with open_admitted(ask, admission, backend=slow, **sizes) as work:
            admission._options = evolve(admission._options, headroom=10.0)  # room for both in the first step
            await work.run_step(0)
            scorer = RewardScorer(RewardConfig(), SimpleNamespace(), InlineCpuPool())
            dataset = EvalDataset(name="held", tasks=make_tasks(1), n_samples=1, concurrency=1)
            evaluation = Evaluation(dataset=dataset, shared=work.shared, limits=LIMITS, scorer=scorer)
            assert len((await evaluation.run()).samples) == 1
            result = await work.run_step(1)
        nursery.cancel_scope.cancel()
    (group,) = result.groups
    assert group.samples[0].place == "G1/0"
    assert result.kv_metrics["agentic_kv/admission/bypass_protected"] == 1


async def test_a_step_tells_what_admission_did_in_its_time_and_metrics_jsonl_has_it(autojump_clock, tmp_path):
    admission = make_admission(steady(2 * 100, usage=0.25))
    config = Config(rollout=RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2))
    evidence = Evidence.open(config, tmp_path, InlineCpuPool(), 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        async with open_admitted(ask, admission) as work:
            for step in range(2):
                result = await work.run_step(step)
                evidence.step(result, {}, {"perf/rollout_time": result.seconds})
        nursery.cancel_scope.cancel()
    for step in read_metrics(tmp_path):
        told = {n.removeprefix("agentic_kv/"): v for n, v in step.items() if n.startswith("agentic_kv/")}
        assert told == {
            "admission/admit": 4,
            "admission/bypass": 0,
            "admission/bypass_protected": 0,
            "admission/bypass_degraded": 0,
            "admission/bypass_aged": 0,
            "admission/wait": 2,
            "admission/waiting": 2,
            "admission/cancelled": 0,
            "admission/wait_seconds_mean": 3,
            "budget/ceiling": 180,
            "budget/reserved": 2 * TURN,
            "budget/reserved_utilization": 2 * TURN / 180,
            "budget/kv_token_usage_mean": 0.25,
            "budget/kv_token_usage_max": 0.25,
            "budget/degraded": 0,
        }


async def test_without_admission_a_step_tells_nothing_of_it(autojump_clock):
    async with open_work() as work:
        assert (await work.run_step(0)).kv_metrics == {}


async def test_session_counts_are_those_of_each_step(autojump_clock):
    """The backend counts over the whole run."""
    totals = iter([{}, {"close": 4.0}, {"close": 9.0, "close_failure": 1.0}])
    backend = FakeBackend(lambda attempt: answer("ok"), tokens_per_s=1.0)
    backend.load = lambda: BackendLoad(
        n_running=0, n_waiting=0, extra={f"agentic_kv/session/{name}": n for name, n in next(totals).items()}
    )
    async with open_work(backend=backend) as work:
        told = [(await work.run_step(step)).kv_metrics for step in range(3)]
    assert told == [
        {},
        {"agentic_kv/session/close": 4.0, "agentic_kv/session/close_failure": 0.0},
        {"agentic_kv/session/close": 5.0, "agentic_kv/session/close_failure": 1.0},
    ]


def test_a_lease_that_is_lost_where_an_attempt_is_cancelled_is_found(monkeypatch):
    leave = Admission._leave

    def forgetful(admission, ticket):
        if sys.exc_info()[0] is None:
            leave(admission, ticket)

    monkeypatch.setattr(Admission, "_leave", forgetful)
    report = explore(scenarios.line_of_admission, kinds=["drop"], sample=20)

    assert "tokens are leased" in "\n".join(problem for run in report.violations for problem in run.problems)


# --- what it is good for -------------------------------------------------------------------------------------------

POOL, N_SESSIONS, N_TURNS, N_SAID = 750, 16, 3, 100
SAYS = answer("x" * (N_SAID - 1))


async def run_in_pool(**admission_options):
    """Sessions of three turns of 100 tokens over a pool that holds a few of them; returns the backend and the step."""
    backend = PooledBackend(POOL, lambda attempt: SAYS)
    server = MeteredServer("server 0", backend.metrics)
    admission = make_admission(lambda capacity: follow_servers(lambda: [server], capacity), **admission_options)

    async def agent(agent):
        history = [user("q" + "p" * 30)]
        for _ in range(N_TURNS):
            history.append(await agent.client.chat(agent, *history))
            await trio.sleep(1)
            history.append(user("t" * 10))
        agent.write_output({"reward": 1.0})

    fields = {"rollout_batch_size": 1, "n_samples_per_prompt": N_SESSIONS, "backend": backend}
    async with trio.open_nursery() as nursery:
        if admission_options:
            await nursery.start(admission.run)
        async with open_work(
            agent, shared_fields={"admission": admission if admission_options else None}, **fields
        ) as work:
            work.residents.limits = evolve(LIMITS, max_response_len=N_SAID)
            result = await work.run_step(0)
            assert len(result.samples) == N_SESSIONS
            assert all(list(sample.turn_lens) == [N_SAID] * N_TURNS for sample in result.samples)
        nursery.cancel_scope.cancel()
    return backend, result


async def test_admission_computes_fewer_tokens_anew_than_none_over_a_pool_that_is_too_small(autojump_clock):
    """About 23,500 tokens without, 18,500 under the default wait, 13,400 where nobody passes by age."""
    without, _ = await run_in_pool()
    defaults, told = await run_in_pool(headroom=0.9)
    patient, told_patient = await run_in_pool(max_wait_s=1000)

    assert without.n_computed - without.n_recomputed == defaults.n_computed - defaults.n_recomputed
    assert (without.n_retracted > 0, patient.n_retracted) == (True, 0)
    assert patient.n_recomputed < 0.7 * without.n_recomputed
    assert defaults.n_recomputed < 0.9 * without.n_recomputed
    assert told.kv_metrics["agentic_kv/admission/bypass_aged"] > 0
    assert told_patient.kv_metrics["agentic_kv/admission/admit"] == N_SESSIONS * N_TURNS
    assert patient.most_used <= told_patient.kv_metrics["agentic_kv/budget/ceiling"] == int(POOL * 0.9)
