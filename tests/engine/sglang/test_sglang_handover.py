"""A real SGLang server on the CPU that is given adapters, weights by broadcast, and whose memory is lent."""

from __future__ import annotations

import pytest
import trio
from builders_adapter import RANK, adapter_source, merged_model
from builders_backend import make_attempt, recompute, serving
from builders_sglang import SERVED_VOCAB_LEN, backend_on, require_spans, served_model

from relax_trio.backend.base import WeightSource
from relax_trio.backend.sglang.adapters import write_adapter
from relax_trio.errors import TrainError, WeightSyncError

pytestmark = [pytest.mark.engine, pytest.mark.sglang_server]

START_S = 300.0
ATOL = 1e-4
"""Float32 on both sides; kernels and batch widths differ."""


@pytest.fixture(scope="module")
def sources():
    return {"v2": adapter_source(1), "v3": adapter_source(2)}


@pytest.fixture(scope="module")
def models(sources):
    """Plain models of the versions."""
    return {"v1": served_model(0), **{version: merged_model(source) for version, source in sources.items()}}


@pytest.fixture
def make(lora_server, tmp_path):
    checkpoint, url = lora_server

    def make(**options):
        return backend_on(checkpoint, tmp_path, url, start_timeout_s=START_S, vocab_len=SERVED_VOCAB_LEN, **options)

    return make


@pytest.fixture(params=["retract", "abort"])
def recipe(request, lora_server):
    """One that the server's version allows."""
    if request.param == "retract":
        require_spans(lora_server[1])
    return request.param


def worst_difference(models, prefix, result):
    """Largest difference of a logprob to that of the plain model of the token's own version."""
    tokens, worst, at = [*prefix, *result.token_ids], 0.0, 0
    for span in result.versions:
        end = at + span.n_tokens
        plain = recompute(models[span.version], tokens[: len(prefix) + end], span.n_tokens)
        worst = max(worst, *(abs(a - b) for a, b in zip(plain, result.logprobs[at:end], strict=True)))
        at = end
    return worst


def versions(result):
    return [span.version for span in result.versions]


async def busy_while(backend, do):
    """Attempts under way while `do` runs; what they brought, with their prefixes."""
    results, over = [], trio.Event()

    async def keep_asking(i):
        while not over.is_set():
            prefix = [5 + i, 7, 9 + len(results)]
            attempt = make_attempt(prefix, session=f"s{i}", max_new_tokens=300)
            results.append((prefix, await backend.generate(attempt)))

    async with trio.open_nursery() as nursery:
        for i in range(3):
            nursery.start_soon(keep_asking, i)
        await backend.generate(make_attempt([3], session="pace", max_new_tokens=20))
        await do()
        over.set()
    return results


# --- adapters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "transfer"), [("auto", "disk"), ("drain", "tensor")])
async def test_every_logprob_is_that_of_the_adapter_whose_version_its_token_names(
    make, models, sources, recipe, transfer
):
    async with serving(make(recipe=recipe, transfer=transfer, adapter_rank=RANK)) as backend:

        async def update_twice():
            await backend.update_weights("v2", sources["v2"])
            await backend.generate(make_attempt([3], session="pace", max_new_tokens=20))
            await backend.update_weights("v3", sources["v3"])

        results = await busy_while(backend, update_twice)
        late = await backend.generate(make_attempt([3], session="late", max_new_tokens=4))
        assert backend.servers[0].unused_adapters == []
    assert versions(late) == ["v3"]
    assert max(worst_difference(models, prefix, result) for prefix, result in [*results, ([3], late)]) < ATOL
    spans = {tuple(versions(result)) for _, result in results}
    assert ({"v1", "v2", "v3"} <= {version for span in spans for version in span}) is True
    assert any(len(span) > 1 for span in spans) is (recipe != "drain")


async def test_no_prefix_is_taken_from_the_cache_of_another_adapter(make, models, sources):
    """Nothing is flushed: the server's cache knows adapters apart."""
    prefix = [5 + i % 60 for i in range(64)]
    hits = {}
    async with serving(make(adapter_rank=RANK)) as backend:
        for version in ("v1", "v2", "v3"):
            if version != "v1":
                await backend.update_weights(version, sources[version])
            for i in range(2):
                result = await backend.generate(make_attempt(prefix, max_new_tokens=3))
                hits[version, i] = result.cached_len
                assert versions(result) == [version]
                assert worst_difference(models, prefix, result) < ATOL
    assert [hits[version, 0] for version in ("v1", "v2", "v3")] == [0, 0, 0]
    assert all(hits[version, 1] > 0 for version in ("v1", "v2", "v3"))


async def test_a_server_that_comes_with_the_checkpoint_gets_the_adapter_before_work(
    lora_server, models, sources, tmp_path
):
    """As one does that was started again, or a run's that goes on from a checkpoint."""
    checkpoint, url = lora_server
    write_adapter(sources["v2"].adapter, tmp_path / "adapter")
    backend = backend_on(
        checkpoint,
        tmp_path,
        url,
        version="v2",
        adapter=tmp_path / "adapter",
        start_timeout_s=START_S,
        adapter_rank=RANK,
    )
    async with serving(backend):
        result = await backend.generate(make_attempt([5, 6, 7], max_new_tokens=20))
        assert backend.weight_version == "v2"
    assert versions(result) == ["v2"]
    assert worst_difference(models, [5, 6, 7], result) < ATOL


# --- broadcast --------------------------------------------------------------------------------------------------


async def test_weights_that_were_broadcast_are_those_that_logprobs_are_of(make, models, sources, recipe):
    async with serving(make(recipe=recipe, transfer="distributed")) as backend:

        async def update_twice():
            await backend.update_weights("v2", WeightSource(tensors=sources["v2"].tensors))
            await backend.generate(make_attempt([3], session="pace", max_new_tokens=20))
            await backend.update_weights("v3", WeightSource(tensors=sources["v3"].tensors))

        results = await busy_while(backend, update_twice)
        odd = {**sources["v3"].tensors, "no.such.weight": sources["v3"].tensors["model.norm.weight"]}
        with pytest.raises(WeightSyncError, match=r"unknown no\.such\.weight"):
            await backend.update_weights("v4", WeightSource(tensors=odd))
    assert max(worst_difference(models, prefix, result) for prefix, result in results) < ATOL
    assert {"v1", "v2", "v3"} <= {version for _, result in results for version in versions(result)}


# --- lent memory ------------------------------------------------------------------------------------------------


async def test_attempts_go_on_under_new_weights_after_the_memory_was_lent(make, models, sources, recipe):
    """The real server exits when it is told to release while it is not idle."""
    async with serving(make(recipe=recipe)) as backend:

        async def step():
            async with backend.lend_memory():
                (server,) = backend.servers
                assert server.released == {"kv_cache", "weights"}
                await trio.sleep(0.2)
                await backend.update_weights("v2", WeightSource(tensors=sources["v2"].tensors))
                assert server.released == set()

        results = await busy_while(backend, step)
    assert max(worst_difference(models, prefix, result) for prefix, result in results) < ATOL
    assert any(versions(result) == ["v1", "v2"] for _, result in results)


async def test_a_step_that_fails_leaves_servers_with_the_weights_of_before(make, models):
    async with serving(make()) as backend:
        with pytest.raises(TrainError):
            async with backend.lend_memory():
                raise TrainError("no memory")
        result = await backend.generate(make_attempt([5, 6, 7], max_new_tokens=20))
    assert versions(result) == ["v1"]
    assert worst_difference(models, [5, 6, 7], result) < ATOL
