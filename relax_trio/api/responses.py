"""The Responses dialect: the fields of a request, the response object of a reply.

A request may set its input, instructions, tools, template arguments, token limit, stop strings, seed and logprobs;
sampling is the run's, and nothing is stored. Not covered: what input items mean (responses_input.py), tools
(responses_tools.py), output items (responses_output.py), the event sequence (responses_events.py).
"""

from __future__ import annotations

import json
from collections.abc import Container
from types import UnionType
from typing import Final

from relax_trio.api.dialect import ParsedRequest, sse_comment
from relax_trio.api.envelopes import openai_error
from relax_trio.api.fields import (
    SEED_LIMIT,
    body_object,
    effort_wish,
    kind_of,
    optional_bool,
    optional_int,
    optional_text,
    refuse_many_choices,
    stop_strings,
    thinking_kwargs,
)
from relax_trio.api.history import History
from relax_trio.api.responses_events import failure_events, reply_events
from relax_trio.api.responses_input import InputReader
from relax_trio.api.responses_output import output_items
from relax_trio.api.responses_tools import Tools, read_tools
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.normalize import clean_text, nonempty_text, normalize_template_kwargs, text_or_none
from relax_trio.data.request import CanonicalRequest, Completion, Usage
from relax_trio.errors import InvalidRequest, ProtocolError, UnsupportedFeature

_TOOL_CHOICES: Final = frozenset({"auto", "none", "required"})
_LOGPROBS: Final = "message.output_text.logprobs"
_STORED: Final = {
    "previous_response_id": "no response is kept here; send the complete input of the conversation instead",
    "conversation": "no conversation is kept here; send the complete input instead",
    "prompt": "no prompt is kept here; send its text as instructions and input instead",
}
_ECHOED: Final[dict[str, tuple[type | UnionType, JsonValue]]] = {
    "instructions": (str, None),
    "metadata": (dict, {}),
    "parallel_tool_calls": (bool, True),
    "prompt_cache_key": (str, None),
    "reasoning": (dict, {"effort": None, "summary": None}),
    "safety_identifier": (str, None),
    "text": (dict, {"format": {"type": "text"}}),
    "tool_choice": (str | dict, "auto"),
    "tools": (list, []),
    "user": (str, None),
}
"""Fields that the reply repeats: the type they are repeated in, and what stands there otherwise."""


class ResponsesDialect:
    """`Dialect` of `/v1/responses`."""

    history_key = None

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
        _refuse_what_is_stored(fields)
        refuse_many_choices(fields)
        listed = read_tools(fields.get("tools"))
        reader = InputReader(listed)
        messages = reader.read(fields.get("input"), optional_text(fields, "instructions"))
        request = CanonicalRequest(
            messages=messages,
            tools=tuple(listed.functions),
            chat_template_kwargs=_template_kwargs(fields, template_variables),
            model=optional_text(fields, "model") or "model",
            max_tokens=optional_int(fields, "max_output_tokens", low=1),
            stop=stop_strings(fields, "stop"),
            seed=optional_int(fields, "seed", low=-SEED_LIMIT),
            logprobs=_wants_logprobs(fields),
            tool_choice=_tool_choice(fields.get("tool_choice"), listed),
            digest=digest,
            retry=retry,
            skipped=tuple(dict.fromkeys([*listed.skipped, *reader.skipped])),
        )
        return ParsedRequest(request=request, stream=optional_bool(fields, "stream"), echo=_echo(fields))

    def render(self, completion: Completion, parsed: ParsedRequest, *, name: str) -> JsonObject:
        """See `Dialect.render`."""
        return _finished(completion, parsed, name, _items(completion, parsed, name))

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
        """Created, every item with its parts, then completed or incomplete."""
        items = _items(completion, parsed, name)
        started = _response(parsed, f"resp_{name}", status="in_progress", created_at=completion.created_unix)
        return reply_events(started, _finished(completion, parsed, name, items), items)

    def sse_failed(self, error: ProtocolError, parsed: ParsedRequest) -> bytes:
        """Created, the error, then failed. The time of a reply that never was is 0; its id is the same on a retry."""
        envelope = openai_error(error)["error"]
        assert isinstance(envelope, dict), "an envelope holds an object"
        response_id = f"resp_{parsed.request.digest.hex()[:24] or 'failed'}"
        started = _response(parsed, response_id, status="in_progress", created_at=0)
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        failed = {**started, "status": "failed", "error": {**envelope, "code": code}}
        return failure_events(started, failed, envelope)


RESPONSES: Final = ResponsesDialect()


# --- request ---------------------------------------------------------------------------------------------------


def _refuse_what_is_stored(fields: JsonObject) -> None:
    for name, advice in _STORED.items():
        if fields.get(name) is not None:
            raise UnsupportedFeature(f"{name} is set, but {advice}", param=name)
    if optional_bool(fields, "background"):
        raise UnsupportedFeature(
            "background is true, but a reply is given only to the request that asked for it; leave it out",
            param="background",
        )


def _template_kwargs(fields: JsonObject, template_variables: Container[str]) -> JsonObject:
    """The request's template arguments; where they don't say whether to think, `reasoning.effort` does."""
    kwargs = normalize_template_kwargs(fields.get("chat_template_kwargs"), param="chat_template_kwargs")
    reasoning = fields.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise InvalidRequest(f"reasoning must be an object, not {kind_of(reasoning)}", param="reasoning")
    wish = effort_wish((reasoning or {}).get("effort"), "reasoning.effort")
    return {**thinking_kwargs(wish, template_variables), **kwargs}


def _wants_logprobs(fields: JsonObject) -> bool:
    include = fields.get("include")
    if include is not None and not isinstance(include, list):
        raise InvalidRequest(f"include must be a list of strings, not {kind_of(include)}", param="include")
    return bool(optional_int(fields, "top_logprobs", low=0)) or _LOGPROBS in (include or [])


def _tool_choice(raw: JsonValue, tools: Tools) -> str:
    """The choice in canonical words: a mode, or the name of the function that is asked for."""
    if raw is None:
        return "auto"
    if isinstance(raw, str):
        if raw in _TOOL_CHOICES:
            return raw
        raise InvalidRequest(
            f"tool_choice must be auto, none, required or an object with a type, not {raw!r}", param="tool_choice"
        )
    if not isinstance(raw, dict):
        raise InvalidRequest(f"tool_choice must be a string or an object, not {kind_of(raw)}", param="tool_choice")
    kind = nonempty_text(raw.get("type"), "tool_choice.type")
    if kind == "allowed_tools":
        mode = raw.get("mode")
        if mode is not None and mode not in ("auto", "required"):
            raise InvalidRequest(f"tool_choice.mode must be auto or required, not {mode!r}", param="tool_choice.mode")
        return str(mode or "auto")
    if kind != "function":
        return "auto"  # a hosted tool, which was left out
    name = nonempty_text(raw.get("name"), "tool_choice.name")
    return tools.canonical_name(name, text_or_none(raw.get("namespace"), "tool_choice.namespace"))


def _echo(fields: JsonObject) -> JsonObject:
    return {
        name: plain_json(fields.get(name)) if isinstance(fields.get(name), kind) else default
        for name, (kind, default) in _ECHOED.items()
    }


def plain_json(value: JsonValue) -> JsonValue:
    """`value` as it can go out: lone surrogates replaced, null for a number that JSON has no text for (1e999)."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # of which UnicodeEncodeError is one
        return _plain(value)
    return value


def _plain(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _plain(item) for key, item in value.items()}
    return value


# --- reply -----------------------------------------------------------------------------------------------------


def _items(completion: Completion, parsed: ParsedRequest, name: str) -> list[JsonObject]:
    return output_items(completion, read_tools(parsed.echo["tools"]), name=name)


def _finished(completion: Completion, parsed: ParsedRequest, name: str, items: list[JsonObject]) -> JsonObject:
    is_cut = completion.finish == "length"
    status = "incomplete" if is_cut else "completed"
    return {
        **_response(parsed, f"resp_{name}", status=status, created_at=completion.created_unix),
        "completed_at": None if is_cut else completion.created_unix,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(items),
        "usage": _usage(completion.usage),
    }


def _response(parsed: ParsedRequest, response_id: str, *, status: str, created_at: int) -> JsonObject:
    """The response object before anything was generated."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": parsed.request.max_tokens,
        "model": parsed.request.model,
        "output": [],
        "usage": None,
        "background": False,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "top_p": None,
        "truncation": "disabled",
        **parsed.echo,
    }


def _usage(usage: Usage) -> JsonObject:
    """Token counts. Reasoning is not counted apart: it is known as text, not as a span of tokens."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
