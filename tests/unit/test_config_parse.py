"""Flags and files: what wins, what is refused and how the refusal reads."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.config.option import option
from relax_trio.config.parse import parse_command, parse_config
from relax_trio.config.spec import config_specs
from relax_trio.config.tree import Config
from relax_trio.errors import ConfigError, EngineFault


@pytest.fixture
def config_file(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def refused(argv, **options):
    with pytest.raises(ConfigError) as caught:
        parse_config(argv, **options)
    return str(caught.value)


def test_no_words_give_the_defaults():
    resolved = parse_config([])
    assert resolved.config == Config()
    assert set(resolved.origins.values()) == {"default"}
    assert set(resolved.origins) == {spec.name for spec in config_specs()}


def test_every_option_has_help_and_every_name_is_unique():
    specs = config_specs()
    assert all(spec.help.endswith(".") for spec in specs)
    assert len({spec.name for spec in specs}) == len(specs)
    assert len({spec.flag for spec in specs} | {"config"}) == len(specs) + 1


def test_values_are_typed_by_their_options():
    config = parse_config(
        shlex.split(
            "--agent-command 'python agent.py --fast' --agent-cwd app --agent-timeout 90 --lr 1e-5 --save out "
            "--rollout-batch-size 4 --rollout-top-k -1 --num-rollout=3 --label-key=answer --rollout-stop END -stop- "
            "--rollout-stop-token-ids 1 2 --deterministic --no-grpo-std-normalization --use-agentic-rollout"
        )
    ).config
    assert config.agent.agent_command == "python agent.py --fast"
    assert config.agent.agent_cwd == Path("app")
    assert config.agent.agent_timeout == 90.0
    assert type(config.agent.agent_timeout) is float
    assert (config.train.lr, config.train.save) == (1e-5, Path("out"))
    assert (config.rollout.rollout_batch_size, config.rollout.rollout_top_k) == (4, -1)
    assert (config.rollout.num_rollout, config.data.label_key) == (3, "answer")
    assert config.rollout.rollout_stop == ("END", "-stop-")
    assert config.rollout.rollout_stop_token_ids == (1, 2)
    assert config.rollout.deterministic
    assert not config.reward.grpo_std_normalization


def test_a_home_directory_in_a_path_is_expanded(config_file):
    file = config_file("load: ~/there\n")
    config = parse_config(["--save=~/here", "--config", file]).config
    assert (config.train.save, config.train.load) == (Path.home() / "here", Path.home() / "there")


def test_agent_env_pairs_add_up_and_the_last_duplicate_wins():
    config = parse_config(["--agent-env", "A=1", "B=x=y", "A=2", "--agent-env", "C=", "B=3"]).config
    assert config.agent.agent_env == {"A": "2", "B": "3", "C": ""}


def test_a_flag_given_again_replaces_what_it_said():
    config = parse_config(["--lr", "1", "--rollout-stop", "a", "b", "--lr", "2", "--rollout-stop", "c"]).config
    assert (config.train.lr, config.rollout.rollout_stop) == (2.0, ("c",))


def test_a_value_that_begins_with_dashes_is_written_with_an_equals_sign():
    assert parse_config(["--agent-command=--odd"]).config.agent.agent_command == "--odd"
    text = refused(["--agent-command", "--odd"])
    assert "--agent-command needs a value (COMMAND); write --agent-command=VALUE" in text


def test_command_line_wins_over_file_wins_over_command_defaults_wins_over_default(config_file):
    file = config_file("lr: 2\nseed: 2\nweight_decay: 2\n")
    resolved = parse_config(
        ["--lr", "3", "--config", file],
        defaults={"lr": 1.0, "seed": 1, "clip_grad": 1.5},
        defaults_origin="demo default",
    )
    train = resolved.config.train
    assert (train.lr, train.seed, train.weight_decay, train.clip_grad, train.eps_clip) == (3.0, 2, 2.0, 1.5, 0.2)
    assert {name: resolved.origins[name] for name in ("lr", "seed", "weight_decay", "clip_grad", "eps_clip")} == {
        "lr": "command line",
        "seed": file,
        "weight_decay": file,
        "clip_grad": "demo default",
        "eps_clip": "default",
    }


def test_a_later_file_wins_over_an_earlier_one(config_file):
    first, second = config_file("lr: 1\nseed: 1\n", "a.yaml"), config_file("lr: 2\n", "b.yaml")
    resolved = parse_config(["--config", first, f"--config={second}"])
    assert (resolved.config.train.lr, resolved.config.train.seed) == (2.0, 1)
    assert (resolved.origins["lr"], resolved.origins["seed"]) == (second, first)


def test_agent_env_adds_up_over_all_places(config_file):
    file = config_file("agent_env: {A: file, PORT: 80}\n")
    resolved = parse_config(["--config", file, "--agent-env", "A=line"], defaults={"agent_env": {"D": "demo"}})
    assert resolved.config.agent.agent_env == {"D": "demo", "A": "line", "PORT": "80"}
    assert resolved.origins["agent_env"] == f"command default + {file} + command line"


def test_defaults_of_a_command_must_be_options():
    with pytest.raises(EngineFault, match="names lrr"):
        parse_config([], defaults={"lrr": 1.0})


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rolout-batch-size", "4"], "unknown flag --rolout-batch-size; did you mean --rollout-batch-size?"),
        (["--rollout_batch_size=4"], "unknown flag --rollout_batch_size; did you mean --rollout-batch-size?"),
        (["--no-determinstic"], "unknown flag --no-determinstic; did you mean --no-deterministic?"),
        (["--rollout-batch", "4"], "unknown flag --rollout-batch; did you mean --rollout-batch-size?"),
        (["--xyzzy"], "unknown flag --xyzzy"),
        (["-v"], "unknown flag -v"),
        (["--no-lr"], "--no-lr: only a switch can be turned off; --lr takes a value"),
        (["agent.py"], "'agent.py' belongs to no flag; quote a value that holds blanks"),
        (["--agent-command", "python", "agent.py"], "'agent.py' belongs to no flag; quote a value that holds blanks"),
        (["--lr"], "--lr needs a value (X)"),
        (["--config"], "--config needs a value (FILE)"),
        (["--lr", "fast"], "--lr: must be a number, not 'fast'"),
        (["--lr", "inf"], "--lr: must be a number, not 'inf'"),
        (["--lr=-1"], "--lr: must be 0 or greater, not -1.0"),
        (["--seed", "1.5"], "--seed: must be a whole number, not '1.5'"),
        (["--rollout-batch-size", "0"], "--rollout-batch-size: must be greater than 0, not 0"),
        (["--rollout-top-p", "1.1"], "--rollout-top-p: must be greater than 0 and at most 1, not 1.1"),
        (["--save", ""], "--save: must be a path, not ''"),
        (["--deterministic=yes"], "--deterministic takes no value; turn it off with --no-deterministic"),
        (["--no-deterministic=1"], "--no-deterministic takes no value"),
        (
            ["--keep-session-dirs", "sometimes"],
            "--keep-session-dirs: must be one of never, failed, always, not 'sometimes'",
        ),
        (["--agent-env", "A"], "--agent-env: must be KEY=VALUE, not 'A'"),
        (["--agent-env", "=A"], "--agent-env: must be KEY=VALUE, not '=A'"),
        (["--agent-env", "A=\0"], "--agent-env: 'A' must not hold a NUL character"),
        (["--agent-command", "a\0b"], "--agent-command: must not hold a NUL character"),
        (["--rollout-stop-token-ids", "1", "x"], "--rollout-stop-token-ids: must be a whole number, not 'x'"),
    ],
)
def test_a_wrong_word_is_refused_with_what_is_wrong(argv, said):
    assert refused(argv) == said


def test_all_problems_of_a_command_line_are_listed_together():
    text = refused(["--lr", "x", "--unknwon", "1", "2", "--seed", "y"])
    assert text.splitlines() == [
        "3 problems:",
        "  - --lr: must be a number, not 'x'",
        "  - unknown flag --unknwon",
        "  - --seed: must be a whole number, not 'y'",
    ]


def test_a_file_may_be_flat_or_nested_in_kebab_or_snake_case(config_file):
    flat = config_file("rollout-batch-size: 4\nrollout_stop: [a, b]\nagent-env: [A=1, B=2]\ndeterministic: true\n")
    nested = config_file(
        "rollout:\n  rollout_batch_size: 4\n  rollout-stop: [a, b]\n  deterministic: yes\n"
        "agent:\n  agent_env: {A: '1', B: 2}\ntrain:\n",
        "nested.yaml",
    )
    assert parse_config(["--config", flat]).config == parse_config(["--config", nested]).config
    assert parse_config(["--config", flat]).config.rollout.rollout_stop == ("a", "b")


def test_an_exponent_without_a_dot_is_a_number_in_a_file(config_file):
    assert parse_config(["--config", config_file("lr: 1e-6\nagent_timeout: 90\n")]).config.train.lr == 1e-6


def test_null_in_a_file_unsets_what_may_be_unset(config_file):
    file = config_file("save_interval: null\n")
    resolved = parse_config(["--config", file], defaults={"save_interval": 5})
    assert resolved.config.train.save_interval is None
    assert resolved.origins["save_interval"] == file


def test_an_empty_file_says_nothing(config_file):
    assert parse_config(["--config", config_file("# nothing\n")]).config == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rolout_batch_size: 4", "rolout_batch_size: unknown key; did you mean rollout_batch_size?"),
        ("rollout: {rollout-batch: 4}", "rollout.rollout-batch: unknown key; did you mean rollout_batch_size?"),
        ("rolout: {rollout-batch-size: 4}", "rolout: unknown key; did you mean rollout?"),
        ("train: {rollout_batch_size: 4}", "train.rollout_batch_size: belongs under rollout, not train"),
        ("train: {rollout: {seed: 4}}", "train.rollout: is a section and belongs at the top, not under train"),
        ("train: 4", "train: is a section and must be a mapping of option names"),
        ("7: 4", "7: unknown key"),
        ("lr: 1\ntrain: {lr: 2}", "train.lr: given twice in this file"),
        ("weight-decay: 1\nweight_decay: 2", "weight_decay: given twice in this file"),
        ("seed: '4'", "seed: must be a whole number, not a text (4)"),
        ("seed: true", "seed: must be a whole number, not a boolean (True)"),
        ("seed: 4.0", "seed: must be a whole number, not a number (4.0)"),
        ("seed:", "seed: must be a whole number, not empty"),
        ("rollout_stop:", "rollout_stop: must be a list, each a text, not empty"),
        ("lr: .inf", "lr: must be a number, not a number (inf)"),
        ("lr: fast", "lr: must be a number, not 'fast'"),
        ("lr: -1", "lr: must be 0 or greater, not -1.0"),
        ("label_key: 5", "label_key: must be a text, not a number (5); quote it"),
        ("label_key: [a]", "label_key: must be a text, not a list (['a'])"),
        ("deterministic: 1", "deterministic: must be true or false, not a number (1)"),
        ("save: 1", "save: must be a path, not a number (1)"),
        ("keep_session_dirs: no", "keep_session_dirs: must be a text, not a boolean (False); quote it"),
        ("rollout_stop: [a, 1]", "rollout_stop: must be a text, not a number (1); quote it"),
        ("agent_env: {A: true}", "agent_env: A must be a text, not a boolean (True); quote it"),
        ("agent_env: {A: 0.50}", "agent_env: A must be a text, not a number (0.5); quote it"),
        ("agent_env: [A]", "agent_env: must be KEY=VALUE, not 'A'"),
        ("agent_env: [1]", "agent_env: must hold KEY=VALUE texts, not a number (1)"),
        ("agent_env: A=1", "agent_env: must be a mapping of names to texts, not a text (A=1)"),
    ],
)
def test_a_wrong_key_of_a_file_is_named_with_the_file(config_file, text, said):
    file = config_file(text)
    assert refused(["--config", file]) == f"{file}: {said}"


def test_a_key_written_twice_is_named_with_its_line(config_file):
    file = config_file("lr: 1\nseed: 2\nlr: 3\n")
    assert refused(["--config", file]) == f"{file}:3: lr: given twice in this file"


def test_anchors_and_merge_keys_of_yaml_work(config_file):
    file = config_file("train:\n  <<: {lr: 1, seed: 2}\n  seed: 3\n")
    train = parse_config(["--config", file]).config.train
    assert (train.lr, train.seed) == (1.0, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- lr", "must be a mapping"),
        ("lr: [", "is no valid YAML"),
        ("lr: !!python/object:os.system x", "no valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(config_file, text, said):
    assert said in refused(["--config", config_file(text)])


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path):
    assert "none.yaml: cannot be read: No such file" in refused(["--config", str(tmp_path / "none.yaml")])
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"lr: \xff\xfe")
    assert "is no valid YAML" in refused(["--config", str(binary)])


@frozen(kw_only=True)
class Own:
    answers: Path = option(help="Script of answers.")  # noqa: RUF009
    sessions: int = option(1, "Sessions to open.")


def test_a_command_has_flags_of_its_own(config_file):
    resolved, own = parse_command(["--answers", "a.jsonl", "--lr", "1", "--sessions", "3"], Own)
    assert own == Own(answers=Path("a.jsonl"), sessions=3)
    assert resolved.config.train.lr == 1.0
    assert "sessions" not in resolved.origins
    with pytest.raises(ConfigError, match="--answers must be given: Script of answers"):
        parse_command([], Own)
    with pytest.raises(ConfigError, match="did you mean --sessions"):
        parse_command(["--answers", "a", "--session", "3"], Own)
    with pytest.raises(ConfigError, match="sessions: unknown key"):
        parse_command(["--answers", "a", "--config", config_file("sessions: 3")], Own)


words = st.text(max_size=8) | st.sampled_from([f"--{spec.flag}" for spec in config_specs()] + ["--config", "--", "1"])


@given(st.lists(words, max_size=6))
@settings(deadline=None)
def test_any_words_give_a_configuration_or_a_config_error(argv):
    try:
        resolved = parse_config(argv)
    except ConfigError:
        return
    assert set(resolved.origins) == {spec.name for spec in config_specs()}
