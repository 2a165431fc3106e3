"""The configuration as people and hooks see it."""

from __future__ import annotations

import shlex
from pathlib import Path

from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.config.namespace import hook_args
from relax_trio.config.option import option
from relax_trio.config.parse import parse_config
from relax_trio.config.render import render_help, render_reference, render_tree, render_yaml
from relax_trio.config.spec import config_specs, section_specs

ROOT = Path(__file__).parents[2]


def tree_lines(argv, **options):
    return [" ".join(line.split()) for line in render_tree(parse_config(argv, **options)).splitlines()]


def test_the_tree_shows_each_flag_with_unit_and_origin():
    lines = tree_lines(
        ["--lr", "0.123456789", "--agent-command", "python agent.py", "--deterministic"],
        defaults={"agent_timeout": 90.0},
        defaults_origin="demo default",
    )
    assert "--lr 0.123456789 (command line)" in lines
    assert "--agent-command 'python agent.py' (command line)" in lines
    assert "--agent-timeout 90 s (demo default)" in lines
    assert "--deterministic (command line)" in lines
    assert "--no-rollout-shuffle (default)" in lines
    assert "--num-rollout (not set) (default)" in lines
    assert [line for line in lines if line and not line.startswith("--")] == [
        *("agent", "data", "rollout", "eval", "backend", "reward", "train", "server", "output"),
    ]
    assert sum(line.startswith("--") for line in lines) == len(config_specs())


def test_secrets_of_the_agent_environment_are_masked():
    pairs = ["OPENAI_API_KEY=s1", "hf_token=s2", "MY_SECRET_X=s3", "PASSWORD=s4", "MODE=fast x"]
    text = render_tree(parse_config(["--agent-env", *pairs]))
    assert not any(secret in text for secret in ("s1", "s2", "s3", "s4"))
    assert "OPENAI_API_KEY=***" in text
    assert "'MODE=fast x'" in text


def test_the_flags_of_a_printed_tree_parse_to_the_same_configuration():
    argv = ["--lr", "1e-05", "--agent-env", "A=b c", "--rollout-stop", "x y", "z", "--no-grpo-std-normalization"]
    words = []
    for line in render_tree(parse_config(argv)).splitlines():
        if line.startswith("  --") and "(not set)" not in line:
            words += shlex.split(line.rpartition("(")[0])
    units = {spec.unit for spec in config_specs()} - {""}
    again = parse_config([word for word in words if word not in units])
    assert again.config == parse_config(argv).config


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)


@given(command=texts, stops=st.lists(texts, min_size=1, max_size=3), value=texts, lr=st.floats(0, 1e3))
@settings(deadline=None, max_examples=50)
def test_a_written_file_gives_the_same_configuration(tmp_path_factory, command, stops, value, lr):
    argv = [
        f"--agent-command={command}",
        "--agent-env",
        f"A={value}",
        "C=007",
        f"--lr={lr}",
        "--rollout-stop-token-ids",
    ]
    resolved = parse_config([*argv, "5", "6", "--save=x: y"], defaults={"rollout_stop": tuple(stops)})
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(render_yaml(resolved), encoding="utf-8")
    assert parse_config(["--config", str(path)]).config == resolved.config


def test_a_written_file_names_origins_and_holds_no_secret():
    text = render_yaml(parse_config(["--agent-env", "API_KEY=s1", "A=1", "--lr", "0.5"]))
    assert "s1" not in text
    assert 'agent_env: {"A": "1"}' in text
    assert "  # command line\n  # API_KEY is not written down\n" in text
    assert "  # command line\n  lr: 0.5\n" in text
    assert "  seed: 1234\n" in text


@frozen(kw_only=True)
class Own:
    sessions: int = option(1, "Sessions to open.", unit="Sessions")


def test_help_lists_every_flag_with_default_and_unit():
    text = render_help("relax-trio serve", "Open the API.", section_specs(Own, ""))
    assert text.startswith("usage: relax-trio serve [--config FILE]")
    assert all(f"]{spec.flag}\n" in text or f"--{spec.flag} " in text for spec in config_specs())
    flat = " ".join(text.split())
    assert "--sessions N Sessions to open. (unit: Sessions; default: 1)" in flat
    assert "--agent-timeout X Active-time budget of a Session. (unit: s; default: 1800)" in flat
    assert "--[no-]deterministic Same seed" in flat
    assert "--keep-session-dirs {never,failed,always}" in flat
    assert max(map(len, text.splitlines())) <= 100


def test_the_reference_page_is_current():
    page = (ROOT / "docs" / "flags.md").read_text()
    assert page == render_reference(), "run: relax-trio config --reference > docs/flags.md"


def test_the_reference_page_is_well_formed():
    rows = [line for line in render_reference().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(config_specs())
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)


def test_hooks_see_every_flag_under_its_name():
    config = parse_config(["--lr", "0.5", "--agent-env", "A=1"]).config
    args = hook_args(config)
    assert set(vars(args)) == {spec.name for spec in config_specs()}
    assert (args.lr, args.n_samples_per_prompt, args.agent_env) == (0.5, 8, {"A": "1"})
    args.agent_env["A"] = "2"
    assert config.agent.agent_env == {"A": "1"}
