"""What the demo tells a person while it runs."""

from __future__ import annotations

import io

from relax_trio.demo.story import Story
from relax_trio.events import Event


def told(name, **fields):
    out = io.StringIO()
    Story(n_steps=3, out=out)(Event(name=name, at=0.0, fields=fields))
    return out.getvalue()


def test_a_stop_is_said_at_once_with_what_a_second_signal_does():
    said = told("run.stopping", signal="SIGINT", hint="a second one kills what is left and exits at once")
    assert said == (
        "\nStopping on SIGINT; the last complete step is kept, and a second one kills what is left and exits at once.\n"
    )


def test_a_failed_session_is_one_line():
    assert (
        told("session.failed", place="G1/0", error="EngineFault: x\ny") == "  (session G1/0 failed: EngineFault: x)\n"
    )


def test_what_is_not_part_of_the_story_is_left_out():
    assert told("wait.stalled", place="G1/0") == ""
