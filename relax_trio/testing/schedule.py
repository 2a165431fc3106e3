"""The virtual clock and the seeded schedule: the same seed gives the same run, task step by task step.

Trio runs the tasks that are ready together in a random order, and has no public way to say which: its Hypothesis plugin
makes the order a function of one generator by setting a flag in `trio._core._run`. `seeded_schedule` sets the same flag
and seeds that generator; it is the only place that reaches into Trio, and it refuses a Trio that lacks either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar, TypeVarTuple

import trio
import trio.testing
from trio._core import _run

from relax_trio.errors import ConfigError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FLAG, _GENERATOR = "_ALLOW_DETERMINISTIC_SCHEDULING", "_r"


@contextmanager
def seeded_schedule(seed: int | str) -> Iterator[None]:
    """Let the order of tasks be a function of `seed` in every `trio.run` that starts and ends within the block.

    Raises:
      ConfigError: this version of Trio can't be seeded.
    """
    if not (hasattr(_run, _FLAG) and hasattr(_run, _GENERATOR)):
        raise ConfigError(
            f"the schedule of trio {trio.__version__} can't be seeded; install the one in constraints.txt"
        )
    generator = _run._r
    flag, state = getattr(_run, _FLAG), generator.getstate()
    setattr(_run, _FLAG, True)
    generator.seed(f"relax_trio schedule {seed}")
    try:
        yield
    finally:
        setattr(_run, _FLAG, flag)
        generator.setstate(state)


def run_virtual(
    fn: Callable[[*Ts], Awaitable[T]], *args: *Ts, seed: int | str = 0, instruments: Sequence[trio.abc.Instrument] = ()
) -> T:
    """`trio.run(fn, *args)` on a clock that jumps to the next deadline whenever every task waits.

    Nothing takes real time but Python itself. Time starts at 0.0. A worker thread would count as waiting, so starting
    one is an error: pass `InlineCpuPool` where a CPU pool is asked for.

    Args:
      seed: of the schedule.

    Raises:
      AssertionError: a worker thread was asked for.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    with seeded_schedule(seed), _without_threads():
        return trio.run(fn, *args, clock=clock, instruments=instruments)


@contextmanager
def _without_threads() -> Iterator[None]:
    run_sync = trio.to_thread.run_sync
    trio.to_thread.run_sync = _refuse
    try:
        yield
    finally:
        trio.to_thread.run_sync = run_sync


def _refuse(*_args: object, **_kwargs: object) -> NoReturn:
    raise AssertionError("a worker thread on the virtual clock: time would jump on while it works")
