"""Every request that real clients sent, against the server with a real Session: served, or refused as documented."""

from __future__ import annotations

import json

from builders_served import body_of, open_served, status_of
from builders_wire import CAPTURES

NOT_SERVED = {
    "openai-sdk/005": (400, None, "this checkpoint takes no images"),
    "openai-sdk/033": (400, None, "this checkpoint takes no images"),
    "anthropic-sdk/004": (400, None, "this checkpoint takes no images"),
    "openai-sdk/032": (400, "previous_response_id", "send the complete input"),
    "openai-sdk/036": (404, None, "/v1/chat/completions"),
    "openai-sdk/037": (404, None, "/v1/chat/completions"),
}
"""Status, param and part of the message."""

ENDS = {
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/responses": b'"type":"response.completed"',
    "/v1/messages": b"event: message_stop",
}
MARKED_RETRIES = ("openai-sdk/019", "openai-sdk/022", "openai-sdk/025", "openai-sdk/028")
"""Each was sent once the request numbered before it had failed."""


def test_the_captures_are_those_of_all_clients():
    by_path = {}
    for capture in CAPTURES.values():
        by_path[capture.path] = by_path.get(capture.path, 0) + 1

    assert len({capture.client for capture in CAPTURES.values()}) == 12
    assert by_path == {
        "/v1/chat/completions": 54,
        "/v1/responses": 13,
        "/v1/messages": 22,
        "/v1/messages/count_tokens": 1,
        "/v1/models": 1,
        "/v1/completions": 2,
    }


async def test_every_captured_request_is_served_or_refused_as_documented(loopback_clock, events):
    """One Session for all: each request begins a conversation of its own, or repeats one and samples afresh."""
    async with open_served([f"</think>{n}" for n in range(100)], tokens_per_s=float("inf")) as served:
        wrong = {}
        for name, capture in CAPTURES.items():
            n_before = len(served.session.forest.nodes)
            body = b"" if capture.body is None else json.dumps(capture.body).encode()
            retry = int(name in MARKED_RETRIES)
            reply = await served.ask(capture.path, body, method=capture.method, retry=retry)
            problem = (
                _refused(reply, *NOT_SERVED[name], grown=len(served.session.forest.nodes) - n_before)
                if name in NOT_SERVED
                else _served(reply, capture)
            )
            if problem:
                wrong[name] = problem

    assert wrong == {}
    assert {(event.name, event.fields["flag"]) for event in events} == {("turn.flagged", "tool_choice_not_met")}


def _served(reply, capture):
    """What is wrong with the reply to a request that is served, None where nothing is."""
    body = body_of(reply)
    if status_of(reply) != 200:
        return reply
    if capture.body and capture.body.get("stream"):
        return None if ENDS[capture.path] in body and b"event: error" not in body else body
    value = json.loads(body)
    if capture.path == "/v1/models":
        return None if value["object"] == "list" else value
    if capture.path.endswith("count_tokens"):
        return None if value["input_tokens"] > 0 else value
    return None if value["model"] == capture.body["model"] else value


def _refused(reply, status, param, says, *, grown):
    error = json.loads(body_of(reply))["error"]
    is_as_said = (status_of(reply), error.get("param")) == (status, param) and says in error["message"]
    return None if is_as_said and not grown else (reply, grown)
