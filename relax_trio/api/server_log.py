"""Hypercorn's log, turned into events."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hypercorn.logging import Logger

from relax_trio.api.failures import tell_failure
from relax_trio.events import emit

if TYPE_CHECKING:
    from hypercorn.typing import ResponseSummary, WWWScope


class ServerLog(Logger):
    """Writes no lines of its own: headers, and so credentials, never reach a log."""

    async def access(self, request: WWWScope, response: ResponseSummary | None, request_time: float) -> None:
        """Nothing."""

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        """An exception that the framework did not turn into a response."""
        exc = sys.exc_info()[1]
        if exc is not None:
            tell_failure(exc, place=None, path=message)
        else:
            emit("api.failed", error=message)

    async def critical(self, message: str, *args: Any, **kwargs: Any) -> None:
        """See `error`."""
        emit("api.failed", error=message % args if args else message)

    async def error(self, message: str, *args: Any, **kwargs: Any) -> None:
        """A complaint of the server."""
        emit("api.failed", error=message % args if args else message)

    async def warning(self, message: str, *args: Any, **kwargs: Any) -> None:
        """See `error`."""
        emit("api.failed", error=message % args if args else message)

    async def info(self, message: str, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run tells its address itself."""
