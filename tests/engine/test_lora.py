"""Low-rank adapters: what is trained, what engine and checkpoints get, how a run goes on."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from attrs import evolve
from builders_disk import DyingDisk, FastDisk, KilledError
from builders_train import CPU, off_policy, relative, rollout, same_tensors, settings, tiny_model
from peft import PeftModel
from transformers import AutoModelForCausalLM

from relax_trio.backend.sglang.adapters import write_adapter
from relax_trio.errors import ConfigError
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.train.checkpoint import find_latest, write_checkpoint
from relax_trio.train.lora import ADAPTER_DIR, add_adapter, has_adapter, plain_name
from relax_trio.train.opening import open_updater
from relax_trio.train.phase import run_phase
from relax_trio.train.policy import Policy
from relax_trio.train.pretrained import load_model
from relax_trio.train.resume import make_payload, read_companions, write_payload
from relax_trio.train.trainer import open_trainer
from relax_trio.train.update import Updater
from relax_trio.train.weights import read_source, write_source

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]

LORA = {"lora_rank": 4, "lr": 0.02}


def adapted(**train):
    torch.manual_seed(1)
    model = tiny_model()
    chosen = settings(**{**LORA, **train})
    add_adapter(model, chosen.train)
    return Updater(Policy(model), chosen)


def logits_of(tensors, ids):
    plain = tiny_model(seed=9)
    plain.load_state_dict({**plain.state_dict(), **tensors})
    plain.tie_weights()
    return plain(ids).logits


def test_only_the_adapter_is_trained_and_what_is_published_is_the_adapted_model():
    updater = adapted()
    model = updater.policy.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = updater.weights
    for _ in range(2):  # while B is zero, the gradient of A is
        run_phase(updater, off_policy(rollout(tiny_model(), 6)), lambda: None)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (plain_name(name) is not None), name
    assert updater.weights.tensors.keys() == dict(tiny_model().named_parameters()).keys()
    assert same_tensors(first, Updater(Policy(tiny_model()), settings()).weights), "at first the adapter adds nothing"
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(logits_of(updater.weights.tensors, ids), model(ids).logits, rtol=1e-4, atol=1e-5)
        assert relative(model(ids).logits, tiny_model()(ids).logits) > 1e-3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_the_adapter_by_itself_on_the_first_weights_is_the_adapted_model_and_outlives_a_file(tmp_path):
    updater = adapted()
    for _ in range(2):
        run_phase(updater, off_policy(rollout(tiny_model(), 6)), lambda: None)
    write_source(updater.weights, tmp_path / "weights.safetensors")
    source = read_source(tmp_path / "weights.safetensors")
    (tmp_path / "weights.safetensors").unlink()
    assert same_tensors(source, updater.weights)
    assert source.adapter.config == updater.weights.adapter.config
    write_adapter(source.adapter, tmp_path / "adapter")
    by_peft = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(by_peft(ids).logits, updater.policy.model(ids).logits)


def test_the_gradient_of_the_adapter_is_that_of_the_weights_it_adds_to():
    """d loss / d B = scale * (d loss / d W') A^T, with the gradient of the plain merged model."""
    updater = adapted(lr=0.0, clip_grad=0.0)
    model = updater.policy.model.double()
    samples = off_policy(rollout(tiny_model(), 5))
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(std=0.1)
    seen = []
    updater._optimizer.register_step_pre_hook(lambda *_: seen.append(layer.lora_B["default"].weight.grad.clone()))
    run_phase(updater, samples, lambda: None)
    merged = tiny_model().double()
    with torch.no_grad():
        merged.model.layers[0].mlp.up_proj.weight += layer.get_delta_weight("default")
    plain = Updater(Policy(merged), settings(lr=0.0, clip_grad=0.0))
    weight = merged.model.layers[0].mlp.up_proj.weight
    plain._optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))
    run_phase(plain, samples, lambda: None)
    expected = layer.scaling["default"] * seen[1] @ layer.lora_A["default"].weight.detach().T
    assert relative(seen[0], expected) < 1e-6


def test_a_phase_that_is_given_up_leaves_the_adapter_as_it_was():
    updater = adapted(global_batch_size=1)
    before = {name: p.detach().clone() for name, p in updater.policy.model.named_parameters()}
    n_asked = 0

    def stop():
        nonlocal n_asked
        n_asked += 1
        if n_asked == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_phase(updater, off_policy(rollout(tiny_model(), 8)), stop)
    assert all(torch.equal(p, before[name]) for name, p in updater.policy.model.named_parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
async def test_a_checkpoint_holds_the_merged_model_and_the_adapter(checkpoint, tmp_path):
    trainer = await open_trainer(settings(**LORA), checkpoint, pool=InlineCpuPool())
    await trainer.step(0, off_policy(rollout(tiny_model(), 6)))
    path = await trainer.save(tmp_path, {"rollout_id": 1})
    plain = AutoModelForCausalLM.from_pretrained(path)
    assert not has_adapter(plain)
    published = trainer.weights().tensors
    assert all(torch.equal(p, published[name]) for name, p in plain.named_parameters())
    ids = torch.arange(10)[None]
    with_adapter = PeftModel.from_pretrained(load_model(checkpoint, CPU), path / ADAPTER_DIR)
    with torch.no_grad():
        torch.testing.assert_close(with_adapter(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


async def test_a_resumed_run_goes_on_exactly(checkpoint, tmp_path):
    first, second = (off_policy(rollout(tiny_model(), 6, seed=seed)) for seed in (1, 2))
    chosen = settings(**LORA, global_batch_size=2)
    torch.manual_seed(5)
    unbroken = await open_trainer(chosen, checkpoint, pool=InlineCpuPool())
    await unbroken.step(0, first)
    path = await unbroken.save(tmp_path, {})
    expected = await unbroken.step(1, second)
    resumed = await open_trainer(chosen, checkpoint, resume=path, pool=InlineCpuPool())
    assert await resumed.step(1, second) == expected
    assert same_tensors(resumed.weights(), unbroken.weights())


async def test_another_adapter_than_the_checkpoints_is_refused(checkpoint, tmp_path):
    trainer = await open_trainer(settings(**LORA), checkpoint, pool=InlineCpuPool())
    path = await trainer.save(tmp_path, {})
    for other in ({"lora_rank": 2}, {"lora_alpha": 3.0}, {"lora_target_modules": ("q_proj",)}):
        with pytest.raises(ConfigError, match="--lora-rank"):
            await open_trainer(settings(**{**LORA, **other}), checkpoint, resume=path)
    with pytest.raises(ConfigError, match="has an adapter"):
        await open_trainer(settings(), checkpoint, resume=path)
    full = await open_trainer(settings(), checkpoint, pool=InlineCpuPool())
    plain = await full.save(tmp_path / "plain", {})
    with pytest.raises(ConfigError, match="has no adapter"):
        await open_trainer(settings(**LORA), checkpoint, resume=plain)


@pytest.mark.parametrize("names", [("nowhere",), ("lm_head",), ("embed_tokens",)])
def test_layers_that_cannot_have_an_adapter_are_refused(names):
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="--lora-target-modules"):
        add_adapter(model, evolve(settings(**LORA).train, lora_target_modules=names))


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["weights", "adapter"])
async def test_a_save_killed_at_any_point_leaves_the_whole_state_of_before_or_after(checkpoint, tmp_path, lora):
    """Weights, moments and counters of the optimizer, adapter: all of one version or all of the other."""
    chosen = settings(**lora, lr=0.02, global_batch_size=2)

    def opened(resume):
        torch.manual_seed(5)
        return open_updater(chosen, checkpoint, resume)

    def state_of(updater):
        optimizer = updater.state()["optimizer"]["state"]
        moments = {f"{n}/{key}": t for n, values in optimizer.items() for key, t in values.items()}
        return {**dict(updater.policy.model.named_parameters()), **moments, "steps": torch.tensor(updater.n_steps)}

    updater = opened(None)
    samples = off_policy(rollout(tiny_model(), 6))
    states, payloads = {}, {}
    for n_phases in (1, 2):
        run_phase(updater, samples, lambda: None)
        states[n_phases] = copy.deepcopy(state_of(updater))
        payloads[n_phases] = copy.deepcopy(make_payload(updater))
    companions = read_companions(checkpoint)
    files = ["trainer.pt", "adapter/adapter_model.safetensors", "model.safetensors", "tokenizer.json"]

    def torn(lost):
        def payload(path):
            write_payload(path, payloads[2], companions)
            for name in lost:
                (path / name).unlink(missing_ok=True)
            raise KilledError

        return payload

    whole = partial(write_payload, payload=payloads[2], companions=companions)
    kills = [(FastDisk(), torn(files[:n])) for n in (1, 3)]
    kills += [(DyingDisk(n, how), whole) for n in range(1, 22, 5) for how in ("before", "after")]
    seen = set()
    for number, (disk, payload) in enumerate(kills):
        home = tmp_path / str(number)
        write_checkpoint(home, 1, partial(write_payload, payload=payloads[1], companions=companions), {}, FastDisk())
        try:
            write_checkpoint(home, 2, payload, {}, disk)
        except KilledError:
            pass
        resumed = opened(find_latest(home))
        found, expected = state_of(resumed), states[resumed.n_phases]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        seen.add(resumed.n_phases)
    assert seen == {1, 2}
