"""ChatCodec: observations equal the template's own rendering; turns become canonical messages."""

from __future__ import annotations

import json
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from builders_tokens import (
    APPENDING,
    FORGETFUL,
    LOOK,
    STRICT,
    THINKING_PROMPT,
    assistant,
    look_call,
    make_codec,
    make_tokenizer,
    result,
    system,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.data.messages import ImagePart, Message
from relax_trio.data.normalize import normalize_messages
from relax_trio.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from relax_trio.ids import StateHash
from relax_trio.tokens.codec import ChatCodec
from relax_trio.tokens.limits import turn_budget
from relax_trio.tokens.probe import probe_template
from relax_trio.tokens.probe_text import report_lines
from relax_trio.tokens.turn_end import TurnEnd

STATE = StateHash(bytes(range(32)))
IM_END = 2

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
follow_ups = st.lists(st.builds(user, text) | st.builds(system, text) | st.builds(result, text), min_size=1, max_size=4)


def generated_text(message: Message) -> str:
    """What a model would have generated for `message` under the appending template."""
    codec = make_codec()
    rendered = codec.template.render((user(), message), (), {}, add_generation_prompt=False)
    return rendered.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


@settings(deadline=None)
@given(
    history=st.lists(st.builds(user, text), min_size=1, max_size=2),
    turn=st.builds(assistant, text.filter(lambda t: "<|" not in t), reasoning=st.none() | text)
    | st.builds(assistant, st.none() | text, calls=st.just((look_call(),))),
    new=follow_ups,
    with_tools=st.booleans(),
)
def test_an_observation_is_the_tail_of_the_templates_own_rendering(history, turn, new, with_tools):
    codec, tools = make_codec(), (LOOK,) if with_tools else ()
    prompt = codec.encode_opening(history, tools, {})
    recorded = array("i", codec._encode(generated_text(turn)))
    tail = codec.encode_observation(new, tools, {}, turn=turn, turn_ids=recorded)
    whole = codec.encode_opening([*history, turn, *new], tools, {})
    assert prompt + recorded + tail == whole


@pytest.mark.parametrize(
    ("turn", "new"),
    [
        (assistant(), [user("again")]),
        (assistant(None, calls=(look_call(), look_call("c2"))), [result("1"), result("2", "c2")]),
    ],
)
def test_after_a_stop_only_what_follows_the_end_of_turn_token_is_supplied(turn, new):
    codec = make_codec()
    cut = codec.encode_observation(new, (LOOK,), {}, turn=turn, turn_ids=[7])
    stopped = codec.encode_observation(new, (LOOK,), {}, turn=turn, turn_ids=[7, IM_END])
    assert cut[0] == IM_END
    assert cut[1:] == stopped
    assert codec.decode(stopped).startswith("\n<|im_start|>user")
    assert codec.decode(stopped).endswith("<|im_start|>assistant\n")


def test_a_stop_token_that_the_template_never_writes_closes_no_turn():
    codec = make_codec()
    supplied = codec.encode_observation([user("again")], (), {}, turn=assistant(), turn_ids=[7, 0])
    assert supplied[0] == IM_END


def test_templates_get_arguments_as_mappings_where_they_are_objects():
    codec = make_codec()
    asked = assistant(None, calls=(look_call(), look_call("c2", "no object")))
    printed = codec.decode(codec.encode_opening([user(), asked, result()], (), {}))
    assert '"arguments": {"at": 1}}' in printed
    assert '"arguments": no object}' in printed


def test_a_template_that_forgets_reasoning_still_gives_exact_observations():
    codec = make_codec(FORGETFUL)
    tail = codec.encode_observation([user("again")], (), {}, turn=assistant(), turn_ids=[7, IM_END])
    assert codec.decode(tail) == "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"


def test_the_codec_knows_how_a_turn_ends():
    codec = make_codec()
    assert codec.turn_ends.plain == codec.turn_ends.calls == TurnEnd("<|im_end|>", "\n")
    assert codec.turn_ends.closers == {"<|im_end|>"}
    assert set(codec.stop_token_ids) == {0, IM_END}
    assert codec.vocab_len == len(make_tokenizer())
    assert codec.token_text(IM_END) == "<|im_end|>"


def test_a_refusal_of_the_template_is_the_clients_400():
    codec = make_codec(STRICT)
    with pytest.raises(InvalidRequest, match="no tools here"):
        codec.encode_opening([user(), result()], (), {})
    with pytest.raises(InvalidRequest, match="no images"):
        codec.encode_opening([Message(role="user", content=(ImagePart("data:,"),))], (), {})


def test_a_later_system_message_that_the_template_refuses_is_rendered_as_a_user_message():
    codec = make_codec(STRICT)
    later = codec.encode_opening([system("a"), user("b"), system("c"), user("d")], (), {})
    assert codec.decode(later) == (
        "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )
    tail = codec.encode_observation([system("c"), user("d")], (), {}, turn=assistant(), turn_ids=[7, IM_END])
    assert codec.decode(tail).startswith("\n<|im_start|>user\nc<|im_end|>")


# --- reading turns ---------------------------------------------------------------------------------------------


def read(codec, written, *, stopped=True, tools=(LOOK,), stop_string=None, state=STATE, kwargs=None):
    ids = array("i", codec._encode(written))
    if stopped and stop_string is None:
        ids.append(IM_END)
    return codec.read_turn(
        ids, stopped=stopped, tools=tools, state=state, stop_string=stop_string, chat_template_kwargs=kwargs
    )


CALL = '<tool_call>\n{"name": "look", "arguments": {"b": 2.0, "a": 1}}\n</tool_call>'


def test_a_turn_with_reasoning_text_and_calls_is_taken_apart():
    turn = read(make_codec(), f"<think>\nhm\n</think>\n\nLet me look.\n{CALL}\n{CALL}")
    assert turn.message.reasoning_content == "hm"
    assert turn.message.content == "Let me look."
    assert [(call.name, call.arguments) for call in turn.message.tool_calls] == [("look", '{"a":1,"b":2}')] * 2
    assert turn.finish == "tool_calls"
    assert turn.flags == ()


def test_call_ids_are_a_function_of_state_tokens_and_position():
    first, again = (read(make_codec(), f"{CALL}\n{CALL}").message.tool_calls for _ in range(2))
    assert first == again
    assert first[0].id != first[1].id
    other = read(make_codec(), f"{CALL}\n{CALL}", state=StateHash(bytes(32))).message.tool_calls
    cut = read(make_codec(), f"{CALL}\n{CALL}", stopped=False).message.tool_calls
    assert len({call.id for call in (*first, *other, *cut)}) == 6
    assert all(len(call.id) == len("call_") + 24 for call in first)


def test_without_tools_in_the_lineage_call_markup_is_text():
    turn = read(make_codec(), CALL, tools=())
    assert (turn.message.content, turn.message.tool_calls, turn.finish) == (CALL, (), "stop")


@pytest.mark.parametrize(
    ("written", "content", "names", "flags"),
    [
        ('<tool_call>\n{"name": "look", "arg', '<tool_call>\n{"name": "look", "arg', [], ("unparsed_tool_call",)),
        (f"a <tool_call>oops</tool_call>\n{CALL}", "a <tool_call>oops</tool_call>", ["look"], ("unparsed_tool_call",)),
        ('<tool_call>\n{"name": "fly"}\n</tool_call>', None, ["fly"], ("unknown_tool",)),
        ('<tool_call>\n{"name": "look", "arguments": 5}\n</tool_call>', None, ["look"], ("scalar_arguments",)),
        (f"<think>{CALL}</think>ok", "ok", [], ("call_in_reasoning",)),
    ],
)
def test_unusual_turns_reach_the_agent_and_carry_a_flag(written, content, names, flags):
    turn = read(make_codec(), written)
    assert turn.message.content == content
    assert [call.name for call in turn.message.tool_calls] == names
    assert turn.flags == flags


def test_finish_without_calls_says_how_the_turn_ended():
    assert read(make_codec(), "done").finish == "stop"
    assert read(make_codec(), "do", stopped=False).finish == "length"


def test_an_empty_turn_has_empty_content():
    codec = make_codec()
    assert read(codec, "").message == assistant("")
    empty = codec.read_turn(array("i"), stopped=False, tools=(), state=STATE, stop_string=None)
    assert (empty.message, empty.finish) == (assistant(""), "length")


def test_a_stop_string_and_what_follows_it_are_not_part_of_the_message():
    assert read(make_codec(), "one\nObservation: x", stop_string="Observation").message.content == "one\n"


def test_the_first_occurrence_of_a_stop_string_counts():
    assert read(make_codec(), "a STOP b STOP", stop_string="STOP").message.content == "a "


def test_only_the_last_stop_token_is_taken_off():
    codec = make_codec()
    ids = array("i", [*codec._encode("a"), 0, *codec._encode("b"), 0])
    turn = codec.read_turn(ids, stopped=True, tools=(), state=STATE, stop_string=None)
    assert turn.message.content == "a<|endoftext|>b"


def test_a_prompt_that_opens_the_reasoning_is_noticed():
    codec = make_codec(THINKING_PROMPT)
    opened = read(codec, "hm</think>\n\nyes")
    assert (opened.message.reasoning_content, opened.message.content) == ("hm", "yes")
    assert read(codec, "yes", kwargs={"enable_thinking": False}).message == assistant("yes")
    cut = read(codec, "hm", stopped=False)
    assert (cut.message, cut.finish) == (assistant(None, reasoning="hm"), "length")


pieces = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "\n", " ", "a", CALL, "<tool_call>", "</tool_call>", '{"name": "look"}', "\x00é"]
    )
    | text,
    max_size=8,
).map("".join)


@settings(deadline=None)
@given(written=pieces, stopped=st.booleans(), reasoning=st.sampled_from([None, "qwen3", "deepseek-r1"]))
def test_a_message_sent_back_as_json_is_the_same_message(written, stopped, reasoning):
    turn = read(make_codec(reasoning=reasoning), written, stopped=stopped)
    sent = json.loads(json.dumps([user().to_chat(), turn.message.to_chat()]))
    assert normalize_messages(sent)[1] == turn.message


# --- loading ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_directory_gives_the_same_codec(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    codec = ChatCodec.load(tmp_path, reasoning_parser=None, tool_call_parser="hermes")
    assert set(codec.stop_token_ids) == {0, IM_END}
    assert codec.encode_opening([user()], (), {}) == make_codec().encode_opening([user()], (), {})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}x{% endfor %}", "does not print"),
        ("{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}", "no special token"),
        ("{{ broken", "cannot be rendered"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_a_template_that_cannot_be_trained_with_is_refused_at_start(template, words):
    with pytest.raises(ConfigError, match=words):
        ChatCodec.from_tokenizer(make_tokenizer(template), name="here")


def test_a_missing_checkpoint_and_unknown_parsers_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="not a directory"):
        ChatCodec.load(tmp_path / "none", reasoning_parser=None, tool_call_parser=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatCodec.load(tmp_path, reasoning_parser=None, tool_call_parser=None)
    with pytest.raises(ConfigError, match="known are deepseek-r1, qwen3"):
        ChatCodec.from_tokenizer(make_tokenizer(), reasoning_parser="nope")
    with pytest.raises(ConfigError, match="known are hermes, "):
        ChatCodec.from_tokenizer(make_tokenizer(), tool_call_parser="nope")


def test_worker_threads_may_share_a_codec():
    codec = make_codec()
    wanted = codec.encode_opening([user("hello " * 200)], (), {})

    def work(_):
        assert codec.decode(codec.encode_opening([user("hello " * 200)], (), {})) == codec.decode(wanted)
        return codec.encode_observation([user()], (), {}, turn=assistant(), turn_ids=[7, IM_END])

    with ThreadPoolExecutor(4) as pool:
        assert len({tuple(ids) for ids in pool.map(work, range(40))}) == 1


# --- probe, limits ---------------------------------------------------------------------------------------------


def probed(template):
    return probe_template(make_codec(template).observations)


def test_the_probe_tells_templates_that_append_from_those_that_rewrite():
    assert {turn.verdict for turn in probed(APPENDING).turns} == {"append-only"}
    assert probed(FORGETFUL).rewriting == ("reasoning", "reasoning with a tool call")
    strict = {turn.kind: turn.verdict for turn in probed(STRICT).turns}
    assert strict["plain"] == "append-only"
    assert strict["system later"] == "append-only"
    assert strict["reasoning"] == "rewriting"
    assert strict["one tool call"] == "refused"


def test_the_probe_shows_the_first_differing_bytes_on_both_sides():
    (reasoning, calling) = [turn for turn in probed(FORGETFUL).turns if turn.verdict == "rewriting"]
    prompt = "<|im_start|>user\nquestion one<|im_end|>\n<|im_start|>assistant\n"
    assert reasoning.detail == "when the next messages come"
    assert reasoning.difference.at == len(prompt)
    assert prompt.endswith(reasoning.difference.before)
    assert reasoning.difference.recorded.startswith("<think>\nthought one\n</think>")
    assert reasoning.difference.template.startswith("answer one<|im_end|>")
    assert calling.detail == "when a further user message comes"


def test_the_probe_plays_enable_thinking_where_the_template_has_it():
    report = probed(THINKING_PROMPT)
    verdicts = {turn.kind: turn.verdict for turn in report.turns}
    assert "enable_thinking" in report.variables
    assert verdicts["plain"] == "rewriting"
    assert verdicts["plain, enable_thinking false"] == "append-only"
    assert not any(kind.endswith("enable_thinking true") for kind in verdicts)  # the same as when nothing is said


def test_the_report_tells_a_person_what_was_found():
    lines = report_lines(probed(THINKING_PROMPT))
    assert "variables   enable_thinking" in lines
    assert "plain turn  ends with '<|im_end|>', then '\\n'" in lines
    assert "            a mapping is printed as JSON, JSON text as JSON" in lines
    assert any(line.startswith("plain ") and "rewriting" in line and "at byte" in line for line in lines)
    assert any(line.startswith("    recorded  ") and "<think>" in line for line in lines)


def test_a_turns_budget_is_the_smallest_of_its_limits():
    assert turn_budget(n_prompt=10, max_context_len=100, turn_limit=50, request_max=None) == 50
    assert turn_budget(n_prompt=10, max_context_len=100, turn_limit=50, request_max=7) == 7
    assert turn_budget(n_prompt=60, max_context_len=100, turn_limit=50, request_max=70) == 40
    assert turn_budget(n_prompt=99, max_context_len=100, turn_limit=None, request_max=None) == 1
    with pytest.raises(ContextLengthExceeded) as caught:
        turn_budget(n_prompt=100, max_context_len=100, turn_limit=50, request_max=1)
    assert (caught.value.n_prompt, caught.value.max_context_len) == (100, 100)
