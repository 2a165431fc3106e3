"""The families of chat templates: every observation is exact, and the probe says of each what playing it shows."""

from __future__ import annotations

import functools
from array import array
from datetime import datetime

import pytest
from builders_tokens import LOOK, assistant, look_call, make_codec, make_tokenizer, result, system, user
from template_exactness import play_exactly, recorded_turn
from template_families import (
    DEEPSEEK_R1,
    FAMILIES,
    GEMMA,
    GLM4_5,
    HARMONY,
    LLAMA3,
    MISTRAL,
    QWEN2_5,
    QWEN3,
    QWEN3_CODER,
    QWEN3_OWN_FILES,
    TEMPLATES,
)

from relax_trio.errors import InvalidRequest
from relax_trio.tokens.codec import ChatCodec
from relax_trio.tokens.dialogues import THINKING, dialogues
from relax_trio.tokens.prefill import prefill_text
from relax_trio.tokens.probe import probe_template
from relax_trio.tokens.sentinel import SENTINEL
from relax_trio.tokens.template import ChatTemplate
from relax_trio.tokens.turn_end import TurnEnd

TOOLS = (LOOK,)
ASKED = (user(),)
CALLED = assistant(None, calls=(look_call("call_1"),))


@functools.cache
def verdicts(family):
    return {turn.kind: turn.verdict for turn in probe_template(family.codec.observations).turns}


THINKERS = (QWEN3, QWEN3_OWN_FILES, GLM4_5)
CELLS = [
    pytest.param(family, dialogue, kwargs, id=f"{family.name}-{dialogue.kind}{', not thinking' if kwargs else ''}")
    for family in FAMILIES
    for kwargs in ({}, {THINKING: False})
    if not kwargs or family in THINKERS
    for dialogue in dialogues(kwargs)
]


@pytest.mark.parametrize(("family", "dialogue", "kwargs"), CELLS)
def test_each_kind_of_turn_is_exact_and_judged_as_it_plays(family, dialogue, kwargs):
    played = play_exactly(family, dialogue.opening, dialogue.rounds, dialogue.tools, kwargs)
    for stopped in ("by its limit", "by a stop string"):
        play_exactly(family, dialogue.opening, dialogue.rounds, dialogue.tools, kwargs, stopped)
    if kwargs:
        assert THINKING in family.codec.template.variables
    judged = verdicts(family)[dialogue.kind + (f", {THINKING} false" if kwargs else "")]
    assert judged == played.removesuffix(" later")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_observation_is_rendered_from_as_many_messages_however_long_the_history(family, monkeypatch):
    codec, counts = family.codec, []
    render = codec.template.render
    monkeypatch.setattr(codec.template, "render", lambda m, *a, **k: counts.append(len(m)) or render(m, *a, **k))
    tool_round = (CALLED, result(call_id="call_1")) if family.takes_tools else ()
    history = (system(), user(), *tool_round, assistant("a"), user("b"))
    for earlier in (history, history * 50):
        counts.append("|")
        codec.encode_observation([user("c")], (), {}, turn=assistant("d"), turn_ids=[7], earlier=earlier)
    first, second = ("".join(f"{count} " for count in counts)).split("| ")[1:]
    assert first == second


def supplied(family, new, *, turn=None, last=None, tools=(), kwargs=None, earlier=ASKED):
    """Text of the observation behind a turn whose recorded tokens end with the token `last`."""
    codec = family.codec
    ids = array("i", codec.encode_text("said" + (last or "")))
    turn = turn or assistant("said")
    return codec.decode(codec.encode_observation(new, tools, kwargs or {}, turn=turn, turn_ids=ids, earlier=earlier))


# --- no token of its own ends a turn -------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["<|observation|>", "<|endoftext|>", None])
def test_the_tag_of_the_next_message_is_supplied_unless_the_model_generated_that_very_tag(last):
    assert supplied(GLM4_5, [user("go on")], last=last) == "<|user|>\ngo on<|assistant|>"
    assert supplied(GLM4_5, [user("go on")], last="<|user|>") == "\ngo on<|assistant|>"


def test_a_tag_that_is_no_stop_token_is_supplied_too():
    assert supplied(GLM4_5, [system("rule"), user("go on")]) == "<|system|>\nrule<|user|>\ngo on<|assistant|>"


def test_results_follow_the_tag_that_a_call_stopped_with():
    new = [result("1", "call_1"), result("2", "call_2")]
    expected = "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|assistant|>"
    assert supplied(GLM4_5, new, turn=CALLED, last="<|observation|>", tools=TOOLS) == expected
    assert supplied(GLM4_5, new, turn=CALLED, last="<|user|>", tools=TOOLS) == "<|observation|>" + expected


def test_tags_that_the_checkpoint_does_not_declare_end_generation_all_the_same():
    tokenizer = make_tokenizer(
        GLM4_5.codec.template.source, special=(*GLM4_5.special, *GLM4_5.marks), marks=(), eos="<|endoftext|>"
    )
    codec = ChatCodec.from_tokenizer(tokenizer)
    assert {codec.token_text(token_id) for token_id in codec.stop_token_ids} == {
        "<|endoftext|>",
        "<|user|>",
        "<|observation|>",
    }
    assert not codec.turn_ends.closers
    assert codec.turn_ends.calls == TurnEnd("<|observation|>", closed=False)


# --- more than one token ends a turn -------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["<|return|>", "<|end|>", "<|call|>"])
def test_whatever_token_ended_the_turn_no_other_is_supplied(last):
    assert supplied(HARMONY, [user("b")], last=last) == "<|start|>user<|message|>b<|end|><|start|>assistant"


def test_a_turn_cut_in_its_analysis_is_closed_as_a_history_closes_turns():
    turn = assistant(None, reasoning="hm")
    assert supplied(HARMONY, [user("b")], turn=turn).startswith("<|end|><|start|>user")
    assert supplied(HARMONY, [result("b", "call_1")], turn=CALLED, tools=TOOLS).startswith("<|call|><|start|>functions")


def test_what_ends_the_last_turn_of_a_conversation_is_found_without_being_declared():
    tokenizer = make_tokenizer(HARMONY.codec.template.source, special=HARMONY.special, marks=(), eos="<|endoftext|>")
    codec = ChatCodec.from_tokenizer(tokenizer)
    assert codec.turn_ends.stops == ("<|return|>", "<|call|>")
    assert codec.turn_ends.closers == {"<|return|>", "<|end|>", "<|call|>"}
    assert set(codec.stop_token_ids) == set(HARMONY.codec.stop_token_ids)


def test_a_token_that_also_ends_parts_of_a_turn_does_not_end_generation():
    stops = {HARMONY.codec.token_text(token_id) for token_id in HARMONY.codec.stop_token_ids}
    assert stops == {"<|return|>", "<|call|>", "<|endoftext|>"}


def test_a_stop_token_that_the_template_writes_elsewhere_closes_turns_too():
    tail = "<|start_header_id|>user<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert supplied(LLAMA3, [user("b")], last="<|eom_id|>") == tail
    assert supplied(LLAMA3, [user("b")], last="<|end_of_text|>") == "<|eot_id|>" + tail


# --- what templates do besides ------------------------------------------------------------------------------------


def test_results_of_calls_that_the_template_cannot_print_together_are_encoded_all_the_same():
    turn = assistant(None, calls=(look_call("call_1"), look_call("call_2")))
    new = [result("1", "call_1"), result("2", "call_2")]
    with pytest.raises(InvalidRequest, match="one tool call a turn"):
        LLAMA3.codec.encode_opening([user(), turn, *new], TOOLS, {})
    tail = supplied(LLAMA3, new, turn=turn, tools=TOOLS)
    assert tail.startswith('<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"1"<|eot_id|>')
    assert '"2"' in tail


def test_the_last_user_message_carries_tools_and_system_text_where_the_template_puts_them_there():
    tail = supplied(MISTRAL, [user("b")], last="</s>", tools=TOOLS, earlier=(system("rule"), user("a")))
    assert tail.startswith('[AVAILABLE_TOOLS][{"type": "function"')
    assert tail.endswith("[/AVAILABLE_TOOLS][INST]rule\n\nb[/INST]")


def test_call_ids_are_shortened_the_same_way_wherever_they_stand():
    turn = assistant(None, calls=(look_call("call_" + "0" * 24),))
    answered = result("1", "call_" + "0" * 24)
    whole = MISTRAL.codec.decode(MISTRAL.codec.encode_opening([user(), turn, answered], TOOLS, {}))
    tail = supplied(MISTRAL, [answered], turn=turn, last="</s>", tools=TOOLS)
    assert whole.endswith(tail)
    short = tail.partition('"call_id": "')[2].partition('"')[0]
    assert len(short) == 9
    assert f'"id": "{short}"' in whole
    named = assistant(None, calls=(look_call("abcdefGH9"),))
    assert '"call_id": "abcdefGH9"' in supplied(MISTRAL, [result("1", "abcdefGH9")], turn=named, tools=TOOLS)


def test_a_system_message_joins_the_user_message_where_roles_must_alternate():
    opening = GEMMA.codec.decode(GEMMA.codec.encode_opening([system("rule"), user("a")], (), {}))
    assert opening == "<bos><start_of_turn>user\nrule\n\na<end_of_turn>\n<start_of_turn>model\n"
    tail = supplied(GEMMA, [system("more"), user("b")], last="<end_of_turn>", earlier=(system("rule"), user("a")))
    assert tail == "\n<start_of_turn>user\nmore\n\nb<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(InvalidRequest, match="must alternate"):
        supplied(GEMMA, [user("b"), user("c")])


def test_a_leading_system_message_stays_one_where_only_a_later_one_is_refused():
    chat = [system("rule"), user("a"), assistant("b"), system("more"), user("c")]
    whole = MISTRAL.codec.decode(MISTRAL.codec.encode_opening(chat, (), {}))
    assert whole == "<s>[INST]a[/INST]b</s>[INST]rule\n\nmore\n\nc[/INST]"


def test_a_later_system_message_that_the_template_would_move_or_drop_is_a_user_message():
    for family, tag in ((DEEPSEEK_R1, "<｜User｜>more"), (HARMONY, "<|start|>user<|message|>more<|end|>")):
        whole = family.codec.decode(
            family.codec.encode_opening([user("a"), assistant("b"), system("more"), user("c")], (), {})
        )
        assert tag in whole
        assert tag in supplied(family, [system("more"), user("c")])


def test_consecutive_results_make_one_user_turn_and_thinking_off_opens_with_an_empty_thought():
    new = [result("1", "call_1"), result("2", "call_2")]
    tail = supplied(QWEN3, new, turn=CALLED, last="<|im_end|>", tools=TOOLS, kwargs={THINKING: False})
    assert tail == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_template_that_remembers_earlier_results_is_shown_one():
    first = supplied(DEEPSEEK_R1, [result("1", "call_1")], turn=CALLED)
    earlier = (user(), CALLED, result("0", "call_1"))
    later = supplied(DEEPSEEK_R1, [result("1", "call_1")], turn=CALLED, earlier=earlier)
    assert "<｜tool▁outputs▁begin｜>" in first
    assert "<｜tool▁outputs▁begin｜>" not in later


COUNTING = """\
{%- set seen = namespace(results=0) -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}{%- set seen.results = seen.results + 1 -%}{%- endif -%}
{{- '<|im_start|>' ~ message.role ~ ('' if message.role != 'tool' else ' ' ~ seen.results) ~ '\\n' ~ message.content -}}
{%- for call in message.tool_calls or [] -%}{{- call.function.name ~ call.function.arguments | tojson -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""


def test_a_template_that_counts_is_shown_every_earlier_message():
    codec = make_codec(COUNTING)
    earlier = (system(), user(), *(CALLED, result("0", "call_1")) * 7)
    whole = codec.encode_opening([*earlier, CALLED, result("1", "call_1")], TOOLS, {})
    tail = codec.encode_observation([result("1", "call_1")], TOOLS, {}, turn=CALLED, turn_ids=[7], earlier=earlier)
    assert codec.observations.memory == "count"
    assert "tool 8\n" in codec.decode(tail)
    assert tail == whole[-len(tail) :]


@pytest.mark.parametrize("family", [QWEN2_5, GLM4_5, HARMONY], ids=lambda family: family.name)
def test_text_that_looks_like_the_encoders_own_stand_in_is_text(family):
    tail = supplied(family, [user(f"a {SENTINEL} b {SENTINEL}z c")])
    assert f"a {SENTINEL} b {SENTINEL}z c" in tail
    quoted = supplied(family, [user("a")], earlier=(system(SENTINEL), user()))
    assert quoted == supplied(family, [user("a")])


@pytest.mark.parametrize("family", [QWEN3_CODER, GLM4_5], ids=lambda family: family.name)
@pytest.mark.parametrize(("arguments", "value"), [("[1]", "[1]"), ("5", "5"), ("no json", "no json")])
def test_arguments_that_are_no_object_are_wrapped_where_the_template_takes_objects_only(family, arguments, value):
    turn = assistant(None, calls=(look_call("call_1", arguments),))
    whole = family.codec.decode(family.codec.encode_opening([user(), turn, result("1", "call_1")], TOOLS, {}))
    assert "value" in whole
    assert value in whole


# --- the date ------------------------------------------------------------------------------------------------------


def test_a_printed_date_stays_that_of_the_start():
    tokenizer = make_tokenizer((TEMPLATES / "harmony.jinja").read_text(), special=HARMONY.special, eos="<|return|>")
    template = ChatTemplate(tokenizer, now=datetime(2020, 2, 3))
    assert template.prints_date
    assert "Current date: 2020-02-03\n" in template.render([user()], (), {}, add_generation_prompt=True)


def test_a_date_that_the_client_gives_is_printed():
    given = LLAMA3.codec.encode_opening([user()], (), {"date_string": "1 Jan 2000"})
    assert "Today Date: 1 Jan 2000\n" in LLAMA3.codec.decode(given)


# --- shapes of message ---------------------------------------------------------------------------------------------


def shaped(body):
    """A ChatML codec whose assistant turns are printed by `body`."""
    return make_codec(
        "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\\n' -}}"
        "{%- if message.role == 'assistant' -%}" + body + "{%- else -%}{{- message.content -}}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}"
    )


def test_arguments_are_given_as_json_text_where_the_template_takes_no_mapping():
    joined = "{%- for c in message.tool_calls or [] -%}{{- c.function.name + c.function.arguments -}}{%- endfor -%}"
    printing = "{%- for c in message.tool_calls or [] -%}{{- c.function.name ~ c.function.arguments -}}{%- endfor -%}"
    for body in (joined, printing):
        codec = shaped("{{- message.content -}}" + body)
        whole = codec.decode(codec.encode_opening([user(), CALLED, result()], TOOLS, {}))
        assert codec.template.habits.arguments_as_text
        assert 'look{"at":1}' in whole
    assert probe_template(codec.observations).mapping_form == "as Python writes mappings"


def test_reasoning_is_given_under_the_key_that_the_template_reads():
    codec = shaped("{{- message.thoughts or message.reasoning or '' -}}{{- message.content -}}")
    whole = codec.decode(codec.encode_opening([user(), assistant("b", reasoning="hm"), user("c")], (), {}))
    assert "assistant\nhmb<|im_end|>" in whole


def test_a_template_of_its_own_for_tools_is_used_where_there_are_tools():
    tokenizer = make_tokenizer.__wrapped__()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": QWEN2_5.codec.template.source}
    codec = ChatCodec.from_tokenizer(tokenizer)
    plain, with_tools = (codec.decode(codec.encode_opening([user()], tools, {})) for tools in ((), TOOLS))
    assert plain == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert with_tools.startswith("<|im_start|>system\nYou are Qwen.\n\n# Tools")
    new = [result("1", "call_1"), result("2", "call_2")]
    tail = codec.encode_observation(new, TOOLS, {}, turn=CALLED, turn_ids=[7])
    assert tail == codec.encode_opening([user(), CALLED, *new], TOOLS, {})[-len(tail) :]


BEHIND_RESULTS = """\
{%- set said = namespace(text='') -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<tool_response>' ~ message.content ~ '</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- (said.text or '') ~ '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- set said.text = message.content if message.tool_calls else '' -%}
{{- message.content if not message.tool_calls -}}
{%- for call in message.tool_calls or [] -%}{{- call.function.name ~ call.function.arguments | tojson -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""
"""Prints text beside a call behind the call's results."""


def test_results_are_not_lost_where_the_turns_text_is_printed_behind_them():
    codec = make_codec(BEHIND_RESULTS)
    turn = assistant("so", calls=(look_call("call_1"),))
    tail = codec.decode(codec.encode_observation([result("found")], TOOLS, {}, turn=turn, turn_ids=[7, 2]))
    assert tail == "\n<tool_response>found</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_messages_are_not_lost_behind_a_turn_that_the_template_forgets_to_close():
    closing_answers_only = (
        "{%- for message in messages -%}{{- '<|im_start|>' ~ message.role ~ '\\n' -}}"
        "{{- (message.reasoning_content or '') ~ message.content -}}"
        "{{- '<|im_end|>\\n' if message.content -}}{%- endfor -%}"
        "{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}"
    )
    codec = make_codec(closing_answers_only)
    turn = assistant(None, reasoning="hm")
    tail = codec.decode(codec.encode_observation([user("go on")], (), {}, turn=turn, turn_ids=[7]))
    assert tail == "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_of_the_renderer_are_not_the_clients():
    for name in ("sanitize_control_tokens", "chat_template"):
        with pytest.raises(InvalidRequest, match=name):
            QWEN3.codec.encode_opening([user()], (), {name: True})


def test_a_turn_is_recorded_as_its_family_writes_it():
    """The check of exactness is only as good as what it takes for a turn."""
    turn = assistant("ok", reasoning="hm", calls=(look_call("call_1"),))
    written = QWEN3.codec.decode(recorded_turn(QWEN3, turn, (result(),), {}, "by a stop token"))
    assert written == (
        '<think>\nhm\n</think>\n\nok\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call><|im_end|>'
    )


# --- turns that the client began --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("kwargs", [{}, {THINKING: False}], ids=["", "not thinking"])
def test_a_turn_that_the_client_began_goes_on_as_the_template_prints_it(family, kwargs):
    template, begun = family.codec.template, "The answer is"
    asked = (user("how much?"),)
    prompt = template.render(asked, (), kwargs, add_generation_prompt=True)
    printed = template.render((*asked, assistant(f"{begun} 4")), (), kwargs, add_generation_prompt=False)
    if family is DEEPSEEK_R1:  # its generation prompt opens the reasoning, and no history holds any
        with pytest.raises(InvalidRequest, match="can't go on from it"):
            prefill_text(template, begun, kwargs)
        return
    assert printed.startswith(f"{prompt}{prefill_text(template, begun, kwargs)} 4")


def test_a_beginning_that_the_template_prints_otherwise_is_refused():
    with pytest.raises(InvalidRequest, match="printed otherwise") as caught:
        prefill_text(LLAMA3.codec.template, "  trimmed", {})
    assert caught.value.param == "messages"
