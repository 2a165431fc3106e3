"""The calls of one SGLang server, each bounded in time but `generate`. Knows no attempts and no other servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import trio
from attrs import frozen

from relax_trio.backend.lanes import Lanes
from relax_trio.backend.sglang import wire
from relax_trio.backend.sglang.workers import ask_workers
from relax_trio.data.json import JsonObject
from relax_trio.errors import BackendError, BackendProtocolError, BackendRejected, BackendUnavailable
from relax_trio.ids import WeightVersion

CONTROL_S = 10.0
"""Bound of a call that the server answers at once."""

FLUSH_WAIT_S = 10
"""How long the server itself waits until it is idle before it refuses to flush its cache."""

LOAD_S = 600.0
"""Bound of loading weights."""

MEMORY_S = 60.0
"""Bound of releasing and resuming memory."""

_N_CONTROL_LANES = 32

ROUTING_KEY_HEADER = "x-smg-routing-key"
"""SGLang's router sends requests that agree in it to the same worker, and hands it on."""

PauseMode = Literal["retract", "in_place"]
MemoryTag = Literal["kv_cache", "weights"]


@frozen
class Probe:
    """What a generated token tells of a server: whether answers tell the version of each token, and the version."""

    has_spans: bool
    version: WeightVersion


@frozen
class Served:
    """The weights that a server says it serves: their version, and the directory that it last loaded from."""

    version: WeightVersion
    path: str


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

    async def generate(self, body: bytes, what: str, routing_key: str | None = None) -> wire.Leg:
        """Run one leg to its finish or abort; see `wire.read_leg` for what is raised.

        Args:
          routing_key: for whatever stands between here and the server.

        Cancellation: the connection is closed; the server goes on unless it is told to abort.
        """
        headers = None if routing_key is None else {ROUTING_KEY_HEADER: routing_key}
        response = await self._generate.request("POST", "/generate", body, headers)
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

    async def is_router(self) -> bool:
        """Whether a router answers here and no server; asked where something does not look like a server."""
        try:
            await ask_workers(self._control, self.name)
        except BackendRejected:  # to whoever has no API key
            return True
        except BackendError:
            return False
        return True

    async def served(self) -> Served:
        """What the server says it serves. Answers while it is paused.

        Raises:
          BackendError: as `info`.
        """
        status, body = await self._call("GET", "/model_info")
        what = f"/model_info of {self.name}"
        answer = wire.read_object(status, body, what)
        version, path = answer.get("weight_version"), answer.get("model_path")
        if not isinstance(version, str):
            raise BackendProtocolError(f"{what}: names no weight version")
        return Served(WeightVersion(version), str(path))

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

    async def has_post(self, path: str) -> bool:
        """Whether the server knows a path that takes POST only; nothing is posted.

        `/begin_weight_update`: tensors are taken between it and `/end_weight_update` only.

        Raises:
          BackendUnavailable: no answer.
        """
        status, _ = await self._call("GET", path)
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

    async def set_weight_version(self, version: WeightVersion) -> None:
        """Have answers name `version`; the weights stay.

        Raises:
          BackendError: refused, or no answer.
        """
        body: JsonObject = {"new_version": version, "abort_all_requests": False}
        status, answer = await self._call("POST", "/update_weight_version", body)
        wire.read_success(status, answer, f"/update_weight_version of {self.name}")

    # --- adapters ---------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load an adapter directory that the server can see, for requests that name it.

        Raises:
          BackendError: refused, or no answer.
        """
        body: JsonObject = {"lora_name": name, "lora_path": str(path)}
        status, answer = await self._call("POST", "/load_lora_adapter", body, seconds=LOAD_S)
        wire.read_adapter_success(status, answer, f"loading adapter {path} on {self.name}")

    async def load_adapter_tensors(self, name: str, config: JsonObject, serialized: str, n_ranks: int) -> None:
        """Load an adapter from its pickled tensors.

        Args:
          config: as PEFT writes it.
          serialized: base64 text, the same for each of the `n_ranks` ranks.

        Raises:
          BackendError: refused, or no answer.
        """
        # The second name is that of older servers, which hand one copy to all ranks.
        tensors: JsonObject = {"serialized_named_tensors": [serialized] * n_ranks, "serialized_tensors": serialized}
        body: JsonObject = {"lora_name": name, "config_dict": config, **tensors}
        status, answer = await self._call("POST", "/load_lora_adapter_from_tensors", body, seconds=LOAD_S)
        wire.read_adapter_success(status, answer, f"loading an adapter on {self.name}")

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; the server waits for requests that name it.

        Raises:
          BackendError: refused, or no answer.
        """
        status, answer = await self._call("POST", "/unload_lora_adapter", {"lora_name": name})
        wire.read_adapter_success(status, answer, f"unloading adapter {name} of {self.name}")

    # --- broadcasts -------------------------------------------------------------------------------------------

    async def join_group(self, name: str, address: str, port: int, world: int, kind: Literal["gloo", "nccl"]) -> None:
        """Have all ranks of the server join a process group, as ranks from 1; returns once they have.

        Raises:
          BackendError: refused, or no answer.
        """
        body: JsonObject = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": name,
            "backend": kind,
        }
        status, answer = await self._call("POST", "/init_weights_update_group", body, seconds=LOAD_S)
        wire.read_success(status, answer, f"/init_weights_update_group of {self.name}")

    async def receive_broadcast(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: WeightVersion,
    ) -> None:
        """Have the server receive tensors by broadcast, and load them. The cache is not flushed by that.

        Raises:
          BackendError: refused, or no answer.
        """
        body: JsonObject = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "flush_cache": False,
            "weight_version": version,
        }
        status, answer = await self._call("POST", "/update_weights_from_distributed", body, seconds=LOAD_S)
        wire.read_success(status, answer, f"receiving weights on {self.name}")

    async def leave_group(self, name: str) -> None:
        """Have the server leave a process group.

        Raises:
          BackendError: refused, or no answer.
        """
        status, answer = await self._call("POST", "/destroy_weights_update_group", {"group_name": name})
        wire.read_success(status, answer, f"/destroy_weights_update_group of {self.name}")

    # --- memory -----------------------------------------------------------------------------------------------

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Free the GPU memory of the tags; what was in it is lost. A server that is not idle exits over this.

        Raises:
          BackendError: refused, or no answer.
        """
        status, body = await self._call("POST", "/release_memory_occupation", {"tags": list(tags)}, seconds=MEMORY_S)
        wire.require_ok(status, body, f"releasing the memory of {self.name}")

    async def resume_memory(self, tag: MemoryTag) -> None:
        """Allocate the memory of a tag again, which was released before.

        Raises:
          BackendError: refused, e.g. because the memory is in use, or no answer.
        """
        status, body = await self._call("POST", "/resume_memory_occupation", {"tags": [tag]}, seconds=MEMORY_S)
        wire.require_ok(status, body, f"resuming the {tag} memory of {self.name}")

    # --- the rest ---------------------------------------------------------------------------------------------

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
