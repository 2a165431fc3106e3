"""Loading, replacing and refusing weights in the embedded engine."""

from __future__ import annotations

import json
import random
import threading

import pytest
import torch
import trio
import trio.testing
from builders_backend import CONTEXT_LEN, make_attempt, make_model, recompute, save_checkpoint, serving
from safetensors.torch import load_file, save_file

from relax_trio.backend.base import WeightSource
from relax_trio.backend.embedded import EmbeddedBackend, EmbeddedOptions
from relax_trio.backend.embedded.model import CausalModel
from relax_trio.errors import BackendProtocolError, ConfigError, WeightSyncError

pytestmark = pytest.mark.engine

KINDS = ["qwen3", "llama", "gpt2"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    return {kind: save_checkpoint(make_model(kind), root / kind) for kind in KINDS}


def make_backend(path, **options):
    return EmbeddedBackend(path, EmbeddedOptions(**{"n_threads": 1, **options}))


def of_checkpoint(model):
    """The state dict with tied names once, as a checkpoint file has them."""
    state = model.state_dict()
    seen = set()
    return {name: t for name, t in state.items() if not (t.data_ptr() in seen or seen.add(t.data_ptr()))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["state dict", "names once", "bfloat16", "path"])
async def test_new_weights_are_served_in_every_form(checkpoints, tmp_path, kind, form):
    new = make_model(kind, seed=1)
    if form == "path":
        source = WeightSource(path=save_checkpoint(new, tmp_path / "new"))
    elif form == "bfloat16":
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in new.state_dict().items()}
        source = WeightSource(tensors=rounded)
        new.load_state_dict(rounded)
    else:
        source = WeightSource(tensors=new.state_dict() if form == "state dict" else of_checkpoint(new))
    async with serving(make_backend(checkpoints[kind])) as backend:
        tokens = [random.Random(1).randrange(97) for _ in range(40)]
        await backend.generate(make_attempt(tokens))
        await backend.update_weights("1", source)
        attempt = make_attempt(tokens, max_new_tokens=12)
        result = await backend.generate(attempt)
        assert result.cached_len == 0
        expected = recompute(new, [*tokens, *result.token_ids], 12)
        assert result.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


async def test_the_engine_keeps_its_own_copy(checkpoints):
    new = make_model("qwen3", seed=1)
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        await backend.update_weights("1", WeightSource(tensors=new.state_dict()))
        before = await backend.generate(make_attempt([1, 2, 3], temperature=0.0, session="a"))
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.zero_()
        after = await backend.generate(make_attempt([1, 2, 3], temperature=0.0, session="b"))
        assert before.token_ids == after.token_ids


async def test_running_attempts_go_on_under_the_new_weights_without_stale_keys_and_values(checkpoints):
    old, new = make_model("llama"), make_model("llama", seed=1)
    n = CONTEXT_LEN - 6
    async with serving(make_backend(checkpoints["llama"])) as backend:
        results = []

        async def call(i):
            attempt = make_attempt([i, 5, 6, 7, 8, 9], session=str(i), max_new_tokens=n)
            results.append((attempt, await backend.generate(attempt)))

        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(call, i)
            await trio.sleep(0.1)
            await backend.update_weights("new", WeightSource(tensors=new.state_dict()))
    for attempt, result in results:
        assert [span.version for span in result.versions] == ["0", "new"]
        n_old, n_new = (span.n_tokens for span in result.versions)
        assert n_old + n_new == n
        tokens = [*attempt.token_ids, *result.token_ids]
        assert result.logprobs[:n_old].tolist() == pytest.approx(recompute(old, tokens[: 6 + n_old], n_old), abs=1e-4)
        assert result.logprobs[n_old:].tolist() == pytest.approx(recompute(new, tokens, n_new), abs=1e-4)


def spoil(tensors, how):
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "missing":
        del tensors[name]
    elif how == "unknown":
        tensors["model.layers.9.mlp.up_proj.weight"] = tensors[name]
    elif how == "misshapen":
        tensors[name] = tensors[name][:, :-1]
    elif how == "integers":
        tensors[name] = tensors[name].to(torch.int32)
    else:
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1.0
    return name if how != "untied" else "lm_head.weight"


@pytest.mark.parametrize("how", ["missing", "unknown", "misshapen", "integers", "untied"])
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(checkpoints, how):
    tensors = make_model("qwen3", seed=1).state_dict()
    name = spoil(tensors, how)
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        before = await backend.generate(make_attempt([1, 2, 3], temperature=0.0, session="a"))
        with pytest.raises(WeightSyncError, match=name.replace("layers.1", r"layers\.\d")):
            await backend.update_weights("1", WeightSource(tensors=tensors))
        assert backend.weight_version == "0"
        after = await backend.generate(make_attempt([1, 2, 3], temperature=0.0, session="b"))
        assert before.token_ids == after.token_ids
        assert after.versions[0].version == "0"


async def test_a_path_without_weights_is_refused(checkpoints, tmp_path):
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        with pytest.raises(WeightSyncError, match="nothing-here"):
            await backend.update_weights("1", WeightSource(path=tmp_path / "nothing-here"))


async def test_weights_that_give_no_numbers_fail_attempts_and_good_ones_heal(checkpoints):
    good = make_model("llama", seed=1)
    broken = {name: tensor * float("nan") for name, tensor in good.state_dict().items()}
    async with serving(make_backend(checkpoints["llama"], max_batch=2)) as backend:
        await backend.update_weights("bad", WeightSource(tensors=broken))
        for i in range(3):
            with pytest.raises(BackendProtocolError, match="'bad' gave logits that are not finite"):
                await backend.generate(make_attempt([1, 2, 3], session=str(i)))
        await backend.update_weights("good", WeightSource(tensors=good.state_dict()))
        attempt = make_attempt([1, 2, 3], max_new_tokens=10)
        result = await backend.generate(attempt)
        expected = recompute(good, [1, 2, 3, *result.token_ids], 10)
        assert result.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


async def test_an_update_whose_caller_left_before_its_turn_is_withdrawn(checkpoints, monkeypatch):
    begun, held, logits = threading.Event(), threading.Event(), CausalModel.logits

    def slow(*args):
        begun.set()
        assert held.wait(20)
        return logits(*args)

    tensors = make_model("llama", seed=1).state_dict()
    async with serving(make_backend(checkpoints["llama"])) as backend:
        monkeypatch.setattr(CausalModel, "logits", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backend.generate, make_attempt([1, 2]))
            await trio.to_thread.run_sync(begun.wait)
            with trio.move_on_after(0.05):
                await backend.update_weights("1", WeightSource(tensors=tensors))
            held.set()
        result = await backend.generate(make_attempt([1, 2]))
        assert result.versions[0].version == backend.weight_version == "0"


async def test_an_update_whose_caller_leaves_while_it_runs_ends_before_the_caller_goes_on(checkpoints, monkeypatch):
    begun, held, replace = threading.Event(), threading.Event(), CausalModel.replace
    order = []

    def slow(self, source):
        begun.set()
        assert held.wait(20)
        replace(self, source)
        order.append("replaced")

    monkeypatch.setattr(CausalModel, "replace", slow)
    tensors = make_model("llama", seed=1).state_dict()
    async with serving(make_backend(checkpoints["llama"])) as backend:
        async with trio.open_nursery() as nursery:

            async def call():
                with trio.CancelScope() as scope:
                    scopes.append(scope)
                    await backend.update_weights("1", WeightSource(tensors=tensors))
                order.append("left")

            scopes = []
            nursery.start_soon(call)
            await trio.to_thread.run_sync(begun.wait)
            scopes[0].cancel(reason="the caller left")
            await trio.testing.wait_all_tasks_blocked()
            assert order == []
            held.set()
        assert order == ["replaced", "left"]
        assert backend.weight_version == "1"


async def test_weights_are_not_taken_when_nothing_is_served(checkpoints):
    with pytest.raises(WeightSyncError, match="not serving"):
        await make_backend(checkpoints["llama"]).update_weights("1", WeightSource(tensors={}))


async def test_bfloat16_weights_serve(checkpoints):
    model = make_model("qwen3").to(torch.bfloat16).float()
    async with serving(make_backend(checkpoints["qwen3"], dtype="bfloat16")) as backend:
        attempt = make_attempt([1, 2, 3], max_new_tokens=10)
        result = await backend.generate(attempt)
        expected = recompute(model, [1, 2, 3, *result.token_ids], 10)
        assert result.logprobs.tolist() == pytest.approx(expected, abs=0.5)


def test_a_directory_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"empty: no config\.json"):
        make_backend(tmp_path / "empty")


def test_a_model_that_keeps_other_state_than_keys_and_values_is_refused(checkpoints, tmp_path):
    config = json.loads((checkpoints["qwen3"] / "config.json").read_text())
    config["layer_types"] = ["linear_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        make_backend(tmp_path)


def test_an_unknown_dtype_is_refused(checkpoints):
    with pytest.raises(ConfigError, match="float8"):
        make_backend(checkpoints["llama"], dtype="float8")


async def test_a_checkpoint_that_lacks_a_tensor_is_refused(checkpoints, tmp_path):
    for path in checkpoints["llama"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        await make_backend(tmp_path).run()


async def test_an_architecture_that_decodes_wrongly_is_refused(checkpoints, monkeypatch):
    def misplaced(self, layer, keys, values, write=None):
        self.plan.index.clamp_(max=3)

    monkeypatch.setattr("relax_trio.backend.embedded.kv.KvStore.write", misplaced)
    with pytest.raises(ConfigError, match="wrongly"):
        await make_backend(checkpoints["llama"]).run()
