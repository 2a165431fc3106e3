"""What every backend keeps, whichever it is: the same tests on the embedded engine, the script, the fake, and SGLang.

SGLang twice in the recorded words of two versions, and, where an environment has it, as a real server on the CPU.
"""

from __future__ import annotations

import contextlib

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
        pause = "retract" if request.getfixturevalue("server_tells_spans") else None
        yield backend_on(served, tmp_path, url, start_timeout_s=300, vocab_len=SERVED_VOCAB_LEN, pause=pause)
    else:
        async with wire_server(kind.split()[1], context_len=CONTEXT_LEN + 6) as server:
            pause = None if server.is_old else "retract"
            yield backend_on(checkpoint, tmp_path, server.url, vocab_len=VOCAB_LEN, pause=pause)
            assert (server.stale_hits, server.n_lost_aborts, server.paused) == (0, 0, None)


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


# --- pauses -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pausing(kind, backend, request):
    """A backend whose attempts can be paused."""
    is_old = kind == "sglang" and not request.getfixturevalue("server_tells_spans")
    if is_old or kind in ("embedded", f"sglang {VERSIONS[0]}"):
        assert backend.pausing is None
        pytest.skip("its attempts can't be paused")
    return backend


@contextlib.asynccontextmanager
async def one_under_way(backend, results, **fields):
    """An attempt of LONG tokens that has begun; its result, once it is there, is put into `results`."""

    async def call():
        results.append(await backend.generate(make_attempt([5, 6], **{"max_new_tokens": LONG, **fields})))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await trio.sleep(0.03)
        yield nursery


async def test_a_paused_attempt_stays_where_it_is_and_says_what_an_unbroken_one_does(pausing):
    async with serving(pausing) as backend:
        results = []
        with trio.fail_after(120):
            async with one_under_way(backend, results, temperature=0.0):
                await backend.pausing.pause()
                await backend.pausing.pause()
                await trio.sleep(0.2)
                assert not results
                await backend.pausing.resume()
                await backend.pausing.resume()
            unbroken = await backend.generate(
                make_attempt([5, 6], session="other", max_new_tokens=LONG, temperature=0.0)
            )
        assert [*results[0].token_ids] == [*unbroken.token_ids]
        assert results[0].finish == unbroken.finish


async def test_weights_change_under_a_paused_attempt_and_its_spans_tell(pausing, source):
    async with serving(pausing) as backend:
        results, before = [], backend.weight_version
        with trio.fail_after(120):
            async with one_under_way(backend, results, temperature=0.0):
                await backend.pausing.pause()
                await backend.update_weights("v2", source)
                assert backend.weight_version == "v2"
                await trio.sleep(0.05)
                assert not results, "an update leaves the pause as it is"
                await backend.pausing.resume()
        (result,) = results
        assert {span.version for span in result.versions} <= {before, "v2"}
        assert result.versions[-1].version == "v2"


async def test_an_attempt_that_comes_in_a_pause_begins_after_it(pausing):
    async with serving(pausing) as backend:
        await backend.pausing.pause()
        results = []
        with trio.fail_after(120):
            async with one_under_way(backend, results, max_new_tokens=2):
                await trio.sleep(0.1)
                assert not results
                await backend.pausing.resume()
        assert len(results[0].token_ids) == 2


async def test_an_abort_in_a_pause_brings_back_what_there_is_at_its_end(pausing):
    async with serving(pausing) as backend:
        results = []
        with trio.fail_after(120):
            async with one_under_way(backend, results, rid="x", temperature=0.0):
                await backend.pausing.pause()
                await backend.abort("x")
                await trio.sleep(0.1)
                await backend.pausing.resume()
        assert results[0].finish == "abort"
        assert len(results[0].token_ids) < LONG


async def test_a_caller_that_goes_away_in_a_pause_leaves_at_once_and_nothing_behind(pausing):
    async with serving(pausing) as backend:
        with trio.fail_after(120):
            async with one_under_way(backend, [], rid="gone") as nursery:
                await backend.pausing.pause()
                nursery.cancel_scope.cancel(reason="gone")
            await backend.pausing.resume()
            await backend.generate(make_attempt([1, 2], rid="gone", max_new_tokens=3))
            while backend.load().n_running:  # noqa: ASYNC110 - what is told of it is a snapshot
                await trio.sleep(0.01)


async def test_the_end_of_run_in_a_pause_ends_attempts_and_hangs_nothing(pausing):
    failures = []

    async def lose():
        try:
            await pausing.generate(make_attempt([1, 2], max_new_tokens=LONG))
        except BackendUnavailable as exc:
            failures.append(exc)

    with trio.fail_after(120):
        async with trio.open_nursery() as callers, serving(pausing) as backend:
            callers.start_soon(lose)
            await trio.sleep(0.05)
            await backend.pausing.pause()
    assert len(failures) == 1
