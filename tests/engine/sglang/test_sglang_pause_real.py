"""Pauses of a real SGLang server on the CPU beside abort and resume: the same results, and what is computed again."""

from __future__ import annotations

import re

import pytest
import trio
from builders_backend import make_attempt, recompute, serving
from builders_sglang import SERVED_VOCAB_LEN, backend_on, served_model

from relax_trio.backend.base import WeightSource

pytestmark = [pytest.mark.engine, pytest.mark.sglang_server]

WAYS = ["abort", "retract", "in_place"]
N, N_PREFIX, N_NEW = 4, 48, 300
SLACK = 2 * N
"""Prompt tokens that nobody here asked for: the last token of an aborted attempt, health checks."""

ATOL = 2e-3
"""Float32 on both sides; kernels and batch widths differ."""


@pytest.fixture(scope="module")
def models():
    """Plain models of the weight versions that the tests use."""
    return {"v1": served_model(0), "v2": served_model(1)}


@pytest.fixture
def make(span_server, tmp_path):
    checkpoint, url = span_server

    def make(way):
        pause = None if way == "abort" else way
        return backend_on(checkpoint, tmp_path, url, start_timeout_s=300, vocab_len=SERVED_VOCAB_LEN, pause=pause)

    return make


class Interrupted:
    """Greedy turns that are interrupted together, as partial rollout does it.

    Attributes:
      ids, logprobs, versions: of each turn's new tokens.
      n_made: tokens that were there when they were interrupted.
      n_computed: prompt tokens that the server computed beyond those of the turns' own prompts.
    """

    def __init__(self, backend, way):
        self.backend, self.way = backend, way
        self.prefixes = [[5 + (i * 7 + k * 3) % 400 for k in range(N_PREFIX)] for i in range(N)]
        self.ids = [[] for _ in range(N)]
        self.logprobs = [[] for _ in range(N)]
        self.versions = [[] for _ in range(N)]
        self._go_on = trio.Event()

    async def run(self, change):
        await self.backend.servers[0].client.flush_cache()
        before = await self._computed()
        async with trio.open_nursery() as nursery:
            for i in range(N):
                nursery.start_soon(self._turn, i)
            await self._until_decoded(30)
            await self._interrupt()
            self.n_made = await self._decoded()
            await change(self.backend)
            self._go_on.set()
            if self.way != "abort":
                await self.backend.pausing.resume()
        self.n_computed = await self._computed() - before - N * N_PREFIX
        return self

    async def _turn(self, i):
        while len(self.ids[i]) < N_NEW:
            prefix = self.prefixes[i] + self.ids[i]
            left = N_NEW - len(self.ids[i])
            attempt = make_attempt(
                prefix, rid=f"t{i}", session=f"s{i}", response_start=N_PREFIX, max_new_tokens=left, temperature=0.0
            )
            result = await self.backend.generate(attempt)
            self.ids[i] += result.token_ids
            self.logprobs[i] += result.logprobs
            self.versions[i] += [span.version for span in result.versions for _ in range(span.n_tokens)]
            if result.finish == "stop":
                return
            await self._go_on.wait()

    async def _interrupt(self):
        if self.way != "abort":
            await self.backend.pausing.pause()
            return
        for i in range(N):
            await self.backend.abort(f"t{i}")
        while self.backend.load().n_running:  # noqa: ASYNC110 - what is told of it is a snapshot
            await trio.sleep(0.01)

    async def _until_decoded(self, n):
        self._decoded_before = await self._metric("decode")
        while await self._decoded() < n:  # noqa: ASYNC110 - a server tells nobody
            await trio.sleep(0.02)

    async def _decoded(self):
        return await self._metric("decode") - self._decoded_before

    async def _computed(self):
        return await self._metric("prefill_compute")

    async def _metric(self, mode):
        text = await self.backend.servers[0].client.metrics()
        found = re.search(rf'^sglang:realtime_tokens_total{{[^}}]*mode="{mode}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return 0 if found is None else int(float(found[1]))


async def nothing(backend):
    await trio.sleep(0.1)


async def test_greedy_turns_say_the_same_in_every_way_and_only_retraction_computes_again(make):
    """Without new weights the cache has all that an aborted attempt had; what the server puts back, it forgets."""
    turns = {}
    for way in WAYS:
        async with serving(make(way)) as backend:
            turns[way] = await Interrupted(backend, way).run(nothing)
    assert turns["retract"].ids == turns["in_place"].ids == turns["abort"].ids
    assert {version for turn in turns.values() for one in turn.versions for version in one} == {"v1"}
    assert turns["abort"].n_computed <= SLACK
    assert turns["in_place"].n_computed <= SLACK
    assert turns["retract"].n_computed >= turns["retract"].n_made


@pytest.mark.parametrize("way", WAYS)
async def test_new_weights_under_a_pause_give_versions_and_logprobs_as_those_after_an_abort(make, models, way):
    """Everything is computed again under the new weights, but in place, where the old cache is built upon."""

    async def change(backend):
        await backend.update_weights("v2", WeightSource(tensors=models["v2"].state_dict()))

    async with serving(make(way)) as backend:
        turns = await Interrupted(backend, way).run(change)
        late = await backend.generate(make_attempt([3], session="late", max_new_tokens=4))
    assert [span.version for span in late.versions] == ["v2"]
    gap = 0.0
    for i in range(N):
        n_old = turns.versions[i].count("v1")
        assert turns.versions[i] == ["v1"] * n_old + ["v2"] * (len(turns.ids[i]) - n_old)
        assert 0 < n_old < len(turns.ids[i])
        for version, upto in (("v1", n_old), ("v2", len(turns.ids[i]))):
            tokens = turns.prefixes[i] + turns.ids[i][:upto]
            n_own = n_old if version == "v1" else upto - n_old
            plain = recompute(models[version], tokens, n_own)
            gap = max(gap, *(abs(a - b) for a, b in zip(plain, turns.logprobs[i][upto - n_own : upto], strict=True)))
    if way == "in_place":
        assert turns.n_computed <= SLACK
        assert gap > 100 * ATOL, "the tokens behind the change are those of no one version's weights"
    else:
        assert turns.n_computed >= N * N_PREFIX + turns.n_made
        assert gap < ATOL
