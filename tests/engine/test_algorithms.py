"""Estimators, old policy, reference and corrections in a trainer with a real model, against autograd on plain rows."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise

import pytest
import torch
from attrs import evolve
from builders_train import (
    flat_gradient,
    off_policy,
    relative,
    rollout,
    same_tensors,
    settings,
    tiny_model,
    write_checkpoint,
)

from relax_trio.config.tree import ESTIMATORS
from relax_trio.data.sample import VersionSpan
from relax_trio.errors import TrainError
from relax_trio.ids import WeightVersion
from relax_trio.train import update
from relax_trio.train.phase import OpenPhase, run_phase
from relax_trio.train.policy import Policy
from relax_trio.train.recompute import recompute_logprobs
from relax_trio.train.reference import Reference
from relax_trio.train.trainer import open_trainer
from relax_trio.train.update import Updater

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]

PLUS = {"estimator": "reinforce_plus_plus", "normalize_advantages": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def go_on():
    """Nothing asks to stop."""


def record_targets(monkeypatch):
    """The list that fills with the targets of every micro-batch that is trained."""
    seen, real = [], update.objective

    def spying(logprobs, entropy, targets, config):
        seen.append(targets)
        return real(logprobs, entropy, targets, config)

    monkeypatch.setattr(update, "objective", spying)
    return seen


def trained(samples, columns):
    """The values of trained tokens, sorted: a way to compare tokens whatever micro-batch they came in."""
    return sorted(
        v for s, column in zip(samples, columns, strict=True) for v, m in zip(column, s.loss_mask, strict=True) if m
    )


@pytest.mark.parametrize(
    ("estimator", "per_token"), [(e, False) for e in ESTIMATORS] + [("grpo", True), ("cispo", True)]
)
def test_fan_out_leaves_the_gradient_of_a_model_as_it_was(estimator, per_token):
    """Off the policy, with what looks at whole sequences, and with contexts of a Session in several micro-batches."""
    model = tiny_model().double()
    samples = [evolve(s, index=i) for i, s in enumerate(off_policy(rollout(model, 5)))]
    flags = {"estimator": estimator, "calculate_per_token_loss": per_token, "normalize_advantages": True}
    flags |= {"use_opsm": True, "opsm_delta": 0.0}
    whole, metrics = flat_gradient(Policy(model), samples, **flags)
    assert 0 < metrics["train/opsm_clipfrac"] < 1
    parts = []
    for s in samples:
        bounds = [0, s.response_length // 3, s.response_length // 2, s.response_length]
        for first, last in pairwise(bounds):
            mask = [int(m and first <= t < last) for t, m in enumerate(s.loss_mask)]
            parts.append(evolve(s, loss_mask=bytearray(mask)))
    for size in (1, 100):
        split, split_metrics = flat_gradient(Policy(model), parts, micro_batch_size=size, **flags)
        assert relative(split, whole) < 1e-6
        assert split_metrics["train/opsm_clipfrac"] == pytest.approx(metrics["train/opsm_clipfrac"])
        assert split_metrics["train/loss"] == pytest.approx(metrics["train/loss"])


@pytest.mark.parametrize(
    ("flags", "size", "n_scored"),
    [
        ({"estimator": "gspo"}, 100, 0),  # every Session is in one micro-batch
        ({"estimator": "gspo"}, 1, 6),
        ({"estimator": "gspo", "use_rollout_logprobs": False}, 1, 0),  # on its own policy every ratio is 1
        ({"estimator": "gspo", "use_rollout_logprobs": False, "use_opsm": True}, 1, 6),
        ({"estimator": "grpo", "use_opsm": True}, 1, 6),
        ({"estimator": "grpo"}, 1, 0),
    ],
)
def test_only_sessions_in_several_micro_batches_are_scored_before(monkeypatch, flags, size, n_scored):
    seen, real = [], Reference.score
    monkeypatch.setattr(Reference, "score", lambda self, b, stop: seen.extend(b) or real(self, b, stop))
    model = tiny_model()
    flat_gradient(Policy(model), off_policy(rollout(model, 6)), micro_batch_size=size, **flags)
    assert len(seen) == n_scored


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("estimator", ["gspo", "cispo", "dr_grpo"])
def test_packing_rows_changes_no_estimators_gradient(packed, estimator):
    model = tiny_model().double()
    samples = off_policy(rollout(model, 7))
    flags = {"estimator": estimator, "use_opsm": True, "opsm_delta": 0.0, "normalize_advantages": True}
    one, metrics = flat_gradient(Policy(model), samples, micro_batch_size=100, **flags)
    size = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 24} if packed else {"micro_batch_size": 2}
    other, other_metrics = flat_gradient(Policy(model), samples, **size, **flags)
    assert relative(other, one) < 1e-6
    assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)
    assert 0 < metrics["train/opsm_clipfrac"] < 1


def test_dr_grpo_divides_by_a_constant_and_its_metrics_are_means_all_the_same():
    model = tiny_model().double()
    samples = off_policy(rollout(model, 6))
    n_tokens = sum(sum(s.loss_mask) for s in samples)
    per_token, means = flat_gradient(Policy(model), samples, calculate_per_token_loss=True)
    constant, metrics = flat_gradient(Policy(model), samples, estimator="dr_grpo", token_budget=50)
    assert relative(constant * 50 * 3, per_token * n_tokens) < 1e-9  # 3 Sessions
    assert metrics["train/loss"] * 50 * 3 == pytest.approx(means["train/loss"] * n_tokens)
    assert metrics["train/entropy"] == pytest.approx(means["train/entropy"])
    assert metrics["train/ratio"] == pytest.approx(means["train/ratio"])


def test_recomputed_old_logprobs_are_those_before_the_phase_for_every_optimizer_step(monkeypatch):
    model = tiny_model()
    samples = off_policy(rollout(model, 8))
    before = recompute_logprobs(model, samples, temperature=1.0)
    seen = record_targets(monkeypatch)
    config = settings(lr=0.05, global_batch_size=1, use_rollout_logprobs=False)
    metrics = run_phase(Updater(Policy(model), config), samples, go_on).metrics
    assert seen[0].old is None, "where no weight has changed the policy is its own old one"
    old = [value for targets in seen[1:] for value in targets.old.tolist()]
    assert sorted(old) == pytest.approx(trained(samples[2:], before[2:]), abs=1e-5)
    assert metrics["train/n_optimizer_steps"] == 4
    assert metrics["train/pg_clipfrac"] > 0, "later optimizer steps are off the policy"
    assert metrics["train/rollout_logprob_abs_diff"] > 0.3, "the gap to rollout is told all the same"


def test_with_one_optimizer_step_the_recomputed_policy_is_on_policy_and_costs_no_forward_pass():
    model = tiny_model().double()
    samples = off_policy(rollout(model, 6))
    gradient, metrics = flat_gradient(Policy(model), samples, use_rollout_logprobs=False)
    recorded = recompute_logprobs(model, samples, temperature=1.0)
    as_recorded = [evolve(s, rollout_log_probs=column) for s, column in zip(samples, recorded, strict=True)]
    expected, _ = flat_gradient(Policy(model), as_recorded)
    assert relative(gradient, expected) < 1e-6
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["train/ppo_kl"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("flag", ["use_tis", "use_mis"])
def test_importance_sampling_is_silent_where_engine_and_trainer_agree_and_bounded_where_not(flag):
    model = tiny_model().double()
    samples = rollout(model, 6)
    plain, _ = flat_gradient(Policy(model), samples)
    gradient, metrics = flat_gradient(Policy(model), samples, **{flag: True})
    assert relative(gradient, plain) < 1e-6
    assert metrics["train/tis"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/tis_clipfrac"] == 0.0
    _, metrics = flat_gradient(Policy(model), off_policy(samples), tis_clip=1.2, tis_clip_low=0.9, **{flag: True})
    assert 0.2 < metrics["train/tis_clipfrac"] < 1
    assert metrics["train/tis_abs"] > 0.1
    assert metrics["train/tis_weight"] < 1.2
    assert ("train/masked_frac" in metrics) == (flag == "use_mis")


def test_the_gap_to_rollout_is_told_as_a_divergence():
    model = tiny_model().double()
    samples = off_policy(rollout(model, 6))
    own = recompute_logprobs(model, samples, temperature=1.0)
    gaps = [
        new - old
        for s, column in zip(samples, own, strict=True)
        for new, old, m in zip(column, s.rollout_log_probs, s.loss_mask, strict=True)
        if m
    ]
    _, metrics = flat_gradient(Policy(model), samples)
    assert metrics["train/rollout_kl"] == pytest.approx(
        math.fsum(math.exp(d) - 1 - d for d in gaps) / len(gaps), rel=1e-6
    )
    assert metrics["train/rollout_logprob_abs_diff"] == pytest.approx(max(map(abs, gaps)), rel=1e-6)


def with_reference(model, other, **flags):
    config = settings(**flags)
    return Updater(Policy(model), config, Reference(Policy(other.requires_grad_(False)), config.distribution))


def test_a_kl_loss_pulls_the_policy_to_the_reference_and_changes_nothing_there():
    model, reference = tiny_model(), tiny_model(seed=7)
    samples = [evolve(s, advantage=0.0) for s in rollout(model, 8)]
    kept = [p.clone() for p in reference.parameters()]
    updater = with_reference(model, reference, lr=5e-3, use_kl_loss=True, kl_loss_coef=1.0)
    found = [run_phase(updater, samples, go_on).metrics["train/kl_loss"] for _ in range(6)]
    assert found[0] > 0.5
    assert found[-1] < 0.7 * found[0]
    assert all(torch.equal(a, b) for a, b in zip(kept, reference.parameters(), strict=True))
    same = with_reference(tiny_model(), tiny_model(), lr=0.0, use_kl_loss=True, kl_loss_coef=1.0)
    metrics = run_phase(same, samples, go_on).metrics
    assert metrics["train/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["train/grad_norm"] < 1e-4


def test_returns_are_shaped_by_the_kl_of_the_old_policy_and_then_whitened_over_the_batch(monkeypatch):
    model, reference = tiny_model().double(), tiny_model(seed=7).double()
    samples = off_policy(rollout(model, 6))
    own, ref = (recompute_logprobs(m, samples, temperature=1.0) for m in (model, reference))
    for recorded in (True, False):
        seen = record_targets(monkeypatch)
        flags = {"kl_coef": 0.3, "use_rollout_logprobs": recorded, "micro_batch_size": 2, "lr": 0.0, **PLUS}
        metrics = run_phase(with_reference(model, reference, **flags), samples, go_on).metrics
        raw, behind = [], {}
        for s, mine, theirs in reversed(list(zip(samples, own, ref, strict=True))):
            old = s.rollout_log_probs if recorded else mine
            kl = [o - r for o, r, m in zip(old, theirs, s.loss_mask, strict=True) if m]
            raw += [s.advantage - 0.3 * (math.fsum(kl[t:]) + behind.get(s.index, 0.0)) for t in range(len(kl))]
            behind[s.index] = behind.get(s.index, 0.0) + math.fsum(kl)  # what its later contexts have cost
        tensor = torch.tensor(raw, dtype=torch.float64)
        expected = (tensor - tensor.mean()) / (tensor.var() + 1e-8).sqrt()
        found = [value for targets in seen for value in targets.advantages.tolist()]
        assert sorted(found) == pytest.approx(sorted(expected.tolist()), rel=1e-6, abs=1e-8)
        assert metrics["train/advantages/mean"] == pytest.approx(0, abs=1e-9)
        assert metrics["train/advantages/std"] == pytest.approx(1, rel=1e-6)
        assert metrics["train/advantages/max"] == pytest.approx(max(found))
        assert "train/ref_kl" in metrics


def test_whitening_takes_no_part_of_an_optimizer_batch():
    samples = rollout(tiny_model(), 6)
    updater = Updater(Policy(tiny_model()), settings(normalize_advantages=True))
    phase = OpenPhase(updater)
    phase.consume(samples[:2], go_on)
    with pytest.raises(TrainError, match="hand over all of its rows together"):
        phase.consume(samples[2:], go_on)
    phase.give_up()
    whole = Updater(Policy(tiny_model()), settings(normalize_advantages=True, global_batch_size=1))
    phase = OpenPhase(whole)
    phase.consume(samples[:2], go_on)
    phase.consume(samples[2:], go_on)
    assert phase.finish().metrics["train/n_optimizer_steps"] == 3


def test_staleness_counts_versions_of_every_generated_token():
    model = tiny_model()
    samples = rollout(model, 4)
    for s, versions in zip(samples, (("2", "5"), ("5",), ("4",), ("elsewhere",)), strict=True):
        s.weight_versions = tuple(VersionSpan(version=WeightVersion(v), n_tokens=3) for v in versions)
    updater = Updater(Policy(model), settings())
    updater.n_phases = 5
    metrics = run_phase(updater, samples, go_on).metrics
    assert metrics["train/staleness/mean"] == pytest.approx((3 + 0 + 0 + 1) / 4)
    assert metrics["train/staleness/max"] == 3


@pytest.mark.parametrize("estimator", ESTIMATORS)
async def test_every_estimator_trains_makes_its_wish_likelier_and_tells_finite_metrics(estimator, checkpoint):
    # `rollout` puts two rows in each Session; one of the two Groups' rows was good.
    samples = [evolve(s, advantage=1.0 if i % 2 else -1.0) for i, s in enumerate(rollout(tiny_model(), 8))]
    flags = {"estimator": estimator, "token_budget": 8, "normalize_advantages": True, "entropy_coef": 1e-4}
    trainer = await open_trainer(settings(lr=3e-3, use_tis=True, use_opsm=True, eps_clip_c=None, **flags), checkpoint)
    metrics = await trainer.step(0, samples)
    assert all(math.isfinite(value) for value in metrics.values())
    tensors = trainer.weights().tensors
    after = tiny_model()
    after.load_state_dict(tensors, strict=False)
    before, now = (recompute_logprobs(m, samples, temperature=1.0) for m in (tiny_model(), after))
    moved = [math.fsum(b) - math.fsum(a) for a, b in zip(before, now, strict=True)]
    assert math.fsum(moved[1::2]) > 0
    assert math.fsum(moved[::2]) < 0


async def test_the_reference_is_the_first_checkpoint_in_a_resumed_run_too(checkpoint, tmp_path, monkeypatch):
    samples = rollout(tiny_model(), 6)
    config = settings(lr=0.02, use_kl_loss=True, kl_loss_coef=0.1)
    trainer = await open_trainer(config, checkpoint)
    assert (await trainer.step(0, samples))["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    saved = await trainer.save(tmp_path / "saved", {})
    metrics = await trainer.step(1, samples)
    resumed = await open_trainer(config, checkpoint, resume=saved)
    assert await resumed.step(1, samples) == metrics
    assert metrics["train/kl_loss"] > 1e-3
    assert same_tensors(resumed.weights(), trainer.weights())


async def test_ref_load_names_another_reference(checkpoint, tmp_path):
    tiny_model(seed=3).save_pretrained(tmp_path / "other")
    config = settings(use_kl_loss=True, ref_load=tmp_path / "other")
    metrics = await (await open_trainer(config, checkpoint)).step(0, rollout(tiny_model(), 6))
    assert metrics["train/kl_loss"] > 0.1


def test_an_entropy_bonus_raises_the_entropy():
    model = tiny_model()
    samples = [evolve(s, advantage=0.0) for s in rollout(model, 8)]
    updater = Updater(Policy(model), settings(lr=5e-3, entropy_coef=1.0))
    found = [run_phase(updater, samples, go_on).metrics["train/entropy"] for _ in range(4)]
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.05


def test_a_reference_of_nonsense_skips_the_step_and_is_counted():
    model, broken = tiny_model(), tiny_model()
    with torch.no_grad():
        next(broken.parameters()).fill_(math.nan)
    samples = rollout(model, 4)
    updater = with_reference(model, broken, use_kl_loss=True, kl_loss_coef=0.1)
    metrics = run_phase(updater, samples, go_on).metrics
    assert (metrics["train/n_optimizer_steps"], metrics["train/n_skipped_steps"]) == (0, 1)
    assert array("d", [metrics["train/loss"]]) == array("d", [0.0])
