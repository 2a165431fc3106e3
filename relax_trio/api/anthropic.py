"""The Anthropic Messages dialect.

A request may set its history, tools, token limit, stop sequences and whether to think, and, as in the other APIs,
template arguments and a seed; sampling is the run's. Not covered: blocks (anthropic_history.py), the reply
(anthropic_reply.py), how long a request is held.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from attrs import evolve

from relax_trio.api.anthropic_history import HistoryReader
from relax_trio.api.anthropic_reply import message_events, message_json, ping
from relax_trio.api.dialect import ParsedRequest, sse_data
from relax_trio.api.envelopes import anthropic_error
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
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.normalize import function_tool, nonempty_text, normalize_template_kwargs
from relax_trio.data.request import CanonicalRequest, Completion
from relax_trio.errors import InvalidRequest, ProtocolError

_THINKING: Final = {"enabled": True, "adaptive": True, "disabled": False}
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class MessagesDialect:
    """`Dialect` of `/v1/messages`."""

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
        limit = optional_int(fields, "max_tokens", low=1)
        if limit is None:
            raise InvalidRequest(
                "max_tokens is required: the most tokens that this turn may generate", param="max_tokens"
            )
        request = _continued(_request(fields, template_variables, max_tokens=limit, digest=digest, retry=retry))
        return ParsedRequest(request=request, stream=optional_bool(fields, "stream"))

    def parse_count(self, body: JsonValue, *, template_variables: Container[str] = frozenset()) -> CanonicalRequest:
        """Read a request whose tokens are to be counted: the same fields, no limit needed.

        Raises:
          InvalidRequest: as `parse`.
        """
        return _request(body_object(body), template_variables)

    def render(self, completion: Completion, parsed: ParsedRequest, *, name: str) -> JsonObject:
        """See `Dialect.render`."""
        return message_json(completion, parsed, name=name)

    def error(self, error: ProtocolError) -> JsonObject:
        """See `Dialect.error`."""
        return anthropic_error(error)

    def sse_open(self, parsed: ParsedRequest) -> bytes:
        """See `Dialect.sse_open`."""
        return ping()

    def sse_heartbeat(self) -> bytes:
        """See `Dialect.sse_heartbeat`."""
        return ping()

    def sse_done(self, completion: Completion, parsed: ParsedRequest, *, name: str) -> bytes:
        """See `Dialect.sse_done`."""
        return message_events(completion, parsed, name=name)

    def sse_failed(self, error: ProtocolError, parsed: ParsedRequest) -> bytes:
        """One error event."""
        return sse_data(anthropic_error(error), event="error")


MESSAGES: Final = MessagesDialect()


def _request(
    fields: JsonObject,
    template_variables: Container[str],
    *,
    max_tokens: int | None = None,
    digest: bytes = b"",
    retry: bool = False,
) -> CanonicalRequest:
    refuse_many_choices(fields)
    history = HistoryReader()
    messages = history.read(fields.get("system"), fields.get("messages"))
    tools = _tools(fields.get("tools"), history)
    return CanonicalRequest(
        messages=messages,
        tools=tools,
        chat_template_kwargs=_template_kwargs(fields, template_variables),
        model=optional_text(fields, "model") or "model",
        max_tokens=max_tokens,
        stop=stop_strings(fields, "stop_sequences"),
        seed=optional_int(fields, "seed", low=-SEED_LIMIT),
        tool_choice=_tool_choice(fields.get("tool_choice")),
        digest=digest,
        retry=retry,
        skipped=tuple(history.skipped),
    )


def _continued(request: CanonicalRequest) -> CanonicalRequest:
    """`request`, whose last message, where it is text of the assistant, is the beginning of the turn."""
    *before, last = request.messages
    is_text = isinstance(last.content, str) and last.content and not last.tool_calls and not last.reasoning_content
    if last.role != "assistant" or not is_text or not before:
        return request
    return evolve(request, messages=tuple(before), prefill=str(last.content))


def _tools(raw: JsonValue, history: HistoryReader) -> tuple[JsonObject, ...]:
    """Function tools of the client's own; those that Anthropic hosts or defines are skipped."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise InvalidRequest(f"tools must be a list of tools, not {kind_of(raw)}", param="tools")
    tools: list[JsonObject] = []
    for index, tool in enumerate(raw):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"{path} must be an object, not {kind_of(tool)}", param=path)
        kind = tool.get("type")
        if kind is not None and not isinstance(kind, str):
            raise InvalidRequest(f"{path}.type must be a string, not {kind_of(kind)}", param=f"{path}.type")
        if kind in (None, "custom"):
            tools.append(_function(tool, path))
        else:
            history.skip(f"tool {kind}")
    return tuple(tools)


def _function(tool: JsonObject, path: str) -> JsonObject:
    """Keys in the order in which OpenAI's tools have them: templates print it, and one tool is the same in all APIs."""
    schema = tool.get("input_schema")
    if schema is not None and not isinstance(schema, dict):
        raise InvalidRequest(
            f"{path}.input_schema must be a JSON schema object, not {kind_of(schema)}", param=f"{path}.input_schema"
        )
    flat: JsonObject = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    return function_tool(flat | {"strict": tool.get("strict")}, path)


def _template_kwargs(fields: JsonObject, template_variables: Container[str]) -> JsonObject:
    """The request's template arguments; where they don't say whether to think, `thinking` or an effort does."""
    kwargs = normalize_template_kwargs(fields.get("chat_template_kwargs"), param="chat_template_kwargs")
    return {**thinking_kwargs(_thinking_wish(fields), template_variables), **kwargs}


def _thinking_wish(fields: JsonObject) -> bool | None:
    """What `thinking` says, else what an effort means."""
    output = fields.get("output_config")
    if output is not None and not isinstance(output, dict):
        raise InvalidRequest(f"output_config must be an object, not {kind_of(output)}", param="output_config")
    effort = effort_wish((output or {}).get("effort"), "output_config.effort")
    thinking = fields.get("thinking")
    if thinking is None:
        return effort
    if not isinstance(thinking, dict):
        raise InvalidRequest(f"thinking must be an object, not {kind_of(thinking)}", param="thinking")
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled", param="thinking.type")
    return _THINKING[kind]


def _tool_choice(raw: JsonValue) -> str:
    """The choice in canonical words: a mode, or the name of the tool that is asked for."""
    if raw is None:
        return "auto"
    if not isinstance(raw, dict):
        raise InvalidRequest(f"tool_choice must be an object, not {kind_of(raw)}", param="tool_choice")
    kind = raw.get("type")
    if kind == "tool":
        return nonempty_text(raw.get("name"), "tool_choice.name")
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    return _TOOL_CHOICES[kind]
