"""The whole loss of a micro-batch, and of an optimizer batch in parts, against straightforward formulas in float64.

The reference is written Session by Session and token by token; its gradient comes from differences, not from torch.
"""

from __future__ import annotations

import math
import random
from array import array
from itertools import pairwise

import pytest
import torch
from attrs import evolve
from builders_train import make_sample, relative, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from relax_trio.config.tree import ESTIMATORS
from relax_trio.train.objective import objective
from relax_trio.train.packing import MicroBatching, loss_normalizer, micro_batches, row_weights
from relax_trio.train.phase import loss_divisor
from relax_trio.train.sequences import tell_away
from relax_trio.train.stats import StepStats
from relax_trio.train.targets import make_targets

BUDGET = 7
CASES = {
    "grpo": {},
    "grpo per token": {"calculate_per_token_loss": True},
    "clip-higher and dual clip": {"eps_clip": 0.1, "eps_clip_high": 0.3, "eps_clip_c": 1.2},
    "dr_grpo": {"estimator": "dr_grpo"},
    "gspo": {"estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.08},
    "cispo": {"estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.1},
    "entropy bonus": {"entropy_coef": 0.1},
    "kl loss k2": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2"},
    "kl loss low_var_kl": {"use_kl_loss": True, "kl_loss_coef": 0.3},
    "kl loss, unbiased": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "kl loss measured only": {"use_kl_loss": True},
    "truncated importance sampling": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.8},
    "masked importance sampling": {"use_mis": True, "tis_clip": 1.2, "tis_clip_low": 0.8},
    "off-policy sequence masking": {"use_opsm": True, "opsm_delta": 0.02},
    "whitening": {"normalize_advantages": True},
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.2},
    "reinforce_plus_plus_baseline": {
        "estimator": "reinforce_plus_plus_baseline",
        "normalize_advantages": True,
        "kl_coef": 0.2,
        "kl_loss_type": "k2",
    },
    "all at once": {
        "estimator": "gspo",
        "entropy_coef": 0.05,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "use_mis": True,
        "tis_clip_low": 0.5,
        "use_opsm": True,
        "normalize_advantages": True,
        "eps_clip_c": 3.0,
    },
}


class World:
    """Rows of some Sessions with all their logprobs: new, old (recomputed), rollout, reference, and entropies."""

    def __init__(self, seed, contexts=(1, 2, 1, 3)):
        draw = random.Random(seed)
        self.samples, self.columns = [], {}
        for index, n_contexts in enumerate(contexts):
            for _ in range(n_contexts):
                mask = [int(draw.random() < 0.7) for _ in range(draw.randint(3, 8))] + [1]
                rollout = [draw.uniform(-2, -0.1) if m else 0.0 for m in mask]
                sample = make_sample(
                    range(2 + len(mask)), mask, index=index, advantage=draw.uniform(-2, 2), logprobs=rollout
                )
                self.columns[id(sample)] = {
                    "rollout": [value for value, m in zip(rollout, mask, strict=True) if m],
                    "old": [v + draw.gauss(0, 0.15) for v, m in zip(rollout, mask, strict=True) if m],
                }
                columns = self.columns[id(sample)]
                columns["new"] = [value + draw.gauss(0, 0.15) for value in columns["old"]]
                columns["ref"] = [value + draw.gauss(0, 0.3) for value in columns["old"]]
                columns["entropy"] = [draw.uniform(0, 2) for _ in columns["old"]]
                self.samples.append(sample)

    def tensors(self, batches, name, *, leaf=False):
        return [
            torch.tensor(
                [value for row in batch.rows for value in self.columns[id(self.samples[row])][name]],
                dtype=torch.float64,
                requires_grad=leaf,
            )
            for batch in batches
        ]


def found(world, config, size=3):
    """(loss, gradient by the new logprobs and by the entropies of each row, metrics) as the trainer makes them."""
    weights = row_weights(world.samples, per_token=config.per_token)
    batches = micro_batches(world.samples, weights, MicroBatching(size=size))
    new, entropy = (world.tensors(batches, name, leaf=True) for name in ("new", "entropy"))
    ref = world.tensors(batches, "ref") if config.train.needs_reference else None
    targets = make_targets(batches, config, own=world.tensors(batches, "old"), ref=ref)
    tell_away(
        [target.sequences for target in targets],
        [logprobs - target.old for logprobs, target in zip(new, targets, strict=True)],
        [logprobs - target.rollout for logprobs, target in zip(new, targets, strict=True)],
    )
    stats = StepStats(
        normalizer=loss_normalizer(world.samples, per_token=config.per_token),
        divisor=loss_divisor(world.samples, config),
    )
    by_row = {}
    for batch, target, logprobs, entropies in zip(batches, targets, new, entropy, strict=True):
        result = objective(logprobs, entropies, target, config)
        gradients = torch.autograd.grad(result.loss, (logprobs, entropies), allow_unused=True)
        stats.add(result.sums, result.gap, result.ratios)
        lens = [sum(world.samples[row].loss_mask) for row in batch.rows]
        parts = [torch.split(g if g is not None else torch.zeros_like(logprobs), lens) for g in gradients]
        for position, row in enumerate(batch.rows):
            by_row[row] = [part[position] / stats.divisor for part in parts]
    rows = [by_row[row] for row in range(len(world.samples))]
    return stats.means["train/loss"], [torch.cat([row[i] for row in rows]) for i in (0, 1)], stats


def kl(new, ref, kind):
    d = new - ref
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": min(k3, 10.0)}[kind]


def expected_advantages(world, config):
    """One list of token advantages per row."""
    train, per_row = config.train, []

    def kl_of(sample):
        columns = world.columns[id(sample)]
        old = columns["rollout"] if train.takes_rollout_logprobs else columns["old"]
        return [kl(o, r, train.kl_estimator) for o, r in zip(old, columns["ref"], strict=True)]

    for position, sample in enumerate(world.samples):
        values = [sample.advantage] * sum(sample.loss_mask)
        if train.kl_coef:
            each = kl_of(sample)
            if config.estimator == "reinforce_plus_plus":
                later = [other for other in world.samples[position + 1 :] if other.index == sample.index]
                to_come = each + [k for other in later for k in kl_of(other)]
                each = [math.fsum(to_come[t:]) for t in range(len(each))]
            values = [value - train.kl_coef * k for value, k in zip(values, each, strict=True)]
        per_row.append(values)
    if train.normalize_advantages:
        flat = [value for values in per_row for value in values]
        mean = math.fsum(flat) / len(flat)
        variance = math.fsum((value - mean) ** 2 for value in flat) / (len(flat) - 1)
        per_row = [[(value - mean) / math.sqrt(variance + 1e-8) for value in values] for values in per_row]
    return per_row


def session_mean(world, sample, name):
    """Mean of new minus `name` logprobs over the tokens of all contexts of the sample's Session."""
    of_session = [world.columns[id(other)] for other in world.samples if other.index == sample.index]
    gaps = [new - other for c in of_session for new, other in zip(c["new"], c[name], strict=True)]
    return math.fsum(gaps) / len(gaps)


def expected_loss(world, config, advantages, new, entropy):
    """The loss of the optimizer batch; `new` and `entropy` give each row's values.

    `advantages` and what has no gradient (the weights of importance sampling, CISPO's coefficients, masks) are taken at
    the world's own values, so that a difference of two losses is the gradient's.
    """
    train, total = config.train, 0.0
    n_tokens = sum(sum(sample.loss_mask) for sample in world.samples)
    sessions = {sample.index for sample in world.samples}
    for position, sample in enumerate(world.samples):
        columns = world.columns[id(sample)]
        rollout, still = columns["rollout"], columns["new"]
        old = rollout if train.takes_rollout_logprobs else columns["old"]
        of_session = sum(sum(other.loss_mask) for other in world.samples if other.index == sample.index)
        session_gap = -session_mean(world, sample, "rollout")
        session_ratio = math.exp(session_mean(world, sample, "rollout" if train.takes_rollout_logprobs else "old"))
        for t in range(len(old)):
            a, logp = advantages[position][t], new[position][t]
            # The token form of GSPO: the Session's ratio, moved by the token's own probability.
            moved = math.exp(logp - still[t])
            ratio = session_ratio * moved if config.estimator == "gspo" else math.exp(logp - old[t])
            low, high = 1 - train.eps_clip, 1 + train.upper_clip
            if config.estimator == "cispo":
                loss = -min(max(math.exp(still[t] - old[t]), low), high) * a * logp
            else:
                loss = -min(ratio * a, min(max(ratio, low), high) * a)
                if train.eps_clip_c is not None and a < 0:
                    loss = min(loss, -train.eps_clip_c * a)
            gap = math.exp(old[t] - rollout[t])
            if train.use_tis:
                loss *= min(max(gap, train.tis_clip_low), train.tis_clip)
            if train.use_mis:
                loss *= gap if train.tis_clip_low <= gap <= train.tis_clip else 0.0
            if train.use_opsm and a < 0 and session_gap > train.opsm_delta:
                loss = 0.0
            loss -= train.entropy_coef * entropy[position][t]
            if train.use_kl_loss:
                unbiased = math.exp(logp - old[t]) if train.use_unbiased_kl else 1.0
                loss += train.kl_loss_coef * unbiased * kl(logp, columns["ref"][t], train.kl_estimator)
            if config.estimator == "dr_grpo":
                total += loss / (BUDGET * len(sessions))
            elif train.calculate_per_token_loss:
                total += loss / n_tokens
            else:
                total += loss / (of_session * len(sessions))
    return total


def differences(world, config, advantages):
    """Gradients of `expected_loss` by every new logprob and every entropy, by central differences."""
    values = {name: [list(world.columns[id(s)][name]) for s in world.samples] for name in ("new", "entropy")}
    made = {"new": [], "entropy": []}
    h = 1e-6
    for name, rows in values.items():
        for row in rows:
            for t, middle in enumerate(row):
                sides = []
                for step in (h, -h):
                    row[t] = middle + step
                    sides.append(expected_loss(world, config, advantages, values["new"], values["entropy"]))
                row[t] = middle
                made[name].append((sides[0] - sides[1]) / (2 * h))
    loss = expected_loss(world, config, advantages, values["new"], values["entropy"])
    return loss, torch.tensor(made["new"], dtype=torch.float64), torch.tensor(made["entropy"], dtype=torch.float64)


def case_settings(case):
    flags = dict(CASES[case])
    flags.setdefault("use_rollout_logprobs", False)
    return settings(token_budget=BUDGET, **flags)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_of_an_optimizer_batch_equal_the_formulas(case, seed):
    world, config = World(seed), case_settings(case)
    loss, (by_logprob, by_entropy), _ = found(world, config)
    advantages = expected_advantages(world, config)
    wanted, wanted_by_logprob, wanted_by_entropy = differences(world, config, advantages)
    assert loss == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    assert relative(by_logprob, wanted_by_logprob) < 1e-7
    assert torch.allclose(by_entropy, wanted_by_entropy, atol=1e-9)


@pytest.mark.parametrize("case", ["grpo", "gspo", "cispo", "off-policy sequence masking"])
def test_the_logprobs_of_rollout_are_the_old_policy_unless_told_otherwise(case):
    config = case_settings(case)
    config = evolve(config, train=evolve(config.train, use_rollout_logprobs=None))
    world = World(5)
    loss, (by_logprob, _), _ = found(world, config)
    wanted, wanted_by_logprob, _ = differences(world, config, expected_advantages(world, config))
    assert loss == pytest.approx(wanted, rel=1e-10)
    assert relative(by_logprob, wanted_by_logprob) < 1e-7


@pytest.mark.parametrize("case", CASES)
def test_how_rows_are_divided_into_micro_batches_changes_nothing(case):
    world, config = World(2), case_settings(case)
    one, parts = found(world, config, size=100), found(world, config, size=1)
    assert parts[0] == pytest.approx(one[0], rel=1e-12)
    for a, b in zip(parts[1], one[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)
    assert parts[2].means == pytest.approx(one[2].means, rel=1e-9, abs=1e-12)


def split_rows(world, draw):
    """The same Sessions with every row divided into up to k contexts of disjoint trained tokens, at equal credit."""
    split = World.__new__(World)
    split.samples, split.columns = [], {}
    for sample in world.samples:
        columns = world.columns[id(sample)]
        n = len(columns["new"])
        cuts = [0, *sorted(draw.sample(range(1, n), min(n - 1, draw.randint(0, 3)))), n]
        places = [t for t, trained in enumerate(sample.loss_mask) if trained]
        for start, end in pairwise(cuts):
            mask = bytearray(len(sample.loss_mask))
            for t in places[start:end]:
                mask[t] = 1
            part = evolve(
                sample,
                loss_mask=mask,
                rollout_log_probs=array("d", [p * m for p, m in zip(sample.rollout_log_probs, mask, strict=True)]),
            )
            split.samples.append(part)
            split.columns[id(part)] = {name: column[start:end] for name, column in columns.items()}
    return split


@pytest.mark.parametrize("case", CASES)
@hypothesis_settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), random_=st.randoms(use_true_random=False))
def test_dividing_a_session_into_contexts_changes_no_gradient(case, seed, random_):
    """Equal credit, disjoint trained tokens, and the tokens' own probabilities: fan-out alone is no reason to learn."""
    world, config = World(seed, contexts=(1, 2, 1)), case_settings(case)
    whole, parts = found(world, config, size=100), found(split_rows(world, random_), config, size=2)
    assert parts[0] == pytest.approx(whole[0], rel=1e-10, abs=1e-13)
    for a, b in zip(parts[1], whole[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)
    assert parts[2].means == pytest.approx(whole[2].means, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@hypothesis_settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), random_=st.randoms(use_true_random=False))
def test_on_policy_fan_out_changes_no_gradient_whatever_the_estimator(estimator, seed, random_):
    """Where the weights are still those that sampled, every sequence ratio is 1 and contexts are as good as one."""
    config = settings(normalize_advantages=True, estimator=estimator, token_budget=BUDGET)
    world = World(seed, contexts=(1, 2, 1))
    for columns in world.columns.values():
        columns["new"] = columns["old"] = columns["rollout"]
    whole, parts = found(world, config), found(split_rows(world, random_), config)
    for a, b in zip(parts[1], whole[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)


def test_masked_tokens_keep_their_place_in_the_mean():
    """Half of a row masked halves its loss: the mean is over all trained tokens, so nothing else gets louder."""
    config = case_settings("masked importance sampling")
    world = World(0, contexts=(1,))
    columns = world.columns[id(world.samples[0])]
    n = len(columns["rollout"])
    columns["new"] = columns["old"] = [p + (1.0 if t == 0 else 0.0) for t, p in enumerate(columns["rollout"])]
    loss, (gradient, _), stats = found(world, config)
    assert loss == pytest.approx(-world.samples[0].advantage * (n - 1) / n)
    assert gradient[0] == 0.0
    assert stats.means["train/masked_frac"] == pytest.approx(1 / n)
    assert stats.means["train/tis_clipfrac"] == pytest.approx(1 / n)


def test_the_kl_in_returns_is_told_of_the_old_policy():
    """It is the old policy's KL that returns are shaped by, whatever the policy has become since."""
    world, config = World(3), case_settings("reinforce_plus_plus")
    _, _, stats = found(world, config)
    total = 0.0
    for sample in world.samples:
        columns = world.columns[id(sample)]
        n = sum(sum(other.loss_mask) for other in world.samples if other.index == sample.index)
        total += math.fsum(o - r for o, r in zip(columns["old"], columns["ref"], strict=True)) / n
    assert stats.means["train/ref_kl"] == pytest.approx(total / len({s.index for s in world.samples}))


def test_an_empty_micro_batch_gives_a_loss_of_zero_and_no_numbers():
    """Processes that share a step may have different numbers of micro-batches."""
    world, config = World(0), case_settings("all at once")
    empty = micro_batches(world.samples, row_weights(world.samples, per_token=False), MicroBatching(size=100))[0]
    empty = evolve(empty, loss_mask=torch.zeros_like(empty.loss_mask))
    nothing = torch.zeros(0, dtype=torch.float64)
    leaf = nothing.clone().requires_grad_()
    (target,) = make_targets([empty], config, own=[nothing], ref=[nothing])
    result = objective(leaf, nothing, target, config)
    stats = StepStats()
    stats.add(result.sums, result.gap, result.ratios)
    assert float(result.loss.detach()) == 0.0
    assert stats.n_tokens == 0
    assert set(stats.sums.values()) == {0.0}
    torch.autograd.grad(result.loss, leaf)
