"""A conversation is one line however a client spells it: spacing, nulls, part lists, reasoning left out."""

from __future__ import annotations

import json
import os
import random

import pytest
from builders_forest import turn
from builders_tokens import LOOK
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.data.messages import Message, ToolCall
from relax_trio.data.normalize import assistant_message, canonical_arguments, normalize_messages, normalize_tools
from relax_trio.forest.forest import SessionForest

SOAK = int(os.environ.get("SOAK", "1"))
ARGUMENTS = ['{"a":"x"}', '{"b":[1,2.5,{"c":null}],"a":3}', "{}", "not json", "3", '{"n":1e3}', '{"ü":"\\u00fc \\n"}']


def converse(rng: random.Random) -> list[Message]:
    """A conversation of generated turns, each behind what was said or found."""
    said = [Message(role="system", content="be kind")] if rng.random() < 0.5 else []
    said.append(Message(role="user", content="hello"))
    for step in range(rng.randrange(1, 6)):
        calls = tuple(
            ToolCall(id=f"call_{step}_{i}", name="look", arguments=canonical_arguments(rng.choice(ARGUMENTS)))
            for i in range(rng.choice([0, 0, 1, 2]))
        )
        reasoning = rng.choice([None, "hm", "so\n\nwhat"])
        content = rng.choice(["", "text", "über\n"]) if calls or reasoning else rng.choice(["text", "über\n", ""])
        said.append(assistant_message(content, reasoning, calls))
        found = [Message(role="tool", content=rng.choice(["", "42"]), tool_call_id=call.id) for call in calls]
        said += found or [Message(role=rng.choice(["user", "user", "system"]), content=f"turn {step}")]
    return said


def spell(message: Message, rng: random.Random) -> tuple[dict, bool]:
    """The message as some client writes it, and whether it left reasoning out."""
    out = message.to_chat()
    if rng.random() < 0.5:
        out |= {"name": None, "audio": None, "annotations": [], "function_call": None, "refusal": None}
    if message.role != "assistant":
        if message.content == "" and rng.random() < 0.7:
            out["content"] = rng.choice([None, [], [{"type": "text", "text": ""}]])
        if message.role == "system" and rng.random() < 0.3:
            out["role"] = "developer"
    else:
        out["tool_calls"] = [spell_call(call, rng) for call in message.tool_calls] or rng.choice([None, []])
        if "content" not in out:
            out["content"] = rng.choice([None, "", []]) if message.tool_calls else ""
    if isinstance(out.get("content"), str) and rng.random() < 0.4:
        at = rng.randrange(len(out["content"]) + 1)
        texts = out["content"][:at], out["content"][at:]
        out["content"] = [{"type": "text", "text": text, "cache_control": None} for text in texts]
    is_silent = message.reasoning_content is not None and rng.random() < 0.5
    if is_silent or message.reasoning_content is None:
        out["reasoning_content"] = rng.choice([None, ""])
    elif rng.random() < 0.5:
        out["reasoning"] = out.pop("reasoning_content")
    return out, is_silent


def spell_call(call: ToolCall, rng: random.Random) -> dict:
    """The call with its arguments as text or as an object, in some order and spacing."""
    out = {"id": call.id, "index": 0, "function": {"name": call.name, "arguments": call.arguments}}
    given = call.arguments_object()
    if given is not None:
        shuffled = dict(rng.sample(list(given.items()), len(given)))
        text = json.dumps(shuffled, indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5)
        out["function"]["arguments"] = shuffled if rng.random() < 0.3 else text
    return out | ({"type": "function"} if rng.random() < 0.5 else {})


@pytest.mark.parametrize("part", range(SOAK))
@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_conversation_is_one_line_however_it_is_spelled(part, seed):
    rng = random.Random(f"{part}/{seed}")
    said = converse(rng)
    forest = SessionForest()
    answers = [index for index, message in enumerate(said) if message.role == "assistant"]
    tools = normalize_tools([LOOK])
    for index in answers:
        spelled = [spell(message, rng) for message in said[:index]]
        sent = normalize_messages(json.loads(json.dumps([raw for raw, _ in spelled])))
        match = forest.match(sent, tools, {})
        assert match.n_restored == sum(is_silent for _, is_silent in spelled)
        assert forest.messages(match.parent) + match.new_messages == tuple(said[:index])
        turn(forest, list(sent), said[index], tools=tools)
    (leaf,) = forest.exportable_leaves()
    assert forest.messages(leaf) == tuple(said[: answers[-1] + 1])
    assert len(forest.nodes) == 2 * len(answers) + 1
