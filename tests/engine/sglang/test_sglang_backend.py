"""The SGLang backend against servers in recorded words: traps out of reach, calling back, new weights, lost servers."""

from __future__ import annotations

import json

import pytest
import trio
from builders_backend import CONTEXT_LEN, VOCAB_LEN, generate_all, make_attempt, make_model, save_checkpoint, serving
from builders_process import eventually
from builders_sglang import backend_on
from sglang_wire import VERSIONS, token_at, wire_server

from relax_trio.backend.base import WeightSource
from relax_trio.backend.sglang.check import EngineCheck, check_engine, table
from relax_trio.backend.sglang.client import SGLangClient
from relax_trio.errors import BackendRejected, BackendUnavailable, ConfigError, WeightSyncError

pytestmark = pytest.mark.engine

LONG = 600


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
async def server(version):
    async with wire_server(version, context_len=CONTEXT_LEN + 6, tokens_per_s=1000.0) as server:
        yield server


@pytest.fixture
def make(checkpoint, tmp_path, server):
    """A backend on `server`, or on the servers given."""

    def make(*urls, **options):
        return backend_on(checkpoint, tmp_path, *(urls or (server.url,)), vocab_len=VOCAB_LEN, **options)

    return make


def expected(prefix_len, n):
    return [token_at(prefix_len + k, VOCAB_LEN) for k in range(n)]


def spans(result):
    return [(span.version, span.n_tokens) for span in result.versions]


# --- what would kill or hang a server ---------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [[VOCAB_LEN], [1, 999_999], [-1]])
async def test_an_id_outside_the_vocabulary_never_reaches_a_server(make, server, prefix):
    async with serving(make()) as backend:
        with pytest.raises(BackendRejected, match="outside the vocabulary"):
            await backend.generate(make_attempt(prefix))
    assert all(max(body["input_ids"]) < VOCAB_LEN for body in server.bodies)


async def test_a_context_that_the_server_would_cut_silently_is_refused(make, server):
    async with serving(make()) as backend:
        assert backend.max_context_len == CONTEXT_LEN
        result = await backend.generate(make_attempt([1] * (CONTEXT_LEN - 4), max_new_tokens=4))
        assert (result.finish, len(result.token_ids)) == ("length", 4)
        with pytest.raises(BackendRejected, match="exceed the context"):
            await backend.generate(make_attempt([1] * (CONTEXT_LEN - 4), max_new_tokens=5))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
async def test_a_server_of_another_model_is_refused_before_it_dies_of_the_weights(make, server, tmp_path, kind):
    other = make_model(kind)
    other.resize_token_embeddings(VOCAB_LEN + 8)
    server.model_path = save_checkpoint(other, tmp_path / "other")
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="serves another model"), flatten_subgroups=True):
        async with serving(make()):
            pass
    assert "POST /update_weights_from_disk" not in server.log


async def test_a_server_of_the_same_model_in_another_directory_is_taken(make, server, model, tmp_path):
    server.model_path = save_checkpoint(model, tmp_path / "same")
    async with serving(make()) as backend:
        assert len(backend.servers) == 1
    assert server.weight_version == "v1"


async def test_no_grammar_session_or_image_field_is_ever_sent(make, server):
    async with serving(make(session_lifecycle=True)) as backend:
        await backend.generate(make_attempt([1], max_new_tokens=2, stop_token_ids=(3,), seed=5))
        await backend.close_session("s")
    told = json.dumps(server.bodies)
    assert not any(word in told for word in ("json_schema", "regex", "ebnf", "session_params", "image_data", "text"))


async def test_an_abort_reaches_no_attempt_whose_name_begins_like_the_aborted_ones(make):
    results = {}

    async def call(rid):
        results[rid] = await backend.generate(make_attempt([1], rid=rid, session=rid, max_new_tokens=150))

    async with serving(make()) as backend, trio.open_nursery() as nursery:
        for rid in ("G1/0-0.r3.1", "G1/0-0.r3.10"):
            nursery.start_soon(call, rid)
        await trio.sleep(0.03)
        await backend.abort("G1/0-0.r3.1")
    assert results["G1/0-0.r3.1"].finish == "abort"
    assert results["G1/0-0.r3.10"].finish == "length"


async def test_weights_are_never_changed_under_a_retracted_request_of_an_older_server(make, server, source):
    """The recorded older server exits over it, so the recipe is chosen by what answers tell."""
    async with serving(make()) as backend, trio.open_nursery() as nursery:
        nursery.start_soon(backend.generate, make_attempt([1], max_new_tokens=200))
        await trio.sleep(0.05)
        await backend.update_weights("v2", source)
    assert ("POST /pause_generation" in server.log) is not server.is_old


async def test_tensors_are_sent_inside_the_bracket_that_newer_servers_want(make, server, source):
    async with serving(make(transfer="tensor")) as backend:
        await backend.update_weights("v2", source)
        result = await backend.generate(make_attempt([1], max_new_tokens=3))
    assert spans(result) == [("v2", 3)]
    assert ("POST /begin_weight_update" in server.log) is not server.is_old
    assert not server.in_update


@pytest.mark.parametrize("transfer", ["disk", "tensor"])
async def test_a_tensor_that_the_model_does_not_have_is_refused_before_a_server_ignores_it(
    make, server, source, transfer
):
    odd = WeightSource(tensors={**source.tensors, "no.such.weight": next(iter(source.tensors.values()))})
    short = WeightSource(tensors=dict(list(source.tensors.items())[1:]))
    async with serving(make(transfer=transfer)) as backend:
        with pytest.raises(WeightSyncError, match=r"unknown no\.such\.weight"):
            await backend.update_weights("v2", odd)
        with pytest.raises(WeightSyncError, match="lack"):
            await backend.update_weights("v2", short)
        assert backend.weight_version == server.weight_version == "v1"


async def test_health_is_not_asked_by_generating_while_the_server_is_paused(make, server):
    """A paused server answers 503 after 20 s; it is not lost for that."""
    async with serving(make(health_timeout_s=0.4)) as backend:
        backend.servers[0].hold("test")
        server.paused = "retract"
        await trio.sleep(0.8)
        assert len(backend.servers) == 1
        assert "GET /model_info" in server.log[-2:]


# --- new weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["auto", "drain", "abort"])
@pytest.mark.parametrize("transfer", ["disk", "tensor"])
async def test_attempts_under_way_go_on_under_new_weights_with_no_token_lost(make, server, source, recipe, transfer):
    results = []

    async def call(i):
        results.append(await backend.generate(make_attempt([1] * (i + 1), session=f"s{i}", max_new_tokens=200)))

    async with serving(make(recipe=recipe, transfer=transfer)) as backend, trio.open_nursery() as nursery:
        for i in range(3):
            nursery.start_soon(call, i)
        await trio.sleep(0.08)
        await backend.update_weights("v2", source)
        late = await backend.generate(make_attempt([9], session="late", max_new_tokens=2))
        assert spans(late) == [("v2", 2)]
    for result in results:
        n_prefix = next(n for n in (1, 2, 3) if [*result.token_ids] == expected(n, 200))
        assert n_prefix
        versions = [version for version, _ in spans(result)]
        assert versions == (["v1"] if recipe == "drain" else ["v1", "v2"])
    assert server.stale_hits == 0


@pytest.mark.parametrize("recipe", ["retract", "in_place"])
async def test_a_server_that_tells_one_version_for_all_tokens_is_not_paused_for_new_weights(
    make, server, source, recipe
):
    async with serving(make(recipe=recipe)) as backend:
        if server.is_old:
            with pytest.raises(WeightSyncError, match="use abort or drain"):
                await backend.update_weights("v2", source)
        else:
            await backend.update_weights("v2", source)
            assert server.weight_version == "v2"


async def test_a_flush_that_the_server_refuses_is_one_clear_error(make, server, source):
    async with serving(make()) as backend:
        server.refuse_flush = True
        with pytest.raises(WeightSyncError, match=r"flushing the prefix cache of .* Flush cache failed"):
            await backend.update_weights("v2", source)
    assert sum("flush_cache" in line for line in server.log) == 2  # at the start, and this one


async def test_a_server_that_begins_with_other_weights_gets_the_runs_before_work(make, server):
    async with serving(make()) as backend:
        assert server.weight_version == "v1"
        result = await backend.generate(make_attempt([1], max_new_tokens=1))
    assert spans(result) == [("v1", 1)]


async def test_a_server_that_calls_other_weights_by_the_same_version_gets_the_runs_before_work(make, server):
    server.weight_version = "v1"  # left there by another run
    async with serving(make()):
        loads = [line for line in server.log if "update_weights_from_disk" in line]
        assert len(loads) == 1
        assert any("flush_cache" in line for line in server.log)


async def test_old_snapshots_go_once_the_next_version_is_served(make, source, tmp_path):
    async with serving(make()) as backend:
        for version in ("2", "3", "4"):
            await backend.update_weights(version, source)
        assert [path.name for path in tmp_path.glob("weights-*")] == ["weights-4"]


# --- calling back -----------------------------------------------------------------------------------------------


async def test_a_caller_that_goes_away_leaves_nothing_on_the_server(make, server):
    async with serving(make()) as backend:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backend.generate, make_attempt([1], rid="x", max_new_tokens=LONG))
            await eventually(lambda: server.running)
            nursery.cancel_scope.cancel(reason="gone")
        await eventually(lambda: backend.load().n_running == 0)
        assert not server.running
    assert "POST /abort_request" in server.log


async def test_the_end_of_a_run_aborts_on_servers_that_live_on(make, server):
    async with serving(make()) as backend, trio.open_nursery() as nursery:
        nursery.start_soon(_ignore_unavailable, backend, make_attempt([1], max_new_tokens=LONG))
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel(reason="leave")
    await eventually(lambda: not server.running)


async def test_an_abort_before_a_server_is_there_returns_nothing_at_once(make, server):
    results = []

    async def call():
        results.append(await backend.generate(make_attempt([1], rid="x", max_new_tokens=5)))

    async with serving(make()) as backend:
        backend._fleet.lose(backend.servers[0], "test")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.sleep(0.01)
            await backend.abort("x")
    assert (results[0].finish, len(results[0].token_ids)) == ("abort", 0)


# --- several servers --------------------------------------------------------------------------------------------


async def test_attempts_go_to_the_server_with_the_fewest(make, version, server):
    async with wire_server(version, context_len=CONTEXT_LEN + 6) as other:
        async with serving(make(server.url, other.url)) as backend:
            attempts = [make_attempt([1], session=f"s{i}", max_new_tokens=20) for i in range(10)]
            await generate_all(backend, attempts)
        assert [sum("input_ids" in b and "rid" in b for b in s.bodies) for s in (server, other)] == [5, 5]


async def test_a_session_stays_on_its_server_where_that_is_asked_for(make, version, server):
    async with wire_server(version, context_len=CONTEXT_LEN + 6) as other:
        async with serving(make(server.url, other.url, routing="session")) as backend:
            # by the hash of ports that nobody chose, one server of the two gets none of n Sessions once in 2**(n - 1)
            attempts = [make_attempt([1], session=f"s{i % 32}", max_new_tokens=1) for i in range(256)]
            await generate_all(backend, attempts)
        counts = [sum("rid" in body for body in s.bodies) for s in (server, other)]
        assert sum(counts) == 256
        assert all(count % 8 == 0 and count for count in counts)


async def test_a_server_that_hangs_is_noticed_and_what_ran_on_it_may_be_sent_again(make, version, server):
    errors = []

    async def call(i):
        try:
            await backend.generate(make_attempt([1], session=f"s{i}", max_new_tokens=LONG))
        except BackendUnavailable as exc:
            errors.append(exc)

    async with (
        wire_server(version, context_len=CONTEXT_LEN + 6) as other,
        serving(make(server.url, other.url, health_timeout_s=0.4)) as backend,
    ):
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for i in range(4):
                    nursery.start_soon(call, i)
                await eventually(lambda: backend.load().n_running == 4)
                server.hangs = True
                server.tokens_per_s = 0.0
        assert [s.client.url for s in backend.servers] == [other.url]
        assert len(errors) == 2
        assert all(error.retryable and "engine-health-timeout" in str(error) for error in errors)
        await backend.generate(make_attempt([1], session="again", max_new_tokens=2))
        server._scope.cancel(reason="it never answers")


async def test_a_server_that_hangs_while_weights_change_holds_up_the_others_for_its_health_timeout(
    make, version, server, source
):
    async with (
        wire_server(version, context_len=CONTEXT_LEN + 6) as other,
        serving(make(server.url, other.url, health_timeout_s=0.4)) as backend,
    ):
        server.hangs = True
        with trio.fail_after(10):  # the call itself may take ten minutes
            await backend.update_weights("v2", source)
        assert [s.client.url for s in backend.servers] == [other.url]
        assert other.weight_version == "v2"
        server._scope.cancel(reason="it never answers")


@pytest.mark.parametrize("paused", [None, "retract", "in_place"])
async def test_a_server_that_hung_and_is_back_goes_on_and_ends_what_nobody_waits_for(make, server, source, paused):
    async with serving(make(health_timeout_s=0.4)) as backend, trio.open_nursery() as nursery:
        nursery.start_soon(_ignore_unavailable, backend, make_attempt([1], max_new_tokens=LONG))
        await eventually(lambda: server.running)
        server.tokens_per_s, server.hangs = 0.0, True
        await eventually(lambda: not backend.servers)
        await backend.update_weights("v2", source)
        server.paused, server.hangs, server.tokens_per_s = paused, False, 20.0  # the attempt would take half a minute
        await eventually(lambda: not server.running)
        await eventually(lambda: backend.servers)
        server.tokens_per_s = 1000.0
        result = await backend.generate(make_attempt([1], session="again", rid="again", max_new_tokens=2))
    assert spans(result) == [("v2", 2)]
    assert server.paused is None


# --- sessions ---------------------------------------------------------------------------------------------------


async def test_every_server_is_told_that_a_session_ended(make, version, server):
    async with wire_server(version, context_len=CONTEXT_LEN + 6) as other:
        async with serving(make(server.url, other.url, session_lifecycle=True)) as backend:
            await backend.generate(make_attempt([1], session="G1/0-0", max_new_tokens=1))
            await backend.close_session("G1/0-0")
            assert backend.load().extra == {"agentic_kv/session/close": 2.0}
        assert all("POST /close_session" in s.log for s in (server, other))
        assert [body["session_id"] for s in (server, other) for body in s.bodies if "session_id" in body] == ["G1/0-0"]


async def test_a_close_that_gets_no_answer_is_counted_and_ends_in_two_seconds(make, server):
    async with serving(make(session_lifecycle=True, health_timeout_s=60)) as backend:
        server.hangs = True
        started_s = trio.current_time()
        await backend.close_session("G1/0-0")
        assert trio.current_time() - started_s < 4
        assert backend.load().extra["agentic_kv/session/close_failure"] == 1
        server._scope.cancel(reason="it never answers")


async def test_without_the_lifecycle_no_server_hears_of_sessions(make, server):
    async with serving(make()) as backend:
        await backend.close_session("G1/0-0")
    assert "POST /close_session" not in server.log


async def _ignore_unavailable(backend, attempt):
    try:
        await backend.generate(attempt)
    except BackendUnavailable:
        pass


# --- the table --------------------------------------------------------------------------------------------------


async def test_the_check_of_a_server_finds_what_its_version_can_do(server, version):
    findings = await trio.to_thread.run_sync(check_engine, server.url, 5.0)

    told = {finding.what: finding.verdict for finding in findings}
    assert "FAILED" not in {verdict for what, verdict in told.items() if what not in CACHED}, table(findings)
    assert told["SGLang"] == version
    assert told["version of each token"] == ("no" if server.is_old else "yes")
    assert ("a paused attempt goes on (retract)" in told) is not server.is_old


async def test_the_check_takes_no_model_that_ends_its_turns_soon_for_a_broken_server(server):
    server.eos_id = token_at(4, server.vocab_len)  # the second one of a greedy answer

    findings = await trio.to_thread.run_sync(check_engine, server.url, 5.0)

    told = {finding.what: finding.verdict for finding in findings}
    assert "FAILED" not in {verdict for what, verdict in told.items() if what not in CACHED}, table(findings)


@pytest.mark.parametrize("refused", ["refuse_pause", "refuse_continue"])
async def test_a_server_that_fails_in_the_middle_of_a_check_fails_that_one_and_runs_nothing_of_it(server, refused):
    setattr(server, refused, True)

    findings = await trio.to_thread.run_sync(check_engine, server.url, 5.0)

    told = {finding.what: finding.verdict for finding in findings}
    assert told["a paused attempt goes on (in_place)"] == "FAILED"
    assert told["metrics"] == "yes"
    if refused == "refuse_pause":
        assert not server.running


async def test_a_check_that_is_interrupted_in_a_pause_leaves_the_server_going_on_and_idle(server):
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            client = SGLangClient(server.url, "server", 8)
            nursery.start_soon(EngineCheck(client).run)
            await eventually(lambda: server.paused)
            nursery.cancel_scope.cancel(reason="Ctrl-C")
        await client.aclose()
        await eventually(lambda: not server.running)
    assert server.paused is None


CACHED = {"a prefix is cached, and flushed"}
"""Has no meaning for a server that tells recorded numbers of cached tokens."""
