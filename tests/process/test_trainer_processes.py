"""Training in several processes: the same gradients, checkpoints and manners as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trio
from attrs import evolve
from builders_checkpoint import save_tiny_checkpoint
from builders_commands import command, run, running, wait_until, write_rows
from builders_process import alive, new_tag, running_warden
from builders_train import off_policy, relative, rollout, same_tensors, settings, tiny_model, write_checkpoint
from team_gradient import CASES, gradient
from transformers import AutoModelForCausalLM

from relax_trio.errors import ConfigError, TrainError
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.train.processes import open_process_trainer
from relax_trio.train.stats import GAP_METRICS
from relax_trio.train.trainer import open_trainer

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}


def trained(chosen, checkpoint, warden, tmp_path, *, n=2, **more):
    homes = {"run_dir": tmp_path, "temp_root": tmp_path}
    return open_process_trainer(chosen, checkpoint, n=n, warden=warden, seed=1, **homes, **more)


def test_the_gradient_of_two_processes_is_that_of_one(tmp_path):
    """Packed, padded, with fewer micro-batches than processes, with layers recomputed, with a reference."""
    script, out = Path(__file__).parents[1] / "team_gradient.py", tmp_path / "out.pt"
    words = [[sys.executable, str(script), str(rank), "2", str(tmp_path / "store"), str(out)] for rank in range(2)]
    processes = [subprocess.Popen(w, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for w in words]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    found = torch.load(out)
    for case in CASES:
        expected, metrics = gradient(case, torch.float64)
        for name, bound in (("float64", 1e-6), ("float32", 1e-4)):
            flat, told = found[f"{case}/{name}"]
            assert relative(flat, expected) < bound, (case, name)
            for metric, value in metrics.items():
                assert told[metric] == pytest.approx(value, rel=10 * bound, abs=10 * bound), (case, name, metric)


async def in_batches(team, *batches):
    async with team.phase(0) as phase:
        for batch in batches:
            await phase.consume(batch)


async def test_two_processes_train_as_one_does(checkpoint, tmp_path):
    """Weights after two phases of several optimizer steps, metrics, and what either makes of the other's checkpoint."""
    steps = [off_policy(rollout(tiny_model(), 9, seed=seed)) for seed in (1, 2)]
    # Small steps of a smooth optimizer, so that rounding isn't blown up by AdamW's division.
    chosen = settings(**DYNAMIC, lr=1e-3, adam_eps=1e-2, global_batch_size=2, entropy_coef=0.01, use_kl_loss=True)
    alone = await open_trainer(chosen, checkpoint, pool=InlineCpuPool())
    expected = [await alone.step(i, samples) for i, samples in enumerate(steps)]
    async with running_warden() as warden, trained(chosen, checkpoint, warden, tmp_path) as team:
        assert team.weight_version == "0"
        assert same_tensors(team.weights(), (await open_trainer(chosen, checkpoint, pool=InlineCpuPool())).weights())
        found = [await team.step(0, steps[0])]
        path = await team.save(tmp_path / "saved", {"rollout_id": 1})
        async with team.phase(1) as phase:
            await phase.consume(steps[1][:4])
            await phase.consume(steps[1][4:])
        found.append(phase.metrics)
        assert team.weight_version == "2"
        weights = team.weights().tensors
    first = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    for name, tensor in alone.weights().tensors.items():
        assert relative(weights[name] - first[name], tensor - first[name]) < 1e-4, name
    for one, two in zip(expected, found, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            # In batches, rows meet other weights than all at once: that gap is another.
            assert name in GAP_METRICS or two[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    resumed = await open_trainer(chosen, checkpoint, resume=path, pool=InlineCpuPool())
    again = await resumed.step(1, steps[1])
    assert again["train/loss"] == pytest.approx(expected[1]["train/loss"], rel=1e-4)
    for name, tensor in alone.weights().tensors.items():
        assert relative(resumed.weights().tensors[name] - first[name], tensor - first[name]) < 1e-3, name


async def test_a_team_goes_on_from_a_checkpoint_of_one_and_is_refused_another_models(checkpoint, tmp_path):
    chosen = settings(**DYNAMIC, lr=1e-3, lora_rank=2)
    torch.manual_seed(1)
    alone = await open_trainer(chosen, checkpoint, pool=InlineCpuPool())
    samples = off_policy(rollout(tiny_model(), 3))
    await alone.step(0, samples)
    path = await alone.save(tmp_path / "alone", {})
    expected = await alone.step(1, samples)
    async with running_warden() as warden:
        async with trained(chosen, checkpoint, warden, tmp_path, resume=path) as team:
            assert team.weight_version == "1"
            metrics = await team.step(1, samples)
            assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)
            assert (await team.save(tmp_path / "team", {}) / "adapter").is_dir()
        with pytest.raises(ConfigError, match="has an adapter"):
            async with trained(settings(), checkpoint, warden, tmp_path, n=1, resume=path):
                pass


async def test_bad_rows_and_a_cancelled_step_leave_the_team_as_it_was_and_a_killed_process_ends_it(
    checkpoint, tmp_path
):
    samples = off_policy(rollout(tiny_model(), 4))
    odd = [evolve(sample, index=sample.index + 10) for sample in off_policy(rollout(tiny_model(), 4))]
    odd[0].tokens[0] = 10_000
    async with running_warden() as warden, trained(settings(**DYNAMIC), checkpoint, warden, tmp_path) as team:
        before = team.weights()
        with pytest.raises(TrainError, match="token ids"):
            await team.step(0, odd)
        with trio.move_on_after(0) as scope:
            await team.step(0, samples)
        assert scope.cancelled_caught
        assert team.weight_version == "0"
        with pytest.raises(TrainError, match="token ids"):
            await in_batches(team, samples, odd)
        assert team.weight_version == "0"
        assert team.weights() is before
        assert (await team.step(0, samples))["train/n_optimizer_steps"] == 1
        assert team.weight_version == "1"
        os.kill(team._links[1].child.pid, signal.SIGKILL)
        with pytest.raises(TrainError, match="trainer process 1 ended"):
            await team.step(1, samples)
        with pytest.raises(TrainError, match="has failed before"):
            await team.save(tmp_path / "saved", {})


def trainers(tag):
    """Trainer processes whose environment holds the tag."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"relax_trio.train.rank" in (process / "cmdline").read_bytes():
                found += [process.name] if tag.encode() in (process / "environ").read_bytes() else []
        except OSError:
            continue  # it has ended
    return found


def test_a_command_with_trainer_processes_trains_and_leaves_none_behind(tmp_path):
    tag, data, log = new_tag(), write_rows(tmp_path / "d.jsonl", 8), tmp_path / "log"
    out, temp = tmp_path / "run", tmp_path / tag
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    words = command("train", checkpoint, data, out, "--agent-env", f"TEST_TAG={tag}", "HANG_FROM=4", tag=tag)
    words += ["--trainer-processes", "2", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"]
    metrics = out / "metrics.jsonl"
    with running(words, temp=temp, log=log) as process:
        wait_until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) == 2 and alive(f"{tag}-child"),
            within_s=120,
            log=log,
        )
        assert len(trainers(tag)) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert not alive(tag)
    assert not trainers(tag)
    assert not list(temp.iterdir())
    assert (out / "checkpoints" / "step_000002" / "model.safetensors").is_file()


def test_two_processes_train_while_rollout_goes_on(tmp_path):
    data, out = write_rows(tmp_path / "d.jsonl", 8), tmp_path / "run"
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    words = command("train", checkpoint, data, out, "--fully-async", "--max-staleness", "2", "--num-rollout", "3")
    words += ["--trainer-processes", "2", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"]
    words += ["--num-iters-per-train-update", "2", "--rollout-batch-size", "4", "--save-interval", "1"]
    done = run(words, within_s=180)

    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["train/n_tokens"] > 0 for step in steps] == [True] * 3
    assert (out / "checkpoints" / "step_000003" / "model.safetensors").is_file()
