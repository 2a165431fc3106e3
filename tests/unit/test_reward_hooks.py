"""Hooks: loading by name, calling, and what becomes of their failures."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from attrs import evolve

from relax_trio.errors import ConfigError, RewardError
from relax_trio.reward.hooks import call_hook, load_hook
from relax_trio.sync.cpu import InlineCpuPool, ThreadCpuPool

SOURCE = """
import asyncio, functools, threading

NUMBER = 3

def rm(args, sample):
    return 1.0

async def rm_async(args, sample):
    return 2.0

def rm_returns_coroutine(args, sample):
    return rm_async(args, sample)

class Judge:
    async def __call__(self, args, sample):
        return 3.0

judge = Judge()
partial_rm = functools.partial(rm)

def takes_one(sample):
    return 0.0

def needs_keyword(args, sample, *, tokenizer):
    return 0.0

def with_default(args, sample, evaluation=None):
    return evaluation

def with_any(args, sample, **kwargs):
    return sorted(kwargs)

def thread_name(args, sample):
    return threading.current_thread().name

def helper_that_fails(sample):
    raise KeyError(f"no answer in {sample}")

def failing(args, sample):
    return helper_that_fails(sample)

async def failing_async(args, sample):
    return helper_that_fails(sample)

def stops(args, sample):
    raise StopIteration

async def yields_to_asyncio(args, sample):
    await asyncio.sleep(0)

async def asks_for_the_loop(args, sample):
    await asyncio.sleep(0.01)

async def own_time_limit(args, sample):
    import trio
    with trio.fail_after(0):
        await trio.sleep_forever()

def long_story(args, sample):
    raise ValueError("x" * 100_000)
"""


def load(name):
    return load_hook("--custom-rm-path", f"my_hooks_under_test.{name}", parameters=("args", "sample"))


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    (tmp_path / "my_hooks_under_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_hooks_under_test", None)
    yield load
    sys.modules.pop("my_hooks_under_test", None)


async def call(hook, *, cpu=None, limit_s=60.0, **optional):
    return await call_hook(
        hook,
        SimpleNamespace(),
        "a sample",
        place="G7/2",
        cpu=cpu or InlineCpuPool(),
        limit_s=limit_s,
        optional=optional,
    )


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module_here.rm", "no_such_module_here cannot be imported"),
        ("my_hooks_under_test.rn", "has no rn"),
        ("my_hooks_under_test.NUMBER", "not a function"),
        ("rm", "package.module.function"),
        ("my_hooks_under_test.takes_one", r"takes_one\(args, sample\)"),
        ("my_hooks_under_test.needs_keyword", "'tokenizer'"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_when_it_is_loaded(hooks, path, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load_hook("--custom-rm-path", path, parameters=("args", "sample"))

    assert "--custom-rm-path" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_async", "value"),
    [
        ("rm", False, 1.0),
        ("rm_async", True, 2.0),
        ("rm_returns_coroutine", False, 2.0),
        ("judge", True, 3.0),
        ("partial_rm", False, 1.0),
    ],
)
async def test_every_kind_of_callable_is_called(hooks, name, is_async, value):
    hook = hooks(name)

    assert hook.is_async is is_async
    assert await call(hook) == value


@pytest.mark.parametrize(("name", "value"), [("rm", 1.0), ("with_default", True), ("with_any", ["evaluation"])])
async def test_a_hook_gets_the_optional_keywords_that_it_takes(hooks, name, value):
    assert await call(hooks(name), evaluation=True) == value


async def test_a_sync_hook_runs_in_a_worker_thread(hooks):
    assert await call(hooks("thread_name"), cpu=ThreadCpuPool(1)) != threading.current_thread().name


@pytest.mark.parametrize("name", ["failing", "failing_async"])
@pytest.mark.parametrize("cpu", [InlineCpuPool(), ThreadCpuPool(1)], ids=["inline", "thread"])
async def test_an_exception_names_hook_and_place_and_shows_the_hooks_own_frames_only(hooks, name, cpu):
    with pytest.raises(RewardError) as caught:
        await call(hooks(name), cpu=cpu)

    text = str(caught.value)
    assert text.startswith(
        f"session G7/2: --custom-rm-path my_hooks_under_test.{name} raised KeyError: 'no answer in a sample'"
    )
    assert "in helper_that_fails" in text
    assert "hooks.py" not in text
    assert "contextlib" not in text
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(("name", "says"), [("stops", "StopIteration"), ("own_time_limit", "TooSlowError")])
async def test_odd_exceptions_are_the_hooks_failure_too(hooks, name, says):
    with pytest.raises(RewardError, match=f"raised {says}"):
        await call(hooks(name))


@pytest.mark.parametrize("name", ["yields_to_asyncio", "asks_for_the_loop"])
async def test_a_hook_written_for_asyncio_is_told_what_to_do(hooks, name):
    with pytest.raises(RewardError, match="hooks are awaited on Trio's loop"):
        await call(hooks(name))


async def test_the_traceback_in_the_error_is_bounded(hooks):
    with pytest.raises(RewardError) as caught:
        await call(hooks("long_story"))

    assert len(str(caught.value)) < 10_000


async def test_a_sync_hook_that_hangs_is_left_behind_when_its_time_is_over():
    let_go, ended = threading.Event(), threading.Event()

    def hang(args, sample):
        let_go.wait(30)
        ended.set()

    hook = load_hook("--custom-rm-path", "builtins.print", parameters=("args", "sample"))
    pool = ThreadCpuPool(1)
    try:
        with trio.fail_after(20), pytest.raises(RewardError, match=r"did not answer within 0.05 s.*--rm-timeout"):
            await call_hook(evolve(hook, fn=hang), SimpleNamespace(), "a sample", place="G7/2", cpu=pool, limit_s=0.05)
    finally:
        let_go.set()
    with trio.fail_after(20):
        assert await pool.run(ended.wait, 10.0)


async def test_time_spent_waiting_for_a_thread_does_not_count(mock_clock):
    let_go = threading.Event()
    pool = ThreadCpuPool(1)
    results = []

    async def second():
        results.append(await pool.run_within(1.0, lambda: "in time"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.run, let_go.wait, 20.0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(1000)
        await trio.testing.wait_all_tasks_blocked()
        let_go.set()

    assert results == ["in time"]
