"""The fake backend keeps exact virtual time."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from builders_backend import make_attempt, serving

from relax_trio.backend.base import WeightSource
from relax_trio.backend.fake import FAKE_LOGPROB, FakeBackend
from relax_trio.errors import BackendRejected, BackendUnavailable


async def test_tokens_take_their_time(autojump_clock):
    async with serving(FakeBackend([[5, 6, 7, 8]], tokens_per_s=2.0)) as backend:
        start = trio.current_time()
        result = await backend.generate(make_attempt([1]))
        assert trio.current_time() == start + 2.0
    assert result.token_ids.tolist() == [5, 6, 7, 8]
    assert result.logprobs.tolist() == [FAKE_LOGPROB] * 4
    assert result.finish == "stop"


async def test_stop_ids_and_the_limit_end_a_turn(autojump_clock):
    async with serving(FakeBackend(lambda _: [5, 6, 7, 8])) as backend:
        stopped = await backend.generate(make_attempt([1], stop_token_ids=(6,)))
        cut = await backend.generate(make_attempt([1], max_new_tokens=3))
    assert (stopped.token_ids.tolist(), stopped.finish) == ([5, 6], "stop")
    assert (cut.token_ids.tolist(), cut.finish) == ([5, 6, 7], "length")


async def test_abort_returns_the_tokens_so_far_and_the_turn_goes_on(autojump_clock):
    async with serving(FakeBackend([[5, 6, 7, 8], [9]], tokens_per_s=1.0)) as backend:
        results = []

        async def call(attempt):
            results.append((await backend.generate(attempt), trio.current_time() - start))

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, make_attempt([1], rid="x"))
            await trio.sleep(2.5)
            await backend.abort("x")
        await call(make_attempt([1, 5, 6], response_start=1))
        await call(make_attempt([1, 5, 6, 7, 8, 2]))
    (first, at_1), (second, at_2), (third, _) = results
    assert (first.token_ids.tolist(), first.finish, at_1) == ([5, 6], "abort", 2.5)
    assert (second.token_ids.tolist(), second.finish, at_2) == ([7, 8], "stop", 4.5)
    assert third.token_ids.tolist() == [9]


async def test_an_abort_may_take_long_or_for_ever(autojump_clock):
    for delay, expected in ((1.0, (3, "abort")), (float("inf"), (8, "stop"))):
        backend = FakeBackend(lambda _: range(8), tokens_per_s=1.0, abort_delay_s=delay)
        async with serving(backend), trio.open_nursery() as nursery:
            results = []

            async def call(backend=backend, results=results):
                results.append(await backend.generate(make_attempt([1], rid="x")))

            nursery.start_soon(call)
            await trio.sleep(2)
            await backend.abort("x")
            await trio.sleep(10)
        assert (len(results[0].token_ids), results[0].finish) == expected


async def test_tokens_carry_the_version_of_their_moment(autojump_clock):
    async with serving(FakeBackend(lambda _: range(4), tokens_per_s=1.0)) as backend:
        results = []

        async def call():
            results.append(await backend.generate(make_attempt([1])))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.sleep(2.5)
            await backend.update_weights("1", WeightSource(tensors={}))
    assert [(span.version, span.n_tokens) for span in results[0].versions] == [("0", 2), ("1", 2)]


async def test_calls_are_recorded_in_order(autojump_clock):
    async with serving(FakeBackend(lambda _: [1], tokens_per_s=1.0)) as backend:
        start = trio.current_time()
        await backend.generate(make_attempt([1], rid="r"))
        await backend.abort("r")
        await backend.close_session("s")
    calls = [(call.name, call.at - start, call.what) for call in backend.calls]
    assert calls == [("generate", 0, "r"), ("abort", 1, "r"), ("close_session", 1, "s")]
    assert [attempt.rid for attempt in backend.attempts] == ["r"]


async def test_failures_come_when_told(autojump_clock):
    async with serving(FakeBackend([[1], [2]])) as backend:
        backend.fail_next(BackendUnavailable("told to"))
        with pytest.raises(BackendUnavailable, match="told to"):
            await backend.generate(make_attempt([1]))
        assert (await backend.generate(make_attempt([1]))).token_ids.tolist() == [1]
        await backend.generate(make_attempt([1]))
        with pytest.raises(BackendRejected, match="no answer 3"):
            await backend.generate(make_attempt([1]))


async def test_every_method_checkpoints(autojump_clock):
    async with serving(FakeBackend(lambda _: [1])) as backend:
        for call in (
            lambda: backend.generate(make_attempt([1])),
            lambda: backend.abort("x"),
            lambda: backend.update_weights("1", WeightSource(tensors={})),
            lambda: backend.close_session("s"),
        ):
            with trio.testing.assert_checkpoints():
                await call()
