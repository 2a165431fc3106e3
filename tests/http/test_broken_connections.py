"""Captured conversations over the real server while connections break: one call, one node, one leaf for each turn.

A client whose connection broke sends the same body again, marked as the SDKs mark it.
"""

from __future__ import annotations

import json

import pytest
import trio
from builders_served import body_of, open_served, read_to_end, status_of
from builders_wire import CAPTURES, CONVERSATIONS, REWRITTEN, said, with_ids_of, written

LAST = "</think>The answer is 4."
LEAVES_S = 1.0
"""When a client leaves in a hold: every turn takes longer."""

BACK_S = 2.0
"""How long it stays away: within a grace of 5 s."""

ONE_OF_EACH_API = [
    ("openai-sdk/006", "openai-sdk/007"),
    ("pydantic-ai-responses/001", "pydantic-ai-responses/002"),
    ("anthropic-sdk/008", "anthropic-sdk/009"),
]


async def replay(served, names, ask, *, stream=None):
    """Both requests of a conversation; the model says what the captured server said. `ask` sends one."""
    first, second = (CAPTURES[name] for name in names)
    session, theirs = served.session, said(first, second)
    await ask(first.path, _body(first.body, stream))
    (leaf,) = session.forest.leaves()
    await ask(second.path, _body(with_ids_of(second.body, theirs, leaf.messages[0]), stream))


def _body(body, stream):
    return json.dumps(body if stream is None else {**body, "stream": stream}).encode()


def check_one_line(served):
    """One root, one leaf, and nothing beside the line between them; the client has all of it."""
    assert served.kinds == ["root", *["observation", "response"] * 2]
    forest = served.session.forest
    assert len(forest.root.children) == len(forest.leaves()) == len(forest.exportable_leaves()) == 1


@pytest.mark.parametrize("names", CONVERSATIONS, ids="+".join)
async def test_a_captured_conversation_is_one_line(loopback_clock, names):
    async def ask(path, body):
        assert status_of(await served.ask(path, body)) == 200

    async with open_served([written(said(*map(CAPTURES.get, names))), LAST]) as served:
        await replay(served, names, ask)
        check_one_line(served)
        assert served.n_generated == 2


@pytest.mark.parametrize("names", REWRITTEN, ids="+".join)
async def test_a_client_that_rewrites_turns_begins_a_conversation_with_each_request(loopback_clock, names):
    """What the model generated is not in such a request: it can't be a part of its lineage."""
    first, second = (CAPTURES[name] for name in names)
    call = '<tool_call>\n{"name": "calc", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    async with open_served([f"</think>{call}", LAST]) as served:
        for capture in (first, second):
            assert status_of(await served.ask(capture.path, _body(capture.body, None))) == 200
        assert served.kinds == ["root", *["observation", "response"] * 2]
        assert len(served.session.forest.root.children) == len(served.session.forest.leaves()) == 2


# --- where a connection may break ----------------------------------------------------------------------------------


async def send_part(served, head, body, n_bytes):
    """Send this many bytes of a request and leave."""
    async with await trio.open_tcp_stream("127.0.0.1", served.port) as stream:
        await stream.send_all((head + body)[:n_bytes])
        await trio.sleep(0.1)


async def before_headers(served, head, body, reply):
    await send_part(served, head, body, 0)


async def in_headers(served, head, body, reply):
    await send_part(served, head, body, len(head) // 2)


async def before_body(served, head, body, reply):
    await send_part(served, head, body, len(head))


async def in_body(served, head, body, reply):
    await send_part(served, head, body, len(head) + len(body) // 2)


async def before_last_byte_of_body(served, head, body, reply):
    await send_part(served, head, body, len(head) + len(body) - 1)


async def in_hold(served, head, body, reply):
    async with await trio.open_tcp_stream("127.0.0.1", served.port) as stream:
        await stream.send_all(head + body)
        await trio.sleep(LEAVES_S)


async def get_part(served, head, body, n_bytes):
    """The connection breaks when this many bytes of the reply are through; the server sees it as it writes on."""
    served.cuts.append(n_bytes)
    async with await trio.open_tcp_stream("127.0.0.1", served.port) as stream:
        await stream.send_all(head + body)
        assert len(await read_to_end(stream)) <= n_bytes


async def before_reply(served, head, body, reply):
    await get_part(served, head, body, 0)


async def in_reply_headers(served, head, body, reply):
    await get_part(served, head, body, 20)


async def before_reply_body(served, head, body, reply):
    await get_part(served, head, body, reply.index(b"\r\n\r\n") + 4)


async def in_reply_body(served, head, body, reply):
    await get_part(served, head, body, _end(reply) - 60)


async def before_last_byte(served, head, body, reply):
    await get_part(served, head, body, _end(reply) - 1)


def _end(reply):
    """Where the reply's last byte is through: of a chunked one, that of its last chunk that says something."""
    return len(reply.removesuffix(b"\r\n0\r\n\r\n"))


UNSEEN = (before_headers, in_headers, before_body, in_body, before_last_byte_of_body)
HELD = (in_hold,)
REPLYING = (before_reply, in_reply_headers, before_reply_body, in_reply_body, before_last_byte)


FAULTS = [
    *[(fault, False, 5.0) for fault in UNSEEN],
    *[(fault, stream, grace_s) for fault in (*HELD, *REPLYING) for stream in (False, True) for grace_s in (0.0, 5.0)],
]
"""With whether a stream is asked for, and the grace; neither matters for a request that the server never gets whole."""


async def whole_replies(names, stream, _known={}):  # noqa: B006  # shared by the tests: it is what they compare with
    """The replies of a conversation in which nothing breaks, as bytes on the wire, and its states."""
    if (names, stream) not in _known:
        replies = []

        async def ask(path, body):
            replies.append(await served.ask(path, body))

        async with open_served([written(said(*map(CAPTURES.get, names))), LAST]) as served:
            await replay(served, names, ask, stream=stream)
            _known[names, stream] = replies, [node.state for node in served.session.forest.nodes]
    return _known[names, stream]


@pytest.mark.parametrize(
    ("fault", "stream", "grace_s"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
async def test_a_marked_retry_after_a_broken_connection_is_the_same_turn(loopback_clock, fault, stream, grace_s):
    """Only where a grace of 0 ends a held turn at once is the engine asked again, and nothing of the first is kept."""
    is_seen_in_hold = fault in HELD or (stream and fault in REPLYING[:3])
    for names in ONE_OF_EACH_API:
        replies, states = await whole_replies(names, stream)
        whole = iter(replies)

        async def ask_twice(path, body, whole=whole):
            reply = next(whole)
            await fault(served, served.head(path, body), body, reply)
            await trio.sleep(BACK_S)
            again = await served.ask(path, body, retry=1)
            assert status_of(again) == 200
            assert body_of(again).endswith(body_of(reply)[-30:])

        async with open_served([written(said(*map(CAPTURES.get, names))), LAST], retry_grace_s=grace_s) as served:
            await replay(served, names, ask_twice, stream=stream)
            check_one_line(served)
            assert [node.state for node in served.session.forest.nodes] == states
            assert served.n_generated == (4 if is_seen_in_hold and not grace_s else 2)
            assert [call.is_delivered for call in served.session.calls if call.node is not None] == [True, True]
            assert len(served.session.calls) == served.n_generated


# --- what is no retry ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ONE_OF_EACH_API, ids="+".join)
@pytest.mark.parametrize("stream", [False, True], ids=["json", "sse"])
async def test_an_unmarked_repeat_samples_afresh(loopback_clock, names, stream):
    """After a lost reply, and beside a request in flight."""
    capture = CAPTURES[names[0]]
    body = _body(capture.body, stream)
    async with open_served([f"</think>{n}" for n in range(3)]) as served:
        reply = await served.ask(capture.path, body)
        served.cuts.append(_end(reply) - 1)
        await served.ask(capture.path, body)
        await served.ask(capture.path, body)
        assert served.n_generated == 3
        assert served.kinds == ["root", "observation", *["response"] * 3]
        assert [call.is_delivered for call in served.session.calls] == [True, False, True]


@pytest.mark.parametrize("names", ONE_OF_EACH_API, ids="+".join)
async def test_retries_that_overlap_share_one_call(loopback_clock, names):
    """A client's own timeout breaks nothing that the server sees: both connections get the reply."""
    capture = CAPTURES[names[0]]
    replies = []

    async def ask(retry):
        replies.append(body_of(await served.ask(capture.path, _body(capture.body, False), retry=retry)))

    async with open_served(["</think>one", "</think>two"]) as served:
        async with trio.open_nursery() as nursery:
            for retry in range(3):
                nursery.start_soon(ask, retry)
                await trio.sleep(0.5)
        assert len(set(replies)) == 1
        assert served.n_generated == len(served.session.calls) == 1


REFUSED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": ""}]},
    "/v1/responses": {"input": "hi", "previous_response_id": "resp_1"},
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        ],
    },
}


@pytest.mark.parametrize("names", ONE_OF_EACH_API, ids="+".join)
async def test_a_refused_retry_leaves_the_forest_as_it_was(loopback_clock, names):
    capture = CAPTURES[names[0]]
    async with open_served(["</think>one", "</think>two"]) as served:
        await served.ask(capture.path, _body(capture.body, False))
        before = served.nodes
        for retry in (0, 1, 2):
            reply = await served.ask(capture.path, json.dumps(REFUSED[capture.path]).encode(), retry=retry)
            assert status_of(reply) == 400
            assert b"x-should-retry: false" in reply
        assert served.nodes == before
        assert served.n_generated == 1
