"""Who asks: the credential of a request, and the Session or the operator behind it."""

from __future__ import annotations

import hmac
from typing import Protocol

from relax_trio.api.sessions import SessionDirectory, SessionPort
from relax_trio.errors import AuthenticationError, EngineUnavailable, SessionDiscarded


class Headers(Protocol):
    """Request headers, asked for by lower-case name."""

    def get(self, key: str, default: str, /) -> str:
        """The header's text, or `default`."""
        ...


def bearer(headers: Headers) -> str | None:
    """The bearer token, or the Anthropic SDK's key; None where neither is there in a readable form."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None


def credential(headers: Headers) -> str:
    """As `bearer`.

    Raises:
      AuthenticationError: there is none.
    """
    found = bearer(headers)
    if found is None:
        raise AuthenticationError(
            "no credential: send the header `Authorization: Bearer $RELAX_SESSION_ID` (or `x-api-key`)"
        )
    return found


def live_session(directory: SessionDirectory, headers: Headers) -> SessionPort:
    """The Session whose credential the request carries.

    Raises:
      EngineUnavailable, AuthenticationError, SessionDiscarded.
    """
    asked = credential(headers)
    if directory.closing:
        raise EngineUnavailable("the run is shutting down and takes no more requests")
    session = directory.find(asked)
    if session is None:
        raise SessionDiscarded(
            "this credential opens no live session: it has ended, or never was; a retry can't succeed"
        )
    return session


def is_operator(asked: str, operator_token: bytes) -> bool:
    """Whether the credential is the operator's, compared in constant time."""
    return hmac.compare_digest(asked.encode(), operator_token)


def is_retry(headers: Headers) -> bool:
    """Both SDKs count their own retries in this header."""
    count = headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdigit() and count.strip("0") != ""  # of any length: not a number to Python
