"""The operator's views: the state of the run and its gauges."""

from __future__ import annotations

from typing import Final

from quart import request
from quart.wrappers import Response

from relax_trio.api.answers import bytes_answer
from relax_trio.api.credentials import credential, is_operator
from relax_trio.api.dialect import reply_bytes
from relax_trio.api.sessions import SessionDirectory, Statistics
from relax_trio.errors import AuthenticationError, SessionDiscarded
from relax_trio.sync.cpu import CpuPool

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class OperatorViews:
    """Views of the run. No state of their own.

    Args:
      directory: knows every live Session.
      operator_token: opens the whole.
      cpu: writes large views off the event loop.
    """

    def __init__(self, directory: SessionDirectory, *, operator_token: str, cpu: CpuPool) -> None:
        self._directory = directory
        self._operator_token = operator_token.encode()
        self._cpu = cpu

    async def debug_state(self) -> Response:
        """Own part with a Session's credential, the whole with the operator token; `forest=1` adds nodes."""
        asked = credential(request.headers)
        forest = request.args.get("forest") == "1"
        if is_operator(asked, self._operator_token):
            state = self._directory.debug_state(forest=forest)
        else:
            session = self._directory.find(asked)
            if session is None:
                raise SessionDiscarded("this credential opens neither a live session nor the operator's view")
            state = session.debug_state(forest=forest)
        return bytes_answer(await self._cpu.run(reply_bytes, state) if forest else reply_bytes(state))

    async def metrics(self) -> Response:
        """Gauges in Prometheus' text format, with the operator token only."""
        if not is_operator(credential(request.headers), self._operator_token):
            raise AuthenticationError("/metrics needs the operator token that is printed at start")
        return bytes_answer(metrics_text(self._directory.statistics()).encode(), content_type=METRICS_TYPE)


def metrics_text(statistics: Statistics) -> str:
    """The gauges, one family after the other. States are words of this project and need no escaping."""
    requests = [
        f'relax_trio_requests{{waiting_for="{state}"}} {count}' for state, count in statistics.n_requests.items()
    ]
    lines = [
        "# HELP relax_trio_sessions Live Sessions.",
        "# TYPE relax_trio_sessions gauge",
        f"relax_trio_sessions {statistics.n_sessions}",
        "# HELP relax_trio_requests Open model requests by what they wait for.",
        "# TYPE relax_trio_requests gauge",
        *sorted(requests),
        "# HELP relax_trio_attempts Attempts that the backend has.",
        "# TYPE relax_trio_attempts gauge",
        f"relax_trio_attempts {statistics.n_attempts}",
    ]
    return "\n".join([*lines, ""])
