"""The calls of one SGLang server, each bounded in time but `generate`. Knows no attempts and no other servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import trio
from attrs import frozen

from relax_trio.backend.lanes import Lanes
from relax_trio.backend.sglang import wire
from relax_trio.data.json import JsonObject
from relax_trio.errors import BackendProtocolError, BackendUnavailable
from relax_trio.ids import WeightVersion

CONTROL_S = 10.0
"""Bound of a call that the server answers at once."""

FLUSH_WAIT_S = 10
"""How long the server itself waits until it is idle before it refuses to flush its cache."""

LOAD_S = 600.0
"""Bound of loading weights."""

_N_CONTROL_LANES = 32

PauseMode = Literal["retract", "in_place"]


@frozen
class Probe:
    """What a generated token tells of a server: whether answers tell the version of each token, and the version."""

    has_spans: bool
    version: WeightVersion


class SGLangClient:
    """One server over HTTP.

    Args:
      url: scheme, host and port.
      name: what messages call it.
      max_inflight: attempts at once.
    """

    def __init__(self, url: str, name: str, max_inflight: int) -> None:
        self.url = url.rstrip("/")
        self.name = name
        self._generate = Lanes(self.url, max_inflight)
        # Apart, so that an abort never waits behind what it is to abort.
        self._control = Lanes(self.url, _N_CONTROL_LANES)

    async def generate(self, body: bytes, what: str) -> wire.Leg:
        """Run one leg to its finish or abort; see `wire.read_leg` for what is raised.

        Cancellation: the connection is closed; the server goes on unless it is told to abort.
        """
        response = await self._generate.request("POST", "/generate", body)
        return wire.read_leg(response.status_code, response.content, f"{what} on {self.name}")

    async def abort(self, rid: str) -> None:
        """Ask the server to give back what it has of `rid`. An unknown rid is no error.

        Raises:
          BackendUnavailable: it does not answer.
        """
        assert rid, "an empty rid is a prefix of all"
        await self._call("POST", "/abort_request", {"rid": rid})

    async def info(self) -> wire.ServerInfo:
        """What the server tells about itself.

        Raises:
          BackendError: it does not answer, or is no SGLang server.
        """
        status, body = await self._call("GET", "/server_info")
        return wire.read_info(status, body, f"/server_info of {self.name}")

    async def weight_version(self) -> WeightVersion:
        """The version that the server says it serves. Answers while it is paused.

        Raises:
          BackendError: as `info`.
        """
        status, body = await self._call("GET", "/model_info")
        what = f"/model_info of {self.name}"
        version = wire.read_object(status, body, what).get("weight_version")
        if not isinstance(version, str):
            raise BackendProtocolError(f"{what}: names no weight version")
        return WeightVersion(version)

    async def probe(self, seconds: float) -> Probe:
        """Generate a token.

        Raises:
          BackendError: it can't.
        """
        body: JsonObject = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
        }
        status, answer = await self._call("POST", "/generate", body, seconds=seconds)
        leg = wire.read_leg(status, answer, f"probe of {self.name}")
        if len(leg.token_ids) != 1:
            raise BackendProtocolError(f"probe of {self.name}: {len(leg.token_ids)} tokens instead of one")
        return Probe(wire.has_spans(answer), leg.versions[0].version)

    async def is_alive(self, seconds: float, *, paused: bool) -> bool:
        """Whether the server generates, or, while it is paused, whether it answers at all."""
        path = "/model_info" if paused else "/health"
        try:
            status, _ = await self._call("GET", path, seconds=seconds)
        except BackendUnavailable:
            return False
        return status == 200

    async def pause(self, mode: PauseMode) -> None:
        """Let no attempt make another token until `resume`.

        Raises:
          BackendError: refused, or no answer.
        """
        status, body = await self._call("POST", "/pause_generation", {"mode": mode})
        wire.require_ok(status, body, f"pause ({mode}) of {self.name}")

    async def resume(self) -> None:
        """Go on generating; harmless where nothing is paused.

        Raises:
          BackendError: refused, or no answer.
        """
        status, body = await self._call("POST", "/continue_generation", {})
        wire.require_ok(status, body, f"continuing {self.name}")

    async def flush_cache(self, wait_s: int = FLUSH_WAIT_S) -> None:
        """Empty the prefix cache. The server waits until it is idle; that is not repeated.

        Args:
          wait_s: how long it does; 0 where it is paused: what is put back into the queue never gets idle.

        Raises:
          BackendRejected: refused: it is not idle.
          BackendUnavailable: no answer.
        """
        path = f"/flush_cache?timeout={wait_s}"
        status, body = await self._call("POST", path, seconds=wait_s + CONTROL_S)
        wire.require_ok(status, body, f"flushing the prefix cache of {self.name}")

    async def load_from_disk(self, path: Path, version: WeightVersion) -> None:
        """Load a checkpoint directory that the server can see. The cache is not flushed by that.

        Args:
          path: absolute.

        Raises:
          BackendError: refused, or no answer.
        """
        body: JsonObject = {"model_path": str(path), "weight_version": version, "flush_cache": False}
        status, answer = await self._call("POST", "/update_weights_from_disk", body, seconds=LOAD_S)
        wire.read_success(status, answer, f"loading {path} on {self.name}")

    async def needs_update_session(self) -> bool:
        """Whether tensors are taken between `/begin_weight_update` and `/end_weight_update` only.

        Raises:
          BackendUnavailable: no answer.
        """
        status, _ = await self._call("GET", "/begin_weight_update")  # a path that knows POST only
        return status == 405

    async def update_session(self, step: Literal["begin", "end"]) -> None:
        """Open or close the bracket around `load_tensors`.

        Raises:
          BackendError: refused, or no answer.
        """
        status, body = await self._call("POST", f"/{step}_weight_update", {}, seconds=LOAD_S)
        wire.read_success(status, body, f"/{step}_weight_update of {self.name}")

    async def load_tensors(self, serialized: str, n_ranks: int, version: WeightVersion) -> None:
        """Load pickled named tensors. The cache is not flushed by that.

        Args:
          serialized: base64 text, the same for each of the `n_ranks` ranks.

        Raises:
          BackendError: refused, or no answer.
        """
        body: JsonObject = {
            "serialized_named_tensors": [serialized] * n_ranks,
            "flush_cache": False,
            "weight_version": version,
        }
        status, answer = await self._call("POST", "/update_weights_from_tensor", body, seconds=LOAD_S)
        wire.read_success(status, answer, f"loading tensors on {self.name}")

    async def close_session(self, session_id: str) -> None:
        """Tell the server that a Session ended; an unknown one is no error.

        Raises:
          BackendError: refused, or no answer.
        """
        status, body = await self._call("POST", "/close_session", {"session_id": session_id})
        wire.require_ok(status, body, f"closing session {session_id} on {self.name}")

    async def metrics(self) -> str:
        """The server's Prometheus metrics, as text.

        Raises:
          BackendError: it has none (`--enable-metrics`), or no answer.
        """
        status, body = await self._call("GET", "/metrics")
        wire.require_ok(status, body, f"/metrics of {self.name}")
        return body.decode()

    async def aclose(self) -> None:
        """Close every connection; see `Lanes.aclose`."""
        await self._generate.aclose()
        await self._control.aclose()

    async def _call(
        self, method: str, path: str, body: JsonObject | None = None, *, seconds: float = CONTROL_S
    ) -> tuple[int, bytes]:
        content = None if body is None else json.dumps(body).encode()
        with trio.move_on_after(seconds) as scope:
            response = await self._control.request(method, path, content)
        if scope.cancelled_caught:
            raise BackendUnavailable(f"{method} {self.url}{path}: no answer within {seconds:g} s")
        return response.status_code, response.content
