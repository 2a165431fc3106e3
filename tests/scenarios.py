"""Scenarios of rollout for the cancellation explorer: each holds whatever is cancelled, or fails, in it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import trio

from relax_trio.agent.fake import AgentExit
from relax_trio.backend.admission import Admission, AdmissionOptions
from relax_trio.backend.base import WeightSource
from relax_trio.backend.capacity import Reading
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import RewardConfig, RolloutConfig
from relax_trio.errors import BackendUnavailable, CreditError, EngineFault, ProtocolError, RunFailed
from relax_trio.runtime.evaluate import EvalDataset, Evaluation
from relax_trio.testing import (
    LIMITS,
    Bench,
    ConnectionBroken,
    make_request,
    make_rows,
    prompt_of,
    prompt_text,
    turn,
    user,
)

FAST, SLOW = "ok", "x" * 20
"""What a turn says, one letter a second and one second for its end."""


def row_of(agent):
    return agent.session_input["metadata"]["row"]


def model(says=None, **fields):
    """A backend whose turns about row N say `says[N]`, and FAST about any other row, at one token a second."""

    def answer(attempt):
        row = int(prompt_text(attempt.token_ids).removeprefix("<user>q").partition("<")[0])
        return turn((says or {}).get(row, FAST))

    return FakeBackend(answer, tokens_per_s=1.0, **fields)


def check_step(result, n_groups, says=None):
    """A step has its Groups, and every turn is whole, however often it was interrupted."""
    assert len(result.groups) == n_groups
    for sample in result.samples:
        assert sample.response == (says or {}).get(sample.row, FAST), f"{sample.place} says {sample.response!r}"


async def ask(agent):
    """One turn about the row, reward 1."""
    await agent.client.chat(agent, prompt_of(agent))
    agent.write_output({"reward": 1.0})


async def plain_step(bench: Bench) -> None:
    """Two Groups of two Sessions; agents take a while to start and to end."""
    config = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2)
    async with bench.engine(ask, start_s=0.5, end_s=0.5), bench.open_work(config) as work:
        check_step(await work.run_step(0), 2)


async def drop_in_the_barrier(bench: Bench) -> None:
    """A Group is dropped while one of its places has asked and the other has not, and a place withdraws its request."""

    async def agent(agent):
        if row_of(agent) == 0 and agent.spec.place.endswith("/1"):
            await trio.sleep(5)
        elif row_of(agent) == 1:
            bench.client.send(agent, make_request(user("never mind"))).hang_up(for_good=True)
            await trio.sleep(2)
        await ask(agent)

    async def drop_early(work):
        await trio.sleep(3)
        for resident in work.residents.all:
            if resident.group.task.row == 0 and not resident.group.lease.is_set():
                resident.drop("the scenario's")

    config = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2)
    async with bench.engine(agent, retry_grace_s=0.0), bench.open_work(config) as work, trio.open_nursery() as nursery:
        nursery.start_soon(drop_early, work)
        assert len((await work.run_step(0)).groups) == 2


async def prelaunch_across_a_step(bench: Bench) -> None:
    """Next-step Groups are prepared in the step, hold their requests over the optimizer phase, and are leased then."""
    config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2, agentic_prelaunch=True, agentic_concurrency=3)
    async with bench.engine(ask), bench.open_work(config, n_steps=2) as work:
        for step in range(2):
            assert len((await work.run_step(step)).groups) == 1
            await trio.sleep(100)


async def partial_pause(bench: Bench) -> None:
    """At the first close two attempts run, since 6 s and since 3 s, and one request waits for its permit."""

    async def agent(agent):
        await trio.sleep(row_of(agent) / 10)
        await ask(agent)
        await trio.sleep(3)

    config = RolloutConfig(
        rollout_batch_size=1, n_samples_per_prompt=1, partial_rollout=True, over_sampling_batch_size=4
    )
    says = {1: SLOW, 2: SLOW, 3: SLOW}
    async with bench.engine(agent, backend=model(says), n_permits=2), bench.open_work(config, n_steps=2) as work:
        for step in range(2):
            check_step(await work.run_step(step), 1, says)
            await trio.sleep(5)
            await bench.backend.update_weights(str(step + 1), WeightSource(tensors={}))


async def paused_between_steps(bench: Bench) -> None:
    """At closes attempts are paused instead: weights change under them, a step that the surplus pays leaves the pause
    on, and after two pauses a Session is protected."""

    async def agent(agent):
        await trio.sleep(row_of(agent) / 10)
        await ask(agent)
        await trio.sleep(3)

    config = RolloutConfig(
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        partial_rollout=True,
        partial_rollout_pause="retract",
        partial_rollout_max_aborted_count=2,
        over_sampling_batch_size=3,
    )
    says = {1: SLOW, 4: SLOW, 5: SLOW}
    async with bench.engine(agent, backend=model(says), n_permits=2), bench.open_work(config, n_steps=4) as work:
        for step in range(4):
            check_step(await work.run_step(step, may_pause=True), 1, says)
            await trio.sleep(5)
            await bench.backend.update_weights(str(step + 1), WeightSource(tensors={}))


async def readings_with_a_gap(capacity):
    """A pool of 100 tokens, read every 2 s but between seconds 20 and 32."""
    capacity.follow("server")
    while True:
        if not 20 <= trio.current_time() < 32:
            capacity.read("server", Reading(n_total_tokens=100, n_used_tokens=0, token_usage=0.0))
        await trio.sleep(2)


async def line_of_admission(bench: Bench) -> None:
    """The pool has room for one turn: requests wait for it, are sent back to the gate by a close, and go on.

    In the second step readings fail while one waits, which then passes.
    """
    admission = Admission(AdmissionOptions(scope="all"), readings_with_a_gap)
    config = RolloutConfig(
        rollout_batch_size=1, n_samples_per_prompt=2, partial_rollout=True, over_sampling_batch_size=2
    )
    says = {1: SLOW}
    async with (
        bench.engine(ask, backend=model(says), admission=admission),
        bench.open_work(config, n_steps=2) as work,
    ):
        for step in range(2):
            check_step(await work.run_step(step), 1, says)
            await trio.sleep(3)
            await bench.backend.update_weights(str(step + 1), WeightSource(tensors={}))


async def abort_at_the_exact_budget(bench: Bench) -> None:
    """Aborts act when all tokens are there, 18 s after the close: of a turn that stopped, and of one at its limit."""

    async def agent(agent):
        await agent.client.chat(agent, prompt_of(agent), max_tokens=21)
        agent.write_output({"reward": 1.0})

    config = RolloutConfig(
        rollout_batch_size=1, n_samples_per_prompt=1, partial_rollout=True, over_sampling_batch_size=3
    )
    backend = model({1: SLOW, 2: "x" * 30}, abort_delay_s=18 - 1e-9)
    async with bench.engine(agent, backend=backend, abort_grace_s=60.0), bench.open_work(config, n_steps=3) as work:
        for step in range(3):
            check_step(await work.run_step(step), 1, {1: SLOW, 2: "x" * 21})


async def lost_abort(bench: Bench) -> None:
    """An abort is not answered in time: what the attempt had is lost, and the turn is asked for anew."""
    backend = model({1: SLOW}, abort_delay_s=math.inf)
    config = RolloutConfig(
        rollout_batch_size=1, n_samples_per_prompt=1, partial_rollout=True, over_sampling_batch_size=2
    )
    engine = bench.engine(ask, backend=backend, abort_grace_s=2.0)
    async with engine, bench.open_work(config, n_steps=2) as work:
        for step in range(2):
            check_step(await work.run_step(step), 1, {1: SLOW})
            await backend.update_weights(str(step + 1), WeightSource(tensors={}))


async def protected_close(bench: Bench) -> None:
    """A Session that was aborted once is protected from the next resume on, and the close of that step waits for it."""
    config = RolloutConfig(
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        partial_rollout=True,
        partial_rollout_max_aborted_count=1,
        over_sampling_batch_size=2,
    )
    async with bench.engine(ask, backend=model({1: SLOW})), bench.open_work(config, n_steps=3) as work:
        for step in range(3):
            check_step(await work.run_step(step), 1, {1: SLOW})


async def dynamic_close(bench: Bench) -> None:
    """Each partition also takes the surplus that is complete, by pairs of rows."""
    config = RolloutConfig(
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        partial_rollout=True,
        over_sampling_batch_size=4,
        use_dynamic_global_batch_size=True,
    )
    engine = bench.engine(ask, backend=model({3: SLOW}))
    async with engine, bench.open_work(config, n_steps=2, data_parallel_size=2) as work:
        for step in range(2):
            result = await work.run_step(step)
            check_step(result, len(result.groups) or 1, {3: SLOW})


async def eval_overlap(bench: Bench) -> None:
    """Two evaluations run while a train Session is parked and another one is prepared."""
    config = RolloutConfig(
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        partial_rollout=True,
        over_sampling_batch_size=2,
        agentic_prelaunch=True,
        agentic_concurrency=3,
    )
    async with bench.engine(ask, backend=model({1: SLOW})) as shared, bench.open_work(config, n_steps=2) as work:
        for step in range(2):
            assert len((await work.run_step(step)).groups) == 1
            for name in ("one", "two"):
                dataset = EvalDataset(name=name, tasks=make_rows(1), n_samples=1, concurrency=1)
                result = await Evaluation(dataset=dataset, shared=shared, limits=LIMITS, scorer=work.scorer).run()
                assert len(result.samples) + result.n_failed == 1


async def client_disconnect_and_retry(bench: Bench) -> None:
    """A client loses its connection in a turn and joins it again; later it stays away, and asks anew."""

    async def agent(agent):
        request = make_request(prompt_of(agent))
        first = bench.client.send(agent, request)
        await trio.sleep(1)
        first.hang_up()
        await trio.sleep(1)
        try:
            reply = (await bench.client.send(agent, make_request(prompt_of(agent), retry=True)).reply()).message
        except (ProtocolError, ConnectionBroken) as exc:
            raise AgentExit(1) from exc
        left = bench.client.send(agent, make_request(prompt_of(agent), reply, user("leave")))
        await trio.sleep(1)
        left.hang_up(for_good=True)
        await agent.client.chat(agent, prompt_of(agent), reply, user("stay"))
        agent.write_output({"reward": 1.0})

    config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2)
    async with bench.engine(agent, retry_grace_s=2.0), bench.open_work(config) as work:
        assert len((await work.run_step(0)).groups) == 1


async def engine_death(bench: Bench) -> None:
    """The backend dies in the middle of a step, with attempts running and requests waiting."""

    async def die():
        await trio.sleep(4)
        bench.backend.die("explorer: planned")

    config = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2)
    try:
        async with (
            bench.engine(ask, backend=model({1: SLOW}), n_permits=1),
            bench.open_work(config, n_steps=2) as work,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(die)
            await work.run_step(0)
    except* EngineFault:
        pass


async def retry_in_place(bench: Bench) -> None:
    """Launches and attempts fail: places try again beside their siblings, until one has failed too often."""
    backend = model()
    for _ in range(2):
        backend.fail_next(BackendUnavailable("a flaky engine"))
    config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2, agentic_session_retries=1)
    engine = bench.engine(ask, backend=backend, launch_errors=("no memory",), end_s=1.0)
    async with engine, bench.open_work(config) as work:
        check_step(await work.run_step(0), 1)


async def rows_set_aside(bench: Bench) -> None:
    """A row whose agents always fail is set aside; the step goes on with others."""

    async def agent(agent):
        if row_of(agent) == 0:
            raise AgentExit(1)
        await ask(agent)

    config = RolloutConfig(rollout_batch_size=3, n_samples_per_prompt=1, max_row_failures=2)
    async with bench.engine(agent), bench.open_work(config, rows=4) as work:
        check_step(await work.run_step(0), 3)


async def credit_error(bench: Bench) -> None:
    """A row exports no reward and nothing can be asked for one: the run ends in the second step."""

    async def agent(agent):
        await agent.client.chat(agent, prompt_of(agent))
        if row_of(agent) != 2:
            agent.write_output({"reward": 1.0})

    config = RolloutConfig(
        rollout_batch_size=2, n_samples_per_prompt=1, partial_rollout=True, over_sampling_batch_size=3
    )
    try:
        async with bench.engine(agent, backend=model({1: SLOW})), bench.open_work(config) as work:
            for step in range(3):
                await work.run_step(step)
    except* CreditError:
        pass


async def failing_agents(bench: Bench) -> None:
    """Nothing but failures: the run gives up."""

    async def agent(agent):
        await agent.client.chat(agent, prompt_of(agent))
        raise AgentExit(1)

    config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2, max_row_failures=1)
    async with bench.engine(agent), bench.open_work(config) as work:
        try:
            await work.run_step(0)
        except RunFailed:
            pass


async def judge(args, samples):
    """A reward hook for whole Groups that takes its time."""
    await trio.sleep(2)
    return [float(sample.index % 2) for sample in samples]


def keep_even_rows(args, samples):
    """A dynamic filter."""
    return SimpleNamespace(keep=samples[0].metadata["row"] % 2 == 0, reason="odd")


async def parallel_requests(bench: Bench) -> None:
    """Agents work on two branches at once and export one; a close parks the requests of both."""

    async def agent(agent):
        branches = {}

        async def work_on(name):
            history = [prompt_of(agent), user(name)]
            for _ in range(2):
                history.append(await agent.client.chat(agent, *history))
                await trio.sleep(2)
                history.append(user("go on"))
            branches[name] = [message.to_chat() for message in history[:-1]]

        async with trio.open_nursery() as nursery:
            for name in ("left", "right"):
                nursery.start_soon(work_on, name)
        agent.write_output({"name": "left", "messages": branches["left"], "reward": 1.0})

    config = RolloutConfig(
        rollout_batch_size=1, n_samples_per_prompt=1, partial_rollout=True, over_sampling_batch_size=2
    )
    async with bench.engine(agent, backend=model({1: SLOW})), bench.open_work(config, n_steps=2) as work:
        for step in range(2):
            result = await work.run_step(step)
            assert [sample.name for sample in result.samples] == ["left"]
            assert [len(sample.turn_lens) for sample in result.samples] == [2]


async def filtered_groups(bench: Bench) -> None:
    """Groups are judged as a whole, and every second one is filtered: what it would have paid is paid by another."""

    async def agent(agent):
        await agent.client.chat(agent, prompt_of(agent))

    reward = RewardConfig(
        custom_rm_path="scenarios.judge", group_rm=True, dynamic_sampling_filter_path="scenarios.keep_even_rows"
    )
    config = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2)
    async with bench.engine(agent), bench.open_work(config, reward=reward) as work:
        result = await work.run_step(0)
        assert [group.task.row % 2 for group in result.groups] == [0, 0]


async def slow_rm(args, sample):
    await trio.sleep(3 if sample.group_index == 0 else 30)
    return 1.0


async def slow_reward(bench: Bench) -> None:
    """Rewards take longer than agents: a Group in Reward has no permit, and is cancelled when it is not needed."""

    async def agent(agent):
        await agent.client.chat(agent, prompt_of(agent))

    reward = RewardConfig(custom_rm_path="scenarios.slow_rm")
    config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=2)
    async with bench.engine(agent), bench.open_work(config, reward=reward) as work:
        for step in range(2):
            assert len((await work.run_step(step)).groups) == 1
