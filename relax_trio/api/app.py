"""The Quart-Trio application: paths, and the front half of a model request.

A front half finds the Session, reads the body, submits, waits and writes; it owns nothing that matters when it is
cancelled. Not covered: sockets and shutdown (serve.py), what a dialect says (chat.py, responses.py, anthropic.py), the
other views (views.py, operator.py), refusals (refusal.py), the work itself (runtime).
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Container
from typing import TypeVar

from quart import request
from quart.wrappers import Response
from quart_trio import QuartTrio

from relax_trio.api.answers import json_answer
from relax_trio.api.anthropic import MESSAGES
from relax_trio.api.body import parse_body, read_body
from relax_trio.api.chat import CHAT
from relax_trio.api.credentials import is_retry, live_session
from relax_trio.api.dialect import Dialect, ParsedRequest
from relax_trio.api.operator import OperatorViews
from relax_trio.api.paths import BASE_PATH
from relax_trio.api.refusal import refuse
from relax_trio.api.reply import ReplyTracker, find_reply
from relax_trio.api.responses import RESPONSES
from relax_trio.api.sessions import SessionDirectory, SessionPort
from relax_trio.api.sse import call_name, sse_frames
from relax_trio.api.views import Views
from relax_trio.config.tree import ServerConfig
from relax_trio.data.request import CanonicalRequest
from relax_trio.sync.cpu import CpuPool

INLINE_BODY_BYTES = 256 * 1024
"""Bodies up to this are parsed on the event loop (a few milliseconds); a thread costs more than it saves there."""

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_View = Callable[..., Awaitable[Response]]
_T = TypeVar("_T")


def make_app(
    directory: SessionDirectory,
    *,
    config: ServerConfig,
    operator_token: str,
    cpu: CpuPool,
    model_name: str = "relax-trio",
    template_variables: Container[str] = frozenset(),
) -> QuartTrio:
    """Build the application of the model API.

    Args:
      directory: finds Sessions by credential.
      config: `max_request_bytes` is enforced here.
      operator_token: opens `/metrics` and the whole of `/debug_state`.
      cpu: parses large bodies and writes large views off the event loop.
      model_name: the model that `/v1/models` lists; requests may name any.
      template_variables: names that the checkpoint's chat template reads, see `Dialect.parse`.
    """
    app = QuartTrio(__name__, static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # a request may be held for hours
        BODY_TIMEOUT=None,  # clients are local; a slow one holds nothing but its own connection
        MAX_CONTENT_LENGTH=None,  # body.py enforces the limit, see there
        BACKGROUND_TASK_SHUTDOWN_TIMEOUT=None,  # there are none
    )
    requests = _ModelRequests(
        directory, max_bytes=config.max_request_bytes, cpu=cpu, template_variables=template_variables
    )
    views = Views(directory, model_name=model_name)
    _add_routes(app, requests, views, OperatorViews(directory, operator_token=operator_token, cpu=cpu))
    app.register_error_handler(Exception, refuse)
    app.asgi_app = ReplyTracker(app.asgi_app)  # type: ignore[method-assign]  # the way Quart documents for middleware
    return app


def _add_routes(app: QuartTrio, requests: _ModelRequests, views: Views, operator: OperatorViews) -> None:
    """Register every path. SDKs differ in whether they append `/v1`, so most paths stand with and without it."""

    def add(path: str, view: _View, method: str, *, bare: bool = False) -> None:
        for prefix in ("", "/v1") if bare else ("",):
            rule = f"{BASE_PATH}{prefix}{path}"
            app.add_url_rule(rule, f"{method} {rule}", view, methods=[method], strict_slashes=False)

    add("/", views.base, "GET")
    add("/health", views.health, "GET")
    add("/openapi.json", views.openapi, "GET")
    add("/debug_state", operator.debug_state, "GET")
    add("/metrics", operator.metrics, "GET")
    add("/models", views.models, "GET", bare=True)
    add("/models/<path:model_id>", views.model, "GET", bare=True)
    for path, dialect in (("/chat/completions", CHAT), ("/responses", RESPONSES), ("/messages", MESSAGES)):
        add(path, requests.view(dialect), "POST", bare=True)
    add("/messages/count_tokens", requests.count_tokens, "POST", bare=True)
    add("/completions", views.completions, "POST", bare=True)


class _ModelRequests:
    """The front halves. One for each app; no state of its own."""

    def __init__(
        self, directory: SessionDirectory, *, max_bytes: int, cpu: CpuPool, template_variables: Container[str]
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._cpu = cpu
        self._template_variables = template_variables

    def view(self, dialect: Dialect) -> _View:
        """The view of the path at which `dialect` is spoken."""

        async def model_request() -> Response:
            return await self._answer(dialect)

        return model_request

    async def _answer(self, dialect: Dialect) -> Response:
        session = self._session()
        path, retry = request.path, is_retry(request.headers)

        def parse(body: bytes) -> ParsedRequest:
            digest = hashlib.sha256(path.encode() + b"\0" + body).digest()
            return dialect.parse(
                parse_body(body), digest=digest, retry=retry, template_variables=self._template_variables
            )

        parsed = await self._parse(parse)
        call = session.submit(parsed.request)
        reply = find_reply(request.scope)
        reply.hold(call)
        if parsed.stream:
            # What is refused at once is refused by status: clients look there for a full context first.
            await call.wait_begun()
            frames = sse_frames(dialect, parsed, call, session.place, reply)
            return Response(frames, headers=_SSE_HEADERS, mimetype="text/event-stream")
        completion = await call.wait_done()
        return json_answer(dialect.render(completion, parsed, name=call_name(session.place, completion)))

    async def count_tokens(self) -> Response:
        """How long the prompt of a Messages request is; begins nothing."""
        session = self._session()

        def parse(body: bytes) -> CanonicalRequest:
            return MESSAGES.parse_count(parse_body(body), template_variables=self._template_variables)

        return json_answer({"input_tokens": await session.count_tokens(await self._parse(parse))})

    def _session(self) -> SessionPort:
        session = live_session(self._directory, request.headers)
        find_reply(request.scope).place = session.place
        return session

    async def _parse(self, parse: Callable[[bytes], _T]) -> _T:
        """What `parse` makes of the body, off the event loop where it is large."""
        body = await read_body(request.body, content_length=request.content_length, max_bytes=self._max_bytes)
        return parse(body) if len(body) <= INLINE_BODY_BYTES else await self._cpu.run(parse, body)
