"""Pauses over SGLang servers in recorded words: what is said to them, in which order, and who goes on after what."""

from __future__ import annotations

import pytest
import trio
from builders_backend import CONTEXT_LEN, VOCAB_LEN, make_attempt, serving
from builders_process import eventually
from builders_sglang import backend_on
from sglang_wire import VERSIONS, token_at, wire_server

from relax_trio.backend.sglang.client import SGLangClient
from relax_trio.backend.sglang.connect import connect
from relax_trio.errors import BackendUnavailable, ConfigError

pytestmark = pytest.mark.engine

OLD, NEW = VERSIONS
LONG = 600


@pytest.fixture
async def server():
    async with wire_server(NEW, context_len=CONTEXT_LEN + 6, tokens_per_s=1000.0) as server:
        yield server


@pytest.fixture
def make(checkpoint, tmp_path, server):
    """A backend on `server`, or on the servers given, whose attempts are put back into queues by a pause."""

    def make(*urls, pause="retract", **options):
        urls = urls or (server.url,)
        return backend_on(checkpoint, tmp_path, *urls, vocab_len=VOCAB_LEN, pause=pause, **options)

    return make


def expected(prefix_len, n):
    return [token_at(prefix_len + k, VOCAB_LEN) for k in range(n)]


def said(server, *names):
    """Paths of calls of those names, in order."""
    paths = [line.split()[1].partition("?")[0].strip("/") for line in server.log]
    return [path for path in paths if path in names]


class Late:
    """A keeper whose server comes later."""

    def __init__(self, url):
        self.client = SGLangClient(url, "late server", 8)
        self.come = trio.Event()

    async def keep(self, fleet, snapshots, admit, started):
        started.set()
        await self.come.wait()
        try:
            await admit(await connect(self.client, 10.0), None)
            await trio.sleep_forever()
        finally:
            await self.client.aclose()


async def call(backend, results):
    results.append(await backend.generate(make_attempt([1, 2], max_new_tokens=LONG)))


async def lose(backend, errors):
    try:
        await backend.generate(make_attempt([1, 2], max_new_tokens=LONG))
    except BackendUnavailable as exc:
        errors.append(exc)


# --- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["disk", "tensor"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_an_update_loads_under_the_pause_and_leaves_it(make, server, source, mode, transfer):
    """One pause and one continue, and the cache flushed in between, where attempts do not go on from it."""
    results = []
    with trio.fail_after(20):
        async with serving(make(pause=mode, transfer=transfer)) as backend, trio.open_nursery() as nursery:
            nursery.start_soon(call, backend, results)
            await trio.sleep(0.1)
            server.log.clear()
            await backend.pausing.pause()
            await backend.update_weights("v2", source)
            assert (server.paused, server.weight_version) == (mode, "v2")
            await backend.pausing.resume()
    flushed = ["flush_cache"] if mode == "retract" else []
    control = said(server, "pause_generation", "flush_cache", "continue_generation", "abort_request")
    assert control == ["pause_generation", *flushed, "continue_generation"]
    assert [*results[0].token_ids] == expected(2, LONG)
    assert [span.version for span in results[0].versions] == ["v1", "v2"]


async def test_a_server_without_attempts_is_flushed_under_a_pause_in_place_too(make, server, source):
    """A real one refuses while attempts that have ended are in a batch that is held, until it puts that back."""
    async with serving(make(pause="in_place")) as backend:
        await backend.pausing.pause()
        server.n_ended_held = 2
        await backend.update_weights("v2", source)
        await backend.pausing.resume()
        assert said(server, "pause_generation", "flush_cache", "continue_generation")[-4:] == [
            "pause_generation",
            "pause_generation",
            "flush_cache",
            "continue_generation",
        ]
    assert server.weight_version == "v2"


@pytest.mark.parametrize("recipe", ["auto", "drain", "abort"])
async def test_the_way_of_the_pause_counts_and_not_the_recipe(make, server, source, recipe):
    """Attempts that are paused never end first, and an abort would be lost."""
    results = []
    with trio.fail_after(20):
        async with serving(make(recipe=recipe)) as backend, trio.open_nursery() as nursery:
            nursery.start_soon(call, backend, results)
            await trio.sleep(0.1)
            await backend.pausing.pause()
            await backend.update_weights("v2", source)
            await backend.pausing.resume()
    assert server.n_lost_aborts == 0
    assert [span.version for span in results[0].versions] == ["v1", "v2"]


@pytest.mark.parametrize("updates_first", [False, True])
async def test_attempts_held_in_place_are_put_back_before_the_servers_watchdog_ends_it(
    make, server, source, updates_first
):
    """Their own cache is gone then; an update that comes later flushes the rest."""
    server.watchdog_s, results = 0.6, []
    with trio.fail_after(20):
        async with serving(make(pause="in_place")) as backend, trio.open_nursery() as nursery:
            nursery.start_soon(call, backend, results)
            await trio.sleep(0.1)
            server.log.clear()
            await backend.pausing.pause()
            if updates_first:
                await backend.update_weights("v2", source)
            await eventually(lambda: server.paused == "retract")
            await trio.sleep(1.0)
            if not updates_first:
                await backend.update_weights("v2", source)
            await backend.pausing.resume()
    assert ("flush_cache" in said(server, "flush_cache")) is not updates_first
    assert [*results[0].token_ids] == expected(2, LONG)
    assert [span.version for span in results[0].versions] == ["v1", "v2"]


# --- servers that can't -----------------------------------------------------------------------------------------


async def test_a_server_that_tells_one_version_for_all_tokens_is_refused_at_the_start(make):
    async with wire_server(OLD, context_len=CONTEXT_LEN + 6) as old:
        refused = pytest.RaisesExc(ConfigError, match="use --partial-rollout-pause abort")
        with pytest.RaisesGroup(refused, flatten_subgroups=True):
            async with serving(make(old.url)):
                pass
    async with wire_server(OLD, context_len=CONTEXT_LEN + 6) as old, serving(make(old.url, pause=None)) as backend:
        assert backend.pausing is None


async def test_attempts_on_a_server_that_refuses_to_pause_are_called_back_and_wait(make, server, source):
    """They are not given back: each goes on after the pause, from what it has, without a token lost."""
    results = []
    with trio.fail_after(20):
        async with serving(make()) as backend, trio.open_nursery() as nursery:
            nursery.start_soon(call, backend, results)
            await trio.sleep(0.1)
            server.refuse_pause = True
            await backend.pausing.pause()
            assert not server.running
            await backend.update_weights("v2", source)
            await trio.sleep(0.1)
            assert not results
            assert not server.running
            await backend.pausing.resume()
    assert [*results[0].token_ids] == expected(2, LONG)
    assert [span.version for span in results[0].versions] == ["v1", "v2"]


# --- servers that come and go -----------------------------------------------------------------------------------


async def test_a_paused_server_is_asked_for_its_health_without_generating_and_stays(make, server):
    async with serving(make(health_timeout_s=0.4)) as backend:
        await backend.pausing.pause()
        server.log.clear()
        await trio.sleep(1.0)
        assert len(backend.servers) == 1
        assert set(said(server, "health", "model_info")) == {"model_info"}
        await backend.pausing.resume()
        await eventually(lambda: said(server, "health"))


async def test_a_server_that_hangs_in_a_pause_costs_its_attempts_and_holds_up_nothing(make, server):
    errors = []
    with trio.fail_after(20):
        async with (
            wire_server(NEW, context_len=CONTEXT_LEN + 6) as other,
            serving(make(server.url, other.url, health_timeout_s=0.4)) as backend,
            trio.open_nursery() as nursery,
        ):
            for _ in range(2):
                nursery.start_soon(lose, backend, errors)
            await eventually(lambda: server.running and other.running)
            await backend.pausing.pause()
            server.hangs = True
            await eventually(lambda: errors)
            assert [s.client.url for s in backend.servers] == [other.url]
            server._scope.cancel(reason="it never answers")
            await backend.pausing.resume()
    assert len(errors) == 1
    assert errors[0].retryable


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_server_that_comes_in_a_pause_gets_the_weights_and_no_work_until_its_end(make, server, source, version):
    """Of an older version it may be, too: at the next pause attempts are called back from it."""
    results = []
    with trio.fail_after(20):
        async with wire_server(version, context_len=CONTEXT_LEN + 6, tokens_per_s=1000.0) as other:
            backend = make()
            late = Late(other.url)
            backend._keepers += (late,)
            async with serving(backend):
                await backend.pausing.pause()
                await backend.update_weights("v2", source)
                late.come.set()
                await eventually(lambda: len(backend.servers) == 2)
                assert other.weight_version == "v2"
                backend._fleet.lose(backend.servers[0], "test")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(call, backend, results)
                    await trio.sleep(0.1)
                    assert not other.running
                    await backend.pausing.resume()
                    await eventually(lambda: other.running)
                    await backend.pausing.pause()
                    await trio.sleep(0.05)
                    assert not results
                    await backend.pausing.resume()
            assert (other.n_lost_aborts, other.paused) == (0, None)
            assert ("/pause_generation" in str(other.log)) is not other.is_old
    assert [*results[0].token_ids] == expected(2, LONG)


# --- ends -------------------------------------------------------------------------------------------------------


async def test_a_caller_that_leaves_in_a_pause_is_aborted_on_the_server_after_it(make, server):
    async with serving(make()) as backend:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, backend, [])
            await eventually(lambda: server.running)
            await backend.pausing.pause()
            nursery.cancel_scope.cancel(reason="gone")
        await trio.sleep(0.2)
        assert said(server, "abort_request") == []
        await backend.pausing.resume()
        await eventually(lambda: not server.running)
    assert server.n_lost_aborts == 0


async def test_the_end_of_a_run_continues_servers_that_live_on_before_it_aborts_there(make, server):
    errors = []
    async with trio.open_nursery() as callers, serving(make()) as backend:
        callers.start_soon(lose, backend, errors)
        await eventually(lambda: server.running)
        await backend.pausing.pause()
    assert len(errors) == 1
    assert server.paused is None
    assert said(server, "pause_generation", "continue_generation", "abort_request") == [
        "pause_generation",
        "continue_generation",
        "abort_request",
    ]
    assert server.n_lost_aborts == 0
    await eventually(lambda: not server.running)


async def test_a_server_that_does_not_go_on_is_told_once_more_at_the_end_of_the_run(make, server, events):
    """Meanwhile it gets no work, others do."""
    async with wire_server(NEW, context_len=CONTEXT_LEN + 6) as other:
        async with serving(make(server.url, other.url)) as backend:
            await backend.pausing.pause()
            server.refuse_continue = True
            await backend.pausing.resume()
            assert (server.paused, other.paused) == ("retract", None)
            for _ in range(4):
                await backend.generate(make_attempt([1], max_new_tokens=1))
            assert not any("rid" in body for body in server.bodies)
            server.refuse_continue = False
        assert (server.paused, other.paused) == (None, None)
    assert [e.fields["server"] for e in events if e.name == "server.resume_failed"] == [f"SGLang server {server.url}"]


async def test_a_server_that_the_run_lost_in_a_pause_is_told_to_go_on_too(make, server):
    """It only seemed to be gone."""
    async with wire_server(NEW) as other, serving(make(server.url, other.url)) as backend:
        await backend.pausing.pause()
        backend._fleet.lose(next(s for s in backend.servers if s.client.url == server.url), "test")
        await backend.pausing.resume()
        assert (server.paused, other.paused) == (None, None)


async def test_servers_are_told_of_a_session_that_ended_in_a_pause_after_it(make, server):
    """Its attempt can't end before; that is no failure, and holds up nothing."""
    async with serving(make(session_lifecycle=True)) as backend:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, backend, [])
            await eventually(lambda: server.running)
            await backend.pausing.pause()
            nursery.cancel_scope.cancel(reason="gone")
        with trio.fail_after(1):
            await backend.close_session("s")
        await trio.sleep(0.1)
        assert said(server, "close_session") == []
        await backend.pausing.resume()
        await eventually(lambda: said(server, "close_session"))
        assert not server.running
        await eventually(lambda: backend.load().extra == {"agentic_kv/session/close": 1.0})
