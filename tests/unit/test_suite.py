"""The tasks of examples/suite: agents, rows, demonstrations, credit and configurations; and tools/run_suite.py."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.config.check import check_config
from relax_trio.config.hook_path import import_hook
from relax_trio.config.parse import parse_config
from relax_trio.demo.tokenizer import END_OF_TURN, train_tokenizer

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "examples" / "suite"
OWN = ("search", "game")
ALL = ("arithmetic", *OWN)


@pytest.fixture(scope="module")
def suite():
    """The tool, and by it the programs of the suite, found as they are when it is run."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("run_suite", ROOT / "tools" / "run_suite.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_suite"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    import game_agent
    import search_agent
    import search_credit

    module.game_agent, module.search_agent, module.search_credit = game_agent, search_agent, search_credit
    yield module
    sys.path[:] = before
    for name, loaded in list(sys.modules.items()):
        if name == "run_suite" or str(getattr(loaded, "__file__", "")).startswith(str(SUITE)):
            del sys.modules[name]


def rows(name):
    return [json.loads(line) for line in (SUITE / f"{name}.jsonl").read_text().splitlines()]


def says(*replies):
    """A model that says these, one after another."""
    left = list(replies)
    return lambda messages: {"role": "assistant", "content": left.pop(0)}


# The game


def play(suite, start, goal, *moves):
    messages = [{"role": "user", "content": "begin"}]
    return suite.game_agent.play(suite.game_agent.Board(start, goal), messages, says(*moves)), messages


def test_the_game_is_won_by_a_shortest_way(suite):
    ending, messages = play(suite, [2, 5], [3, 4], "right", "down")

    assert ending == "won"
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == "You: 3 5. Goal: 3 4."


@pytest.mark.parametrize("moves", [("left",), ("right", "up"), ("right", "right")])
def test_the_game_is_lost_by_the_first_move_too_many(suite, moves):
    assert play(suite, [2, 5], [3, 4], *moves)[0] == "lost"


@pytest.mark.parametrize("reply", ["", "go right", None])
def test_what_is_no_move_ends_the_game(suite, reply):
    assert play(suite, [2, 5], [3, 4], reply)[0] == "no move"


# The search

TASK = {
    "messages": [{"role": "user", "content": "What is the code of the drum?"}],
    "metadata": {
        "wanted": "drum",
        "titles": ["anchor", "drum"],
        "notes": ["anchor: code 11.", "drum: code 22, then 33."],
        "right_note": 1,
        "answer": 33,
    },
}


def test_a_session_exports_both_agents_and_the_reward_of_the_answer(suite):
    searcher, solver = suite.search_agent.run(TASK, says("open drum", "Answer: 33"))

    assert (searcher["name"], searcher["metadata"]) == ("searcher", {"found": 1})
    assert (solver["name"], solver["metadata"], solver["reward"]) == ("solver", {"had_note": 1, "right": 1}, 1.0)
    assert "reward" not in searcher
    assert searcher["messages"][0] == TASK["messages"][0]
    assert "drum: code 22, then 33." in solver["messages"][1]["content"]


def test_the_solver_sees_the_note_that_was_opened_and_no_other(suite):
    searcher, solver = suite.search_agent.run(TASK, says("open anchor", "Answer: 11"))

    assert searcher["metadata"] == {"found": 0}
    assert solver["metadata"] == {"had_note": 0, "right": 0}
    assert "anchor: code 11." in solver["messages"][1]["content"]
    assert "33" not in solver["messages"][1]["content"]


@pytest.mark.parametrize("reply", ["", "open", "open lamp", "drum", None])
def test_a_searcher_that_opens_no_note_is_exported_alone(suite, reply):
    (record,) = suite.search_agent.run(TASK, says(reply))

    assert (record["name"], record["metadata"], record["reward"]) == ("searcher", {"found": 0}, 0.0)


SLOTS = st.lists(
    st.tuples(st.booleans(), st.one_of(st.none(), st.booleans())).map(
        lambda pair: (
            {"searcher": {"found": int(pair[0])}}
            | ({} if pair[1] is None else {"solver": {"had_note": int(pair[0]), "right": int(pair[1])}})
        )
    ),
    min_size=1,
    max_size=8,
)


@given(SLOTS)
def test_each_agent_s_credits_sum_to_zero_over_the_group(suite, slots):
    credits_given = suite.search_credit.advantage(slots)

    assert [set(credit) for credit in credits_given] == [set(contexts) for contexts in slots]
    for name in ("searcher", "solver"):
        assert sum(credit.get(name, 0.0) for credit in credits_given) == pytest.approx(0.0, abs=1e-9)


def test_a_solver_that_was_given_the_wrong_note_gets_no_credit_and_moves_no_baseline(suite):
    right = {"searcher": {"found": 1}, "solver": {"had_note": 1, "right": 1}}
    wrong = {"searcher": {"found": 1}, "solver": {"had_note": 1, "right": 0}}
    misled = {"searcher": {"found": 0}, "solver": {"had_note": 0, "right": 0}}

    assert suite.search_credit.advantage([right, wrong, misled, misled]) == [
        {"searcher": 0.5, "solver": 0.5},
        {"searcher": 0.5, "solver": -0.5},
        {"searcher": -0.5, "solver": 0.0},
        {"searcher": -0.5, "solver": 0.0},
    ]


# Rows, demonstrations, models


def test_the_committed_rows_are_those_that_the_generator_writes(suite, tmp_path):
    suite.make.write_rows(tmp_path)

    for path in tmp_path.iterdir():
        assert path.read_text() == (SUITE / path.name).read_text(), path.name
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in SUITE.glob("*.jsonl")}


@pytest.mark.parametrize("task", ALL)
def test_no_held_out_row_is_trained_on(task):
    questions = [{json.dumps(row["messages"]) for row in rows(f"{task}_{part}")} for part in ("train", "held_out")]

    assert len(questions[0]) == 256
    assert len(questions[1]) == 64
    assert not questions[0] & questions[1]


def test_no_held_out_row_is_demonstrated(suite):
    for task in OWN:
        held_out = {suite.make.dialogue_text(row["messages"], goes_on=False) for row in rows(f"{task}_held_out")}
        openings = {turns[0][0] for turns in suite.make.lessons(task, suite.make.RECIPE)}

        assert len(openings) > 100
        assert not openings & held_out


def replay(suite, task, row, conversations):
    """Whether the agent, told these replies, is rewarded."""
    replies = [reply for turns in conversations for _, reply in turns]
    if task == "game":
        board = suite.game_agent.Board(row["metadata"]["start"], row["metadata"]["goal"])
        return suite.game_agent.play(board, list(row["messages"]), says(*replies)) == "won"
    return suite.search_agent.run(row, says(*replies))[-1]["reward"] == 1.0


@pytest.mark.parametrize("task", OWN)
def test_careful_demonstrations_succeed_and_the_mixture_often_does_not(suite, task):
    program, rng = suite.make.TASKS[task], random.Random(0)
    outcomes = {True: [], False: []}
    for row in rows(f"{task}_train"):
        for careful, seen in outcomes.items():
            seen.append(replay(suite, task, row, program.demonstrate(row, rng, is_careful=careful)))

    assert all(outcomes[True])
    assert 0.2 < sum(outcomes[False]) / 256 < 0.7


@pytest.mark.parametrize("task", OWN)
def test_demonstrations_are_written_as_the_chat_template_writes_them(suite, task):
    hugging_face = train_tokenizer(400, conversations=["a"]).to_transformers()
    row = rows(f"{task}_train")[0]
    for turns in suite.make.TASKS[task].demonstrate(row, random.Random(0), is_careful=True):
        messages, text = [], ""
        for (seen, reply), (prompt, response) in zip(turns, suite.make.conversation(turns), strict=True):
            messages += seen
            text += prompt
            assert text == hugging_face.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            messages.append({"role": "assistant", "content": reply})
            text += response + END_OF_TURN


def test_words_of_a_task_are_one_token_wherever_they_stand(suite):
    tokenizer = train_tokenizer(400, conversations=["open drum\n"], words=("drum", "wagon"))

    drum = tokenizer.token_id("drum")
    assert len(tokenizer) <= 400
    assert all(drum in ids for ids in tokenizer.encode_many(["drum.", " drum,", "adrum\n"]))


@pytest.mark.parametrize("task", ALL)
def test_every_configuration_is_one_that_train_takes(task, monkeypatch):
    monkeypatch.chdir(ROOT)
    resolved = parse_config(["--config", f"examples/suite/{task}.yaml", "--hf-checkpoint", "demo"])

    check_config(resolved.config, command="train", origins=resolved.origins)

    assert resolved.config.rollout.num_rollout == 2 * resolved.config.eval.eval_interval
    hook = resolved.config.reward.agentic_custom_advantage_path
    monkeypatch.syspath_prepend(ROOT)
    assert (hook is not None) == (task == "search")
    assert hook is None or callable(import_hook("--agentic-custom-advantage-path", hook))


# The tool


def write_run(path, rewards, held_out, *, lr=1e-3, failed=0):
    path.mkdir(parents=True, exist_ok=True)
    steps = [{"rollout/raw_reward": reward, "train/lr": lr} for reward in rewards]
    evals = [{"n_steps": n, "eval/held_out": r, "eval/held_out/n_failed": failed} for n, r in held_out]
    for name, records in (("metrics.jsonl", steps), ("eval.jsonl", evals)):
        (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def judged(suite, tmp_path, held_out, *, is_control=False, **options):
    write_run(tmp_path, [0.4] * held_out[-1][0], held_out, **options)
    plan = suite.Plan(task="game", seed=1, is_control=is_control, n_steps=held_out[-1][0])
    return suite.missed(plan, suite.read_run(tmp_path, "x", 1.0))


def test_a_run_must_rise_and_a_control_must_not(suite, tmp_path):
    assert judged(suite, tmp_path, [(0, 0.25), (2, 0.5)]) is None
    assert judged(suite, tmp_path, [(0, 0.25), (2, 0.375)]) == "rose by less than 0.15"
    assert judged(suite, tmp_path, [(0, 0.25), (2, 0.25)], is_control=True, lr=0.0) is None
    assert judged(suite, tmp_path, [(0, 0.25), (2, 0.3125)], is_control=True, lr=0.0) == "moved by more than 0.05"
    assert judged(suite, tmp_path, [(0, 0.25), (2, 0.25)], is_control=True) == "the control's learning rate is not 0"
    assert "failed" in judged(suite, tmp_path, [(0, 0.25), (2, 0.5)], failed=1)


@pytest.mark.parametrize("held_out", [[], [(0, 0.3)], [(1, 0.3), (2, 0.6)], [(0, None), (2, 0.6)]])
def test_a_run_without_an_evaluation_before_and_after_is_no_result(suite, tmp_path, held_out):
    write_run(tmp_path, [0.3, 0.6], held_out)

    with pytest.raises(suite.RunFailed):
        suite.read_run(tmp_path, "x", 1.0)


@pytest.fixture
def stub(suite, monkeypatch):
    """Runs write what `outcomes` says for runs and controls, None for a failure; no model is made. The log has them."""
    outcomes, log = {False: [(0, 0.25), (2, 0.75)], True: [(0, 0.25), (2, 0.25)]}, []

    def run(words, **options):
        if words[0] == "git":
            return suite.subprocess.CompletedProcess(words, 0, "abc", "")
        is_control = "--lr" in words
        log.append(words[words.index("--config") + 1])
        held_out = outcomes[is_control]
        if held_out is not None:
            run_dir = Path(words[words.index("--output-dir") + 1])
            write_run(run_dir, [0.3, 0.6], held_out, lr=0.0 if is_control else 1e-3)
        return suite.subprocess.CompletedProcess(words, 0 if held_out else 1, "", "the run broke")

    monkeypatch.setattr(suite.make, "ensure_model", lambda task, models: models / task)
    monkeypatch.setattr(suite.subprocess, "run", run)
    return outcomes, log


def suite_exit(suite, tmp_path):
    return suite.main(["--tasks", "game", "--seeds", "1", "2", "--steps", "2", "--runs", str(tmp_path / "runs")])


def test_finished_runs_are_not_repeated(suite, tmp_path, stub):
    _, log = stub

    assert suite_exit(suite, tmp_path) == 0
    assert log == ["examples/suite/game.yaml"] * 4
    assert suite_exit(suite, tmp_path) == 0
    assert len(log) == 4


def test_the_page_says_what_was_measured_and_what_was_not_run(suite, tmp_path, stub):
    suite_exit(suite, tmp_path)

    text = (tmp_path / "runs" / "results.md").read_text()
    assert "* 4 of 30 runs are done" in text
    assert "| 1 | train | 0.250 |  | 0.750 | +0.500 | 0.30 | 0.60 | 0 | met |" in text
    assert text.count("| not run |") == 26
    assert "Mean reward of each step: 2 runs, 2 controls" in text


@pytest.mark.parametrize("is_control", [False, True])
@pytest.mark.parametrize("held_out", [[(0, 0.25), (2, 0.35)], None])
def test_a_missed_bound_and_a_failed_run_make_the_exit_status_1(suite, tmp_path, stub, is_control, held_out):
    outcomes, log = stub
    outcomes[is_control] = held_out

    assert suite_exit(suite, tmp_path) == 1
    assert len(log) == 4


def test_a_failed_run_is_tried_again(suite, tmp_path, stub):
    outcomes, log = stub
    outcomes[False], good = None, outcomes[False]
    suite_exit(suite, tmp_path)
    outcomes[False] = good

    assert suite_exit(suite, tmp_path) == 0
    assert len(log) == 6


def test_a_result_of_other_sources_is_not_counted(suite, tmp_path, stub, monkeypatch):
    _, log = stub
    suite_exit(suite, tmp_path)
    monkeypatch.setattr(suite, "fingerprint", lambda task: "other")

    suite_exit(suite, tmp_path)

    assert len(log) == 8
