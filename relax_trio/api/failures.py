"""Bugs that surface while a request is served: told as events, never with a credential in them."""

from __future__ import annotations

import re
import traceback
from typing import Final

from relax_trio.events import emit
from relax_trio.ids import PlaceId

_MAX_TRACE_CHARS = 4000
_CREDENTIAL: Final = re.compile(r"rs-[\w-]{16,}")


def tell_failure(exc: BaseException, *, place: PlaceId | None, path: str, secret: str | None = None) -> None:
    """Emit `api.failed`.

    Args:
      place: the Session that was asked, None where it was not known yet.
      path: what was asked.
      secret: what the request carried as its credential, whether it is one or not.
    """
    trace = "".join(traceback.format_exception(exc))[-_MAX_TRACE_CHARS:]
    fields = {"path": path, "error": f"{type(exc).__name__}: {exc}", "trace": trace}
    if secret:
        fields = {key: text.replace(secret, "<credential>") for key, text in fields.items()}
    emit("api.failed", place=place, **{key: _CREDENTIAL.sub("<credential>", text) for key, text in fields.items()})


def tell_connection_failure(group: BaseExceptionGroup[BaseException]) -> None:
    """Emit `connection.failed` for what the HTTP library raised. Types only: its messages quote what clients sent."""
    emit("connection.failed", error=", ".join(sorted({type(leaf).__name__ for leaf in _leaves(group)})))


def _leaves(exc: BaseException) -> list[BaseException]:
    if not isinstance(exc, BaseExceptionGroup):
        return [exc]
    return [leaf for inner in exc.exceptions for leaf in _leaves(inner)]
