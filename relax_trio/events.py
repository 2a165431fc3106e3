"""Events: one line of evidence for each thing that happened, named `<noun>.<past participle>`.

`emit` hands an `Event` to the sinks of the current context. Sinks are plain functions; the run installs one that writes
the log, tests install a list. No colour, no formatting here: the documented lines are made by `format_line`.
Not covered: metrics (observe/) and progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import frozen

EventValue = str | int | float | bool | None


@frozen
class Event:
    """One thing that happened.

    Attributes:
      name: `<noun>.<past participle>`, e.g. "attempt.finished".
      at: seconds on the clock of the emitter (`trio.current_time()` inside a run); 0.0 outside one.
      fields: details in the order given; ids are public names, never credentials.
    """

    name: str
    at: float
    fields: dict[str, EventValue]


Sink = Callable[[Event], None]

_sinks: ContextVar[tuple[Sink, ...]] = ContextVar("relax_trio_event_sinks", default=())
_clock: ContextVar[Callable[[], float]] = ContextVar("relax_trio_event_clock", default=lambda: 0.0)


def emit(name: str, /, **fields: EventValue) -> None:
    """Tell every sink of this context that `name` happened. Never checkpoints, never raises for want of a sink."""
    sinks = _sinks.get()
    if sinks:
        event = Event(name, _clock.get()(), fields)
        for sink in sinks:
            sink(event)


@contextmanager
def event_sink(sink: Sink, clock: Callable[[], float] | None = None) -> Iterator[None]:
    """Add `sink` for this context and the tasks started in it; `clock` stamps events from here on."""
    token = _sinks.set((*_sinks.get(), sink))
    clock_token = None if clock is None else _clock.set(clock)
    try:
        yield
    finally:
        _sinks.reset(token)
        if clock_token is not None:
            _clock.reset(clock_token)


def format_line(event: Event) -> str:
    """Render an event as one greppable line: `name key=value …`, values with blanks quoted."""
    return " ".join([event.name, *(f"{key}={_text(value)}" for key, value in event.fields.items())])


def accounting_line(event_name: str, rollout_id: int, **fields: EventValue) -> str:
    """Render the documented marker line, e.g. `AGENTIC ROLLOUT event=accounting_end rollout=0 scored=8`."""
    pairs = "".join(f" {key}={_text(value)}" for key, value in fields.items())
    return f"AGENTIC ROLLOUT event={event_name} rollout={rollout_id}{pairs}"


def _text(value: EventValue) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if any(c.isspace() for c in text) else text
