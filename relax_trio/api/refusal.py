"""What becomes of an exception of a view, or of routing: an error in the envelope of its path."""

from __future__ import annotations

from quart import request
from quart.wrappers import Response
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as WerkzeugMethodNotAllowed

from relax_trio.api.answers import json_answer
from relax_trio.api.body import drain_body
from relax_trio.api.credentials import bearer
from relax_trio.api.envelopes import error_envelope
from relax_trio.api.failures import tell_failure
from relax_trio.api.paths import BASE_PATH
from relax_trio.api.reply import find_reply
from relax_trio.errors import InternalError, InvalidRequest, MethodNotAllowed, NotFound, ProtocolError


async def refuse(exc: Exception) -> Response:
    """Answer `exc`, once the client has sent the whole of its request."""
    error, headers = _as_protocol_error(exc), Headers()
    if not error.retryable:
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(exc, WerkzeugMethodNotAllowed) and exc.valid_methods:
        headers["allow"] = ", ".join(sorted(exc.valid_methods))
    await drain_body(request.body)
    envelope = error_envelope(request.path, error, from_anthropic_sdk="anthropic-version" in request.headers)
    return json_answer(envelope, error.status, headers)


def _as_protocol_error(exc: Exception) -> ProtocolError:
    if isinstance(exc, ProtocolError):
        return exc
    if isinstance(exc, WerkzeugMethodNotAllowed):
        return MethodNotAllowed(f"{request.path} does not take {request.method}")
    if isinstance(exc, HTTPException) and exc.code == 404:
        return NotFound(
            f"there is no {request.path} here; the model API is at {BASE_PATH}/v1/chat/completions, "
            f"{BASE_PATH}/v1/responses and {BASE_PATH}/v1/messages"
        )
    if isinstance(exc, HTTPException) and exc.code is not None and exc.code < 500:
        error = InvalidRequest(exc.description or exc.name)
        error.status = exc.code
        return error
    place = find_reply(request.scope).place
    tell_failure(exc, place=place, path=request.path, secret=bearer(request.headers))
    return InternalError(f"the request failed inside relax_trio{f' at {place}' if place else ''}; its log says why")
