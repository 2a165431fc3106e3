"""Error envelopes, and which one a path wears. A refusal that comes before any dialect is chosen still has one."""

from __future__ import annotations

from typing import Final

from relax_trio.data.json import JsonObject
from relax_trio.errors import ContextLengthExceeded, ProtocolError

_ANTHROPIC_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}
_MAX_CHARS: Final = 1000
"""Messages quote what clients sent, templates even whole texts of theirs."""


def openai_error(error: ProtocolError) -> JsonObject:
    """The envelope of Chat Completions and Responses."""
    return {"error": {"message": _cut(error.message), "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ProtocolError) -> JsonObject:
    """The envelope of Messages, which has neither param nor code: a field is named in the message.

    A full context has the wording by which harnesses know it.
    """
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        message = f"prompt is too long: {error.n_prompt} tokens > {error.max_context_len} maximum"
    if error.status < 500:
        kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error")
    else:
        kind = "overloaded_error" if error.status == 503 else "api_error"
    return {"type": "error", "error": {"type": kind, "message": _cut(message)}}


def error_envelope(path: str, error: ProtocolError, *, from_anthropic_sdk: bool = False) -> JsonObject:
    """The envelope that the client of `path` can read. Models are listed by both SDKs: there, the SDK decides."""
    parts = path.split("/")
    is_anthropic = "messages" in parts or (from_anthropic_sdk and "models" in parts)
    return anthropic_error(error) if is_anthropic else openai_error(error)


def _cut(message: str) -> str:
    """`message`, without its middle where it is long: what happened stands in front, what to do at the end."""
    if len(message) <= _MAX_CHARS:
        return message
    return f"{message[: _MAX_CHARS // 2]} … {message[-_MAX_CHARS // 2 :]}"
