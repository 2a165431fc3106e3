"""Adapters, broadcasts and lent memory, told to servers in recorded words: the order of calls, and what is refused."""

from __future__ import annotations

import pytest
import torch
import trio
from builders_adapter import RANK, adapter_source, without_matrix
from builders_backend import CONTEXT_LEN, VOCAB_LEN, make_attempt, make_model, serving
from builders_process import eventually
from builders_sglang import backend_on
from sglang_wire import VERSIONS, token_at
from sglang_wire_weights import weights_server

from relax_trio.backend.base import WeightSource
from relax_trio.backend.sglang import groups
from relax_trio.backend.sglang.adapters import write_adapter
from relax_trio.backend.sglang.check import check_engine
from relax_trio.errors import BackendProtocolError, ConfigError, TrainError, WeightSyncError

pytestmark = pytest.mark.engine

TAKES_ADAPTERS = {"enable_lora": True, "max_lora_rank": 2 * RANK}


@pytest.fixture(scope="module")
def sources():
    return {version: adapter_source(seed, make_model("llama")) for seed, version in enumerate(("v2", "v3"))}


@pytest.fixture
async def server():
    async with weights_server(told=TAKES_ADAPTERS, context_len=CONTEXT_LEN + 6, tokens_per_s=1000.0) as server:
        yield server


@pytest.fixture
def make(checkpoint, tmp_path, server):
    """A backend on `server`, or on the servers given."""

    def make(*urls, **options):
        return backend_on(checkpoint, tmp_path, *(urls or (server.url,)), vocab_len=VOCAB_LEN, **options)

    return make


def spans(result):
    return [(span.version, span.n_tokens) for span in result.versions]


def posts(server):
    """Paths that were posted to but for attempts, without what comes at every start."""
    ignored = ("/generate", "/abort_request")
    told = [line.removeprefix("POST ").partition("?")[0] for line in server.log if line.startswith("POST")]
    return [path for path in told if path not in ignored]


# --- adapters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["auto", "drain"])
@pytest.mark.parametrize("transfer", ["disk", "tensor"])
async def test_attempts_under_way_go_on_under_the_new_adapter_with_no_token_lost(
    make, server, sources, recipe, transfer
):
    results = []

    async def call(i):
        results.append(await backend.generate(make_attempt([1] * (i + 1), session=f"s{i}", max_new_tokens=200)))

    async with serving(make(recipe=recipe, transfer=transfer, adapter_rank=RANK)) as backend:
        await backend.update_weights("v2", sources["v2"])
        async with trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(call, i)
            await eventually(lambda: len(server.running) == 3)
            await trio.sleep(0.05)
            await backend.update_weights("v3", sources["v3"])
        assert [name.rpartition("-")[2] for name in server.adapters] == ["v3"]
    for result in results:
        n_prefix = next(n for n in (1, 2, 3) if result.token_ids[0] == token_at(n, VOCAB_LEN))
        assert list(result.token_ids) == [token_at(n_prefix + k, VOCAB_LEN) for k in range(200)]
        assert [version for version, _ in spans(result)] == (["v2"] if recipe == "drain" else ["v2", "v3"])
    named = [(body.get("lora_path") or "none").rpartition("-")[2] for body in server.bodies if body.get("rid")]
    assert named == ["v2"] * 3 + ([] if recipe == "drain" else ["v3"] * 3)


async def test_the_checkpoint_is_never_loaded_again_and_the_cache_is_kept(make, server, sources):
    async with serving(make(adapter_rank=RANK)) as backend:
        n_before = len(server.log)
        await backend.update_weights("v2", sources["v2"])
        await backend.update_weights("v3", sources["v3"])
        assert posts(server)[-5:] == [
            *("/load_lora_adapter", "/update_weight_version"),
            *("/load_lora_adapter", "/update_weight_version", "/unload_lora_adapter"),
        ]
        assert not any("flush" in line or "from_disk" in line for line in server.log[n_before:])


async def test_matrices_travel_inside_the_request_under_the_names_that_peft_gives_them(make, server, sources):
    async with serving(make(transfer="tensor", adapter_rank=RANK)) as backend:
        await backend.update_weights("v2", sources["v2"])
    (loaded,) = server.adapters.values()
    given = sources["v2"].adapter.tensors
    assert loaded.keys() == given.keys()
    assert all(torch.equal(loaded[name], given[name]) for name in given)


async def test_a_server_that_comes_gets_the_checkpoint_and_on_top_of_it_the_current_adapter(
    make, checkpoint, server, sources, tmp_path
):
    write_adapter(sources["v2"].adapter, tmp_path / "saved")
    backend = backend_on(
        checkpoint,
        tmp_path,
        server.url,
        version="v2",
        adapter=tmp_path / "saved",
        vocab_len=VOCAB_LEN,
        adapter_rank=RANK,
    )
    async with serving(backend):
        result = await backend.generate(make_attempt([1], max_new_tokens=3))
    assert spans(result) == [("v2", 3)]
    assert posts(server)[:4] == [
        *("/update_weights_from_disk", "/flush_cache"),
        *("/load_lora_adapter", "/update_weight_version"),
    ]
    assert list(server.adapters.values()) == [str(tmp_path / "saved")]


async def test_an_adapter_that_does_not_fit_is_refused_before_a_server_ignores_it(make, server, sources):
    async with serving(make(adapter_rank=RANK)) as backend:
        with pytest.raises(WeightSyncError, match="have shapes"):
            await backend.update_weights("v2", without_matrix(sources["v2"]))
        with pytest.raises(WeightSyncError, match="this source has none"):
            await backend.update_weights("v2", WeightSource(tensors=sources["v2"].tensors))
        assert server.adapters == {}
        assert backend.weight_version == "v1"


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({}, r"takes no adapters: start it with --enable-lora --max-lora-rank 4"),
        ({"enable_lora": True, "max_lora_rank": 2}, r"up to rank 2 .* but --lora-rank is 4"),
        ({**TAKES_ADAPTERS, "dp_size": 2}, r"2 data-parallel replicas"),
    ],
)
async def test_a_server_that_can_take_no_adapter_is_named_at_the_start(checkpoint, tmp_path, told, problem):
    async with weights_server(told=told) as server:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with serving(backend_on(checkpoint, tmp_path, server.url, adapter_rank=RANK)):
                raise AssertionError("it serves")
    assert caught.group_contains(ConfigError, match=problem)


async def test_a_server_whose_version_somebody_else_changed_is_found_out(make, server, sources):
    async with serving(make(adapter_rank=RANK)) as backend:
        await backend.update_weights("v2", sources["v2"])
        server.weight_version = "theirs"
        with pytest.raises(BackendProtocolError, match=r"adapter 'v2', the server says 'theirs'"):
            await backend.generate(make_attempt([1], max_new_tokens=3))


async def test_an_adapter_that_can_not_be_unloaded_now_is_unloaded_with_the_next(make, server, sources):
    async with serving(make(adapter_rank=RANK)) as backend:
        await backend.update_weights("v2", sources["v2"])
        server.in_trouble.add("/unload_lora_adapter")
        await backend.update_weights("v3", sources["v3"])
        server.in_trouble.clear()
        assert len(server.adapters) == 2
        await backend.update_weights("v4", sources["v2"])
        assert [name.rpartition("-")[2] for name in server.adapters] == ["v4"]


async def test_an_adapter_that_the_server_does_not_have_any_more_is_forgotten(make, server, sources):
    async with serving(make(adapter_rank=RANK)) as backend:
        await backend.update_weights("v2", sources["v2"])
        server.adapters.clear()
        await backend.update_weights("v3", sources["v3"])
        assert backend.servers[0].unused_adapters == []


@pytest.mark.parametrize("recipe", ["retract", "in_place"])
async def test_an_attempt_is_never_put_back_while_its_adapter_changes(make, sources, recipe):
    async with serving(make(recipe=recipe, adapter_rank=RANK)) as backend:
        with pytest.raises(WeightSyncError, match="use abort or drain"):
            await backend.update_weights("v2", sources["v2"])


# --- broadcasts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_tensor_is_broadcast_to_every_server_in_a_group_of_its_own(checkpoint, tmp_path, model, version):
    tensors = dict(model.state_dict())
    async with weights_server(version) as one, weights_server(version) as other:
        backend = backend_on(checkpoint, tmp_path, one.url, other.url, transfer="distributed", vocab_len=VOCAB_LEN)
        async with serving(backend):
            for name in ("v2", "v3"):
                await backend.update_weights(name, WeightSource(tensors=tensors))
            assert [len(server.groups) for server in (one, other)] == [1, 1]
            assert one.groups.keys() != other.groups.keys()
        for server in (one, other):
            assert all(torch.equal(server.received[name], tensor) for name, tensor in tensors.items())
            assert posts(server).count("/init_weights_update_group") == 1
            assert ("/begin_weight_update" in posts(server)) is not server.is_old
            assert server.groups == {}


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/update_weights_from_distributed"])
async def test_a_server_that_refuses_its_part_ends_the_update_at_once_and_the_group(
    checkpoint, tmp_path, model, server, path
):
    backend = backend_on(checkpoint, tmp_path, server.url, transfer="distributed", vocab_len=VOCAB_LEN)
    async with serving(backend):
        server.refuses.add(path)
        with trio.fail_after(10), pytest.raises(WeightSyncError, match="no"):
            await backend.update_weights("v2", WeightSource(tensors=model.state_dict()))
        server.refuses.clear()
        await backend.update_weights("v3", WeightSource(tensors=model.state_dict()))
        assert server.weight_version == "v3"
        assert posts(server).count("/init_weights_update_group") == 2


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/update_weights_from_distributed"])
async def test_a_server_that_dies_in_its_part_holds_nobody_up(checkpoint, tmp_path, model, path):
    """It is lost as ever; the others have the new weights."""
    tensors = dict(model.state_dict())
    async with weights_server() as lives, weights_server() as dies:
        backend = backend_on(
            checkpoint,
            tmp_path,
            lives.url,
            dies.url,
            transfer="distributed",
            vocab_len=VOCAB_LEN,
            health_timeout_s=0.4,
        )
        async with serving(backend):
            dies.dies_at = path
            with trio.fail_after(20):
                await backend.update_weights("v2", WeightSource(tensors=tensors))
            assert [server.client.url for server in backend.servers] == [lives.url]
        assert lives.weight_version == "v2"
        assert all(torch.equal(lives.received[name], tensor) for name, tensor in tensors.items())


async def test_a_server_that_takes_no_part_is_given_up_when_time_is_up(
    checkpoint, tmp_path, model, server, monkeypatch
):
    monkeypatch.setattr(groups, "GROUP_S", 0.5)
    backend = backend_on(checkpoint, tmp_path, server.url, transfer="distributed", vocab_len=VOCAB_LEN)
    async with serving(backend):
        server.silent.add("/init_weights_update_group")
        with trio.fail_after(20), pytest.raises(WeightSyncError, match="broadcasting weights failed"):
            await backend.update_weights("v2", WeightSource(tensors=model.state_dict()))


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"dp_size": 2}, "tensor-parallel ranks only"),
        ({"pp_size": 2}, "tensor-parallel ranks only"),
        ({"device": "cuda"}, "this process has no GPU to broadcast from"),
    ],
)
async def test_a_server_that_nothing_can_be_broadcast_to_is_named_at_the_start(
    checkpoint, tmp_path, monkeypatch, told, problem
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    async with weights_server(told=told) as server:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with serving(backend_on(checkpoint, tmp_path, server.url, transfer="distributed")):
                raise AssertionError("it serves")
    assert caught.group_contains(ConfigError, match=problem)


# --- lent memory ------------------------------------------------------------------------------------------------

RECIPES = [(version, recipe) for version in VERSIONS for recipe in ("auto", "abort", "drain")]


@pytest.mark.parametrize(("version", "recipe"), RECIPES)
async def test_memory_is_released_and_taken_back_in_the_order_that_servers_want(
    checkpoint, tmp_path, model, version, recipe
):
    results = []

    async def call(i):
        results.append(await backend.generate(make_attempt([1] * (i + 1), session=f"s{i}", max_new_tokens=200)))

    async with weights_server(version, tokens_per_s=1000.0) as server:
        backend = backend_on(checkpoint, tmp_path, server.url, recipe=recipe, vocab_len=VOCAB_LEN)
        async with serving(backend), trio.open_nursery() as nursery:
            for i in range(3):
                nursery.start_soon(call, i)
            await eventually(lambda: len(server.running) == 3)
            await trio.sleep(0.05)
            server.log.clear()
            async with backend.lend_memory():
                nursery.start_soon(call, 3)  # waits
                assert server.released == {"kv_cache", "weights"}
                server.log.append("POST the step")
                await backend.update_weights("v2", WeightSource(tensors=model.state_dict()))
                assert server.released == set()
        retracts = recipe == "auto" and not server.is_old
        assert posts(server) == [
            *(["/pause_generation"] if retracts else []),
            *("/flush_cache", "/release_memory_occupation", "the step", "/resume_memory_occupation"),
            *("/update_weights_from_disk", "/resume_memory_occupation", "/flush_cache"),
            *(["/continue_generation"] if retracts else []),
        ]
        assert server.stale_hits == 0
    found = sorted([version for version, _ in spans(result)] for result in results)
    assert found == [["v1"], ["v1"], ["v1"], ["v2"]] if recipe == "drain" else [["v1", "v2"]] * 3 + [["v2"]]


async def test_servers_that_are_paused_between_steps_lend_their_memory_and_stay_paused(make, server, model):
    results = []

    async def call():
        results.append(await backend.generate(make_attempt([1], max_new_tokens=100)))

    async with serving(make(pause="retract")) as backend, trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await eventually(lambda: server.running)
        await trio.sleep(0.03)
        server.log.clear()
        await backend.pausing.pause()
        async with backend.lend_memory():
            await backend.update_weights("v2", WeightSource(tensors=model.state_dict()))
        assert server.paused == "retract"
        await backend.pausing.resume()
    assert posts(server) == [
        *("/pause_generation", "/flush_cache", "/release_memory_occupation"),
        *("/resume_memory_occupation", "/update_weights_from_disk", "/resume_memory_occupation", "/flush_cache"),
        "/continue_generation",
    ]
    assert [version for version, _ in spans(results[0])] == ["v1", "v2"]


async def test_a_failed_step_gives_servers_the_weights_of_before_and_attempts_go_on(make, server):
    async with serving(make()) as backend:
        server.log.clear()
        with pytest.raises(TrainError):
            async with backend.lend_memory():
                raise TrainError("no memory")
        assert posts(server) == [
            *("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"),
            *("/update_weights_from_disk", "/resume_memory_occupation", "/flush_cache"),
        ]
        result = await backend.generate(make_attempt([1], max_new_tokens=3))
    assert spans(result) == [("v1", 3)]


async def test_a_block_that_updates_nothing_ends_with_the_weights_of_before(make, server):
    async with serving(make()) as backend:
        async with backend.lend_memory():
            pass
        result = await backend.generate(make_attempt([1], max_new_tokens=3))
    assert (spans(result), server.released) == ([("v1", 3)], set())


async def test_a_cancelled_step_gives_nothing_back(make, server):
    """The run ends, and its servers with it; to load weights first would only hold it up."""
    async with serving(make()) as backend:
        with trio.move_on_after(0.05):
            async with backend.lend_memory():
                await trio.sleep_forever()
        assert server.released == {"kv_cache", "weights"}
        server.released.clear()


async def test_a_server_that_comes_while_memory_is_lent_waits_and_gets_the_new_weights(
    checkpoint, tmp_path, model, server
):
    async with weights_server() as late:
        backend = backend_on(checkpoint, tmp_path, server.url, late.url, vocab_len=VOCAB_LEN, health_timeout_s=0.4)
        async with serving(backend):
            async with backend.lend_memory():
                late.is_sick = True
                late.released.clear()  # it is started again
                await eventually(lambda: len(backend.servers) == 1)
                late.is_sick = False
                await trio.sleep(0.1)
                assert len(backend.servers) == 1
                await backend.update_weights("v2", WeightSource(tensors=model.state_dict()))
            await eventually(lambda: len(backend.servers) == 2)
            assert late.weight_version == "v2"


async def test_a_server_that_somebody_else_uses_is_not_told_to_release(make, server):
    async with serving(make()) as backend:
        server.refuse_flush = True
        with pytest.raises(WeightSyncError, match="flushing the prefix cache"):
            async with backend.lend_memory():
                raise AssertionError("it is lent")
        assert "/release_memory_occupation" not in posts(server)


async def test_a_server_that_dies_over_the_release_is_lost_as_ever(checkpoint, tmp_path, model, server):
    async with weights_server() as dies:
        backend = backend_on(checkpoint, tmp_path, server.url, dies.url, vocab_len=VOCAB_LEN, health_timeout_s=0.4)
        async with serving(backend):
            dies.dies_at = "/release_memory_occupation"
            async with backend.lend_memory():
                await backend.update_weights("v2", WeightSource(tensors=model.state_dict()))
            assert [one.client.url for one in backend.servers] == [server.url]
            result = await backend.generate(make_attempt([1], max_new_tokens=3))
    assert spans(result) == [("v2", 3)]


# --- the table --------------------------------------------------------------------------------------------------


async def test_the_check_of_a_server_tells_what_can_be_done_with_its_weights():
    async with weights_server(told={**TAKES_ADAPTERS, "pp_size": 2, "enable_memory_saver": True}) as server:
        findings = await trio.to_thread.run_sync(check_engine, server.url, 5.0)
    found = {finding.what: finding.verdict for finding in findings}
    rows = ("weights by broadcast", "adapters (--sglang-lora-transfer)", "memory lent to the trainer")
    assert tuple(found[row] for row in rows) == ("no", "yes", "yes")
