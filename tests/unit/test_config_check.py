"""What is refused before anything is started, and what must not be refused."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from relax_trio.config.check import check_config
from relax_trio.config.check_command import command_problems
from relax_trio.config.hook_path import import_hook
from relax_trio.config.parse import parse_config
from relax_trio.config.render import render_yaml
from relax_trio.errors import ConfigError


@pytest.fixture
def runnable(tmp_path, monkeypatch):
    """Flags of a run that can be started, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BASH_ENV", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"input": "a"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    return ["--prompt-data", "rows.jsonl", "--hf-checkpoint", "model", "--agent-command", "true"]


def problems(argv, command="train", **options):
    resolved = parse_config(argv)
    with pytest.raises(ConfigError) as caught:
        check_config(resolved.config, command=command, origins=resolved.origins, **options)
    lines = str(caught.value).splitlines()
    return [line.removeprefix("  - ") for line in (lines if len(lines) == 1 else lines[1:])]


def warnings(argv, command="train", **options):
    resolved = parse_config(argv)
    return check_config(resolved.config, command=command, origins=resolved.origins, **options)


@pytest.mark.parametrize("command", ["train", "rollout", "serve", "demo"])
def test_a_runnable_configuration_passes_without_warnings(runnable, command):
    assert warnings(runnable, command) == ()


def test_serve_needs_no_agent_and_no_data_and_demo_no_data(runnable):
    assert warnings(["--hf-checkpoint", "model"], "serve") == ()
    assert warnings(["--hf-checkpoint", "demo", "--agent-command", "true"], "demo") == ()


def test_all_problems_are_listed_together_each_with_its_flag(runnable):
    found = problems(["--agent-cwd", "nowhere", "--agent-env", "RELAX_BASE_URL=x", "--rollout-top-k", "0"])
    assert [line.split()[0].rstrip(":") for line in found] == [
        "--hf-checkpoint",
        "--rollout-top-k",
        "--prompt-data",
        "--agent-env",
        "--agent-cwd",
        "--agent-command",
    ]
    with pytest.raises(ConfigError, match=r"^6 problems:\n  - --hf-checkpoint is missing"):
        check_config(
            parse_config(["--agent-cwd", "no", "--agent-env", "RELAX_X=1", "--rollout-top-k", "0"]).config,
            command="train",
        )


def test_checkpoints(runnable, tmp_path):
    def said(name, **options):
        return problems(["--hf-checkpoint", name], "serve", **options)

    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[")
    assert "does not exist; nothing is downloaded" in said("Qwen/Qwen3-0.6B")[0]
    assert "is not a directory" in said("rows.jsonl")[0]
    assert "holds no config.json" in said("empty")[0]
    assert "config.json cannot be read" in said("broken")[0]
    assert "holds no weights" in said("bare")[0]
    assert "holds no tokenizer" in said("bare", scripted=True)[0]
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    assert warnings(["--hf-checkpoint", "empty"], "serve", scripted=True) == ()
    assert warnings(["--hf-checkpoint", "demo"], "serve") == ()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("none.jsonl", "--prompt-data none.jsonl: does not exist"),
        ("none.jsonl@[0:5]", "--prompt-data none.jsonl: does not exist"),
        ("model", "--prompt-data model: is not a file"),
        ("rows.jsonl@[5]", "--prompt-data: rows.jsonl@[5]: [5] is no slice; write PATH@[a:b], e.g. rows.jsonl@[0:100]"),
    ],
)
def test_a_missing_dataset_is_named(runnable, spec, said):
    assert problems([*runnable, "--prompt-data", spec]) == [said]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--over-sampling-batch-size 4", "--over-sampling-batch-size 4 is below --rollout-batch-size 8"),
        ("--deterministic --over-sampling-batch-size 9", "--deterministic takes no oversampling"),
        ("--global-batch-size 7", "--global-batch-size 7 does not divide the 64 samples of a step"),
        ("--global-batch-size 16 --micro-batch-size 17", "--micro-batch-size 17 is above --global-batch-size 16"),
        ("--rollout-max-context-len 1024", "--rollout-max-context-len 1024 leaves no room for a prompt"),
        ("--rollout-stop-token-ids -5", "--rollout-stop-token-ids: a token id is 0 or greater"),
        ("--rollout-stop=", "--rollout-stop: an empty text"),
        ("--use-dynamic-batch-size", "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        ("--max-tokens-per-gpu 100", "--max-tokens-per-gpu is given without --use-dynamic-batch-size"),
        ("--attn-implementation flash_attention_2", "works in half precision: set --train-dtype bfloat16"),
        ("--lora-alpha 8", "--lora-alpha is given without --lora-rank"),
        ("--adam-beta2 1", "--adam-beta2 1.0: must be 0 or greater and below 1"),
        ("--adam-eps 0", "--adam-eps 0.0: must be greater than 0"),
        ("--eval-interval 5", "--eval-interval is given without --eval-prompt-data"),
        ("--eval-prompt-data a rows.jsonl b", "--eval-prompt-data takes pairs NAME PATH, but holds 3 words"),
        ("--eval-prompt-data a rows.jsonl a rows.jsonl", "--eval-prompt-data: two datasets are named a"),
        ("--eval-prompt-data a none.jsonl", "--eval-prompt-data a none.jsonl: does not exist"),
        (
            "--eval-prompt-data a rows.jsonl --eval-max-context-len 900",
            "--eval-max-context-len 900 leaves no room for a prompt beside a turn of --rollout-max-response-len 1024",
        ),
        ("--no-use-agentic-rollout", "--no-use-agentic-rollout: agentic rollout is the only path"),
        ("--port 65536", "--port 65536: the greatest port is 65535"),
        ("--host nowhere.invalid", "--host nowhere.invalid: is no address"),
        ("--host 203.0.113.7", "--host 203.0.113.7 --port 0: cannot be listened on"),
        ("--load none", "--load none: is not a directory of checkpoints"),
        ("--save rows.jsonl", "--save rows.jsonl: rows.jsonl is not a directory"),
        ("--output-dir rows.jsonl/x", "--output-dir rows.jsonl/x: rows.jsonl is not a directory"),
        ("--save-debug-rollout-data dump", "--save-debug-rollout-data dump: must hold {rollout_id}"),
        ("--save-debug-rollout-data {step}", "only {rollout_id} may stand in braces"),
        ("--save-debug-rollout-data {rollout_id", "only {rollout_id} may stand in braces"),
        ("--save-debug-rollout-data rows.jsonl/{rollout_id}", "rows.jsonl is not a directory"),
        ("--custom-rm-path score", "--custom-rm-path score: must be package.module.function"),
    ],
)
def test_a_contradiction_is_refused_with_what_to_do(runnable, flags, said):
    (problem,) = problems([*runnable, *flags.split()])
    assert said in problem


RUNNABLE = [
    "--agentic-concurrency 1",
    "--over-sampling-batch-size 8 --deterministic",
    "--use-dynamic-batch-size --max-tokens-per-gpu 100 --gradient-checkpointing --train-dtype bfloat16",
    "--lora-rank 8 --lora-alpha 16 --lora-target-modules q_proj v_proj --trainer-processes 2",
    "--global-batch-size 4",  # below the default micro-batch, which nobody chose
    "--rollout-batch-size 1 --n-samples-per-prompt 2",
    "--rollout-max-context-len 1025",
    "--eval-prompt-data a rows.jsonl@[0:1] b rows.jsonl --eval-interval 1",
    "--save new/directory --output-dir new --load model",
    "--save-debug-rollout-data dumps/step-{rollout_id:04d}.jsonl",
    "--host ::1" if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else "--port 0",
    "--host localhost",
]


@pytest.mark.parametrize("flags", RUNNABLE)
def test_what_can_be_run_is_not_refused(runnable, flags):
    assert warnings([*runnable, *flags.split()]) == ()


@pytest.mark.parametrize("flags", [*RUNNABLE, "--global-batch-size 4 --use-tis", "--n-samples-per-prompt 2"])
def test_what_a_run_writes_as_its_configuration_is_taken_again(runnable, flags, tmp_path):
    """With every default in it, and with the checkpoint it goes on from."""
    file = tmp_path / "config.yaml"
    file.write_text(render_yaml(parse_config([*runnable, *flags.split()])))
    assert warnings(["--config", str(file), "--load", "model"]) == ()


def test_rollout_does_not_look_at_the_training_flags(runnable):
    assert warnings([*runnable, "--global-batch-size", "7"], "rollout") == ()


@pytest.mark.parametrize("command", ["rollout", "serve"])
def test_only_training_goes_on_from_a_checkpoint(runnable, command, tmp_path):
    with pytest.raises(ConfigError, match="only training goes on"):
        warnings([*runnable, "--load", str(tmp_path)], command)


def test_a_directory_that_may_not_be_written_is_refused(runnable, monkeypatch):
    # Root may write everywhere, so permissions of a real directory would prove nothing where tests run as root.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "model")
    (problem,) = problems([*runnable, "--save", "model/out"])
    assert "model may not be written to" in problem


def test_a_port_in_use_is_refused_and_a_closing_one_is_not(runnable):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (problem,) = problems([*runnable, "--port", port])
        assert problem == f"--host 127.0.0.1 --port {port}: the port is in use; choose another, or 0 for a free one"
        # The end that closes first leaves the port in TIME_WAIT.
        with socket.create_connection(taken.getsockname()):
            accepted, _ = taken.accept()
            accepted.close()
    assert warnings([*runnable, "--port", port]) == ()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--custom-generate-function-path a.b", "--custom-generate-function-path is ignored"),
        ("--n-samples-per-prompt 1", "--n-samples-per-prompt 1: a Group of one"),
        ("--rollout-temperature 0", "--rollout-temperature 0"),
        ("--eval-prompt-data a rows.jsonl", "--eval-prompt-data is given without --eval-interval"),
    ],
)
def test_what_can_be_run_but_is_odd_is_warned_about(runnable, flags, said):
    (warning,) = warnings([*runnable, *flags.split()])
    assert said in warning


# --- the agent's command ---------------------------------------------------------------------------------------


@pytest.fixture
def command_check(tmp_path, monkeypatch):
    monkeypatch.delenv("BASH_ENV", raising=False)
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "plain.sh").write_text("true\n")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)

    def check(command, *flags):
        resolved = parse_config(["--agent-command", command, "--agent-cwd", str(tmp_path), *flags])
        return command_problems(resolved.config.agent)

    return check


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "--agent-command is missing"),
        ("  ", "--agent-command is missing"),
        ("no-such-program --x", "no-such-program is not found on PATH"),
        ("exec no-such-program", "no-such-program is not found on PATH"),
        ("X=1 no-such-program && true", "no-such-program is not found on PATH"),
        ("./nothing.sh", "./nothing.sh is not found in"),
        ("./plain.sh", "./plain.sh is not executable; chmod +x it"),
        ("bash ./nothing.sh", "./nothing.sh is not found in"),
        (f"{sys.executable} nothing.py --x", "nothing.py is not found in"),
        ("echo 'open", "cannot be parsed by bash"),
        ("if true; then", "cannot be parsed by bash"),
        ("echo )", "cannot be parsed by bash"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(command_check, command, said):
    (problem,) = command_check(command)
    assert said in problem


@pytest.mark.parametrize(
    "command",
    [
        "true",
        "./tool --x",
        f"{sys.executable} agent.py --x",
        f"{sys.executable} -m some.module",
        f"{sys.executable} -c 'print(1)'",
        "bash plain.sh",
        "bash somewhere_on_path.sh",
        "cd sub && ./made_later",
        "exec ./tool",
        "X=1 Y='a b' ./tool",
        "PATH=/opt/special:$PATH only-there",
        '"$AGENT_HOME"/run',
        "$(which true)",
        "~/agent/run",
        "{ true; }",
        "( true )",
        "helper() { true; }; helper",
        "for x in 1 2; do echo $x; done",
        "[[ -n x ]] && true",
        "! false",
        "# say it\ntrue",
        "shopt -s extglob\nls !(x)",
        "cat <<'END'\nit's\nEND",
        "echo 'it'\\''s' | cat",
        "missing-program || true",
        "missing-program; true",
        "missing-program\ntrue",
        "missing-program | cat",
        "missing-program & true",
        "time true",
        ": nothing",
    ],
)
def test_a_command_that_a_shell_could_run_is_not_refused(command_check, command):
    assert command_check(command) == []


def test_the_search_path_of_the_agent_counts(command_check, tmp_path):
    assert command_check("tool", "--agent-env", f"PATH={tmp_path}") == []
    assert command_check("tool") != []


@pytest.mark.parametrize("flags", [["--agent-login-shell"], ["--agent-env", "BASH_ENV=setup.sh"]])
def test_what_a_startup_file_could_change_is_not_judged(command_check, flags):
    assert command_check("no-such-program", *flags) == []


def test_nothing_of_the_command_is_run(command_check, tmp_path):
    marker = tmp_path / "marker"
    command_check(f"touch {marker}")
    command_check(f"X=$(touch {marker}) true `touch {marker}`")
    assert not marker.exists()


# --- hooks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    (tmp_path / "my_hooks.py").write_text("def score(args, sample):\n    return 1.0\n\nLIMIT = 3\n")
    (tmp_path / "my_broken_hooks.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "my_failing_hooks.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "my_wrong_hooks.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("my_") and name.endswith("hooks")]:
        del sys.modules[name]


def test_a_hook_is_imported_by_its_name(hooks, runnable):
    assert import_hook("--custom-rm-path", "my_hooks.score")(None, None) == 1.0
    assert warnings([*runnable, "--custom-rm-path", "my_hooks.score"]) == ()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_hooks.scores", "my_hooks has no scores; did you mean score?"),
        ("my_hooks.LIMIT", "is a int, not a function"),
        ("my_hooks", "must be package.module.function"),
        ("my_hooks:score", "must be package.module.function"),
        ("nowhere_at_all.score", "nowhere_at_all cannot be imported: ModuleNotFoundError"),
        ("my_broken_hooks.score", "my_broken_hooks cannot be imported: ModuleNotFoundError: No module named 'not_in"),
        ("my_failing_hooks.score", "my_failing_hooks cannot be imported: RuntimeError: no licence"),
        ("my_wrong_hooks.score", "my_wrong_hooks cannot be imported: SyntaxError"),
    ],
)
def test_a_hook_that_cannot_be_imported_is_refused(hooks, path, said):
    with pytest.raises(ConfigError) as caught:
        import_hook("--custom-rm-path", path)
    assert str(caught.value).startswith(f"--custom-rm-path {path}: ")
    assert said in str(caught.value)
