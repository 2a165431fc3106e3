"""The application that is served: model requests (front.py) in front of the Quart-Trio application with the views.

Not covered: sockets and shutdown (serve.py), the views themselves (views.py, operator.py), refusals (refusal.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container

from quart.wrappers import Response
from quart_trio import QuartTrio

from relax_trio.api.front import ModelRequests
from relax_trio.api.operator import OperatorViews
from relax_trio.api.paths import BASE_PATH
from relax_trio.api.refusal import refuse
from relax_trio.api.reply import AsgiApp, ReplyTracker
from relax_trio.api.sessions import SessionDirectory
from relax_trio.api.views import Views
from relax_trio.config.tree import ServerConfig
from relax_trio.sync.cpu import CpuPool

_View = Callable[..., Awaitable[Response]]


def make_app(
    directory: SessionDirectory,
    *,
    config: ServerConfig,
    operator_token: str,
    cpu: CpuPool,
    model_name: str = "relax-trio",
    template_variables: Container[str] = frozenset(),
) -> AsgiApp:
    """Build the application of the model API.

    Args:
      directory: finds Sessions by credential.
      config: `max_request_bytes` is enforced here.
      operator_token: opens `/metrics` and the whole of `/debug_state`.
      cpu: parses large bodies and writes large views off the event loop.
      model_name: the model that `/v1/models` lists; requests may name any.
      template_variables: names that the checkpoint's chat template reads, see `Dialect.parse`.
    """
    views = make_views(directory, operator_token=operator_token, cpu=cpu, model_name=model_name)
    requests = ModelRequests(
        directory, max_bytes=config.max_request_bytes, cpu=cpu, template_variables=template_variables, others=views
    )
    return ReplyTracker(requests)


def make_views(
    directory: SessionDirectory, *, operator_token: str, cpu: CpuPool, model_name: str = "relax-trio"
) -> QuartTrio:
    """The application of all that is no model request; arguments as in `make_app`. Served behind a tracker only."""
    app = QuartTrio(__name__, static_folder=None)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # a large view may take its time
        BODY_TIMEOUT=None,  # clients are local; a slow one holds nothing but its own connection
        MAX_CONTENT_LENGTH=None,  # no view reads its body
        BACKGROUND_TASK_SHUTDOWN_TIMEOUT=None,  # there are none
    )
    views = Views(directory, model_name=model_name)
    _add_routes(app, views, OperatorViews(directory, operator_token=operator_token, cpu=cpu))
    app.register_error_handler(Exception, refuse)
    return app


def _add_routes(app: QuartTrio, views: Views, operator: OperatorViews) -> None:
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
    add("/completions", views.completions, "POST", bare=True)
