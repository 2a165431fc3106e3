"""Flags of the algorithm that contradict each other, or would change nothing, are refused at start."""

from __future__ import annotations

import pytest

from relax_trio.config.check import check_config
from relax_trio.config.check_algorithm import algorithm_problems, algorithm_warnings
from relax_trio.config.parse import parse_config
from relax_trio.config.render import render_yaml
from relax_trio.config.tree import ESTIMATORS
from relax_trio.errors import ConfigError

WHITE = "--normalize-advantages"
PLUS = f"--advantage-estimator reinforce_plus_plus {WHITE}"


def problems(flags):
    resolved = parse_config(flags.split())
    return algorithm_problems(resolved.config, resolved.origins)


def warnings(flags):
    return algorithm_warnings(parse_config(flags.split()).config)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--advantage-estimator dr_grpo --calculate-per-token-loss", "leave --calculate-per-token-loss out"),
        ("--advantage-estimator dr_grpo --grpo-std-normalization", "doesn't divide by the standard deviation"),
        ("--advantage-estimator rloo --grpo-std-normalization", "doesn't divide by the standard deviation"),
        ("--advantage-estimator reinforce_plus_plus", "add --normalize-advantages"),
        ("--advantage-estimator reinforce_plus_plus_baseline", "add --normalize-advantages"),
        ("--advantage-estimator rloo --n-samples-per-prompt 1", "raise --n-samples-per-prompt above 1"),
        ("--advantage-estimator rloo --agentic-custom-advantage-path a.b", "leave one of the two out"),
        (f"{WHITE} --fully-async --num-iters-per-train-update 2", "set it to 1"),
        ("--advantage-estimator cispo --eps-clip-c 3", "no dual clip"),
        ("--kl-coef 0.1", "use --use-kl-loss --kl-loss-coef"),
        ("--advantage-estimator rloo --kl-coef 0.1", "use --use-kl-loss --kl-loss-coef"),
        (f"{PLUS} --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "choose one place for the KL"),
        ("--kl-loss-coef 0.1", "without --use-kl-loss"),
        ("--use-unbiased-kl", "without --use-kl-loss"),
        ("--kl-loss-type k3", "--kl-loss-type is given without --use-kl-loss or --kl-coef"),
        ("--ref-load somewhere", "--ref-load is given without --use-kl-loss or --kl-coef"),
        ("--use-kl-loss --kl-loss-coef 0.1 --ref-load no/where", "--ref-load no/where: is not a directory"),
        ("--use-tis --use-mis", "exclude each other"),
        ("--use-tis --use-rollout-logprobs", "with --use-rollout-logprobs there is none"),
        ("--use-mis --use-rollout-logprobs", "with --use-rollout-logprobs there is none"),
        ("--use-tis --tis-clip 0.5", "must have 1"),
        ("--use-mis --tis-clip-low 1.5", "must have 1"),
        ("--tis-clip 3", "--tis-clip is given without --use-tis or --use-mis"),
        ("--tis-clip-low 0.5", "--tis-clip-low is given without --use-tis or --use-mis"),
        ("--opsm-delta 0.1", "without --use-opsm"),
    ],
)
def test_a_combination_without_sense_is_refused_and_says_what_to_do(flags, told):
    found = problems(flags)
    assert len(found) == 1, found
    assert told in found[0]
    assert found[0].startswith("--")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        *(f"--advantage-estimator {name} {WHITE}" for name in ESTIMATORS),
        "--advantage-estimator dr_grpo",
        "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --eps-clip-c 3",
        "--advantage-estimator cispo --eps-clip 1 --eps-clip-high 4 --calculate-per-token-loss",
        f"{PLUS} --kl-coef 0.01 --kl-loss-type k2",
        f"{PLUS} --agentic-custom-advantage-path a.b",
        "--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --entropy-coef 0.001",
        "--use-kl-loss --kl-loss-coef 0.001 --ref-load demo",
        "--use-tis --tis-clip 2 --tis-clip-low 0.5",
        "--use-mis --tis-clip 5 --no-use-rollout-logprobs",
        "--use-opsm --opsm-delta 0.01 --use-rollout-logprobs",
        "--no-use-rollout-logprobs --eps-clip-high 0.28",
        f"{WHITE} --fully-async --num-iters-per-train-update 1",
    ],
)
def test_what_researchers_run_is_let_through(flags):
    assert problems(flags) == []


@pytest.mark.parametrize("flags", ["", f"{PLUS} --kl-coef 0.01", "--advantage-estimator dr_grpo", "--use-tis"])
def test_the_file_that_a_run_writes_is_taken_again_although_it_holds_every_default(flags, tmp_path):
    written = tmp_path / "config.yaml"
    written.write_text(render_yaml(parse_config(flags.split())))
    assert problems(f"--config {written}") == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--advantage-estimator cispo", "--eps-clip 1"),
        ("--advantage-estimator gspo --calculate-per-token-loss", "mean over sequences"),
        ("--use-kl-loss", "measured and not trained on"),
        ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k1", "doesn't depend on the reference"),
    ],
)
def test_what_is_seldom_meant_is_warned_of(flags, told):
    (found,) = warnings(flags)
    assert told in found


@pytest.mark.parametrize(
    "flags", ["--eps-clip-c 1", "--entropy-coef -1", "--kl-coef -0.1", "--advantage-estimator ppo"]
)
def test_values_out_of_range_are_refused_when_they_are_read(flags):
    with pytest.raises(ConfigError, match=flags.split()[0]):
        parse_config(flags.split())


def test_the_old_policy_and_the_kl_estimator_follow_from_what_is_asked_for():
    def train(flags):
        return parse_config(flags.split()).config.train

    assert train("").takes_rollout_logprobs
    assert not train("--use-tis").takes_rollout_logprobs
    assert not train("--use-mis").takes_rollout_logprobs
    assert not train("--no-use-rollout-logprobs").takes_rollout_logprobs
    assert train("--use-kl-loss").kl_estimator == "low_var_kl"
    assert train("--kl-coef 0.1").kl_estimator == "k1"
    assert train("--use-kl-loss --kl-loss-type k2").kl_estimator == "k2"
    assert [train(f).needs_reference for f in ("", "--use-kl-loss", "--kl-coef 0.1")] == [False, True, True]


def test_training_is_refused_before_it_starts_and_serving_does_not_ask():
    words = ["--hf-checkpoint", "demo", "--use-tis", "--use-mis", "--advantage-estimator", "cispo", "--eps-clip-c", "3"]
    resolved = parse_config(words)
    with pytest.raises(ConfigError, match=r"(?s)no dual clip.*exclude each other"):
        check_config(resolved.config, command="demo", origins=resolved.origins)
    assert check_config(resolved.config, command="serve", origins=resolved.origins) == ()
    fine = parse_config(["--hf-checkpoint", "demo", "--use-kl-loss", "--agent-command", "true"])
    (warned,) = check_config(fine.config, command="demo", origins=fine.origins)
    assert "measured and not trained on" in warned
