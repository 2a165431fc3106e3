"""The Messages dialect, histories: which canonical messages, tools and template arguments a request holds."""

from __future__ import annotations

import json

import pytest
from builders_messages import HI, assistant, parse, read, result, said, text, tool_use, user

from relax_trio.api.anthropic import MESSAGES
from relax_trio.api.sealed import seal
from relax_trio.data.messages import ToolCall

SWITCH = frozenset({"messages", "enable_thinking"})
BILLING = "x-anthropic-billing-header: cc_version=2.1.4; cch=3f1a;"


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("terse", "terse"),
        ([text("a"), text("b", cache_control={"type": "ephemeral"})], "ab"),
        ([text(BILLING), text("terse")], "terse"),
        ([text(f"{BILLING}\n"), text(f"{BILLING}\nbe terse")], f"{BILLING}\nbe terse"),
        ([text(BILLING)], None),
        (BILLING, None),
        ("", None),
        ([], None),
        (None, None),
    ],
    ids=str,
)
def test_system_text_is_one_message_without_the_volatile_block(system, content):
    before = () if content is None else (said("system", content),)

    assert read(*HI, system=system) == (*before, said("user", "hi"))


def test_system_messages_stand_where_they_were_sent_and_leading_ones_are_one():
    messages = read(
        {"role": "system", "content": [text("b")]},
        {"role": "system", "content": BILLING},
        *HI,
        {"role": "system", "content": "c"},
        system="a",
    )

    assert messages == (said("system", "a\n\nb"), said("user", "hi"), said("system", "c"))


def test_results_become_tool_messages_before_the_users_text():
    messages = read(
        *HI,
        assistant(tool_use({"a": 1}, "t1"), tool_use({}, "t2"), tool_use({}, "t3"), tool_use({}, "t4")),
        user(
            result("t1", content="4"),
            result("t2", content=[text("4"), text("2")], is_error=True, cache_control={"type": "ephemeral"}),
            result("t3", content=None),
            result("t4"),
            text("go "),
            text("on"),
        ),
    )

    assert messages[2:] == (
        said("tool", "4", tool_call_id="t1"),
        said("tool", "42", tool_call_id="t2"),
        said("tool", "", tool_call_id="t3"),
        said("tool", "", tool_call_id="t4"),
        said("user", "go on"),
    )


def test_blocks_keep_their_order():
    messages = read(user(text("a"), result("t1", content="1"), text("b"), result("t2", content=""), text("")))

    assert [(m.role, m.content) for m in messages] == [("user", "a"), ("tool", "1"), ("user", "b"), ("tool", "")]


def test_an_assistant_message_is_one_message():
    messages = read(
        *HI,
        assistant(
            {"type": "thinking", "thinking": "one", "signature": "c2ln"},
            {"type": "thinking", "thinking": "two", "signature": "c2ln"},
            text("a"),
            text("b"),
            tool_use({"b": 1.0, "a": "x"}),
        ),
    )

    call = ToolCall(id="toolu_1", name="calc", arguments='{"a":"x","b":1}')
    assert messages[1] == said("assistant", "ab", reasoning_content="one\n\ntwo", tool_calls=(call,))


@pytest.mark.parametrize("content", ["", [], [text("")]])
def test_an_assistant_may_have_said_nothing(content):
    assert read(*HI, {"role": "assistant", "content": content})[1] == said("assistant", "")


def test_plain_strings_stand_for_text_blocks():
    assert read(user("a", {"text": "b"})) == (said("user", "ab"),)


@pytest.mark.parametrize(("given", "arguments"), [(None, "{}"), ('{"b": 1, "a": 2}', '{"a":2,"b":1}'), ("no", "no")])
def test_inputs_that_are_no_object_are_read_as_in_the_other_apis(given, arguments):
    (call,) = read(*HI, assistant(tool_use(given)))[1].tool_calls

    assert call.arguments == arguments


def test_what_nothing_serves_is_skipped_and_named_once():
    parsed = parse(
        [
            user({"type": "document", "source": {}}, text("hi"), {"type": "document"}),
            assistant(
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "redacted_thinking", "data": "c2VjcmV0"},
                {"type": "thinking", "thinking": "", "signature": "c2ln"},
                text("ok"),
            ),
            user(result(content=[{"type": "search_result"}, text("4"), {"type": "x" * 1000}])),
        ],
        tools=[
            {"type": "web_search_20250305", "name": "web_search"},
            {"name": "calc", "input_schema": {"type": "object"}},
            {"type": "custom", "name": "echo", "description": "say", "input_schema": {}, "defer_loading": True},
        ],
    )

    assert [(m.role, m.content) for m in parsed.request.messages] == [
        ("user", "hi"),
        ("assistant", "ok"),
        ("tool", "4"),
    ]
    assert [tool["function"]["name"] for tool in parsed.request.tools] == ["calc", "echo"]
    assert parsed.request.skipped == (
        "document",
        "server_tool_use",
        "redacted_thinking",
        "thinking",
        "search_result",
        "x" * 64,
        "tool web_search_20250305",
    )


def test_a_message_of_nothing_else_is_skipped_too():
    messages = read(
        {"role": "system", "content": [{"type": "document"}]},
        user({"type": "document"}),
        *HI,
        assistant({"type": "server_tool_use"}),
        user(result(content=[{"type": "document"}])),
        user({"type": "document"}),
    )

    assert messages == (said("user", "hi"), said("assistant", ""), said("tool", "", tool_call_id="toolu_1"))


def test_tools_become_function_tools_with_the_keys_in_openais_order():
    tool = {
        "input_schema": {"type": "object"},
        "cache_control": {"type": "ephemeral"},
        "strict": True,
        "description": "add",
        "name": "calc",
    }

    assert json.dumps(parse(tools=[tool]).request.tools[0]) == json.dumps(
        {
            "type": "function",
            "function": {"name": "calc", "description": "add", "parameters": {"type": "object"}, "strict": True},
        }
    )


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({}, None),
        ({"thinking": None}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False),
        ({"output_config": {"effort": "low"}}, True),
        ({"output_config": {"effort": "none"}}, False),
        ({"output_config": {"format": {"type": "json_schema"}}}, None),
        ({"output_config": None}, None),
    ],
    ids=str,
)
def test_thinking_is_a_template_argument_only_where_the_template_has_one(fields, wish):
    kwargs = {} if wish is None else {"enable_thinking": wish}

    assert parse(**fields, template_variables=SWITCH).request.chat_template_kwargs == kwargs
    assert parse(**fields).request.chat_template_kwargs == {}


def test_template_arguments_win_over_thinking():
    request = parse(
        thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False}, template_variables=SWITCH
    ).request

    assert request.chat_template_kwargs == {"enable_thinking": False}


def test_a_request_like_claude_codes_is_a_plain_conversation():
    """Moving cache marks, a volatile billing block, reminders as system messages: no state depends on them."""

    def body(turn, mark):
        marked = {"cache_control": {"type": "ephemeral"}}
        return {
            "model": "claude-opus-4-6",
            "max_tokens": 32000,
            "stream": True,
            "betas": ["claude-code-20250219"],
            "metadata": {"user_id": f"user_{turn}"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "system": [text(f"x-anthropic-billing-header: cch={turn};"), text("You are an agent.", **marked)],
            "messages": [
                user(text("fix it", **(marked if mark == 0 else {}))),
                {"role": "system", "content": "Files may have changed."},
                assistant({"type": "thinking", "thinking": "hm", "signature": seal("hm")}, tool_use({"a": 1})),
                user(result(content="done", **(marked if mark == 1 else {}))),
            ],
            "tools": [{"name": "Bash", "description": "run", "input_schema": {"type": "object"}}],
        }

    first, second = (MESSAGES.parse(body(n, n), digest=b"", retry=False).request for n in (0, 1))

    assert first == second
    assert [m.role for m in first.messages] == ["system", "user", "system", "assistant", "tool"]
    assert first.messages[0].content == "You are an agent."
