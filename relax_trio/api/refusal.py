"""What becomes of an exception of a front half or a view, or of routing: an error in the envelope of its path."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen
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
from relax_trio.data.json import JsonObject
from relax_trio.errors import InternalError, InvalidRequest, MethodNotAllowed, NotFound, ProtocolError
from relax_trio.ids import PlaceId


@frozen
class Refusal:
    """An error as it goes out."""

    envelope: JsonObject
    status: int
    headers: tuple[tuple[bytes, bytes], ...]


def refusal_of(exc: Exception, *, path: str, headers: Mapping[str, str], place: PlaceId | None) -> Refusal:
    """How `exc` is answered. What no client is to blame for is told (`api.failed`).

    Args:
      path: what was asked.
      headers: of the request, by lower-case name.
      place: the Session that was asked, None where it was not known yet.
    """
    error = exc if isinstance(exc, ProtocolError) else _internal(exc, path=path, headers=headers, place=place)
    envelope = error_envelope(path, error, from_anthropic_sdk="anthropic-version" in headers)
    out = []
    if not error.retryable:
        out.append((b"x-should-retry", b"false"))
    if error.status == 401:
        out.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        out.append((b"allow", ", ".join(sorted(error.allowed)).encode()))
    return Refusal(envelope, error.status, tuple(out))


async def refuse(exc: Exception) -> Response:
    """Answer what a view raised, once the client has sent the whole of its request."""
    await drain_body(request.body)
    refusal = refusal_of(
        _as_protocol_error(exc),
        path=request.path,
        headers={name.lower(): value for name, value in request.headers.items()},
        place=find_reply(request.scope).place,
    )
    headers = Headers([(name.decode(), value.decode()) for name, value in refusal.headers])
    return json_answer(refusal.envelope, refusal.status, headers)


def _internal(exc: Exception, *, path: str, headers: Mapping[str, str], place: PlaceId | None) -> ProtocolError:
    tell_failure(exc, place=place, path=path, secret=bearer(headers))
    return InternalError(f"the request failed inside relax_trio{f' at {place}' if place else ''}; its log says why")


def _as_protocol_error(exc: Exception) -> Exception:
    """An error of Quart's routing in this API's words; every other exception as it is."""
    if isinstance(exc, WerkzeugMethodNotAllowed):
        return MethodNotAllowed(f"{request.path} does not take {request.method}", allowed=exc.valid_methods or ())
    if isinstance(exc, HTTPException) and exc.code == 404:
        return NotFound(
            f"there is no {request.path} here; the model API is at {BASE_PATH}/v1/chat/completions, "
            f"{BASE_PATH}/v1/responses and {BASE_PATH}/v1/messages"
        )
    if isinstance(exc, HTTPException) and exc.code is not None and exc.code < 500:
        error = InvalidRequest(exc.description or exc.name)
        error.status = exc.code
        return error
    return exc
