"""A virtual hour of partial rollout with 64 Sessions at work comes out the same under every schedule.

It takes about a second of CPU time; `tools/check_hour.py` measures it.
"""

from __future__ import annotations

import trio

from relax_trio.backend.base import WeightSource
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import RolloutConfig
from relax_trio.testing import Bench, prompt_of, run_virtual, turn, user

HOUR_S, OPTIMIZER_S, N_TURNS = 3600.0, 90.0, 4


async def agent(agent):
    """Four turns of 52 s with a tool after each, whose time tells the rows at work apart: there are no ties."""
    history = [prompt_of(agent)]
    for _ in range(N_TURNS):
        history += [await agent.client.chat(agent, *history), user("go on")]
        await trio.sleep(105 + agent.session_input["metadata"]["row"] * 37 % 101)
    agent.write_output({"reward": 1.0})


async def hour(bench):
    """Steps of 8 Groups of 4 Sessions, 16 Groups at work, with an optimizer phase and new weights after each."""
    config = RolloutConfig(
        rollout_batch_size=8, n_samples_per_prompt=4, partial_rollout=True, over_sampling_batch_size=16
    )
    backend = FakeBackend(lambda attempt: turn("x" * 12), tokens_per_s=0.25)
    results = []
    async with bench.engine(agent, backend=backend), bench.open_work(config, rows=1000) as work:
        with trio.move_on_at(HOUR_S):
            while True:
                results.append(await work.run_step(len(results)))
                await trio.sleep(OPTIMIZER_S)
                await backend.update_weights(str(len(results)), WeightSource(tensors={}))
        at_work = sum(len(resident.group.sessions) for resident in work.residents.leased)
        assert trio.current_time() == HOUR_S
    return results, at_work


def test_an_hour_of_sixty_four_sessions_is_the_same_under_every_schedule(schedule_seed):
    bench = Bench()

    results, at_work = run_virtual(hour, bench, seed=schedule_seed)

    assert [result.seconds for result in results] == [788.0, 219.0, 732.0, 257.0, 676.0, 243.0]
    assert [len(result.samples) for result in results] == [32] * 6
    assert (at_work, len(bench.sessions.seen)) == (64, 256)
    aborted = [call for call in bench.backend.calls if call.name == "abort"]
    assert (len(bench.backend.attempts), len(aborted)) == (936, 60)
    assert sum(report.n_aborted for result in results for group in result.groups for report in group.reports) == 44
