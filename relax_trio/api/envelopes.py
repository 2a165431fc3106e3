"""Error envelopes, and which one a path wears. A refusal that comes before any dialect is chosen still has one."""

from __future__ import annotations

from typing import Final

from relax_trio.data.json import JsonObject
from relax_trio.errors import ProtocolError

_ANTHROPIC_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


def openai_error(error: ProtocolError) -> JsonObject:
    """The envelope of Chat Completions and Responses."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ProtocolError) -> JsonObject:
    """The envelope of Messages, which has neither param nor code: a field is named in the message."""
    if error.status < 500:
        kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error")
    else:
        kind = "overloaded_error" if error.status == 503 else "api_error"
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_envelope(path: str, error: ProtocolError) -> JsonObject:
    """The envelope that clients of `path` can read."""
    return anthropic_error(error) if "messages" in path.split("/") else openai_error(error)
