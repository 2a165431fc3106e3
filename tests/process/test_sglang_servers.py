"""SGLang servers as children of the run: what is started here answers in SGLang's recorded words."""

from __future__ import annotations

import os
import signal
import stat
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from builders_backend import VOCAB_LEN, make_attempt, make_model, save_checkpoint, serving
from builders_process import alive, eventually, running_warden

from relax_trio.backend.base import WeightSource
from relax_trio.backend.sglang.backend import SGLangBackend, SGLangOptions
from relax_trio.backend.sglang.owned import OwnedServer, OwnedServers
from relax_trio.errors import BackendUnavailable, ConfigError

pytestmark = pytest.mark.process

WIRE = Path(__file__).parents[1] / "sglang_wire.py"


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    return save_checkpoint(model, tmp_path_factory.mktemp("owned") / "llama")


@pytest.fixture
def source(model):
    return WeightSource(tensors=model.state_dict())


@pytest.fixture
def stand_in(tmp_path):
    """An executable that takes the place of the Python which has SGLang."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/bash\nshift 2\nexec {sys.executable} {WIRE} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def run(checkpoint, stand_in, tmp_path):
    """A served backend of its own servers, with its keepers."""

    @asynccontextmanager
    async def run(n_servers=1, *, python=stand_in, max_restarts=3, health_timeout_s=20.0, args=()):
        async with running_warden() as warden:
            common = OwnedServers(
                warden=warden,
                python=python,
                args=(*args, "--tag", str(tmp_path)),
                log_dir=tmp_path / "servers",
                max_restarts=max_restarts,
                start_timeout_s=30.0,
                health_timeout_s=health_timeout_s,
            )
            keepers = [OwnedServer(common, index) for index in range(n_servers)]
            backend = SGLangBackend(
                checkpoint,
                "1",
                snapshot_dir=tmp_path / "weights",
                keepers=keepers,
                options=SGLangOptions(vocab_len=VOCAB_LEN),
            )
            async with serving(backend):
                yield backend

    return run


@pytest.fixture
def pids(tmp_path):
    """Pids of the servers that live, in the order of their start."""
    return lambda: sorted(
        pid for pid in alive(str(tmp_path)) if b"sglang_wire" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


async def test_a_server_is_started_serves_and_is_gone_afterwards(run, pids):
    async with run() as backend:
        result = await backend.generate(make_attempt([1], max_new_tokens=3))
        assert [span.version for span in result.versions] == ["1"]
        assert len(pids()) == 1
    assert not pids()


async def test_a_killed_server_fails_what_ran_on_it_at_once_and_comes_back_with_the_current_weights(
    run, pids, source, tmp_path, events
):
    async with run() as backend:
        await backend.update_weights("2", source)
        with pytest.raises(BackendUnavailable) as caught, trio.fail_after(5):
            async with _killed_meanwhile(pids):
                await backend.generate(make_attempt([1], rid="x", max_new_tokens=600))
        assert caught.value.retryable
        with trio.fail_after(20):
            result = await backend.generate(make_attempt([1], max_new_tokens=3))
        assert [span.version for span in result.versions] == ["2"]
    starts = [line for line in (tmp_path / "servers/sglang-0.log").read_text().splitlines() if line.startswith("flags")]
    assert "--weight-version 1" in starts[0]
    assert f"--model-path {tmp_path}/weights/weights-2 " in starts[1]
    assert "--weight-version 2" in starts[1]
    died = [event.fields for event in events if event.name == "server.died"]
    assert ["SIGKILL" in fields["reason"] for fields in died] == [True]


async def test_a_server_that_hangs_is_ended_and_started_again(run, pids):
    async with run(health_timeout_s=1.0) as backend:
        (pid,) = pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(BackendUnavailable, match="engine-health-timeout"), trio.fail_after(10):
            await backend.generate(make_attempt([1], max_new_tokens=600))
        with trio.fail_after(20):
            await backend.generate(make_attempt([1], max_new_tokens=3))
        assert pids() != [pid]


async def test_the_death_of_one_server_does_not_touch_attempts_on_the_other(run, pids):
    results = []

    async def call(i):
        try:
            results.append(await backend.generate(make_attempt([1], session=f"s{i}", max_new_tokens=300)))
        except BackendUnavailable as exc:
            results.append(exc)

    async with run(2) as backend, trio.open_nursery() as nursery:
        for i in range(4):
            nursery.start_soon(call, i)
        await eventually(lambda: backend.load().n_running == 4)
        os.kill(pids()[0], signal.SIGKILL)
    assert sorted(type(result).__name__ for result in results) == ["AttemptResult"] * 2 + ["BackendUnavailable"] * 2


async def test_a_server_that_does_not_start_says_why(run):
    with pytest.RaisesGroup(BackendUnavailable, flatten_subgroups=True, allow_unwrapped=True) as caught:
        async with run(args=("--crash", "")):
            pass
    text = str(_only(caught.value))
    assert "did not start: it ended with exit code 1" in text
    assert text.endswith("unrecognized arguments: --crash\n")


async def test_a_server_that_dies_too_often_ends_the_run_with_its_log(run, pids):
    with pytest.RaisesGroup(BackendUnavailable, flatten_subgroups=True, allow_unwrapped=True) as caught:
        async with run(max_restarts=0):
            os.kill(pids()[0], signal.SIGKILL)
            await trio.sleep_forever()
    text = str(_only(caught.value))
    assert "--sglang-max-restarts" in text
    assert "flags: --model-path" in text


async def test_a_python_that_is_not_there_is_a_configuration_error(run, tmp_path):
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True, allow_unwrapped=True) as caught:
        async with run(python=str(tmp_path / "nothing")):
            pass
    assert "--sglang-python" in str(_only(caught.value))


@asynccontextmanager
async def _killed_meanwhile(pids):
    """Kill the server a moment after the block was entered."""
    async with trio.open_nursery() as nursery:

        async def kill():
            await trio.sleep(0.3)
            os.kill(pids()[0], signal.SIGKILL)

        nursery.start_soon(kill)
        try:
            yield
        except BackendUnavailable as exc:
            error = exc
        else:
            error = None
    if error is not None:
        raise error


def _only(exc):
    while isinstance(exc, BaseExceptionGroup):
        (exc,) = exc.exceptions
    return exc
