"""The embedded engine on tiny random models: what it draws, what it records, what it reuses, how attempts end."""

from __future__ import annotations

import random

import pytest
import torch
import trio
import trio.testing
from builders_backend import (
    CONTEXT_LEN,
    VOCAB_LEN,
    generate_all,
    make_attempt,
    make_model,
    recompute,
    save_checkpoint,
    serving,
)
from transformers import MistralConfig, MistralForCausalLM

from relax_trio.backend.embedded import EmbeddedBackend, EmbeddedOptions
from relax_trio.errors import BackendRejected, BackendUnavailable, EngineFault

pytestmark = pytest.mark.engine

KINDS = ["qwen3", "llama", "gpt2"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("generation")
    return {kind: save_checkpoint(make_model(kind), root / kind) for kind in KINDS}


def decode(ids):
    """Every token is one letter, so that stop strings can be written down."""
    return "".join(chr(ord("A") + i % 26) for i in ids)


def make_backend(path, **options):
    return EmbeddedBackend(path, EmbeddedOptions(**{"n_threads": 1, **options}), decode=decode)


def random_prefix(rng, n):
    return [rng.randrange(VOCAB_LEN) for _ in range(n)]


def assert_recorded(model, attempt, result, temperature=1.0, tolerance=1e-4):
    """Rollout logprobs equal a plain recomputation over the whole context."""
    tokens = [*attempt.token_ids, *result.token_ids]
    expected = recompute(model, tokens, len(result.token_ids), temperature)
    assert result.logprobs.tolist() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("kind", KINDS)
async def test_recorded_logprobs_match_a_plain_recomputation(checkpoints, kind):
    rng, model = random.Random(1), make_model(kind)
    async with serving(make_backend(checkpoints[kind], max_batch=5)) as backend:
        attempts = [
            make_attempt(random_prefix(rng, n), session=f"s{n}", max_new_tokens=new)
            for n, new in [(1, 9), (2, 4), (40, 12), (7, 1), (90, 20), (3, 15), (33, 6), (600, 30), (64, 8)]
        ]
        for attempt, result in zip(attempts, await generate_all(backend, attempts), strict=True):
            assert_recorded(model, attempt, result)


@pytest.mark.parametrize("kind", KINDS)
async def test_greedy_tokens_are_those_of_transformers(checkpoints, kind):
    rng, model = random.Random(2), make_model(kind).eval()
    prefix = random_prefix(rng, 20)
    expected = model.generate(
        torch.tensor([prefix]),
        attention_mask=torch.ones(1, 20, dtype=torch.int64),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
    )
    async with serving(make_backend(checkpoints[kind])) as backend:
        attempts = [make_attempt(prefix, max_new_tokens=12, temperature=0.0, session=str(i)) for i in range(3)]
        for result in await generate_all(backend, attempts):
            assert result.token_ids.tolist() == expected[0, 20:].tolist()


async def test_temperature_is_part_of_the_recorded_distribution(checkpoints):
    model = make_model("qwen3")
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        attempt = make_attempt([5, 6, 7], max_new_tokens=20, temperature=0.5)
        assert_recorded(model, attempt, await backend.generate(attempt), temperature=0.5)


@pytest.mark.parametrize("kind", KINDS)
async def test_turns_of_a_session_reuse_what_was_computed(checkpoints, kind):
    rng, model = random.Random(3), make_model(kind)
    async with serving(make_backend(checkpoints[kind])) as backend:
        tokens = random_prefix(rng, 30)
        for turn in range(4):
            attempt = make_attempt(tokens, max_new_tokens=10)
            result = await backend.generate(attempt)
            # All but the turn's last token, whose keys and values nobody needed yet.
            assert result.cached_len == (0 if turn == 0 else len(tokens) - 7 - 1)
            assert_recorded(model, attempt, result)
            tokens = [*tokens, *result.token_ids, *random_prefix(rng, 7)]


async def test_a_fork_reuses_the_common_part_only(checkpoints):
    rng, model = random.Random(4), make_model("llama")
    async with serving(make_backend(checkpoints["llama"])) as backend:
        tokens = random_prefix(rng, 50)
        await backend.generate(make_attempt(tokens))
        forks = [make_attempt([*tokens[:n], (tokens[n] + 1) % VOCAB_LEN, 4], max_new_tokens=6) for n in (1, 20, 49)]
        for fork, shared in zip(forks, (1, 20, 49), strict=True):
            result = await backend.generate(fork)
            assert result.cached_len == shared
            assert_recorded(model, fork, result)
        shorter = make_attempt(tokens[:25], max_new_tokens=6)
        result = await backend.generate(shorter)
        assert result.cached_len == 24
        assert_recorded(model, shorter, result)


async def test_sessions_that_start_together_compute_a_common_opening_once(checkpoints):
    rng, model = random.Random(5), make_model("llama")
    async with serving(make_backend(checkpoints["llama"])) as backend:
        opening = random_prefix(rng, 80)
        attempts = [make_attempt([*opening, i, i + 1], session=f"s{i}", max_new_tokens=12) for i in range(8)]
        results = await generate_all(backend, attempts)
        assert sorted(result.cached_len for result in results) == [0] + [80] * 7
        for attempt, result in zip(attempts, results, strict=True):
            assert_recorded(model, attempt, result)
        await backend.close_session("s3")
        late = make_attempt([*opening, 50], session="late")
        assert (await backend.generate(late)).cached_len == 80


async def test_a_small_cache_forgets_the_oldest(checkpoints):
    rng = random.Random(6)
    async with serving(make_backend(checkpoints["llama"], max_cached_tokens=100)) as backend:
        prefixes = [random_prefix(rng, 40) for _ in range(4)]
        for i, prefix in enumerate(prefixes):
            await backend.generate(make_attempt(prefix, session=str(i), max_new_tokens=5))
            assert backend.load().n_cached_tokens <= 100
        again = [
            (await backend.generate(make_attempt(prefixes[i], session=str(i), max_new_tokens=1))).cached_len
            for i in (3, 0)
        ]
        assert again == [39, 0]


async def test_a_seed_gives_the_same_tokens_alone_and_in_company(checkpoints):
    rng = random.Random(7)
    prefix = random_prefix(rng, 12)
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        alone = await backend.generate(make_attempt(prefix, seed=11, max_new_tokens=25, session="alone"))
        crowd = [
            make_attempt(random_prefix(rng, 5 + i), session=f"c{i}", max_new_tokens=10 + i, seed=i) for i in range(9)
        ]
        same = make_attempt(prefix, seed=11, max_new_tokens=25, session="same")
        other = make_attempt(prefix, seed=12, max_new_tokens=25, session="other")
        results = await generate_all(backend, [*crowd, same, other])
        assert results[-2].token_ids == alone.token_ids
        assert results[-1].token_ids != alone.token_ids


async def test_without_a_seed_attempts_differ(checkpoints):
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        attempts = [make_attempt([1, 2, 3], max_new_tokens=20, session=str(i)) for i in range(2)]
        first, second = await generate_all(backend, attempts)
        assert first.token_ids != second.token_ids


async def test_a_stop_token_ends_the_turn_and_is_kept(checkpoints):
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        free = await backend.generate(make_attempt([9, 8], seed=3, max_new_tokens=30, session="free"))
        stop_id = free.token_ids[6]
        end = free.token_ids.index(stop_id) + 1
        attempt = make_attempt([9, 8], seed=3, max_new_tokens=30, stop_token_ids=(stop_id, 500))
        result = await backend.generate(attempt)
        assert result.token_ids == free.token_ids[:end]
        assert result.logprobs.tolist() == pytest.approx(free.logprobs[:end].tolist(), abs=1e-5)
        assert (result.finish, result.stop_string) == ("stop", None)


async def test_a_stop_string_ends_the_turn_with_the_token_that_completes_it(checkpoints):
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        free = await backend.generate(make_attempt([9, 8], seed=3, max_new_tokens=30, session="free"))
        text = decode(free.token_ids)
        stop = text[4:7]
        attempt = make_attempt([9, 8], seed=3, max_new_tokens=30, stop=("no such text", stop))
        result = await backend.generate(attempt)
        assert decode(result.token_ids) == text[: text.index(stop) + 3]
        assert (result.finish, result.stop_string) == ("stop", stop)


async def test_stop_strings_are_looked_for_from_the_response_start(checkpoints):
    async with serving(make_backend(checkpoints["qwen3"])) as backend:
        free = await backend.generate(make_attempt([9, 8], seed=3, max_new_tokens=9, session="free"))
        text = decode(free.token_ids)
        resumed = {"seed": 3, "max_new_tokens": 4, "stop": (text[2:6],)}
        prefix = [9, 8, *free.token_ids[:5]]
        across = await backend.generate(make_attempt(prefix, response_start=2, session="a", **resumed))
        assert (across.finish, across.token_ids[0]) == ("stop", free.token_ids[5])
        assert len(across.token_ids) == 1
        after = await backend.generate(make_attempt(prefix, response_start=7, session="b", **resumed))
        assert (after.finish, len(after.token_ids)) == ("length", 4)


async def test_stop_strings_need_a_decoder(checkpoints):
    async with serving(EmbeddedBackend(checkpoints["llama"], EmbeddedOptions(n_threads=1))) as backend:
        with pytest.raises(BackendRejected, match="decoder"):
            await backend.generate(make_attempt([1], stop=("x",)))


async def test_attempts_beyond_the_batch_wait_their_turn_and_abort_with_nothing(checkpoints):
    async with serving(make_backend(checkpoints["llama"], max_batch=1)) as backend:
        results = {}

        async def call(name, **kwargs):
            results[name] = await backend.generate(make_attempt([1, 2], rid=name, session=name, **kwargs))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: call("long", max_new_tokens=CONTEXT_LEN - 2))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(lambda: call("queued"))
            nursery.start_soon(lambda: call("next"))
            await trio.testing.wait_all_tasks_blocked()
            assert backend.load().n_waiting >= 2
            await backend.abort("queued")
            await backend.abort("long")
        assert (results["queued"].finish, len(results["queued"].token_ids)) == ("abort", 0)
        assert results["long"].finish == "abort"
        assert len(results["next"].token_ids) == 8


async def test_an_idle_engine_wakes_for_a_new_attempt(checkpoints):
    async with serving(make_backend(checkpoints["llama"])) as backend:
        for i in range(3):
            await backend.generate(make_attempt([1, i], session=str(i)))
            await trio.sleep(0.01)


@pytest.mark.parametrize("length", [100, 512])
async def test_a_sliding_window_hides_what_is_older(tmp_path, length):
    torch.manual_seed(8)
    config = MistralConfig(
        vocab_size=VOCAB_LEN,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_LEN,
        sliding_window=16,
        initializer_range=0.3,
    )
    model = MistralForCausalLM(config)
    save_checkpoint(model, tmp_path / "mistral")
    async with serving(make_backend(tmp_path / "mistral")) as backend:
        attempt = make_attempt(random_prefix(random.Random(9), length), max_new_tokens=20)
        assert_recorded(model, attempt, await backend.generate(attempt))


async def test_a_failure_in_the_thread_is_an_engine_fault_and_waiters_are_told(checkpoints, monkeypatch):
    backend = make_backend(checkpoints["llama"])
    outcomes = []

    async def call():
        try:
            await backend.generate(make_attempt([1, 2]))
        except BackendUnavailable as exc:
            outcomes.append(str(exc))

    def broken(*args):
        raise RuntimeError("out of memory, say")

    async with trio.open_nursery() as callers:
        with pytest.RaisesGroup(pytest.RaisesExc(EngineFault, match="out of memory, say")):
            async with trio.open_nursery() as services:
                await services.start(backend.run)
                monkeypatch.setattr("relax_trio.backend.embedded.model.CausalModel.logits", broken)
                callers.start_soon(call)
                await trio.sleep_forever()
    assert len(outcomes) == 1
    assert "engine ended" in outcomes[0]
    with pytest.raises(BackendUnavailable):
        await backend.generate(make_attempt([1]))
