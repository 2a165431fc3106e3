"""Whole responses, each one watched until its last byte is out."""

from __future__ import annotations

from typing import Final

from quart import request
from quart.wrappers import Response
from werkzeug.datastructures import Headers

from relax_trio.api.dialect import reply_bytes
from relax_trio.api.reply import find_reply
from relax_trio.data.json import JsonObject

JSON: Final = "application/json"


def json_answer(value: JsonObject, status: int = 200, headers: Headers | None = None) -> Response:
    """A JSON response to the current request."""
    return bytes_answer(reply_bytes(value), status=status, headers=headers)


def bytes_answer(
    body: bytes, *, status: int = 200, headers: Headers | None = None, content_type: str = JSON
) -> Response:
    """A response of known length to the current request."""
    response = Response(find_reply(request.scope).last_part(body), status, headers, content_type=content_type)
    response.content_length = len(body)
    return response
