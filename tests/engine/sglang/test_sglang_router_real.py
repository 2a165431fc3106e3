"""A real SGLang router: its workers are found while they come and go; one routing key goes to one worker."""

from __future__ import annotations

import json
from array import array

import httpx
import pytest
import trio
from builders_backend import CONTEXT_LEN, make_attempt, serving
from builders_process import eventually
from builders_sglang import SERVED_VOCAB_LEN, RealRouter, backend_on, require_router, router_backend
from sglang_wire import VERSIONS, wire_server

from relax_trio.backend.base import SamplingParams
from relax_trio.backend.sglang import wire
from relax_trio.backend.sglang.client import SGLangClient
from relax_trio.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.sglang_server]

LONG = 400


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    """Without workers; requests with one routing key go to one of them."""
    require_router()
    router = RealRouter(tmp_path_factory.mktemp("router") / "router.log", "--policy", "manual")
    try:
        router.wait_ready()
        yield router
    finally:
        router.stop()


@pytest.fixture
async def workers(router):
    """Adds and takes away workers of the router; none is left afterwards."""
    async with httpx.AsyncClient(base_url=router.url, trust_env=False) as http:
        workers = Workers(http)
        yield workers
        for url in [worker["url"] for worker in await workers.listed()]:
            await workers.take(url)


class Workers:
    def __init__(self, http):
        self._http = http

    async def listed(self):
        return (await self._http.get("/workers")).json()["workers"]

    async def add(self, url):
        """Returns once the router lists it: it tells nobody that it does."""
        assert (await self._http.post("/workers", json={"url": url})).status_code == 202
        with trio.fail_after(60):
            while not any(worker["url"] == url and worker["is_healthy"] for worker in await self.listed()):  # noqa: ASYNC110
                await trio.sleep(0.1)

    async def take(self, url):
        (found,) = [worker for worker in await self.listed() if worker["url"] == url]
        assert (await self._http.delete(f"/workers/{found['id']}")).status_code == 202


async def test_workers_are_found_served_from_and_left_as_the_router_has_them(sglang_server, router, workers, tmp_path):
    checkpoint, url = sglang_server
    other = url.replace("127.0.0.1", "localhost")  # one server, which the router takes for two
    await workers.add(url)
    options = {"vocab_len": SERVED_VOCAB_LEN, "start_timeout_s": 60, "interval_s": 0.1}
    async with serving(router_backend(checkpoint, tmp_path, router.url, **options)) as backend:
        assert [server.client.url for server in backend.servers] == [url]
        await workers.add(other)
        await eventually(lambda: len(backend.servers) == 2, within_s=30)
        results = []

        async def call(i):
            results.append(await backend.generate(make_attempt([5 + i], session=f"s{i}", max_new_tokens=LONG)))

        async with trio.open_nursery() as nursery:
            for i in range(2):
                nursery.start_soon(call, i)
            await eventually(lambda: [server.n_legs for server in backend.servers] == [1, 1])
            await workers.take(other)
            await eventually(lambda: [server.client.url for server in backend.servers] == [url], within_s=30)
        assert [span.version for result in results for span in result.versions] == ["v1", "v1"]
        assert "abort" not in [result.finish for result in results]


async def test_a_real_router_that_is_named_as_a_server_is_noticed_at_once(sglang_server, router, tmp_path):
    with trio.fail_after(20):
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="is an SGLang router"), flatten_subgroups=True):
            async with serving(backend_on(sglang_server[0], tmp_path, router.url, start_timeout_s=600)):
                pass


async def test_a_router_in_between_sends_what_has_one_routing_key_to_one_worker(router, workers):
    keys = [f"G{i}/0-0" for i in range(8)]
    async with (
        wire_server(VERSIONS[1], context_len=CONTEXT_LEN + 6) as first,
        wire_server(VERSIONS[1], context_len=CONTEXT_LEN + 6) as second,
    ):
        for server in (first, second):
            await workers.add(server.url)
        client = SGLangClient(router.url, "router", 8)
        for n in range(4):
            for key in keys:
                rid = json.dumps([n, key])
                body = wire.generate_body(rid, array("i", [5]), SamplingParams(max_new_tokens=1), 1, routing_key=key)
                await client.generate(body, rid, key)
        await client.aclose()
        seen = [{key: server.routing_keys.count(key) for key in server.routing_keys} for server in (first, second)]
    assert set(seen[0]).isdisjoint(seen[1])
    assert {**seen[0], **seen[1]} == dict.fromkeys(keys, 4)
