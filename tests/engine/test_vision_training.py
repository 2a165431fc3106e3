"""Training on rows with images: the trainer reads the processor's own inputs, and its numbers are the plain model's."""

from __future__ import annotations

import random

import pytest
import torch
from attrs import evolve
from builders_train import make_sample, settings
from builders_vision import (
    MODEL_VOCAB_LEN,
    data_url,
    picture,
    plain_logprobs,
    save_family_checkpoint,
    save_vision_checkpoint,
    vision_model,
)
from safetensors.torch import load_file

from relax_trio.backend.checkpoint import load_causal_lm
from relax_trio.errors import ConfigError, TrainError
from relax_trio.tokens.codec import ChatCodec
from relax_trio.train.head import Distribution
from relax_trio.train.images import open_images
from relax_trio.train.opening import open_updater
from relax_trio.train.pretrained import checkpoint_names, load_model
from relax_trio.train.recompute import logprob_gap, recompute_logprobs
from relax_trio.train.team import ALONE, Team
from relax_trio.train.trainer import open_trainer

pytestmark = pytest.mark.engine

PICTURES = [picture(90, 61), picture(40, 150, seed=1), picture(56, 56, seed=2)]
ATOL = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def rows(checkpoint):
    """Rows without an image, with one, with two, and with one behind the last trained token; and their pictures."""
    codec = ChatCodec.load(checkpoint, reasoning_parser=None, tool_call_parser=None)
    pads, model = codec.vision.pads, vision_model()
    encoded = [codec.vision.encode(data_url(image)) for image in PICTURES]
    dice = random.Random(0)

    def text(n):
        return [dice.randrange(MODEL_VOCAB_LEN - 40) for _ in range(n)]

    def shown(index):
        return [510, *[pads.image_id] * encoded[index].n_tokens, 511]

    made = []
    for which, pieces in enumerate(([], [0], [1, 2], [0])):
        prompt, response, mask = text(5), text(6), [1] * 6
        for index in pieces[:1] if which != 3 else []:
            prompt += shown(index) + text(3)
        for index in pieces[1:] if which != 3 else pieces:
            more = shown(index) + text(2)
            response += more
            mask += [0] * len(more)
        if which == 2:
            response, mask = response + text(4), mask + [1] * 4
        tokens = prompt + response
        plain = plain_logprobs(model, tokens, [PICTURES[i] for i in pieces], forbidden=pads.ids)[len(prompt) - 1 :]
        logprobs = [value if trained else 0.0 for value, trained in zip(plain, mask, strict=True)]
        sample = make_sample(tokens, mask, index=which, advantage=(-1.0) ** which, logprobs=logprobs)
        made.append(evolve(sample, images=tuple(encoded[i] for i in pieces)))
    return made


@pytest.mark.parametrize("size", [1, 4])
def test_recomputed_logprobs_are_those_of_the_plain_model_over_the_original_images(checkpoint, rows, size):
    logprobs = recompute_logprobs(checkpoint, rows, temperature=1.0, micro_batch_size=size)

    assert [any(row.images) for row in rows] == [False, True, True, True]
    assert logprob_gap(rows, logprobs) < ATOL


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_other_families_with_the_same_processor_agree_too(tmp_path, kind):
    model, processor = save_family_checkpoint(kind, tmp_path)
    codec = ChatCodec.load(tmp_path, reasoning_parser=None, tool_call_parser=None)
    pads = codec.vision.pads
    encoded = [codec.vision.encode(data_url(image)) for image in PICTURES]
    tokens = [5, *(token for image in encoded for token in (510, *[pads.image_id] * image.n_tokens, 511)), 7, 8, 9, 10]
    plain = plain_logprobs(model, tokens, PICTURES, forbidden=pads.ids, processor=processor)
    row = evolve(make_sample(tokens, [1] * 4, logprobs=plain[-4:]), images=tuple(encoded))

    assert logprob_gap([row], recompute_logprobs(tmp_path, [row], temperature=1.0)) < ATOL
    loaded = load_model(tmp_path, torch.device("cpu"))
    assert set(checkpoint_names(loaded, dict(loaded.named_parameters()))) == set(
        load_file(tmp_path / "model.safetensors")
    )


def test_another_picture_in_the_place_of_one_shows(checkpoint, rows):
    (row,) = (row for row in rows if len(row.images) == 2)
    codec = ChatCodec.load(checkpoint, reasoning_parser=None, tool_call_parser=None)
    other = codec.vision.encode(data_url(picture(40, 150, seed=7)))
    swapped = evolve(row, images=(other, row.images[1]))

    assert other.n_tokens == row.images[0].n_tokens

    assert logprob_gap([row], recompute_logprobs(checkpoint, [swapped], temperature=1.0)) > 100 * ATOL


async def test_a_phase_trains_the_vision_tower_too_and_hands_out_names_of_the_checkpoint(checkpoint, rows, tmp_path):
    trainer = await open_trainer(settings(lr=1e-2), checkpoint)
    before = {name: tensor.clone() for name, tensor in trainer.weights().tensors.items()}
    metrics = await trainer.step(0, rows)

    after = trainer.weights().tensors
    on_disk = load_file(checkpoint / "model.safetensors")
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in on_disk.items()}
    assert all(torch.equal(before[name], tensor) for name, tensor in on_disk.items())
    for part in ("visual.patch_embed", "visual.merger", "model.layers.0", "lm_head"):
        changed = [not torch.equal(before[name], after[name]) for name in after if name.startswith(part)]
        assert any(changed), part
    assert metrics["train/rollout_logprob_abs_diff"] < ATOL

    saved = await trainer.save(tmp_path, {})
    assert {"preprocessor_config.json", "chat_template.jinja"} <= {path.name for path in saved.iterdir()}
    assert all(torch.equal(after[name], tensor) for name, tensor in load_file(saved / "model.safetensors").items())
    assert logprob_gap(rows, recompute_logprobs(saved, rows, temperature=1.0)) > ATOL
    again = await open_trainer(settings(lr=1e-2), checkpoint, resume=saved)
    assert all(torch.equal(after[name], tensor) for name, tensor in again.weights().tensors.items())


async def test_a_phase_over_micro_batches_is_that_over_one(checkpoint, rows):
    weights = []
    for size in (1, 4):
        trainer = await open_trainer(settings(lr=1e-2, micro_batch_size=size), checkpoint)
        await trainer.step(0, rows)
        weights.append(trainer.weights().tensors)
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 2e-3


def test_a_row_whose_placeholders_are_not_its_images_is_refused(checkpoint, rows):
    (row,) = (row for row in rows if len(row.images) == 2)

    for images in ((), row.images[:1], (row.images[1], row.images[0])):
        with pytest.raises(TrainError, match="placeholders of others"):
            recompute_logprobs(checkpoint, [evolve(row, images=images)], temperature=1.0)


@pytest.mark.parametrize(("fields", "team"), [({"lora_rank": 4}, ALONE), ({}, Team(n=2))])
def test_a_model_with_images_is_trained_whole_and_in_one_process(checkpoint, fields, team):
    with pytest.raises(ConfigError, match="a model with images is trained whole, in one process"):
        open_updater(settings(**fields), checkpoint, None, team)


def test_forbidden_tokens_are_off_the_support_with_and_without_a_nucleus():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    recorded = torch.tensor([1])
    plain = Distribution().log_softmax(logits[:, 1:], recorded - 1)
    for more in ({}, {"top_k": 3}, {"top_p": 0.9999}):
        found = Distribution(forbidden_ids=(0,), **more).log_softmax(logits, recorded)
        assert found[0, 0] == float("-inf")
        assert torch.allclose(found[:, 1:], plain, atol=1e-3)


def test_the_embedded_engine_says_where_such_a_checkpoint_is_served(checkpoint):
    with pytest.raises(ConfigError, match="a qwen2_5_vl model reads images, and the embedded engine text only"):
        load_causal_lm(checkpoint, torch.float32)


def test_a_text_checkpoint_has_no_image_inputs(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    assert open_images(tmp_path) is None
