"""Random conversations: recorded pieces joined are the template's own rendering, whatever is said in them."""

from __future__ import annotations

import os

import pytest
from builders_tokens import LOOK, assistant, result, system, user
from hypothesis import given, settings
from hypothesis import strategies as st
from template_exactness import play_exactly
from template_families import CHATML, FAMILIES, GEMMA, GLM4_5, LLAMA3, QWEN2_5, QWEN3_CODER

from relax_trio.data.messages import ToolCall
from relax_trio.data.normalize import canonical_arguments
from relax_trio.tokens.dialogues import THINKING
from relax_trio.tokens.sentinel import SENTINEL

SOAK = int(os.environ.get("SOAK", "1"))
"""Factor on the number of examples, for long runs."""

WORDS = ("a", "Be", "42", "x-1", "naïve", "日本", "Ω≠µ", "it's", '"q"', "{}", "a\\n", "🙂", "e\u0301", "\ufb01", "x=y;")
MARKUP = (
    "\n",
    " ",
    "}",
    '"}}',
    "}\n</tool_call>",
    "</think>",
    "<|im_end|>",
    "<|user|>",
    "</s>",
    SENTINEL,
    "\x00\u2028",
)

words = st.sampled_from(WORDS)
spoken = st.lists(words, min_size=1, max_size=3).map(" ".join)
"""What models say: no whitespace at the ends, because templates trim, and no control tokens, which end turns."""

anything = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
given_text = st.lists(st.sampled_from(WORDS + MARKUP), min_size=1, max_size=4).map("".join) | anything
"""What agents send: anything, markup and control tokens included."""

arguments = st.one_of(
    st.dictionaries(words, spoken | st.integers() | st.lists(words, max_size=2), max_size=2),
    st.sampled_from(['["a"]', "5", "no json at all", '"text"']),
).map(canonical_arguments)

kinds_of_stop = st.sampled_from(["by a stop token", "by its limit", "by a stop string"])


@st.composite
def rounds(draw, family, *, reasoning=True, calls=True, beside=True, max_calls=3):
    """A generated turn and what follows it."""
    thought = draw(st.none() | spoken) if reasoning else None
    if calls and family.takes_tools and draw(st.booleans()):
        ids = [f"call_{draw(st.integers(0, 2**64)):024x}" for _ in range(draw(st.integers(1, max_calls)))]
        made = tuple(ToolCall(id=call_id, name=draw(words), arguments=draw(arguments)) for call_id in ids)
        turn = assistant(draw(st.none() | spoken) if beside else None, reasoning=thought, calls=made)
        new = [result(draw(st.just("") | given_text), call_id) for call_id in ids]
        if not family.alternates and draw(st.booleans()):
            new.append(user(draw(given_text)))
    else:
        turn = assistant(draw(spoken), reasoning=thought)
        new = [user(draw(given_text))]
        if draw(st.integers(0, 3)) == 0:
            new.insert(0, system(draw(given_text)))
        if not family.alternates and draw(st.integers(0, 3)) == 0:
            new.append(user(draw(given_text)))
    return turn, tuple(new)


@st.composite
def conversations(draw, family, **shape):
    """Opening, rounds, tools, template arguments."""
    opening = [system(draw(given_text))] if draw(st.booleans()) else []
    opening.append(user(draw(given_text)))
    played = draw(st.lists(rounds(family, **shape), min_size=1, max_size=4))
    kwargs = draw(st.sampled_from([{}, {THINKING: False}])) if THINKING in family.codec.template.variables else {}
    if kwargs:  # a model that doesn't think has no reasoning
        played = [(assistant(turn.content, calls=turn.tool_calls), new) for turn, new in played]
    return opening, played, draw(st.sampled_from([(), (LOOK,)])), kwargs


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(deadline=None, max_examples=25 * SOAK)
@given(data=st.data())
def test_observations_of_any_conversation_are_the_end_of_the_templates_own_rendering(family, data):
    opening, played, tools, kwargs = data.draw(conversations(family))
    play_exactly(family, opening, played, tools, kwargs, data.draw(kinds_of_stop))


APPENDING = {
    CHATML: {"reasoning": False, "calls": False},
    QWEN2_5: {"reasoning": False},
    QWEN3_CODER: {"reasoning": False},
    LLAMA3: {"reasoning": False, "beside": False, "max_calls": 1},
    GLM4_5: {"reasoning": False},
    GEMMA: {"reasoning": False},
}
"""Families that append, and in what conversations they do."""


@pytest.mark.parametrize("family", APPENDING, ids=lambda family: family.name)
@settings(deadline=None, max_examples=25 * SOAK)
@given(data=st.data())
def test_recorded_pieces_joined_are_the_rendering_of_the_whole_where_a_template_appends(family, data):
    opening, played, tools, kwargs = data.draw(conversations(family, **APPENDING[family]))
    assert play_exactly(family, opening, played, tools, kwargs) == "append-only"
