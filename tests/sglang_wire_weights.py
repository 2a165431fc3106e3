"""The wire server with adapters, weights by broadcast, and memory that can be released."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial

import torch
import trio
from sglang_wire import TICK_S, VERSIONS, Died, WireServer, answer_of, main

NEW = VERSIONS[1]
"""All answers of this kind were recorded there; the older server has the same paths."""


class WeightsWireServer(WireServer):
    """State of one server.

    Args:
      told: fields of `/server_info` that differ from the recorded ones.
    """

    def __init__(self, version, *, told=None, **how):
        super().__init__(version, **how)
        self.told = told or {}
        self.adapters = {}  # name → what it was loaded from
        self.groups = {}
        self.received = {}
        self.released = set()
        self.refuses = set()  # paths that answer with 400
        self.silent = set()  # paths that never answer
        self.in_trouble = set()  # paths that answer with 500
        self.dies_at = None
        self.is_sick = False

    async def _answer(self, method, target, body):
        path = target.partition("?")[0]
        if method == "POST":
            if path == self.dies_at:
                self.log.append(f"{method} {target}")
                self._scope.cancel(reason="killed by the test")
                await trio.sleep_forever()
            if path in self.silent:
                self.log.append(f"{method} {target}")
                await trio.sleep_forever()
            if path in self.in_trouble:
                return 500, b"Internal Server Error"
            if path in self.refuses:
                self.log.append(f"{method} {target}")
                return 400, b'{"success":false,"message":"no","error_message":"no"}'
        return await super()._answer(method, target, body)

    async def _server_info(self, body):
        status, answer = await super()._server_info(body)
        return status, _json({**json.loads(answer), **self.told})

    async def _health(self, body):
        return (503, b"") if self.is_sick else await super()._health(body)

    async def _model_info(self, body):
        return (503, b"") if self.is_sick else await super()._model_info(body)

    async def _generate(self, body):
        if self.released:
            raise Died("a request while its memory is released")
        if body.get("lora_path") not in {None, *self.adapters}:
            return answer_of(NEW, "17_generate_unknown_adapter")
        return await super()._generate(body)

    # --- adapters ---------------------------------------------------------------------------------------------

    async def _load_lora_adapter(self, body):
        if not os.path.isdir(body["lora_path"]):  # noqa: ASYNC240 - a test may block
            return answer_of(NEW, "17_load_lora_adapter_bad_path")
        return self._loaded(body, body["lora_path"])

    async def _load_lora_adapter_from_tensors(self, body):
        (serialized,) = body["serialized_named_tensors"]
        return self._loaded(body, pickle.loads(base64.b64decode(serialized)))

    def _loaded(self, body, what):
        if body["lora_name"] in self.adapters:
            return answer_of(NEW, "17_load_lora_adapter_twice")
        self.adapters[body["lora_name"]] = what
        return answer_of(NEW, "17_load_lora_adapter")

    async def _unload_lora_adapter(self, body):
        name = body["lora_name"]
        if self.adapters.pop(name, None) is None:
            return answer_of(NEW, "17_unload_lora_adapter_unknown")
        while any(request.body.get("lora_path") == name for request in self.running.values()):  # noqa: ASYNC110
            await trio.sleep(TICK_S)
        return answer_of(NEW, "17_unload_lora_adapter")

    async def _update_weight_version(self, body):
        self.weight_version = body["new_version"]
        return answer_of(NEW, "07_update_weight_version")

    # --- broadcasts -------------------------------------------------------------------------------------------

    async def _init_weights_update_group(self, body):
        assert body["backend"] == "gloo"
        join = partial(_join, body["group_name"], body["master_address"], body["master_port"], body["world_size"])
        self.groups[body["group_name"]] = await trio.to_thread.run_sync(join, abandon_on_cancel=True)
        return answer_of(NEW, "18_init_weights_update_group")

    async def _update_weights_from_distributed(self, body):
        if not self.is_old and not self.in_update:
            return answer_of(NEW, "18_update_weights_from_distributed_outside")
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        receive = partial(_receive, self.groups[body["group_name"]], tensors)
        await trio.to_thread.run_sync(receive, abandon_on_cancel=True)
        self.received |= dict(zip(body["names"], tensors, strict=True))
        return self._updated(body, "11_update_unknown_name")

    async def _destroy_weights_update_group(self, body):
        if self.groups.pop(body["group_name"], None) is None:
            return answer_of(NEW, "18_destroy_weights_update_group_unknown")
        return answer_of(NEW, "18_destroy_weights_update_group")

    # --- memory -----------------------------------------------------------------------------------------------

    async def _release_memory_occupation(self, body):
        if self.running and (self.is_old or self.paused != "retract"):
            raise Died("release_memory_occupation should be called only when server is idle.")
        self.released |= set(body["tags"])
        self.cached_under = set()
        return answer_of(NEW, "07_release_memory")

    async def _resume_memory_occupation(self, body):
        if not set(body["tags"]) <= self.released:
            raise Died("memory is resumed that was not released")
        self.released -= set(body["tags"])
        return answer_of(NEW, "07_resume_memory")

    def _updated(self, body, template):
        if "weights" in self.released:
            raise Died("weights are loaded into memory that is released")
        return super()._updated(body, template)


@asynccontextmanager
async def weights_server(version=NEW, **how):
    """A running server for the length of the block; one that died fails the test."""
    server = WeightsWireServer(version, **how)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        yield server
        nursery.cancel_scope.cancel(reason="the test is done with its server")
    assert server.died_of is None, server.died_of


def _join(name, address, port, world):
    """As SGLang does it, but for torch's global state, of which one process has only one."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    timeout = timedelta(seconds=20)
    store = TCPStore(address, port, world, is_master=False, timeout=timeout)
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return ProcessGroupGloo(store, 1, world, options)


def _receive(group, tensors):
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for tensor in tensors:
        group.broadcast([tensor], options).wait()


def _json(value):
    return json.dumps(value).encode()


class _Started(WeightsWireServer):
    """One that was started by its flags, and tells of them."""

    def __init__(self, version, **how):
        words = sys.argv[1:]
        rank = int(words[words.index("--max-lora-rank") + 1]) if "--enable-lora" in words else None
        memory = "--enable-memory-saver" in words
        told = {"enable_lora": rank is not None, "max_lora_rank": rank, "enable_memory_saver": memory}
        super().__init__(version, told=told, **how)

    async def _answer(self, method, target, body):
        if method == "POST" and not target.startswith("/generate"):
            print("POST", target, flush=True)
        return await super()._answer(method, target, body)


if __name__ == "__main__":
    main(sys.argv[1:], _Started)
