"""The fake trainer keeps to the Protocol on the virtual clock."""

from __future__ import annotations

import pytest
import trio

from relax_trio.errors import TrainError
from relax_trio.train.base import Trainer
from relax_trio.train.checkpoint import find_latest, load_state
from relax_trio.train.fake import FakeTrainer


async def test_a_phase_takes_its_time_and_makes_the_next_version(autojump_clock, tmp_path):
    trainer: Trainer = FakeTrainer(step_s=3.0, save_s=2.0)
    metrics = await trainer.step(0, [])
    assert trio.current_time() == 3.0
    assert {"train/loss", "train/n_tokens"} <= metrics.keys()
    assert trainer.weight_version == "1"
    path = await trainer.save(tmp_path, {"rollout_id": 0})
    assert trio.current_time() == 5.0
    assert find_latest(tmp_path) == path
    assert load_state(path) == {"rollout_id": 0}


async def test_a_cancelled_phase_leaves_the_version(autojump_clock):
    trainer = FakeTrainer(step_s=3.0)
    with trio.move_on_after(1.0):
        await trainer.step(0, [])
    assert (trainer.weight_version, trainer.steps) == ("0", [(0, ())])


async def test_a_phase_fails_when_told_to(autojump_clock):
    trainer = FakeTrainer(failures={1: TrainError("no memory")})
    await trainer.step(0, [])
    with pytest.raises(TrainError, match="no memory"):
        await trainer.step(1, [])
    assert trainer.weight_version == "1"
