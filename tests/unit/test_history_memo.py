"""Histories that are remembered: a body means the same, whether its beginning was read before or not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.api import history as history_module
from relax_trio.api.chat import CHAT
from relax_trio.api.history import HistoryMemo, read_json
from relax_trio.errors import InvalidRequest

PATH = "/agentic_api/v1/chat/completions"
SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "é漢🙂"}
ANSWER = {
    "role": "assistant",
    "content": None,
    "reasoning": "hm",
    "tool_calls": [{"id": "c", "function": {"name": "f"}}],
}
RESULT = {"role": "tool", "content": "", "tool_call_id": "c"}
TOOL = {"type": "function", "function": {"name": "f"}}


def ask(memo, raw, path=PATH):
    """What the front half does with a body: the request or the error, and whether a beginning was known."""
    known = memo.find(path, raw)
    try:
        body = read_json(path, raw, known=known, key=CHAT.history_key)
        parsed = CHAT.parse(body.value, digest=body.digest, retry=False, known=body.known)
    except InvalidRequest as exc:
        return (str(exc), exc.param), False
    kept = None if parsed.request.skipped else body.history(parsed.request.messages, parsed.request.tools)
    if kept is not None:
        memo.remember(kept, behind=known)
    return parsed, body.known is not None


def body(messages, *, plain=True, **fields):
    return json.dumps({"model": "m", "messages": messages, **fields}, ensure_ascii=plain).encode()


def test_a_body_that_goes_on_is_read_behind_what_is_known():
    memo = HistoryMemo()
    first, _ = ask(memo, body([SYSTEM, USER], plain=False))
    raw = body([SYSTEM, USER, ANSWER, RESULT], plain=False, tools=[TOOL])
    known = memo.find(PATH, raw)
    assert read_json(PATH, raw, known=known, key="messages").value["messages"] == [ANSWER, RESULT]
    second, was_known = ask(memo, raw)
    assert was_known
    assert second.request.messages[:2] == first.request.messages
    assert second.request.messages[0] is first.request.messages[0]
    assert second == ask(HistoryMemo(), raw)[0]
    assert len(memo._histories) == 1


def test_leading_system_messages_are_one_wherever_the_known_beginning_ends():
    raw = [body([SYSTEM] * n + [USER] * (n > 2)) for n in (1, 2, 3)]
    memo = HistoryMemo()
    for n, sent in enumerate(raw, 1):
        parsed, was_known = ask(memo, sent)
        assert was_known is (n > 1)
        assert parsed == ask(HistoryMemo(), sent)[0]
    assert parsed.request.messages[0].content == "s\n\ns\n\ns"


@pytest.mark.parametrize(
    "tail",
    [
        b"]}",
        b' ] , "n": 1}',
        b",]}",
        b", ]}",
        b"",
        b"]",
        b"}",
        b"]}x",
        b"}]}",
        b',{"role":"user"}]}',
        b',{"role":"user","content":"x"},7]}',
        b',{"role":"user","content":"x"}],"messages":[{"role":"user","content":"y"}]}',
        b'],"messages":[{"role":"user","content":"y"}]}',
        b'],"messages":null}',
        b'],"seed":NaN}',
        b'],"seed":1.5}',
        b',{"role":"user","content":[{"type":"image_url","image_url":"data:x"}]}]}',
        b',{"role":"user","content":[{"type":"audio"}]}]}',
        b',{"role":"user","content":"\xff"}]}',
        b',{"role":"user","content":' + b"[" * 300 + b"]" * 300 + b"}]}",
        b' "x"]}',
    ],
)
def test_whatever_is_behind_a_known_beginning_is_taken_or_refused_as_ever(tail):
    start = json.dumps({"model": "é", "messages": [SYSTEM, USER]})[:-2].encode()
    memo = HistoryMemo()
    ask(memo, start + b"]}")
    assert memo.find(PATH, start + tail) is not None
    assert ask(memo, start + tail)[0] == ask(HistoryMemo(), start + tail)[0]


MESSAGES = st.lists(st.sampled_from([SYSTEM, USER, ANSWER, RESULT, {"role": "user", "content": ""}]), max_size=4)
FIELDS = st.dictionaries(st.sampled_from(["seed", "tools", "x"]), st.sampled_from([1, [TOOL], "é"]), max_size=2)


@settings(max_examples=200)
@given(st.lists(st.tuples(MESSAGES, FIELDS, FIELDS, st.booleans(), st.sampled_from([None, 1])), max_size=6))
def test_requests_in_any_order_mean_what_they_mean_alone(requests):
    memo = HistoryMemo()
    line = []
    for more, before, behind, goes_on, indent in requests:
        line = [*line, *more] if goes_on else list(more)
        raw = json.dumps({**before, "messages": line, **behind}, ensure_ascii=goes_on, indent=indent).encode()
        assert ask(memo, raw)[0] == ask(HistoryMemo(), raw)[0]


def test_paths_do_not_share_histories():
    memo, raw = HistoryMemo(), body([USER])
    ask(memo, raw)
    parsed, was_known = ask(memo, raw, "/elsewhere")
    assert not was_known
    assert parsed.request.digest != ask(memo, raw)[0].request.digest


def test_a_history_of_which_something_was_left_out_is_told_each_time():
    memo = HistoryMemo()
    raw = body([USER, {"role": "user", "content": [{"type": "audio"}]}])
    for _ in range(2):
        parsed, was_known = ask(memo, raw)
        assert (parsed.request.skipped, was_known) == (("audio",), False)


def test_only_the_last_few_are_remembered(monkeypatch):
    memo = HistoryMemo()
    for name in "abcdef":
        ask(memo, body([{"role": "user", "content": name}]))
    assert [history.messages[0].content for history in memo._histories] == ["c", "d", "e", "f"]
    monkeypatch.setattr(history_module, "_MOST_BYTES", 2 * len(memo._histories[0].prefix) + 10)
    ask(memo, body([{"role": "user", "content": "g"}]))
    assert [history.messages[0].content for history in memo._histories] == ["f", "g"]
    ask(memo, body([{"role": "user", "content": "h" * 1000}]))
    assert memo._histories == []
    memo.clear()
    assert memo.find(PATH, body([USER])) is None
