"""Starts a command's Trio run: signals outermost, then log and progress, then the command's own block."""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import trio

from relax_trio.runtime.engine import Engine
from relax_trio.runtime.stop import Stop
from relax_trio.sync.debug import dump_on_signal

T = TypeVar("T")

SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval while torch threads and the event loop share cores: at the default of 5 ms a busy
thread delays every socket by as much."""

GC_THRESHOLDS = (2_000, 1_000, 1_000)
"""When Python looks for garbage in cycles by itself: often among what is young, which takes a millisecond or two, and
next to never in the whole heap, which with long histories takes 50 to 300 ms in which nothing is served."""


def tune_interpreter() -> None:
    """Settings of this whole process, for an event loop that shares it with large heaps and busy threads.

    What was imported so far is never searched for garbage again; `collect_garbage` searches the rest.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    gc.collect()
    gc.freeze()


def collect_garbage() -> None:
    """Search the whole heap, between two steps: what a step left in cycles may hold tensors."""
    gc.collect()


def run_command(body: Callable[[Stop], Awaitable[T]], evidence: Callable[[], AbstractContextManager[None]]) -> T:
    """Run `body` to its end or to a signal, and return what it returned.

    Args:
      body: the command; works inside `stop.work()`.
      evidence: opens log and progress for the run; called inside it.

    Raises:
      RelaxTrioError: expected failures, alone or in exception groups.
      SystemExit: with status 130 or 143, when a signal ended the run before its work had begun.
    """
    tune_interpreter()
    results, stop = trio.run(_main, body, evidence, restrict_keyboard_interrupt_to_checkpoints=True)
    if not results:
        assert stop.stopped_by is not None, "a body that does not return was stopped"
        raise SystemExit(128 + stop.stopped_by)
    return results[0]


def tell_operator(engine: Engine) -> None:
    """Print the token that opens `/debug_state` of the whole run. To the terminal only: it is a secret."""
    say(f"operator token for {engine.shared.base_url}/debug_state: {engine.operator_token}")


def say(text: str) -> None:
    """Tell a person on stderr; that nobody reads there any more stops no run."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


async def _main(
    body: Callable[[Stop], Awaitable[T]], evidence: Callable[[], AbstractContextManager[None]]
) -> tuple[list[T], Stop]:
    stop = Stop()
    results: list[T] = []
    with evidence():
        async with trio.open_nursery() as nursery:
            await nursery.start(stop.watch, name="signals")
            await nursery.start(dump_on_signal, say, name="task dumps")
            with stop.run():
                results.append(await body(stop))
            nursery.cancel_scope.cancel(reason="the run ended")
    return results, stop
