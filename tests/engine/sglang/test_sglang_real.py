"""A real SGLang server on the CPU: what only real weights, a real cache and a real scheduler can show."""

from __future__ import annotations

import pytest
import torch
import trio
from builders_backend import generate_all, make_attempt, recompute, serving
from builders_sglang import END_ID, SERVED_VOCAB_LEN, backend_on, served_model

from relax_trio.backend.base import WeightSource
from relax_trio.backend.sglang.check import check_engine

pytestmark = [pytest.mark.engine, pytest.mark.sglang_server]

START_S = 300.0
ATOL = 2e-3
"""Float32 on both sides; kernels and batch widths differ."""


@pytest.fixture(scope="module")
def models():
    """Plain models of the weight versions that the tests use."""
    return {"v1": served_model(0), "v2": served_model(1)}


@pytest.fixture
def make(sglang_server, tmp_path):
    checkpoint, url = sglang_server

    def make(**options):
        return backend_on(checkpoint, tmp_path, url, start_timeout_s=START_S, vocab_len=SERVED_VOCAB_LEN, **options)

    return make


def worst_difference(models, prefix, result):
    """Largest difference of a logprob to that of the plain model of the token's own version."""
    tokens = [*prefix, *result.token_ids]
    worst, at = 0.0, 0
    for span in result.versions:
        end = at + span.n_tokens
        plain = recompute(models[span.version], tokens[: len(prefix) + end], span.n_tokens)
        worst = max(worst, *(abs(a - b) for a, b in zip(plain, result.logprobs[at:end], strict=True)))
        at = end
    return worst


@pytest.fixture(params=["retract", "abort", "drain"])
def recipe(request):
    """One that the server's version allows."""
    if request.param == "retract":
        request.getfixturevalue("span_server")
    return request.param


@pytest.mark.parametrize("transfer", ["disk", "tensor"])
async def test_every_logprob_is_that_of_the_version_its_token_names(make, models, recipe, transfer):
    results, updated = [], trio.Event()

    async def keep_asking(i):
        """However long the update takes to prepare, attempts are under way when it comes."""
        while not updated.is_set():
            prefix = [5 + i, 7, 9 + len(results)]
            attempt = make_attempt(prefix, session=f"s{i}", max_new_tokens=600)
            results.append((prefix, await backend.generate(attempt)))

    async with serving(make(recipe=recipe, transfer=transfer)) as backend:
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(keep_asking, i)
            await backend.generate(make_attempt([3], session="pace", max_new_tokens=20))
            await backend.update_weights("v2", WeightSource(tensors=models["v2"].state_dict()))
            updated.set()
        late = await backend.generate(make_attempt([3], session="late", max_new_tokens=4))
        assert [span.version for span in late.versions] == ["v2"]
    for prefix, result in [*results, ([3], late)]:
        assert result.finish == "length" or result.token_ids[-1] == END_ID  # rare, but it is drawn
        assert worst_difference(models, prefix, result) < ATOL
    written = [[span.version for span in result.versions] for _, result in results]
    assert ["v1"] in written or ["v1", "v2"] in written
    assert (["v1", "v2"] in written) is (recipe != "drain")


async def test_a_sampled_answer_has_the_logprobs_of_its_temperature(make, models):
    prefix = [3, 1, 4, 1, 5]
    async with serving(make()) as backend:
        (result,) = await generate_all(backend, [make_attempt(prefix, max_new_tokens=40, temperature=0.7)])
    plain = recompute(models["v1"], [*prefix, *result.token_ids], len(result.token_ids), temperature=0.7)
    assert torch.allclose(torch.tensor(plain), torch.tensor(result.logprobs.tolist()), atol=ATOL)


async def test_the_contract_as_a_table_has_no_failure(sglang_server):
    findings = await trio.to_thread.run_sync(check_engine, sglang_server[1], START_S)

    assert {finding.what: finding.detail for finding in findings if finding.verdict == "FAILED"} == {}
