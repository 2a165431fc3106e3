"""The virtual clock of loopback tests."""

from __future__ import annotations

import pytest
import trio
import trio.testing


@pytest.fixture
def loopback_clock(monkeypatch):
    """A MockClock that jumps once sockets have been silent for a moment: bytes on their way through the kernel are
    not seen as work. Worker threads are refused, as under the other virtual clock.
    """

    def refuse(*args, **kwargs):
        raise AssertionError("worker thread under a virtual clock")

    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    return trio.testing.MockClock(autojump_threshold=0.01)
