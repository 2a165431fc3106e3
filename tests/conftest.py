"""Fixtures of all tests: the guarded virtual clock, an event list."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from relax_trio.events import Event, event_sink


@pytest.fixture
def autojump_clock(monkeypatch):
    """A MockClock that jumps when idle; a worker thread under it is a loud error, because it would count as idle."""

    def refuse(*args, **kwargs):
        raise AssertionError("worker thread under an autojump clock")

    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.fixture
def events():
    """The events emitted by the test, in order."""
    seen: list[Event] = []
    with event_sink(seen.append):
        yield seen
