"""Builders of tests with images: a tiny random Qwen2.5-VL checkpoint with processor and template, and images."""

from __future__ import annotations

import base64
import copy
import functools
import io
import json

import numpy as np
import torch
from builders_runtime import open_leased_session
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from relax_trio.data.messages import ImagePart, Message, TextPart
from relax_trio.data.request import CanonicalRequest
from relax_trio.demo.tokenizer import train_tokenizer
from relax_trio.runtime.shared import TurnLimits

VOCAB_LEN = 512
MODEL_VOCAB_LEN = 544
"""Rows of the embedding: some more than the tokenizer has ids, as real checkpoints have."""

CONTEXT_LEN = 1030
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
END = "<|im_end|>"

QWEN_VL_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What Qwen2.5-VL has, without videos."""


@functools.cache
def _trained():
    return train_tokenizer(VOCAB_LEN).to_transformers()


def vision_tokenizer():
    """The demo's tokenizer with the tokens of vision and a template that prints them."""
    tokenizer = copy.deepcopy(_trained())
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(text, special=True, normalized=False) for text in VISION_TOKENS]}
    )
    tokenizer.chat_template = QWEN_VL_TEMPLATE
    return tokenizer


def vision_config(tokenizer):
    start, end, image, video = (tokenizer.convert_tokens_to_ids(text) for text in VISION_TOKENS)
    return Qwen2_5_VLConfig(
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        text_config={
            "vocab_size": MODEL_VOCAB_LEN,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT_LEN + 6,
            "initializer_range": 0.3,
            "bos_token_id": tokenizer.convert_tokens_to_ids(END),
            "eos_token_id": tokenizer.convert_tokens_to_ids(END),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
    )


def vision_model(seed=0):
    """A tiny random Qwen2.5-VL; eager to say pads where nobody forbids them."""
    torch.manual_seed(seed)
    tokenizer = vision_tokenizer()
    model = Qwen2_5_VLForConditionalGeneration(vision_config(tokenizer)).eval()
    model.lm_head.weight.data[tokenizer.convert_tokens_to_ids(END)] = 0.0
    model.lm_head.weight.data[[tokenizer.convert_tokens_to_ids(text) for text in VISION_TOKENS]] *= 2.0
    return model


def vision_processor():
    """Of small images, so that a test has few pads."""
    return Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16})


def save_vision_checkpoint(path, seed=0):
    """A checkpoint directory as one of Qwen2.5-VL is laid out."""
    vision_model(seed).save_pretrained(path)
    tokenizer = vision_tokenizer()
    tokenizer.save_pretrained(path)
    vision_processor().save_pretrained(path)
    config = json.loads((path / "preprocessor_config.json").read_text())
    config["image_processor_type"] = "Qwen2VLImageProcessor"
    (path / "preprocessor_config.json").write_text(json.dumps(config))
    end = tokenizer.convert_tokens_to_ids(END)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "bos_token_id": end}))
    return path


def save_family_checkpoint(kind, path):
    """A checkpoint of another family with the same image processor: `qwen2_vl` or `qwen3_vl`; returns its model."""
    torch.manual_seed(0)
    tokenizer = vision_tokenizer()
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, map(tokenizer.convert_tokens_to_ids, VISION_TOKENS), strict=True))
    end = tokenizer.convert_tokens_to_ids(END)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {
        "vocab_size": MODEL_VOCAB_LEN,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LEN + 6,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "rope_parameters": rope,
    }
    vision = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.3}
    if kind == "qwen2_vl":
        patch = 14
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": patch}
        config = Qwen2VLConfig(**ids, text_config=text, vision_config=vision, tie_word_embeddings=True)
        model = Qwen2VLForConditionalGeneration(config).eval()
    else:
        patch = 16
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "patch_size": patch}
        vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 16, "rope_parameters": {**rope, "mrope_interleaved": True}}
        config = Qwen3VLConfig(**ids, text_config=text, vision_config=vision, tie_word_embeddings=True)
        model = Qwen3VLForConditionalGeneration(config).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    unit = (2 * patch) ** 2
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * unit, "longest_edge": 16 * unit}, patch_size=patch)
    processor.save_pretrained(path)
    return model, processor


def picture(width=84, height=56, seed=0):
    """An RGB image of noise that depends on the seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 14, width // 14, 3), dtype=np.uint8)
    return Image.fromarray(pixels.repeat(14, axis=0).repeat(14, axis=1), "RGB")


def data_url(image, kind="PNG"):
    """The image as a data: URL."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


# --- plain numbers -----------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_logprobs(model, tokens, images, *, forbidden=(), processor=None):
    """Logprobs of tokens 1… by one plain forward pass over the processor's own inputs of the original images."""
    ids = torch.tensor([list(tokens)])
    inputs = {}
    if images:
        made = (processor or vision_processor())(images=list(images), return_tensors="pt")
        inputs = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0].float()
    logits[:, list(forbidden)] = float("-inf")
    return torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0].tolist()


# --- Sessions ----------------------------------------------------------------------------------------------------


def open_vision_session(backend, codec, *, max_context_len=CONTEXT_LEN):
    """A leased Session over a backend that it runs."""
    limits = TurnLimits(temperature=1.0, max_response_len=40, max_context_len=max_context_len)
    return open_leased_session(backend, codec, limits)


async def ask(session, *messages, **fields):
    """The completion of one request."""
    call = session.submit(CanonicalRequest(messages=messages, chat_template_kwargs={}, max_tokens=12, **fields))
    completion = await call.wait_done()
    call.delivered()
    return completion


def shown(image, text="what is it?", role="user", **fields):
    """A message with an image before its text."""
    return Message(role=role, content=(ImagePart(data_url(image)), TextPart(text)), **fields)
