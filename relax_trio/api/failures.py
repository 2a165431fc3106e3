"""Bugs that surface in a front half: told as an event, never with a credential in it."""

from __future__ import annotations

import traceback

from relax_trio.events import emit
from relax_trio.ids import PlaceId

_MAX_TRACE_CHARS = 4000


def tell_failure(exc: BaseException, *, place: PlaceId | None, path: str, secret: str | None = None) -> None:
    """Emit `api.failed`.

    Args:
      place: the Session that was asked, None where it was not known yet.
      path: what was asked.
      secret: text that must not appear, i.e. the credential.
    """
    error = "; ".join(f"{type(leaf).__name__}: {leaf}" for leaf in _leaves(exc))
    trace = "".join(traceback.format_exception(exc))[-_MAX_TRACE_CHARS:]
    if secret:
        error, trace, path = (text.replace(secret, "<credential>") for text in (error, trace, path))
    emit("api.failed", place=place, path=path, error=error, trace=trace)


def _leaves(exc: BaseException) -> list[BaseException]:
    if not isinstance(exc, BaseExceptionGroup):
        return [exc]
    return [leaf for inner in exc.exceptions for leaf in _leaves(inner)]
