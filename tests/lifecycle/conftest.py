"""Randomized scheduling: each lifecycle test runs under a seed of Trio's scheduler, which a failure names.

SCHEDULE_SEEDS="7" repeats one; SCHEDULE_SEEDS="0-19" runs every test under each of these. Without it a run has one
random seed. Properties (`@given`) seed the scheduler themselves and run once.
"""

from __future__ import annotations

import inspect
import os
import random

import pytest

from relax_trio.testing.schedule import seeded_schedule

RANDOM = str(random.SystemRandom().randrange(10**6))


def schedule_seeds() -> list[str]:
    """The seeds that SCHEDULE_SEEDS names."""
    words = os.environ.get("SCHEDULE_SEEDS", RANDOM).split(",")
    ranges = [word.partition("-")[::2] for word in words]
    return [str(seed) for first, last in ranges for seed in range(int(first), int(last or first) + 1)]


def pytest_generate_tests(metafunc):
    """One item for each seed, where there are several and the test runs on the virtual clock."""
    seeds = schedule_seeds()
    named = inspect.signature(metafunc.function).parameters
    if len(seeds) > 1 and ("autojump_clock" in metafunc.fixturenames or "schedule_seed" in named):
        metafunc.parametrize("schedule_seed", seeds, indirect=True)


@pytest.fixture
def schedule_seed(request):
    """The seed of this test."""
    return getattr(request, "param", schedule_seeds()[0])


@pytest.fixture(autouse=True)
def seeded_scheduler(request, schedule_seed):
    """Seed the scheduler anew for each test, so that a test alone is scheduled as it was among others."""
    request.node.user_properties.append(("schedule_seed", schedule_seed))
    with seeded_schedule(schedule_seed):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure says how to schedule the test in the same way again."""
    report = yield
    seed = dict(item.user_properties).get("schedule_seed")
    if report.failed and seed is not None:
        report.sections.append(("schedule", f"again: SCHEDULE_SEEDS={seed} pytest '{item.nodeid}'"))
    return report
