"""Under `deterministic` an attempt's tokens and logprobs are the same bits whatever else the engine does."""

from __future__ import annotations

import random

import pytest
import trio
from attrs import evolve
from builders_backend import VOCAB_LEN, generate_all, make_attempt, make_model, recompute, save_checkpoint, serving

from relax_trio.backend.embedded import EmbeddedBackend, EmbeddedOptions

pytestmark = pytest.mark.engine

KINDS = ["qwen3", "llama", "gpt2"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("deterministic")
    return {kind: save_checkpoint(make_model(kind), root / kind) for kind in KINDS}


def make_backend(path, **options):
    return EmbeddedBackend(path, EmbeddedOptions(**{"n_threads": 1, "deterministic": True, "max_batch": 8, **options}))


def make_sessions(rng):
    """Prompts on both sides of chunk and length borders; every other pair shares a long opening."""
    opening = [rng.randrange(VOCAB_LEN) for _ in range(130)]
    sessions = []
    for i, n in enumerate([1, 5, 63, 64, 65, 127, 128, 190, 200, 129, 255, 257, 300, 20]):
        own = [rng.randrange(VOCAB_LEN) for _ in range(n)]
        sessions.append((f"s{i}", [*opening, *own] if i % 4 > 1 else own))
    # The samples of a Group: one prompt, of which all but the last token may be found computed.
    return [*sessions, *((f"t{i}", sessions[i][1]) for i in (4, 9))]


async def play(backend, name, prompt, number):
    """Two turns of a Session; returns all ids and logprobs."""
    heard = []
    tokens = list(prompt)
    for turn in range(2):
        result = await backend.generate(
            make_attempt(tokens, session=name, seed=number * 10 + turn, max_new_tokens=3 + number % 7, top_p=0.9)
        )
        heard.append((result.token_ids.tolist(), result.logprobs.tolist()))
        tokens = [*tokens, *result.token_ids, 1, 2, 3]
    return heard


async def play_all(path, order, stagger_s, **options):
    heard = {}

    async def one(place, number, name, prompt):
        await trio.sleep(place * stagger_s)
        heard[name] = await play(backend, name, prompt, number)

    async with serving(make_backend(path, **options)) as backend, trio.open_nursery() as nursery:
        for place, (number, (name, prompt)) in enumerate(order):
            nursery.start_soon(one, place, number, name, prompt)
    return heard


@pytest.mark.parametrize("kind", KINDS)
async def test_order_and_company_change_no_bit(checkpoints, kind):
    rng = random.Random(1)
    order = list(enumerate(make_sessions(rng)))
    expected = await play_all(checkpoints[kind], order, 0.0)
    rng.shuffle(order)
    assert await play_all(checkpoints[kind], order, 0.0) == expected
    rng.shuffle(order)
    assert await play_all(checkpoints[kind], order, 0.01, max_cached_tokens=150) == expected
    alone = {}
    async with serving(make_backend(checkpoints[kind], max_cached_tokens=0)) as backend:
        for number, (name, prompt) in order[:5]:
            alone[name] = await play(backend, name, prompt, number)
    assert alone == {name: expected[name] for name in alone}


async def test_logprobs_still_match_a_plain_recomputation(checkpoints):
    model = make_model("qwen3")
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        attempts = [evolve(make_attempt(p, max_new_tokens=9), session_key=name) for name, p in make_sessions(random)]
        for attempt, result in zip(attempts, await generate_all(backend, attempts), strict=True):
            expected = recompute(model, [*attempt.token_ids, *result.token_ids], 9)
            assert result.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


async def test_whole_chunks_are_reused(checkpoints):
    async with serving(make_backend(checkpoints["llama"])) as backend:
        prompt = [i % VOCAB_LEN for i in range(150)]
        await backend.generate(make_attempt(prompt))
        assert (await backend.generate(make_attempt([*prompt, 5]))).cached_len == 128
        assert (await backend.generate(make_attempt(prompt[:128], session="t"))).cached_len == 64
