"""What an SGLang router tells of its workers, in the words of its versions since 0.1.

`/workers` lists objects since 0.2; `/list_workers` of older ones lists URLs. A router that knows of data parallelism
lists every rank of a server, with the rank behind its URL.
"""

from __future__ import annotations

import json
import re

import trio
from attrs import evolve, frozen

from relax_trio.backend.lanes import Lanes
from relax_trio.backend.sglang.wire import require_ok
from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.errors import BackendProtocolError, BackendUnavailable

_ANSWER_S = 5.0
_RANK = re.compile(r"/*(@\d+)?$")
_UNKNOWN = "unknown"


@frozen(kw_only=True)
class Worker:
    """One server behind a router.

    Attributes:
      url: of the server, without rank and final slash.
      model: what it serves, as it calls it; None where that is not told.
      is_healthy: as the router sees it.
      unfit: why it can't be sent an attempt; None where it can.
    """

    url: str
    model: str | None = None
    is_healthy: bool = True
    unfit: str | None = None


async def ask_workers(lanes: Lanes, router: str) -> dict[str, Worker]:
    """The workers of the router that `lanes` lead to, by URL.

    Raises:
      BackendUnavailable: no answer, or one that tells of trouble.
      BackendRejected: it wants an API key.
      BackendProtocolError: it is no router.
    """
    with trio.move_on_after(_ANSWER_S):
        path = "/workers"
        response = await lanes.request("GET", path)
        if response.status_code == 404:
            path = "/list_workers"
            response = await lanes.request("GET", path)
        require_ok(response.status_code, response.content, f"{path} of {router}")
        return read_workers(response.content, f"{path} of {router}")
    raise BackendUnavailable(f"{router}: no answer within {_ANSWER_S:g} s")


def read_workers(body: bytes, what: str) -> dict[str, Worker]:
    """The answer to `/workers` or `/list_workers`, by URL.

    Args:
      what: names the answer in messages.

    Raises:
      BackendProtocolError: it is something else.
    """
    try:
        value = parse_json(body)
    except ValueError as exc:
        raise BackendProtocolError(f"{what}: no JSON: {exc}") from exc
    listed: JsonValue = value.get("workers", value.get("urls")) if isinstance(value, dict) else None
    if not isinstance(listed, list):
        raise BackendProtocolError(f"{what}: lists no workers: {json.dumps(value)[:200]}")
    workers: dict[str, Worker] = {}
    for item in listed:
        worker = _worker({"url": item} if isinstance(item, str) else item, what)
        known = workers.get(worker.url, worker)  # another rank of the same server
        workers[worker.url] = evolve(worker, is_healthy=worker.is_healthy or known.is_healthy)
    return workers


def _worker(item: JsonValue, what: str) -> Worker:
    if not isinstance(item, dict) or not isinstance(url := item.get("url"), str):
        raise BackendProtocolError(f"{what}: a worker without a URL: {json.dumps(item)[:200]}")
    model = item.get("model_id")
    return Worker(
        url=_RANK.sub("", url),
        model=model if isinstance(model, str) and model != _UNKNOWN else None,
        is_healthy=item.get("is_healthy") is not False,
        unfit=_unfit(url, item),
    )


def _unfit(url: str, item: JsonObject) -> str | None:
    kind, mode = str(item.get("worker_type", "regular")), str(item.get("connection_mode", "http"))
    if kind != "regular":
        return f"it is a {kind} worker, which serves no attempt alone"
    if not url.startswith(("http://", "https://")) or not mode.lower().startswith("http"):
        return "it does not speak HTTP"
    return None
