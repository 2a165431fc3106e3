"""What every backend keeps, whichever it is: the same tests on the embedded engine, the script, the fake, and SGLang.

SGLang twice in the recorded words of two versions, and, where an environment has it, as a real server on the CPU.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing
from builders_backend import CONTEXT_LEN, VOCAB_LEN, generate_all, make_attempt, make_model, save_checkpoint, serving
from builders_sglang import SERVED_VOCAB_LEN, backend_on, served_model
from sglang_wire import VERSIONS, wire_server

from relax_trio.backend.base import WeightSource
from relax_trio.backend.embedded import EmbeddedBackend, EmbeddedOptions
from relax_trio.backend.fake import FakeBackend
from relax_trio.backend.scripted import Answer, ScriptedBackend
from relax_trio.errors import BackendRejected, BackendUnavailable, WeightSyncError

pytestmark = pytest.mark.engine

BEYOND = 10_000_000
"""Stands for the first id that is outside the vocabulary."""

LONG = 600
"""More tokens than any of the backends makes in the time that a test waits."""


KINDS = [
    "embedded",
    "scripted",
    "fake",
    *(f"sglang {version}" for version in VERSIONS),
    pytest.param("sglang", marks=pytest.mark.sglang_server),
]


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    return save_checkpoint(model, tmp_path_factory.mktemp("contract") / "llama")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
async def backend(kind, request, checkpoint, tmp_path):
    """A backend whose long attempts (LONG tokens) are still under way after some milliseconds."""
    if kind == "embedded":
        yield EmbeddedBackend(checkpoint, EmbeddedOptions(n_threads=1, max_batch=4))
    elif kind == "scripted":
        long = Answer(ids=tuple(i % VOCAB_LEN for i in range(LONG)), finish="length", delay_s=0.05)
        yield ScriptedBackend([long] * 9, name="script", max_context_len=CONTEXT_LEN, vocab_len=VOCAB_LEN)
    elif kind == "fake":
        ids = [i % VOCAB_LEN for i in range(LONG)]
        yield FakeBackend(lambda _: ids, tokens_per_s=1000.0, max_context_len=CONTEXT_LEN, vocab_len=VOCAB_LEN)
    elif kind == "sglang":
        served, url = request.getfixturevalue("sglang_server")
        yield backend_on(served, tmp_path, url, start_timeout_s=300, vocab_len=SERVED_VOCAB_LEN)
    else:
        async with wire_server(kind.split()[1], context_len=CONTEXT_LEN + 6) as server:
            yield backend_on(checkpoint, tmp_path, server.url, vocab_len=VOCAB_LEN)
            assert server.stale_hits == 0


@pytest.fixture
def source(kind, model):
    return WeightSource(tensors=(served_model(seed=1) if kind == "sglang" else model).state_dict())


async def test_attempts_end_at_their_limit_with_a_logprob_and_a_version_for_each_token(backend):
    async with serving(backend):
        attempts = [make_attempt([3, 4, 5], session=f"s{i}", max_new_tokens=2 + i) for i in range(6)]
        for attempt, result in zip(attempts, await generate_all(backend, attempts), strict=True):
            assert len(result.token_ids) == attempt.sampling.max_new_tokens
            assert result.token_ids.typecode == "i"
            assert result.logprobs.typecode == "d"
            assert all(value <= 0.0 for value in result.logprobs)
            assert result.finish == "length"
            assert [span.version for span in result.versions] == [backend.weight_version]


async def test_nothing_is_served_before_and_after_run(backend):
    with pytest.raises(BackendUnavailable):
        await backend.generate(make_attempt([1]))
    async with serving(backend):
        await backend.generate(make_attempt([1], max_new_tokens=1))
    with pytest.raises(BackendUnavailable):
        await backend.generate(make_attempt([1]))
    assert backend.load().n_running == 0


async def test_the_end_of_run_makes_attempts_under_way_unavailable(backend):
    failures = []

    async def lose():
        try:
            await backend.generate(make_attempt([1, 2], max_new_tokens=LONG))
        except BackendUnavailable as exc:
            failures.append(exc)

    async with trio.open_nursery() as callers, serving(backend):
        callers.start_soon(lose)
        await trio.sleep(0.02)
    assert len(failures) == 1
    assert failures[0].retryable


@pytest.mark.parametrize(
    ("prefix", "limit", "words"),
    [
        ([1] * 100, CONTEXT_LEN - 99, "exceed the context"),
        ([1, BEYOND], 4, "outside the vocabulary"),
        ([1, -1], 4, "outside the vocabulary"),
        ([], 4, "at least one prefix token"),
        ([1], 0, "room for one new token"),
    ],
)
async def test_unfit_attempts_are_rejected(backend, kind, prefix, limit, words):
    vocab_len = SERVED_VOCAB_LEN if kind == "sglang" else VOCAB_LEN
    prefix = [vocab_len if token == BEYOND else token for token in prefix]
    async with serving(backend):
        with pytest.raises(BackendRejected, match=words):
            await backend.generate(make_attempt(prefix, max_new_tokens=limit))


async def test_the_whole_context_can_be_used(backend):
    async with serving(backend):
        result = await backend.generate(make_attempt([1] * (CONTEXT_LEN - 5), max_new_tokens=5))
        assert len(result.token_ids) == 5


async def test_a_name_that_is_running_is_rejected_and_free_again_afterwards(backend):
    async with serving(backend):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backend.generate, make_attempt([1], rid="twin", max_new_tokens=LONG))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(BackendRejected, match="twin"):
                await backend.generate(make_attempt([1], rid="twin", session="other"))
            await backend.abort("twin")
        await backend.generate(make_attempt([1], rid="twin", session="other", max_new_tokens=1))


async def test_abort_returns_what_is_there_and_the_turn_goes_on_from_it(backend, kind):
    # Seeds are honoured by a server that was started for it, which needs a GPU.
    sampling = {"temperature": 0.0} if kind == "sglang" else {"seed": 7}
    async with serving(backend):
        results = []

        async def call():
            results.append(await backend.generate(make_attempt([5, 6], rid="x", max_new_tokens=LONG, **sampling)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.sleep(0.03)
            await backend.abort("x")
        first = results[0]
        assert first.finish == "abort"
        n_first = len(first.token_ids)
        assert n_first < LONG
        rest = make_attempt([5, 6, *first.token_ids], response_start=2, max_new_tokens=20, **sampling)
        second = await backend.generate(rest)
        assert len(second.token_ids) == min(20, LONG - n_first)
        unbroken = make_attempt([5, 6], session="other", max_new_tokens=n_first + len(second.token_ids), **sampling)
        assert [*first.token_ids, *second.token_ids] == [*(await backend.generate(unbroken)).token_ids]


async def test_abort_of_an_unknown_name_and_close_of_an_unknown_session_do_nothing(backend):
    async with serving(backend):
        await backend.abort("nobody")
        await backend.close_session("nobody")
        await backend.generate(make_attempt([1], max_new_tokens=1))


async def test_cancelling_a_caller_frees_the_engine(backend):
    async with serving(backend):
        with trio.move_on_after(0.02):
            await backend.generate(make_attempt([1, 2], rid="gone", max_new_tokens=LONG))
        with trio.fail_after(10):
            await backend.generate(make_attempt([1, 2], rid="gone", max_new_tokens=3))
        assert backend.load().n_waiting == 0


async def test_load_counts_attempts_under_way(backend):
    async with serving(backend), trio.open_nursery() as nursery:
        for i in range(3):
            nursery.start_soon(backend.generate, make_attempt([1, 2], session=f"s{i}", max_new_tokens=LONG))
        await trio.sleep(0.02)
        load = backend.load()
        assert load.n_running + load.n_waiting == 3
        nursery.cancel_scope.cancel(reason="counted")


async def test_tokens_after_an_update_carry_its_version(backend, source):
    async with serving(backend):
        await backend.generate(make_attempt([1], max_new_tokens=2))
        await backend.update_weights("v2", source)
        assert backend.weight_version == "v2"
        result = await backend.generate(make_attempt([1], session="t", max_new_tokens=3))
        assert [(span.version, span.n_tokens) for span in result.versions] == [("v2", 3)]


async def test_an_update_without_weights_is_refused_and_the_old_version_stays(backend):
    async with serving(backend):
        before = backend.weight_version
        with pytest.raises(WeightSyncError):
            await backend.update_weights("v2", WeightSource())
        assert backend.weight_version == before
        await backend.generate(make_attempt([1], max_new_tokens=1))
