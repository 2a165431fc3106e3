"""Optimizer phases whose rows come in batches: the steps are those of the whole, and a phase is all or nothing."""

from __future__ import annotations

import functools
import math
import random
from array import array

import pytest
import torch
import trio
from attrs import evolve
from builders_train import (
    VOCAB,
    cancel_at_score,
    make_sample,
    off_policy,
    relative,
    rollout,
    same_tensors,
    settings,
    tiny_model,
)

from relax_trio.errors import TrainError
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.train.phase import OpenPhase, run_phase
from relax_trio.train.policy import Policy
from relax_trio.train.pretrained import load_model
from relax_trio.train.stats import GAP_METRICS
from relax_trio.train.trainer import open_trainer
from relax_trio.train.update import Updater
from relax_trio.train.weights import snapshot

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]


# --- any cut makes the same optimizer steps ----------------------------------------------------------------------


@functools.cache
def twelve_rows(seed):
    return off_policy(rollout(tiny_model(), 12, seed=seed, max_len=6))


def random_batches(seed, rng):
    """Sessions of one to three contexts, some without a trained token, cut into batches of one to five Sessions."""
    rows = iter(twelve_rows(seed))
    sessions = [[evolve(next(rows), index=i) for _ in range(n)] for i, n in enumerate((1, 3, 2, 1, 2, 1, 1, 1))]
    sessions[1][1] = evolve(sessions[1][1], loss_mask=bytearray(sessions[1][1].response_length))
    sessions[5] = [evolve(s, loss_mask=bytearray(s.response_length)) for s in sessions[5]]
    rng.shuffle(sessions)
    batches = []
    while sessions:
        n = rng.randint(1, 5)
        batches.append([s for session in sessions[:n] for s in session])
        rng.shuffle(batches[-1])
        sessions = sessions[n:]
    return batches


def in_batches(updater, batches):
    phase = OpenPhase(updater)
    for batch in batches:
        phase.consume(batch, lambda: None)
    return phase.finish()


def assert_same_steps(cut, whole, start):
    """Two updaters, begun with the weights `start`, made the same optimizer steps, up to rounding."""
    assert (cut.n_steps, cut.n_phases) == (whole.n_steps, whole.n_phases)
    for name, begun in start.items():
        assert relative(cut.weights.tensors[name] - begun, whole.weights.tensors[name] - begun) < 1e-6, name
    found, expected = cut.state()["optimizer"]["state"], whole.state()["optimizer"]["state"]
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key]["step"] == values["step"]
        assert relative(found[key]["exp_avg"], values["exp_avg"]) < 1e-6


def double_weights():
    return snapshot(tiny_model().double()).tensors


def assert_same_metrics(found, expected, *, but=()):
    assert found.keys() == expected.keys()
    for name in expected.keys() - set(but):
        assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_cut_into_any_batches_make_the_optimizer_steps_of_the_whole(size, per_token, seed):
    rng = random.Random(f"{seed} {size} {per_token}")
    config = settings(
        global_batch_size=size,
        calculate_per_token_loss=per_token,
        micro_batch_size=2,
        lr_warmup_iters=2,
        lr_decay_style="linear",
        n_total=20,
        weight_decay=0.1,
        clip_grad=0.05,
    )
    cut, whole = (Updater(Policy(tiny_model().double()), config) for _ in range(2))
    start = whole.weights.tensors
    for phase in range(2):
        batches = random_batches(phase, rng)
        result = in_batches(cut, batches)
        expected = run_phase(whole, [s for batch in batches for s in batch], lambda: None)
        assert_same_metrics(result.metrics, expected.metrics, but=GAP_METRICS if size else ())
    assert expected.metrics["train/n_optimizer_steps"] == {None: 1, 1: 7, 3: 3}[size]
    assert expected.metrics["train/grad_norm"] > 0.05, "clipping is at work"
    assert_same_steps(cut, whole, start)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 9])
def test_batches_of_every_size_make_the_optimizer_steps_of_the_whole(n_rows):
    config = settings(global_batch_size=4)
    cut, whole = (Updater(Policy(tiny_model().double()), config) for _ in range(2))
    samples = [evolve(s, index=i) for i, s in enumerate(off_policy(rollout(tiny_model(), 9)))]
    result = in_batches(cut, [samples[start : start + n_rows] for start in range(0, 9, n_rows)])
    expected = run_phase(whole, samples, lambda: None)
    assert expected.metrics["train/n_optimizer_steps"] == 3
    assert_same_metrics(result.metrics, expected.metrics, but=GAP_METRICS)
    assert_same_steps(cut, whole, double_weights())


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_an_optimizer_step_that_is_not_finite_is_skipped_in_any_cut(position):
    """A row whose loss overflows spoils its optimizer step and no other."""
    samples = [evolve(s, index=i) for i, s in enumerate(rollout(tiny_model(), 6))]
    spoilt = samples[position]
    samples[position] = evolve(
        spoilt,
        advantage=1.7e308,
        rollout_log_probs=array("d", [p - 1.0 if m else 0.0 for p, m in _columns(spoilt)]),
    )
    config = settings(global_batch_size=2)
    cut, whole = (Updater(Policy(tiny_model().double()), config) for _ in range(2))
    result = in_batches(cut, [samples[:1], samples[1:4], samples[4:]])
    expected = run_phase(whole, samples, lambda: None)
    assert result.skipped == expected.skipped == (position // 2,)
    assert (expected.metrics["train/n_optimizer_steps"], expected.metrics["train/n_skipped_steps"]) == (2, 1)
    assert_same_metrics(result.metrics, expected.metrics, but=GAP_METRICS)
    assert_same_steps(cut, whole, double_weights())


def _columns(sample):
    return zip(sample.rollout_log_probs, sample.loss_mask, strict=True)


def test_the_gap_of_rows_behind_an_optimizer_step_is_that_of_the_weights_they_met():
    samples = rollout(tiny_model(), 6)  # three Sessions
    config = settings(lr=0.05, global_batch_size=1)
    at_once = in_batches(Updater(Policy(tiny_model()), config), [samples])
    later = in_batches(Updater(Policy(tiny_model()), config), [samples[:2], samples[2:]])
    assert max(at_once.metrics[name] for name in GAP_METRICS) < 1e-5
    assert later.metrics["train/rollout_logprob_abs_diff"] > 0.1
    within = tiny_model()
    within.load_state_dict(after_first_step(samples[:2], config), strict=False)
    scored = Updater(Policy(within), config)
    expected = in_batches(scored, [samples[2:]])  # before its own first step
    assert later.metrics[GAP_METRICS[0]] == pytest.approx(expected.metrics[GAP_METRICS[0]], rel=1e-4)


def after_first_step(samples, config):
    updater = Updater(Policy(tiny_model()), config)
    in_batches(updater, [samples])
    return updater.weights.tensors


def test_one_batch_is_a_whole_step_bit_by_bit_and_an_empty_one_changes_nothing():
    samples = off_policy(rollout(tiny_model(), 6))
    config = settings(global_batch_size=2)
    cut, whole = (Updater(Policy(tiny_model()), config) for _ in range(2))
    assert in_batches(cut, [[], samples, []]) == run_phase(whole, samples, lambda: None)
    assert same_tensors(cut.weights, whole.weights)


# --- the trainer's block -----------------------------------------------------------------------------------------

CONFIG = {"global_batch_size": 1, "micro_batch_size": 1, "lr_warmup_iters": 20}


async def test_a_phase_in_batches_makes_the_next_version_when_its_block_is_left(checkpoint, events):
    samples = off_policy(rollout(tiny_model(), 8))
    trainer, fresh = [await open_trainer(settings(), checkpoint) for _ in range(2)]
    before = trainer.weights()
    async with trainer.phase(0) as phase:
        for start in (0, 2, 6):
            await phase.consume(samples[start : start + 4 if start == 2 else start + 2])
        assert trainer.weight_version == "0"
        assert trainer.weights() is before
        with pytest.raises(AssertionError, match="has not ended"):
            phase.metrics  # noqa: B018
    assert trainer.weight_version == "1"
    assert trainer.weights() is not before
    expected = await fresh.step(0, samples)
    assert phase.metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert not events


async def test_skipped_optimizer_steps_of_a_phase_in_batches_are_told(checkpoint, events):
    trainer = await open_trainer(settings(global_batch_size=1), checkpoint)
    samples = rollout(tiny_model(), 4)
    broken = iter([True, False])
    next(trainer._updater.policy.model.parameters()).register_hook(lambda g: g * math.nan if next(broken) else g)
    async with trainer.phase(7) as phase:
        await phase.consume(samples[:2])
        await phase.consume(samples[2:])
    assert (phase.metrics["train/n_skipped_steps"], phase.metrics["train/n_optimizer_steps"]) == (1, 1)
    assert [(e.name, e.fields["rollout"], e.fields["step"]) for e in events] == [("optimizer_step.skipped", 7, 0)]


async def test_in_deterministic_mode_the_rows_of_a_batch_may_come_in_any_order(checkpoint):
    samples = [evolve(s, group_index=i // 4, index=i) for i, s in enumerate(rollout(tiny_model(), 8))]
    results = []
    for halves in ((samples[:4], samples[4:]), (samples[3::-1], samples[:3:-1])):
        trainer = await open_trainer(settings(deterministic=True, global_batch_size=4), checkpoint)
        async with trainer.phase(0) as phase:
            for half in halves:
                await phase.consume(half)
        results.append((phase.metrics, trainer.weights()))
    assert results[0][0] == results[1][0]
    assert same_tensors(results[0][1], results[1][1])


async def in_phase(trainer, rollout_id, body):
    async with trainer.phase(rollout_id) as phase:
        await body(phase)


async def trained_pair(checkpoint):
    """A trainer to harm, an equal one to compare with, and rows for a phase; both have a phase behind them."""
    trainer, fresh = [await open_trainer(settings(**CONFIG), checkpoint) for _ in range(2)]
    first = rollout(tiny_model(), 4, seed=1)
    assert await trainer.step(0, first) == await fresh.step(0, first)
    return trainer, fresh, rollout(tiny_model(), 6)


async def assert_undone(trainer, fresh, samples):
    """Weights, moments, schedule and counters are those from before the phase: the next one is the same bit by bit."""
    assert trainer.weight_version == fresh.weight_version == "1"
    assert same_tensors(trainer.weights(), fresh.weights())
    assert await trainer.step(1, samples) == await fresh.step(1, samples)
    assert same_tensors(trainer.weights(), fresh.weights())


async def test_an_exception_in_the_block_undoes_the_optimizer_steps_made(checkpoint):
    trainer, fresh, samples = await trained_pair(checkpoint)
    before = trainer.weights()

    async def body(phase):
        seen.append(phase)
        await phase.consume(samples[:4])
        raise KeyError("reward")

    seen = []
    with pytest.raises(KeyError, match="reward"):
        await in_phase(trainer, 1, body)
    assert trainer.weights() is before
    with pytest.raises(AssertionError, match="has not ended"):
        seen[0].metrics  # noqa: B018
    await assert_undone(trainer, fresh, samples)


async def test_gradients_of_rows_whose_optimizer_step_never_came_are_dropped(checkpoint):
    trainer, fresh = [await open_trainer(settings(), checkpoint) for _ in range(2)]
    samples = rollout(tiny_model(), 6)

    async def body(phase):
        await phase.consume(samples[:4])
        raise KeyError

    with pytest.raises(KeyError):
        await in_phase(trainer, 0, body)
    assert await trainer.step(0, samples) == await fresh.step(0, samples)
    assert same_tensors(trainer.weights(), fresh.weights())


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("id", f"token ids run from 1 to {VOCAB}"),
        ("credit", "session G0/7: a row without credit"),
        ("again", "session G0/0: its contexts came in two batches"),
    ],
)
async def test_rows_that_cannot_be_trained_on_end_the_phase_and_undo_it(checkpoint, odd, message):
    trainer, fresh, samples = await trained_pair(checkpoint)
    bad = {
        "id": make_sample([1, VOCAB], [1], index=7),
        "credit": make_sample([1, 2], [1], index=7, advantage=None),
        "again": make_sample([1, 2], [1], index=0),
    }[odd]

    async def body(phase):
        await phase.consume(samples[:4])
        await phase.consume([bad])

    with pytest.raises(TrainError, match=message):
        await in_phase(trainer, 1, body)
    await assert_undone(trainer, fresh, samples)


async def test_a_failure_of_torch_in_a_batch_is_a_train_error_and_undoes_the_phase(checkpoint, monkeypatch):
    trainer, fresh, samples = await trained_pair(checkpoint)

    def failing(self, batch, distribution):
        raise RuntimeError("out of memory")

    async def body(phase):
        await phase.consume(samples[:4])
        monkeypatch.setattr(Policy, "score", failing)
        await phase.consume(samples[4:])

    with pytest.raises(TrainError, match="rollout step 1 failed: RuntimeError: out of memory"):
        await in_phase(trainer, 1, body)
    monkeypatch.undo()
    await assert_undone(trainer, fresh, samples)


@pytest.mark.parametrize("rows", [[], [make_sample([1, 2], [0])]])
async def test_a_phase_without_a_trained_token_fails_when_it_is_left(checkpoint, rows):
    trainer, fresh, samples = await trained_pair(checkpoint)

    async def body(phase):
        await phase.consume(rows)

    with pytest.raises(TrainError, match=f"none of the {len(rows)} rows"):
        await in_phase(trainer, 1, body)
    await assert_undone(trainer, fresh, samples)


async def test_a_phase_whose_end_fails_is_undone(checkpoint, monkeypatch):
    trainer, fresh, samples = await trained_pair(checkpoint)

    def failing(model):
        raise RuntimeError("out of memory")

    async def body(phase):
        await phase.consume(samples)
        monkeypatch.setattr("relax_trio.train.update.snapshot", failing)

    with pytest.raises(TrainError, match="rollout step 1 failed: RuntimeError: out of memory"):
        await in_phase(trainer, 1, body)
    monkeypatch.undo()
    await assert_undone(trainer, fresh, samples)


async def test_a_cancel_while_rows_are_awaited_undoes_the_phase(checkpoint):
    trainer, fresh, samples = await trained_pair(checkpoint)
    with trio.CancelScope() as scope:
        async with trainer.phase(1) as phase:
            await phase.consume(samples[:4])
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    await assert_undone(trainer, fresh, samples)


async def test_a_cancel_within_a_batch_ends_it_after_the_micro_batch_at_work_and_undoes_the_phase(
    checkpoint, monkeypatch
):
    trainer, fresh, samples = await trained_pair(checkpoint)
    with trio.CancelScope() as scope:
        async with trainer.phase(1) as phase:
            await phase.consume(samples[:2])
            # Two rows are measured, two trained, an optimizer step is made, and the last Session's first row trained.
            n_scored = cancel_at_score(5, monkeypatch, scope)
            await phase.consume(samples[2:])
    assert scope.cancelled_caught
    assert len(n_scored) == 5
    monkeypatch.undo()
    await assert_undone(trainer, fresh, samples)


async def test_a_cancel_in_the_last_micro_batch_comes_before_the_end_of_the_phase_and_undoes_it(
    checkpoint, monkeypatch
):
    trainer, fresh, samples = await trained_pair(checkpoint)
    with trio.CancelScope() as scope:
        async with trainer.phase(1) as phase:
            await phase.consume(samples[:4])
            cancel_at_score(2, monkeypatch, scope)
            await phase.consume(samples[4:])
    assert scope.cancelled_caught
    monkeypatch.undo()
    await assert_undone(trainer, fresh, samples)


@pytest.mark.parametrize("is_at_work", [False, True])
async def test_a_phase_that_goes_on_after_a_cancelled_batch_is_refused_and_undone(checkpoint, monkeypatch, is_at_work):
    """Else rows would be lost or counted twice: whether the batch was begun can't be told from outside."""
    trainer, fresh, samples = await trained_pair(checkpoint)

    async def body(phase):
        await phase.consume(samples[:4])
        with trio.CancelScope() as scope:
            if is_at_work:
                cancel_at_score(1, monkeypatch, scope)
            else:
                scope.cancel()
            await phase.consume(samples[4:])
        assert scope.cancelled_caught
        with pytest.raises(AssertionError, match="takes no rows"):
            await phase.consume(samples[4:])

    with pytest.raises(AssertionError, match="has to be left by that exception"):
        await in_phase(trainer, 1, body)
    monkeypatch.undo()
    await assert_undone(trainer, fresh, samples)


async def test_an_open_phase_is_not_saved_and_an_undone_one_is_as_before(checkpoint, tmp_path):
    trainer = await open_trainer(settings(**CONFIG), checkpoint)

    async def body(phase):
        await phase.consume(rollout(tiny_model(), 4))
        with pytest.raises(TrainError, match="neither complete nor undone"):
            await trainer.save(tmp_path / "open", {})
        raise KeyError

    with pytest.raises(KeyError):
        await in_phase(trainer, 0, body)
    path = await trainer.save(tmp_path / "undone", {})
    saved = dict(load_model(path, torch.device("cpu")).named_parameters())
    assert all(torch.equal(saved[name], t) for name, t in tiny_model().named_parameters())


async def test_a_phase_that_cannot_be_undone_is_a_train_error_and_is_never_saved(checkpoint, tmp_path, monkeypatch):
    trainer = await open_trainer(settings(**CONFIG), checkpoint)

    def failing(model, source):
        raise RuntimeError("device lost")

    monkeypatch.setattr("relax_trio.train.update.put_back", failing)

    async def body(phase):
        await phase.consume(rollout(tiny_model(), 4))
        raise KeyError

    with pytest.raises(TrainError, match="rollout step 5 could not be undone: RuntimeError: device lost"):
        await in_phase(trainer, 5, body)
    assert trainer.weight_version == "0"
    with pytest.raises(TrainError, match="neither complete nor undone"):
        await trainer.save(tmp_path, {})


async def test_phases_do_not_overlap(checkpoint):
    trainer, fresh, samples = await trained_pair(checkpoint)

    async def body(phase):
        await phase.consume(samples[:4])
        await trainer.step(2, samples)

    with pytest.raises(AssertionError, match="one phase at a time"):
        await in_phase(trainer, 1, body)
    await assert_undone(trainer, fresh, samples)


async def test_a_phase_without_threads_waits_and_is_cancelled_on_the_virtual_clock(checkpoint, autojump_clock):
    trainer = await open_trainer(settings(**CONFIG), checkpoint, pool=InlineCpuPool())
    samples = rollout(tiny_model(), 4)
    with trio.move_on_after(5):
        async with trainer.phase(0) as phase:
            await phase.consume(samples[:2])
            await trio.sleep(10)
    assert (trio.current_time(), trainer.weight_version) == (5, "0")
    async with trainer.phase(0) as phase:
        await phase.consume(samples[:2])
        await trio.sleep(10)
        await phase.consume(samples[2:])
    assert (trio.current_time(), trainer.weight_version) == (15, "1")
    assert phase.metrics["train/n_optimizer_steps"] == 2
