"""What `--partial-rollout-pause` needs, and what it can't be had with."""

from __future__ import annotations

import pytest

from relax_trio.config.check_backend import backend_problems
from relax_trio.config.check_pause import pause_problems
from relax_trio.config.check_sizes import rollout_size_problems
from relax_trio.config.parse import parse_config
from relax_trio.loop.servers import LONGEST_PAUSE_S, extra_flags

SGLANG = ("--rollout-backend", "sglang")
PARTIAL = ("--partial-rollout", *SGLANG)


def parse(*words):
    return parse_config(words).config


def problems(*words, trains=True):
    config = parse(*words)
    return backend_problems(config) + pause_problems(config, trains=trains) + rollout_size_problems(config)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*SGLANG, "--partial-rollout-pause", "retract"), "is given without --partial-rollout"),
        (("--partial-rollout", "--partial-rollout-pause", "retract"), "needs --rollout-backend sglang"),
        ((*PARTIAL, "--partial-rollout-pause", "in_place"), "needs --allow-stale-kv"),
        ((*PARTIAL, "--partial-rollout-pause", "retract", "--allow-stale-kv"), "--allow-stale-kv belong together"),
        (
            (*PARTIAL, "--partial-rollout-pause", "retract", "--sglang-update-recipe", "drain"),
            "--partial-rollout-pause retract and --sglang-update-recipe drain say different things",
        ),
        (
            (*SGLANG, "--fully-async", "--partial-rollout-pause", "retract"),
            "is given without --partial-rollout",
        ),
        (
            (*PARTIAL, "--fully-async", "--partial-rollout-pause", "retract"),
            "--partial-rollout and --fully-async exclude each other",
        ),
    ],
)
def test_what_does_not_go_together_is_one_clear_problem(words, told):
    (problem,) = problems(*words)
    assert told in problem


@pytest.mark.parametrize(
    "words",
    [
        ("--partial-rollout",),
        (*PARTIAL, "--partial-rollout-pause", "abort"),
        (*PARTIAL, "--partial-rollout-pause", "retract"),
        (*PARTIAL, "--partial-rollout-pause", "retract", "--sglang-update-recipe", "retract"),
        (*PARTIAL, "--partial-rollout-pause", "in_place", "--allow-stale-kv"),
        (*PARTIAL, "--partial-rollout-pause", "in_place", "--allow-stale-kv", "--sglang-update-recipe", "in_place"),
    ],
)
def test_what_goes_together_is_no_problem(words):
    assert problems(*words) == []
    assert parse(*words).rollout.pauses_attempts is ("retract" in words or "in_place" in words)


def test_where_no_weights_change_an_attempt_in_place_needs_no_leave_for_stale_caches():
    words = (*PARTIAL, "--partial-rollout-pause", "in_place")
    assert problems(*words, trains=False) == []
    assert problems(*words, "--allow-stale-kv", trains=False) == []


def test_servers_of_the_run_are_not_ended_by_their_watchdog_while_they_hold_attempts_in_place():
    words = (*PARTIAL, "--allow-stale-kv", "--partial-rollout-pause", "in_place")
    assert extra_flags(parse(*words))[-2:] == ("--watchdog-timeout", str(LONGEST_PAUSE_S))
    assert extra_flags(parse(*words, "--sglang-watchdog-timeout", "60")) == ()
    assert extra_flags(parse(*PARTIAL, "--partial-rollout-pause", "retract")) == ()
