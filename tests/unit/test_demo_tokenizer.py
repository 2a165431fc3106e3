"""The demo's tokenizer and chat template."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.demo.recipe import WarmStartRecipe
from relax_trio.demo.task import SYSTEM_PROMPT, TOOLS, answer_text, call_text
from relax_trio.demo.tokenizer import (
    CONTROL_TOKENS,
    MARK_TOKENS,
    DemoTokenizer,
    first_prompt_text,
    tool_result_text,
    train_tokenizer,
)

QUESTION = "What is (37 + 45) * 12?"
OPENING = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def tokenizer() -> DemoTokenizer:
    return train_tokenizer(WarmStartRecipe().vocab_len)


@pytest.fixture(scope="module")
def hugging_face(tokenizer: DemoTokenizer):
    return tokenizer.to_transformers()


def called(a: int, op: str, b: int) -> dict:
    arguments = json.dumps({"a": a, "op": op, "b": b})
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "calculate", "arguments": arguments}}],
    }


def render(hugging_face, messages: list[dict], **options) -> str:
    return hugging_face.apply_chat_template(messages, tokenize=False, **options)


@settings(max_examples=300)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(hugging_face, text: str) -> None:
    ids = hugging_face.encode(text, add_special_tokens=False)
    assert hugging_face.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*CONTROL_TOKENS, *MARK_TOKENS]))))
def test_text_with_control_tokens_in_it_survives_too(hugging_face, pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = hugging_face.encode(text, add_special_tokens=False)
    assert hugging_face.decode(ids, skip_special_tokens=False) == text


def test_skipping_special_tokens_keeps_the_marks_of_tools_and_thinking(hugging_face) -> None:
    text = "<|im_start|><tool_call>x</tool_call><think>y</think><|im_end|>"
    ids = hugging_face.encode(text, add_special_tokens=False)
    assert hugging_face.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call><think>y</think>"


@pytest.mark.parametrize("token", [*CONTROL_TOKENS, *MARK_TOKENS])
def test_each_control_token_is_one_token(tokenizer: DemoTokenizer, token: str) -> None:
    assert tokenizer.encode_many([token]) == [[tokenizer.token_id(token)]]


def test_an_unknown_token_has_no_id(tokenizer: DemoTokenizer) -> None:
    with pytest.raises(KeyError):
        tokenizer.token_id("<|nothing|>")


def test_digits_are_single_tokens(tokenizer: DemoTokenizer) -> None:
    (ids,) = tokenizer.encode_many(["90210"])
    assert ids == [tokenizer.token_id(digit) for digit in "90210"]


def test_training_twice_gives_the_same_vocabulary(tokenizer: DemoTokenizer) -> None:
    again = train_tokenizer(WarmStartRecipe().vocab_len)
    assert again.to_transformers().get_vocab() == tokenizer.to_transformers().get_vocab()


def test_the_warm_start_s_text_is_what_the_template_renders(hugging_face) -> None:
    first = first_prompt_text(QUESTION)
    assert first == render(hugging_face, OPENING, tools=TOOLS, add_generation_prompt=True)
    messages = [*OPENING, called(37, "+", 45), {"role": "tool", "tool_call_id": "call_1", "content": "82"}]
    second = first + call_text(37, "+", 45) + "<|im_end|>" + tool_result_text("82")
    assert second == render(hugging_face, messages, tools=TOOLS, add_generation_prompt=True)
    messages += [{"role": "assistant", "content": answer_text(82)}]
    assert second + "Answer: 82<|im_end|>\n" == render(hugging_face, messages, tools=TOOLS)


def test_a_conversation_of_three_turns_takes_fewer_than_a_hundred_tokens(tokenizer: DemoTokenizer) -> None:
    text = first_prompt_text(QUESTION) + call_text(37, "+", 45) + "<|im_end|>" + tool_result_text("82")
    text += call_text(82, "*", 12) + "<|im_end|>" + tool_result_text("984") + answer_text(984) + "<|im_end|>"
    assert len(tokenizer.encode_many([text])[0]) < 100


def test_consecutive_tool_results_share_one_user_turn(hugging_face) -> None:
    results = [{"role": "tool", "tool_call_id": str(n), "content": str(n)} for n in (1, 2)]
    assert render(hugging_face, [{"role": "user", "content": "hi"}, *results]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user"
        "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_arguments_as_text_and_as_an_object_render_alike(hugging_face) -> None:
    as_text = called(1, "-", 2)
    as_object = json.loads(json.dumps(as_text))
    function = as_object["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    assert render(hugging_face, [as_text]) == render(hugging_face, [as_object])


def test_reasoning_content_and_several_calls_are_rendered_in_order(hugging_face) -> None:
    message = called(1, "+", 2) | {"content": "Both.", "reasoning_content": "hm"}
    message["tool_calls"] = message["tool_calls"] * 2
    assert render(hugging_face, [message]) == (
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nBoth.\n"
        f"{call_text(1, '+', 2)}\n{call_text(1, '+', 2)}<|im_end|>\n"
    )


def test_the_template_works_without_a_system_message_and_with_a_later_one(hugging_face) -> None:
    user = {"role": "user", "content": "hi"}
    assert render(hugging_face, [user]) == "<|im_start|>user\nhi<|im_end|>\n"
    assert render(hugging_face, [user], tools=TOOLS).startswith("<|im_start|>system\n# Tools\n")
    late = {"role": "system", "content": "note"}
    assert render(hugging_face, [user, late]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nnote<|im_end|>\n"
    )
