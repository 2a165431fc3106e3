"""Servers found through a router, against a router and servers in recorded words: they come, go, and are refused."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from builders_backend import CONTEXT_LEN, VOCAB_LEN, make_attempt, serving
from builders_process import eventually
from builders_sglang import backend_on, router_backend
from sglang_router_wire import wire_router, worker_at
from sglang_wire import VERSIONS, wire_server

from relax_trio.backend.base import WeightSource
from relax_trio.backend.sglang.check import check_engine
from relax_trio.errors import BackendUnavailable, ConfigError

pytestmark = pytest.mark.engine

LONG = 600


@pytest.fixture
async def servers():
    """Two of them."""
    async with (
        wire_server(VERSIONS[1], context_len=CONTEXT_LEN + 6, tokens_per_s=1000.0) as first,
        wire_server(VERSIONS[1], context_len=CONTEXT_LEN + 6, tokens_per_s=1000.0) as second,
    ):
        yield first, second


@pytest.fixture
def behind(checkpoint, tmp_path):
    """A served backend whose servers are those of a router; it looks at them often."""

    @asynccontextmanager
    async def behind(router, **options):
        with trio.fail_after(20):
            async with serving(
                router_backend(checkpoint, tmp_path, router.url, vocab_len=VOCAB_LEN, **options)
            ) as backend:
                yield backend

    return behind


def urls_of(backend):
    return {server.client.url for server in backend.servers}


async def test_every_worker_gets_the_weights_and_then_work(behind, servers):
    async with wire_router(*(server.url for server in servers)) as router, behind(router) as backend:
        await eventually(lambda: len(backend.servers) == 2)
        assert [server.weight_version for server in servers] == ["v1", "v1"]
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(backend.generate, make_attempt([1], session=f"s{i}", max_new_tokens=30))
    assert [sum("rid" in body for body in server.bodies) for server in servers] == [2, 2]
    assert set(router.log) == {"GET /workers"}


async def test_a_router_that_has_no_worker_yet_is_waited_for(behind, servers, events):
    async with wire_router() as router, trio.open_nursery() as nursery:

        async def add_later():
            await eventually(lambda: len(router.log) >= 2)
            router.workers = [worker_at(servers[0].url)]

        nursery.start_soon(add_later)
        async with behind(router) as backend:
            assert urls_of(backend) == {servers[0].url}
    assert "router.unreachable" not in {event.name for event in events}


async def test_a_worker_that_is_added_gets_the_weights_of_now_and_work(behind, servers, model):
    first, second = servers
    async with wire_router(first.url) as router, behind(router) as backend:
        await backend.update_weights("v2", WeightSource(tensors=model.state_dict()))
        router.workers.append(worker_at(second.url))
        await eventually(lambda: len(backend.servers) == 2)
        assert second.weight_version == "v2"
        async with trio.open_nursery() as nursery:
            for i in range(2):
                nursery.start_soon(backend.generate, make_attempt([1], session=f"s{i}", max_new_tokens=30))
    assert sum("rid" in body for body in second.bodies) == 1


async def test_a_worker_that_is_taken_away_ends_what_it_has_and_gets_no_more(behind, servers, events):
    first, second = servers
    results = []

    async def call(i):
        results.append(await backend.generate(make_attempt([1], session=f"s{i}", max_new_tokens=LONG)))

    async with wire_router(first.url, second.url) as router, behind(router) as backend:
        await eventually(lambda: len(backend.servers) == 2)
        async with trio.open_nursery() as nursery:
            for i in range(2):
                nursery.start_soon(call, i)
            await eventually(lambda: first.running and second.running)
            router.workers = [worker_at(second.url)]
            await eventually(lambda: urls_of(backend) == {second.url})
            assert first.running
            await backend.generate(make_attempt([1], session="later", max_new_tokens=1))
        assert [result.finish for result in results] == ["length", "length"]
        assert sum("rid" in body for body in first.bodies) == 1
        await eventually(lambda: "server.lost" in [event.name for event in events])
        router.workers.append(worker_at(first.url))
        await eventually(lambda: len(backend.servers) == 2)
    lost = [event.fields for event in events if event.name == "server.lost"]
    assert [(fields["legs"], "has it no more" in fields["reason"]) for fields in lost] == [(0, True)]


async def test_a_worker_may_come_and_go_at_any_moment(behind, servers):
    first, second = servers
    async with wire_router(first.url, second.url) as router, behind(router, interval_s=0.0) as backend:
        for _ in range(10):
            await eventually(lambda: len(backend.servers) == 2)
            router.workers = [worker_at(first.url)]
            await eventually(lambda: urls_of(backend) == {first.url})
            router.workers.append(worker_at(second.url))


async def test_a_worker_that_hangs_while_it_is_taken_away_fails_what_it_has(behind, servers):
    first, second = servers
    async with wire_router(first.url) as router, behind(router, health_timeout_s=0.4) as backend:
        async with trio.open_nursery() as nursery:

            async def lose():
                with pytest.raises(BackendUnavailable, match="engine-health-timeout"):
                    await backend.generate(make_attempt([1], max_new_tokens=LONG))

            nursery.start_soon(lose)
            await eventually(lambda: first.running)
            router.workers = [worker_at(second.url)]
            await eventually(lambda: urls_of(backend) == {second.url})
            first.hangs, first.tokens_per_s = True, 0.0
        await eventually(lambda: not any("worker" in name and first.url in name for name in _task_names()))
        assert urls_of(backend) == {second.url}
        first._scope.cancel(reason="it never answers")


async def test_the_routers_word_on_health_counts_for_new_workers_only(behind, servers):
    first, second = servers
    async with wire_router(first.url) as router, behind(router) as backend:
        router.workers = [worker_at(first.url, is_healthy=False), worker_at(second.url, is_healthy=False)]
        n_asked = len(router.log)
        await eventually(lambda: len(router.log) > n_asked + 2)
        assert urls_of(backend) == {first.url}
        router.workers[1]["is_healthy"] = True
        await eventually(lambda: len(backend.servers) == 2)


async def test_a_router_that_does_not_answer_costs_no_server_and_is_told_of_once(behind, servers, events):
    async with wire_router(servers[0].url) as router, behind(router) as backend:
        router.workers = None
        n_asked = len(router.log)
        await eventually(lambda: len(router.log) > n_asked + 3)
        await backend.generate(make_attempt([1], max_new_tokens=1))
    assert [event.name for event in events].count("router.unreachable") == 1


async def test_a_worker_that_can_not_be_used_is_refused_once_while_the_run_goes_on(behind, servers, events):
    first, second = servers
    async with wire_router(first.url) as router, behind(router) as backend:
        router.workers += [worker_at(second.url, model_id="another"), worker_at("grpc://127.0.0.1:1")]
        n_asked = len(router.log)
        await eventually(lambda: len(router.log) > n_asked + 3)
        assert urls_of(backend) == {first.url}
    refused = {event.fields["worker"]: event.fields["reason"] for event in events if "refused" in event.name}
    assert refused == {
        second.url: "it serves 'another', and another serves 'models/tiny-qwen3'",
        "grpc://127.0.0.1:1": "it does not speak HTTP",
    }
    assert [event.name for event in events].count("router.worker_refused") == 2
    assert second.weight_version == "default"


@pytest.mark.parametrize(
    ("speaks_of", "words"),
    [
        ("26_workers_prefill_decode", r"is a (prefill|decode) worker, .* --sglang-server must name"),
        ("26_workers_without_key", "asks for no API key"),
        ("22_list_workers", "must name an SGLang router"),
    ],
)
async def test_a_router_that_can_not_be_used_is_refused_at_the_start(behind, servers, speaks_of, words):
    async with wire_router() as router:
        router.speaks_of = speaks_of
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=words), flatten_subgroups=True):
            async with behind(router):
                pass


async def test_workers_of_several_models_are_refused_before_any_gets_weights(behind, servers):
    async with wire_router(servers[0].url) as router:
        router.workers.append(worker_at(servers[1].url, model_id="another"))
        words = "serves 'another', and another serves"
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=words), flatten_subgroups=True):
            async with behind(router):
                pass
    assert not any("update_weights" in line for server in servers for line in server.log)


async def test_a_router_that_stays_empty_is_named_in_the_error(behind):
    async with wire_router() as router:
        words = f"router {router.url}: no worker within 0.2 s: it has none"
        with pytest.RaisesGroup(pytest.RaisesExc(BackendUnavailable, match=words), flatten_subgroups=True):
            async with behind(router, start_timeout_s=0.2):
                pass


@pytest.mark.parametrize("speaks_of", [None, "26_workers_without_key"])
async def test_a_router_that_is_named_as_a_server_is_noticed_at_once(checkpoint, tmp_path, servers, speaks_of):
    async with wire_router(servers[0].url) as router:
        router.speaks_of = speaks_of
        words = "is an SGLang router and no server; --sglang-router-ip"
        with trio.fail_after(10):
            with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=words), flatten_subgroups=True):
                async with serving(backend_on(checkpoint, tmp_path, router.url, start_timeout_s=600)):
                    pass
            with pytest.raises(ConfigError, match=words):
                await trio.to_thread.run_sync(check_engine, router.url, 600.0)


@pytest.mark.parametrize("routing", ["session", "least_loaded"])
async def test_requests_carry_the_session_as_routing_key_where_sessions_are_to_stay_together(
    checkpoint, tmp_path, servers, routing
):
    options = {"routing": routing, "vocab_len": VOCAB_LEN}
    async with serving(backend_on(checkpoint, tmp_path, servers[0].url, **options)) as backend:
        for session in ("G1/0-0", "G1/0-0", "G1/1-0"):
            await backend.generate(make_attempt([1], session=session, max_new_tokens=1))
    fields = [body.get("routing_key") for body in servers[0].bodies if "rid" in body]
    if routing == "session":
        assert fields == servers[0].routing_keys == ["G1/0-0", "G1/0-0", "G1/1-0"]
    else:
        assert fields == [None, None, None]
        assert servers[0].routing_keys == []


def _task_names():
    """Names of all tasks of this run."""
    names, waiting = [], [trio.lowlevel.current_root_task()]
    while waiting:
        task = waiting.pop()
        names.append(task.name)
        waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return names
