"""The Quart-Trio application: paths, authentication, and the front half of a model request.

A front half finds the Session, reads the body, submits, waits and writes; it owns nothing that matters when it is
cancelled. Not covered: sockets and shutdown (serve.py), what a dialect says (chat.py), the work itself (runtime).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from quart import request
from quart.wrappers import Response
from quart_trio import QuartTrio
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as WerkzeugMethodNotAllowed

from relax_trio.api.body import drain_body, parse_body, read_body
from relax_trio.api.chat import CHAT
from relax_trio.api.dialect import Dialect, ParsedRequest, reply_bytes
from relax_trio.api.envelopes import error_envelope
from relax_trio.api.failures import tell_failure
from relax_trio.api.reply import ReplyTracker, find_reply
from relax_trio.api.sessions import SessionDirectory, SessionPort
from relax_trio.api.sse import call_name, sse_frames
from relax_trio.config.tree import ServerConfig
from relax_trio.data.json import JsonObject
from relax_trio.errors import (
    AuthenticationError,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    ProtocolError,
    SessionDiscarded,
)
from relax_trio.sync.cpu import CpuPool

BASE_PATH = "/agentic_api"
INLINE_BODY_BYTES = 256 * 1024
"""Bodies up to this are parsed on the event loop (a few milliseconds); a thread costs more than it saves there."""

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_View = Callable[..., Awaitable[Response]]


def make_app(
    directory: SessionDirectory,
    *,
    config: ServerConfig,
    operator_token: str,
    cpu: CpuPool,
    model_name: str = "relax-trio",
) -> QuartTrio:
    """Build the application of the model API.

    Args:
      directory: finds Sessions by credential.
      config: `max_request_bytes` is enforced here.
      operator_token: opens the whole of `/debug_state`.
      cpu: parses large bodies and writes large views off the event loop.
      model_name: the model that `/v1/models` lists; requests may name any.
    """
    app = QuartTrio(__name__, static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # a request may be held for hours
        BODY_TIMEOUT=None,  # clients are local; a slow one holds nothing but its own connection
        MAX_CONTENT_LENGTH=None,  # body.py enforces the limit, see there
        BACKGROUND_TASK_SHUTDOWN_TIMEOUT=None,  # there are none
    )
    api = _Api(directory, config=config, operator_token=operator_token, cpu=cpu, model_name=model_name)
    api.add_routes(app)
    app.register_error_handler(Exception, api.refuse)
    app.asgi_app = ReplyTracker(app.asgi_app)  # type: ignore[method-assign]  # the way Quart documents for middleware
    return app


class _Api:
    """The views. One for each app; no state of its own."""

    def __init__(
        self,
        directory: SessionDirectory,
        *,
        config: ServerConfig,
        operator_token: str,
        cpu: CpuPool,
        model_name: str,
    ) -> None:
        self._directory = directory
        self._max_bytes = config.max_request_bytes
        self._operator_token = operator_token.encode()
        self._cpu = cpu
        self._model_name = model_name

    def add_routes(self, app: QuartTrio) -> None:
        """Register every path. SDKs differ in whether they append `/v1`, so most paths stand with and without it."""

        def add(path: str, view: _View, method: str, *, bare: bool = False) -> None:
            for prefix in ("", "/v1") if bare else ("",):
                rule = f"{BASE_PATH}{prefix}{path}"
                app.add_url_rule(rule, f"{method} {rule}", view, methods=[method], strict_slashes=False)

        add("/", self.base, "GET")
        add("/health", self.health, "GET")
        add("/debug_state", self.debug_state, "GET")
        add("/models", self.models, "GET", bare=True)
        add("/models/<path:model_id>", self.model, "GET", bare=True)
        add("/chat/completions", self._model_view(CHAT), "POST", bare=True)
        add("/completions", self.completions, "POST", bare=True)
        for path in ("/responses", "/messages", "/messages/count_tokens"):
            add(path, self.later, "POST", bare=True)

    # --- model requests -------------------------------------------------------------------------------------

    def _model_view(self, dialect: Dialect) -> _View:
        async def view() -> Response:
            return await self._model_request(dialect)

        return view

    async def _model_request(self, dialect: Dialect) -> Response:
        """The front half of one model request."""
        session = self._session()
        reply = find_reply(request.scope)
        reply.place = session.place
        parsed = await self._parse(dialect)
        call = session.submit(parsed.request)
        reply.hold(call)
        if parsed.stream:
            # What is refused at once is refused by status: clients look there for a full context first.
            await call.wait_begun()
            frames = sse_frames(dialect, parsed, call, session.place, reply)
            return Response(frames, headers=_SSE_HEADERS, mimetype="text/event-stream")
        completion = await call.wait_done()
        return _json(dialect.render(completion, parsed, name=call_name(session.place, completion)))

    async def _parse(self, dialect: Dialect) -> ParsedRequest:
        body = await read_body(request.body, content_length=request.content_length, max_bytes=self._max_bytes)
        path, retry = request.path, _is_retry(request.headers)

        def parse() -> ParsedRequest:
            digest = hashlib.sha256(path.encode() + b"\0" + body).digest()
            return dialect.parse(parse_body(body), digest=digest, retry=retry)

        return parse() if len(body) <= INLINE_BODY_BYTES else await self._cpu.run(parse)

    def _session(self) -> SessionPort:
        """The Session whose credential the request carries.

        Raises:
          EngineUnavailable, AuthenticationError, SessionDiscarded.
        """
        credential = _credential(request.headers)
        if self._directory.closing:
            raise EngineUnavailable("the run is shutting down and takes no more requests")
        session = self._directory.find(credential)
        if session is None:
            raise SessionDiscarded(
                "this credential opens no live session: it has ended, or never was; a retry can't succeed"
            )
        return session

    async def completions(self) -> Response:
        """Text completions are not offered: a prompt has no turns to train on."""
        raise NotFound(
            "there is no /v1/completions here; send the conversation as messages to /v1/chat/completions",
            code="unsupported_endpoint",
        )

    async def later(self) -> Response:
        """APIs that are not there yet."""
        raise NotFound(
            f"{request.path} comes with a later version; until then use /v1/chat/completions",
            code="unsupported_endpoint",
        )

    # --- everything else ------------------------------------------------------------------------------------

    async def base(self) -> Response:
        """What is here, for clients and people who probe the base path."""
        return _json(
            {"service": "relax_trio model API", "endpoints": ["/v1/chat/completions", "/v1/models", "/health"]}
        )

    async def health(self) -> Response:
        """Whether requests are accepted."""
        if self._directory.closing:
            raise EngineUnavailable("the run is shutting down")
        return _json({"status": "ok"})

    async def models(self) -> Response:
        """The one model there is."""
        self._session()
        return _json({"object": "list", "data": [_model(self._model_name)]})

    async def model(self, model_id: str) -> Response:
        """Any model by name: names are echoed and select nothing."""
        self._session()
        return _json(_model(model_id))

    async def debug_state(self) -> Response:
        """Own part with a Session's credential, the whole with the operator token; `forest=1` adds nodes."""
        credential = _credential(request.headers)
        forest = request.args.get("forest") == "1"
        if hmac.compare_digest(credential.encode(), self._operator_token):
            state = self._directory.debug_state(forest=forest)
        else:
            session = self._directory.find(credential)
            if session is None:
                raise SessionDiscarded("this credential opens neither a live session nor the operator's view")
            state = session.debug_state(forest=forest)
        body = await self._cpu.run(reply_bytes, state) if forest else reply_bytes(state)
        return _response(body)

    async def refuse(self, exc: Exception) -> Response:
        """Answer an exception of a view, or of routing, in the envelope of its path."""
        error, headers = _as_protocol_error(exc), Headers()
        if not error.retryable:
            headers["x-should-retry"] = "false"
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        if isinstance(exc, WerkzeugMethodNotAllowed) and exc.valid_methods:
            headers["allow"] = ", ".join(sorted(exc.valid_methods))
        await drain_body(request.body)
        return _json(error_envelope(request.path, error), error.status, headers)


def _as_protocol_error(exc: Exception) -> ProtocolError:
    if isinstance(exc, ProtocolError):
        return exc
    if isinstance(exc, WerkzeugMethodNotAllowed):
        return MethodNotAllowed(f"{request.path} does not take {request.method}")
    if isinstance(exc, HTTPException) and exc.code == 404:
        return NotFound(f"there is no {request.path} here; the model API is at {BASE_PATH}/v1/chat/completions")
    if isinstance(exc, HTTPException) and exc.code is not None and exc.code < 500:
        error = InvalidRequest(exc.description or exc.name)
        error.status = exc.code
        return error
    place = find_reply(request.scope).place
    tell_failure(exc, place=place, path=request.path, secret=_bearer(request.headers))
    return InternalError(f"the request failed inside relax_trio{f' at {place}' if place else ''}; its log says why")


def _credential(headers: Headers) -> str:
    """The bearer token, or the Anthropic SDK's key.

    Raises:
      AuthenticationError: neither is there in a readable form.
    """
    credential = _bearer(headers)
    if credential is None:
        raise AuthenticationError(
            "no credential: send the header `Authorization: Bearer $RELAX_SESSION_ID` (or `x-api-key`)"
        )
    return credential


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None


def _is_retry(headers: Headers) -> bool:
    """Both SDKs count their own retries in this header."""
    count = headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdigit() and int(count) > 0


def _model(name: str) -> JsonObject:
    return {"id": name, "object": "model", "created": 0, "owned_by": "relax_trio"}


def _json(value: JsonObject, status: int = 200, headers: Headers | None = None) -> Response:
    return _response(reply_bytes(value), status, headers)


def _response(body: bytes, status: int = 200, headers: Headers | None = None) -> Response:
    response = Response(find_reply(request.scope).last_part(body), status, headers, content_type="application/json")
    response.content_length = len(body)
    return response
