"""Metrics for other systems: the numbers that metrics.jsonl has, under its names and steps."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from attrs import evolve

from relax_trio.config.tree import AgentConfig, Config, OutputConfig
from relax_trio.errors import ConfigError
from relax_trio.observe.writers import open_writers
from relax_trio.sync.cpu import InlineCpuPool


def config_of(**output):
    return Config(output=OutputConfig(**output), agent=AgentConfig(agent_env={"API_KEY": "hidden-value"}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_tensorboard_files_hold_the_numbers_of_each_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    async with open_writers(config_of(use_tensorboard=True), tmp_path, 0, InlineCpuPool()) as (writer,):
        writer.write(0, {"train/loss": 0.5, "rollout/raw_reward": None})
        writer.write(1, {"train/loss": 0.25, "rollout/raw_reward": 1})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(0, 0.5), (1, 0.25)]
    assert [(e.step, e.value) for e in read.Scalars("rollout/raw_reward")] == [(1, 1.0)]


class FakeWandb(SimpleNamespace):
    """The client's three calls, and what they were given."""

    class Error(Exception):
        """As the client's."""

    def __init__(self, failure=None):
        super().__init__(begun=[], logged=[], finished=0)
        self.failure = failure

    def init(self, **given):
        if self.failure is not None:
            raise self.failure
        self.begun.append(given)
        return self

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


async def test_wandb_gets_the_numbers_and_no_command_or_environment(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    config = config_of(use_wandb=True, wandb_mode="offline", wandb_group="sweep")
    run_dir = tmp_path / "run-7"
    async with open_writers(config, run_dir, 0, InlineCpuPool()) as (writer,):
        writer.write(3, {"train/loss": 0.5, "rollout/raw_reward": None})
    (begun,) = fake.begun
    assert (begun["id"], begun["resume"], begun["mode"], begun["group"]) == ("run-7", "allow", "offline", "sweep")
    assert begun["config"]["train"]["lr"] == config.train.lr
    assert "hidden-value" not in str(begun)
    assert fake.logged == [{"train/loss": 0.5, "step": 3}]
    assert fake.finished == 1


async def test_a_client_that_refuses_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(FakeWandb.Error("no key")))
    with pytest.raises(ConfigError, match=r"no key; try --wandb-mode offline"):
        async with open_writers(config_of(use_wandb=True), tmp_path, 0, InlineCpuPool()):
            pass


async def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"relax-trio\[wandb\]"):
        async with open_writers(config_of(use_wandb=True), tmp_path, 0, InlineCpuPool()):
            pass


async def test_without_a_flag_there_is_no_writer(tmp_path):
    config = config_of()
    async with open_writers(evolve(config), tmp_path, 0, InlineCpuPool()) as writers:
        assert writers == ()
    assert not list(tmp_path.iterdir())
