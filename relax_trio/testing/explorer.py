"""The cancellation explorer: a scenario is run once as it is, and again for every point at which it can be disturbed.

A point is a task step and one of the actions that are possible just before it (actions.py). The seeded schedule makes
every run equal to the first one up to its point, so that the names of step and action alone are enough to repeat it.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from relax_trio.testing.actions import KINDS
from relax_trio.testing.rehearsal import ANY, Rehearsal, Scenario, scenario_name
from relax_trio.testing.report import Point, Report, Run

MAX_VIOLATIONS = 20
"""An exploration that has found so many ends."""


def explore(
    scenario: Scenario,
    *,
    seed: int = 0,
    sample: int | None = None,
    pairs: int = 0,
    kinds: Collection[str] = KINDS,
) -> Report:
    """Disturb a scenario at every point, or at a seeded sample of them, and check the invariants of every run.

    Call it outside of `trio.run`; nothing takes real time but Python itself.

    Args:
      scenario: an async function of a `Bench`, which makes one run over it. What it asserts must hold in disturbed
        runs too; it must not depend on wall time, threads or unseeded random numbers.
      seed: of the schedule and of the sample.
      sample: how many points, spread evenly over the kinds of actions; None: all.
      pairs: how many runs more are disturbed twice: at a random point, and by a random action soon after it.
      kinds: first words of the actions to choose from.

    Raises:
      ValueError: a kind that is none.
      EngineFault: called inside a Trio run, or the explorer itself failed.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"no kinds of actions: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    started_s = time.perf_counter()
    first = Rehearsal(scenario, seed=seed).run()
    points = [point for point in first.points() if point.kind in kinds]
    violations, n_runs = [first.result()] if first.problems else [], 1
    for plan in _plans(points, sample, pairs, random.Random(f"relax_trio explorer {seed}")):
        if first.problems or len(violations) == MAX_VIOLATIONS:
            break
        run = Rehearsal(scenario, seed=seed, points=plan, kinds=kinds, like=first).run()
        n_runs += 1
        if run.problems:
            violations.append(run.result())
    return Report(
        scenario=scenario_name(scenario),
        seed=seed,
        n_steps=first.n_steps,
        n_points=len(points),
        n_runs=n_runs,
        violations=tuple(violations),
        real_s=time.perf_counter() - started_s,
    )


def replay(scenario: Scenario, *points: str, seed: int = 0) -> Run:
    """Repeat one run.

    Args:
      points: where it was disturbed, as a report shows them: "143 drop G1". None: the undisturbed run.
      seed: of the schedule.

    Raises:
      ValueError: a point that can't be read.
      EngineFault: as `explore`.
    """
    return Rehearsal(scenario, seed=seed, points=[Point.parse(point) for point in points]).run().result()


def _plans(
    points: Sequence[Point], sample: int | None, pairs: int, generator: random.Random
) -> Iterator[tuple[Point, ...]]:
    """The points of each run: one, or a second one soon after it."""
    yield from ((point,) for point in (points if sample is None else _spread(points, sample, generator)))
    for point in _spread(points, pairs, generator):
        yield point, Point(point.step + generator.randint(1, 60), ANY)


def _spread(points: Sequence[Point], count: int, generator: random.Random) -> list[Point]:
    """`count` points, as evenly over the kinds of actions as there are points of each, in a random order."""
    by_kind: defaultdict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_kind[point.kind].append(point)
    for of_kind in by_kind.values():
        generator.shuffle(of_kind)
    chosen: list[Point] = []
    while len(chosen) < count and any(by_kind.values()):
        chosen += [of_kind.pop() for of_kind in by_kind.values() if of_kind]
    return chosen[:count]
