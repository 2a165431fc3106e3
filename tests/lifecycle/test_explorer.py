"""The cancellation explorer: over every scenario nothing is violated, and what is broken on purpose is found."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import scenarios
import scenarios_loop
import trio
from scenarios import ask, plain_step

from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import RolloutConfig
from relax_trio.data.rows import RowStream
from relax_trio.errors import EngineFault
from relax_trio.runtime.group import Group
from relax_trio.runtime.residents import Resident, Residents
from relax_trio.testing import KINDS, Bench, explore, prompt_of, replay, turn
from relax_trio.testing.__main__ import main
from relax_trio.testing.rehearsal import Rehearsal

SAMPLE, PAIRS = 16, 5
"""Points of each scenario that are tried here; `tools/nightly` tries all of them."""

ROOT = Path(__file__).parents[2]
SCENARIOS = [
    getattr(module, name)
    for module in (scenarios, scenarios_loop)
    for name, value in vars(module).items()
    if getattr(value, "__module__", None) == module.__name__
    and getattr(value, "__annotations__", {}) == {"bench": "Bench", "return": "None"}
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_violated_whatever_is_disturbed(scenario):
    report = explore(scenario, sample=SAMPLE, pairs=PAIRS)

    assert not report.violations, report
    assert report.n_runs == 1 + SAMPLE + PAIRS


SHOWN = {
    "plain_step": ("accounting_end", {"rollout": 0, "scored": 2}),
    "drop_in_the_barrier": ("group.dropped", {"group": "G0", "reason": "the scenario's"}),
    "prelaunch_across_a_step": ("accounting_end", {"rollout": 0, "prepared": 1}),
    "partial_pause": ("session.completed", {"place": "G1/0"}),
    "paused_between_steps": ("attempts.paused", {"attempts": 2}),
    "paused_but_for_evaluation": ("attempts.paused", {"attempts": 1}),
    "line_of_admission": ("pools.lost", {"waiting": 3, "reserved": 83}),
    "abort_at_the_exact_budget": ("session.completed", {"place": "G2/0"}),
    "lost_abort": ("attempt.abort_timeout", {"rid": "G1/0-0.r1.1"}),
    "protected_close": ("step.waiting", {"protected": "G1"}),
    "dynamic_close": ("partition.sealed", {"partition": "train_0", "surplus": 1}),
    "eval_overlap": ("accounting_end", {"rollout": 0, "prepared": 1}),
    "client_disconnect_and_retry": ("request.joined", {"place": "G0/0", "request": "r1"}),
    "engine_death": ("group.dropped", {"group": "G0", "reason": "the work ended"}),
    "retry_in_place": ("session.retried", {"n_try": 1, "fault": "engine"}),
    "rows_set_aside": ("row.set_aside", {"source": "rows.jsonl:1"}),
    "credit_error": ("accounting_end", {"failed": True}),
    "failing_agents": ("accounting_end", {"failed": True}),
    "parallel_requests": ("session.completed", {"place": "G2/0", "n_requests": 4}),
    "filtered_groups": ("group.filtered", {"group": "G1", "reason": "odd"}),
    "slow_reward": ("group.dropped", {"group": "G1", "reason": "the step closed"}),
    "shutdown_in_each_phase": ("eval.scored", {"steps": 2}),
    "fully_async_close_and_backfill": ("step.credited", {"rollout": 1, "debt": 2}),
    "max_staleness_drop": ("group.dropped", {"reason": "its oldest turn is 1 versions old (--max-staleness)"}),
    "fully_async_with_evaluation": ("eval.scored", {"steps": 3}),
}
"""An event of each undisturbed scenario that shows that what it is for happens in it."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_scenario_shows_what_it_is_for(scenario):
    name, fields = SHOWN[scenario.__name__]
    run = replay(scenario)

    assert any(traced.what.name == name and fields.items() <= traced.what.fields.items() for traced in run.trace), (
        run.story()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_action_is_possible(kind):
    report = explore(scenarios.partial_pause, sample=1, kinds=[kind])

    assert (report.n_runs, report.violations) == (2, ())


def test_a_sample_is_spread_over_the_kinds_and_the_same_for_the_same_seed(monkeypatch):
    """A kind with a hundred times the points of another gets no more of a small sample."""
    tried = []

    class Noting(Rehearsal):
        def run(self):
            tried.append([str(point) for point in self._due])
            return super().run()

    monkeypatch.setattr("relax_trio.testing.explorer.Rehearsal", Noting)
    for _ in range(2):
        explore(plain_step, sample=len(KINDS), pairs=1)
    first, again = tried[: len(tried) // 2], tried[len(tried) // 2 :]
    assert first == again
    assert sorted(points[0].split()[1] for points in first[1:-1]) == sorted(KINDS)
    assert [len(points) for points in first] == [0, *[1] * len(KINDS), 2]


# --- what is broken on purpose is found ----------------------------------------------------------------------------


def problems(report):
    return "\n".join(problem for run in report.violations for problem in run.problems)


def test_a_permit_that_comes_back_too_early_is_found_and_replayed(monkeypatch):
    """Whoever drops a Group counts its permit as returned, though its processes still end."""
    drop = Resident.drop

    def hasty(resident, reason):
        resident.vacated.set()
        drop(resident, reason)

    monkeypatch.setattr(Resident, "drop", hasty)
    report = explore(plain_step, kinds=["drop"], sample=10)

    assert "Group permits are taken for" in problems(report)
    found = report.violations[0]
    assert replay(plain_step, *map(str, found.points), seed=found.seed) == found
    assert found.replay.startswith("python -m relax_trio.testing ")
    assert found.replay.endswith(f'tests/scenarios.py:plain_step --seed 0 --at "{found.points[0]}"')
    assert f">>> {found.points[0].action}" in str(found), "the events around it are shown"


def test_a_row_that_is_not_given_back_is_found(monkeypatch):
    give_back = RowStream.give_back

    def forgetful(rows, task):
        if task.row:
            give_back(rows, task)

    monkeypatch.setattr(RowStream, "give_back", forgetful)
    report = explore(plain_step, kinds=["drop"], sample=40)

    assert {run.points[0].action for run in report.violations} == {"drop G0"}
    assert "rows taken" in problems(report)


def test_an_attempt_that_outlives_its_request_is_found(monkeypatch):
    """It swallows its cancellation."""
    generate = FakeBackend.generate

    async def deaf(backend, attempt):
        with trio.CancelScope(shield=True):
            return await generate(backend, attempt)

    async def scenario(bench: Bench) -> None:
        backend = FakeBackend(lambda attempt: turn("x" * 60), tokens_per_s=1.0)
        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1)
        async with bench.engine(ask, backend=backend), bench.open_work(config) as work:
            await work.run_step(0)

    assert not explore(scenario, kinds=["drop", "leave"], sample=20).violations
    monkeypatch.setattr(FakeBackend, "generate", deaf)
    found = problems(explore(scenario, kinds=["drop", "leave"], sample=60))
    assert "'drop G0' had not ended it when it should have" in found
    assert "'leave G0/0-0.r1' had not ended it when it should have" in found


def test_a_lease_for_a_group_whose_place_just_left_is_found(monkeypatch):
    """What the explorer found first: the line is left a moment after the barrier is left."""
    monkeypatch.setattr("relax_trio.testing.explorer.MAX_VIOLATIONS", 1)
    monkeypatch.setattr(Group, "may_be_leased", True)
    report = explore(scenarios.prelaunch_across_a_step, kinds=["kill", "leave"])

    assert "stand in line" in problems(report)


def test_a_session_that_is_never_closed_on_the_backend_is_found(monkeypatch):
    @staticmethod
    async def nothing(key):
        await trio.lowlevel.checkpoint()

    async def scenario(bench: Bench) -> None:
        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1)
        async with bench.engine(ask), bench.open_work(config) as work:
            monkeypatch.setattr(bench.backend, "close_session", nothing)
            await work.run_step(0)

    report = explore(scenario)
    assert "not told once of the end of each Session" in problems(report)
    assert report.n_runs == 1, "a scenario that fails undisturbed is not disturbed"
    assert report.violations[0].replay.startswith("print(relax_trio.testing.replay(test_a_session")


def test_an_end_that_is_told_to_the_backend_without_a_shield_is_found(monkeypatch):
    """What cancels the Session cancels the telling too."""
    monkeypatch.setattr("relax_trio.runtime.session.cleanup_scope", lambda seconds, what: nullcontext())
    report = explore(plain_step, kinds=["drop"], sample=20)

    assert "not told once of the end of each Session" in problems(report)


def test_a_request_that_outlives_its_agent_is_found(monkeypatch):
    """The Session cannot be reached any more, but waits until its requests end by themselves, for the grace."""
    cancel = trio.CancelScope.cancel

    def forgetful(scope, reason=None):
        if reason is None or not (reason.startswith("session ") and reason.endswith(" ended")):
            cancel(scope, reason)

    assert not explore(plain_step, kinds=["kill"], sample=20).violations
    monkeypatch.setattr(trio.CancelScope, "cancel", forgetful)
    report = explore(plain_step, kinds=["kill"], sample=20)

    assert "had not ended it when it should have" in problems(report)


def test_a_run_that_hangs_after_a_disturbance_is_found_and_shown(monkeypatch):
    """Nobody makes up for a Group that was dropped."""
    update = Residents.update

    def tired(residents):
        if not residents.tally.n_dropped:
            update(residents)

    monkeypatch.setattr(Residents, "update", tired)
    report = explore(plain_step, kinds=["drop"], sample=3)

    assert "it hangs; what it waits for after" in problems(report)
    assert "runtime/work.py" in problems(report)


def test_a_run_that_spins_after_a_disturbance_is_found(monkeypatch):
    monkeypatch.setattr("relax_trio.testing.rehearsal.EXTRA_STEPS", 500)

    async def spinning(bench: Bench) -> None:
        await plain_step(bench)
        while bench.is_stopping:
            await trio.lowlevel.checkpoint()

    report = explore(spinning, kinds=["stop"], sample=6)

    assert "it spins: " in problems(report)
    assert "steps, the last one of " in problems(report)


def test_a_file_that_is_left_open_is_found():
    files = []

    async def careless(bench: Bench) -> None:
        files.append(open(os.devnull))  # noqa: ASYNC230, SIM115 - that is the point
        await plain_step(bench)

    try:
        assert problems(explore(careless)) == "1 file descriptors are left open"
    finally:
        files[0].close()


def test_an_assertion_of_the_scenario_is_checked_in_disturbed_runs():
    async def naive(bench: Bench) -> None:
        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1)
        async with bench.engine(ask), bench.open_work(config) as work:
            result = await work.run_step(0)
            assert result.n_dropped == 0, "nothing ever fails here"

    report = explore(naive, kinds=["drop"], sample=4)

    assert "AssertionError: nothing ever fails here" in problems(report)
    assert "test_explorer.py:" in problems(report), "it says where"


def test_a_bug_in_an_agent_function_is_no_failure_of_the_agent():
    async def buggy(agent):
        await agent.client.chat(agent, prompt_of(agent))
        raise ZeroDivisionError("in the agent function")

    async def scenario(bench: Bench) -> None:
        config = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=1)
        async with bench.engine(buggy), bench.open_work(config) as work:
            await work.run_step(0)

    assert "ZeroDivisionError: in the agent function" in problems(explore(scenario))


def test_a_scenario_that_is_random_is_told_apart_from_a_violation():
    async def moody(bench: Bench) -> None:
        for _ in range(random.randrange(3, 60)):
            await trio.lowlevel.checkpoint()
        await plain_step(bench)

    assert "something in the scenario is random" in problems(explore(moody, sample=12))


# --- the same seed, the same run -----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_seed_another_one():
    first, again, other = replay(plain_step, seed=1), replay(plain_step, seed=1), replay(plain_step, seed=2)

    assert first == again
    assert [str(traced) for traced in first.trace] != [str(traced) for traced in other.trace]
    assert (first.problems, other.problems) == ((), ())


def test_a_run_is_the_same_in_another_process():
    """Hashes of texts differ between processes: nothing may depend on the order of a set."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from scenarios import plain_step; "
        "from relax_trio.testing import replay; print(replay(plain_step, '100 drop G1', seed=5).story())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )

    here = replay(plain_step, "100 drop G1", seed=5).story().splitlines()
    assert there.stdout.splitlines()[1:-1] == here[1:-1], "the first and last line name the file"


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_explores_a_file_and_sums_up(capsys, tmp_path):
    file = tmp_path / "two_scenarios.py"
    file.write_text(
        "from scenarios import plain_step as imported\n"
        "async def first(bench): await imported(bench)\n"
        "async def second(bench): pass\n"
        "async def helper(bench, other): pass\n"
    )

    assert main([str(file), "--sample", "3", "--pairs", "1", "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0].rpartition(":")[2] for line in lines[:-1]] == ["first", "second"]
    assert lines[-1].startswith("2 scenarios, ")
    assert lines[-1].endswith(" 0 violations")


def test_the_command_repeats_one_run(capsys):
    assert main(["tests/scenarios.py:plain_step", "--at", "100 drop G1", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert ">>> drop G1" in out
    assert "accounting_start" in out, "all of its events are shown"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.py"], "no file nowhere.py"),
        (["tests/scenarios.py:nothing", "--sample", "1"], "has no scenario nothing"),
        (["tests/scenarios.py", "--at", "1 stop work"], "name one"),
    ],
)
def test_the_command_says_what_is_wrong_with_its_arguments(argv, words):
    with pytest.raises(SystemExit, match=words):
        main(argv)


async def test_inside_a_trio_run_the_explorer_says_where_to_call_it():
    with pytest.raises(EngineFault, match=r"call it outside of trio\.run"):
        explore(plain_step)


def test_a_kind_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no kinds of actions: explode; there are disconnect, "):
        explore(plain_step, kinds=["drop", "explode"])


def test_a_point_that_is_not_there_is_a_problem():
    assert replay(plain_step, "3 drop G9").problems == ("no 'drop G9' is possible before step 3",)
    with pytest.raises(ValueError, match="write a step and an action"):
        replay(plain_step, "drop G1")
