"""The Chat Completions dialect.

A request may set its history, tools, template arguments, token limit, stop strings, seed and logprobs; sampling is the
run's. Not covered: what messages mean (data/normalize.py), how long a request is held, where a call runs.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from relax_trio.api.dialect import ParsedRequest, reply_bytes, sse_comment, sse_data
from relax_trio.api.envelopes import openai_error
from relax_trio.api.fields import (
    SEED_LIMIT,
    body_object,
    kind_of,
    optional_bool,
    optional_int,
    optional_text,
    refuse_many_choices,
    stop_strings,
)
from relax_trio.api.history import History
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import Message
from relax_trio.data.normalize import clean_text, normalize_messages, normalize_template_kwargs, normalize_tools
from relax_trio.data.request import CanonicalRequest, Completion, TokenLogprob, Usage
from relax_trio.errors import InvalidRequest, ProtocolError

_SSE_END: Final = b"data: [DONE]\n\n"
_TOOL_CHOICES: Final = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


class ChatDialect:
    """`Dialect` of `/v1/chat/completions`."""

    history_key = "messages"

    def parse(
        self,
        body: JsonValue,
        *,
        digest: bytes,
        retry: bool,
        template_variables: Container[str] = frozenset(),
        known: History | None = None,
    ) -> ParsedRequest:
        """See `Dialect.parse`."""
        fields = body_object(body)
        refuse_many_choices(fields)
        skipped: list[str] = []
        before, n_before = ((), 0) if known is None else (known.messages, known.n_items)
        messages = normalize_messages(
            fields.get("messages"), param="messages", skipped=skipped, before=before, n_before=n_before
        )
        tools = None if known is None else known.tools
        if tools is None:
            tools = normalize_tools(fields.get("tools"), param="tools", skipped=skipped)
        newer, older = (optional_int(fields, name, low=1) for name in ("max_completion_tokens", "max_tokens"))
        request = CanonicalRequest(
            messages=messages,
            tools=tools,
            chat_template_kwargs=normalize_template_kwargs(
                fields.get("chat_template_kwargs"), param="chat_template_kwargs"
            ),
            model=optional_text(fields, "model") or "model",
            max_tokens=older if newer is None else newer,
            stop=stop_strings(fields, "stop"),
            seed=optional_int(fields, "seed", low=-SEED_LIMIT),
            logprobs=optional_bool(fields, "logprobs"),
            tool_choice=_tool_choice(fields.get("tool_choice")),
            digest=digest,
            retry=retry,
            skipped=tuple(dict.fromkeys(skipped)),
        )
        return ParsedRequest(request=request, stream=optional_bool(fields, "stream"))

    def render(self, completion: Completion, parsed: ParsedRequest, *, name: str) -> JsonObject:
        """See `Dialect.render`."""
        choice = _choice(completion, "message", _message(completion.message))
        return _reply("chat.completion", completion, parsed, name, choice)

    def error(self, error: ProtocolError) -> JsonObject:
        """See `Dialect.error`."""
        return openai_error(error)

    def sse_open(self, parsed: ParsedRequest) -> bytes:
        """See `Dialect.sse_open`."""
        return sse_comment("connected")

    def sse_heartbeat(self) -> bytes:
        """See `Dialect.sse_heartbeat`."""
        return sse_comment("heartbeat")

    def sse_done(self, completion: Completion, parsed: ParsedRequest, *, name: str) -> bytes:
        """One complete chunk with usage, whatever `stream_options` says, then the end mark."""
        choice = _choice(completion, "delta", _delta(completion.message))
        return sse_data(_reply("chat.completion.chunk", completion, parsed, name, choice)) + _SSE_END

    def sse_failed(self, error: ProtocolError, parsed: ParsedRequest) -> bytes:
        """Error data, then the end mark."""
        return b"data: " + reply_bytes(openai_error(error)) + b"\n\n" + _SSE_END


CHAT: Final = ChatDialect()


# --- request ---------------------------------------------------------------------------------------------------


def _tool_choice(raw: JsonValue) -> str:
    """The choice in canonical words: a mode, or the name of the function that is asked for."""
    if raw is None:
        return "auto"
    if isinstance(raw, str):
        if raw in _TOOL_CHOICES:
            return _TOOL_CHOICES[raw]
        raise InvalidRequest(
            f"tool_choice must be auto, none, required or an object that names a function, not {raw!r}",
            param="tool_choice",
        )
    if not isinstance(raw, dict):
        raise InvalidRequest(f"tool_choice must be a string or an object, not {kind_of(raw)}", param="tool_choice")
    if raw.get("type") == "allowed_tools":
        allowed = raw.get("allowed_tools")
        return _tool_choice(allowed.get("mode") if isinstance(allowed, dict) else None)
    kind = raw.get("type")
    if isinstance(kind, str) and kind != "function":
        return "auto"  # a tool of another kind, which was left out
    function = raw.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest("tool_choice.function.name must be a nonempty string", param="tool_choice.function.name")
    return clean_text(name)


# --- reply -----------------------------------------------------------------------------------------------------


def _reply(kind: str, completion: Completion, parsed: ParsedRequest, name: str, choice: JsonObject) -> JsonObject:
    return {
        "id": f"chatcmpl-{name}",
        "object": kind,
        "created": completion.created_unix,
        "model": parsed.request.model,
        "choices": [choice],
        "usage": _usage(completion.usage),
    }


def _choice(completion: Completion, key: str, message: JsonObject) -> JsonObject:
    logprobs = completion.logprobs
    return {
        "index": 0,
        key: message,
        "logprobs": None if logprobs is None else {"content": [_logprob(one) for one in logprobs], "refusal": None},
        "finish_reason": completion.finish,
    }


def _message(message: Message) -> JsonObject:
    """The assistant message. Without calls its content is text, "" at least: clients that drop reasoning send the
    message back, and null beside nothing is no message.
    """
    out = message.to_chat()
    out["content"] = None if message.tool_calls and not message.content else out.get("content", "")
    out["refusal"] = None
    return out


def _delta(message: Message) -> JsonObject:
    out = _message(message)
    calls = out.get("tool_calls")
    if isinstance(calls, list):
        out["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls) if isinstance(call, dict)]
    return out


def _usage(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _logprob(one: TokenLogprob) -> JsonObject:
    """One token. Its bytes are unknown where the token ends inside a character and its text is a replacement."""
    whole = "\ufffd" not in one.token
    return {
        "token": one.token,
        "logprob": one.logprob,
        "bytes": list(one.token.encode()) if whole else None,
        "top_logprobs": [],
        "token_id": one.token_id,
    }
