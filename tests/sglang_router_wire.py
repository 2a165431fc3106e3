"""A router that answers in the recorded words of a real one, over workers that a test adds and takes away."""

from __future__ import annotations

import copy
import json
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import trio
from sglang_wire import DATA, VERSIONS, WireServer

RECORDED = DATA / "router-0.3.2"


def recorded_body(name):
    """Status and body bytes of a recorded answer of the router."""
    response = json.loads((RECORDED / f"{name}.json").read_text())["response"]
    return response["status"], response["body"].encode()


def worker_at(url, **fields):
    """A worker as the router tells of one, at another URL and with other `fields`."""
    (worker,) = json.loads(recorded_body("21_workers_one")[1])["workers"]
    return {**copy.deepcopy(worker), "url": url, **fields}


class WireRouter(WireServer):
    """State of one router.

    Attributes:
      workers: what it lists; None: it answers nobody with sense.
      speaks_of: name of the recording that it answers `/workers` with instead.
    """

    def __init__(self, *urls):
        super().__init__(VERSIONS[1])
        self.workers = [worker_at(url) for url in urls]
        self.speaks_of = None

    async def _answer(self, method, target, body):
        path = urlsplit(target).path
        self.log.append(f"{method} {path}")
        if path != "/workers":
            known = RECORDED / f"22_{path.strip('/')}.json"
            return recorded_body(known.stem) if known.exists() else (404, b"")
        if self.speaks_of is not None:
            return recorded_body(self.speaks_of)
        if self.workers is None:
            return 500, b""
        listed = {"workers": self.workers, "total": len(self.workers)}
        return 200, json.dumps(listed).encode()


@asynccontextmanager
async def wire_router(*urls):
    """A running `WireRouter` for the length of the block."""
    router = WireRouter(*urls)
    async with trio.open_nursery() as nursery:
        await nursery.start(router.run)
        yield router
        nursery.cancel_scope.cancel(reason="the test is done with its router")
