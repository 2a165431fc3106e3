"""One run of a scenario under the eyes of the explorer: steps counted, disturbed at its points, invariants checked."""

from __future__ import annotations

import inspect
import os
import random
import traceback
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

import trio
from attrs import frozen

from relax_trio.errors import EngineFault
from relax_trio.events import Event, event_sink
from relax_trio.sync.debug import render_tree
from relax_trio.testing.actions import KINDS, Action, possible_actions
from relax_trio.testing.bench import Bench
from relax_trio.testing.invariants import Invariants
from relax_trio.testing.report import Point, Run, Traced
from relax_trio.testing.schedule import run_virtual

Scenario = Callable[[Bench], Awaitable[None]]
"""Makes one run over a bench. It runs disturbed too: what it asserts must hold all the same."""

MAX_S, MAX_STEPS = 7 * 24 * 3600.0, 1_000_000
"""An undisturbed run that takes longer hangs or spins."""

EXTRA_S, EXTRA_STEPS = 4 * 3600.0, 20_000
"""So does a disturbed run that takes so much longer than the undisturbed one."""

ANY = "any"
"""Action of a point whose action is chosen by the seed, among those that are possible there."""


@frozen
class Moment:
    """The undisturbed run just before a task step: its history as a checksum, and what may be done."""

    digest: int
    actions: tuple[str, ...]
    n_launches: int


class Rehearsal(trio.abc.Instrument):
    """One run.

    Attributes:
      n_steps: task steps so far.
      ended_s: virtual time of its end.
      moments: what each step of an undisturbed run began with.
      problems: what was wrong.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        seed: int,
        points: Sequence[Point] = (),
        kinds: Collection[str] = KINDS,
        like: Rehearsal | None = None,
    ) -> None:
        """Make a run of `scenario`.

        Args:
          points: where to disturb it, in the order of their steps.
          kinds: what an action that is `ANY` may be.
          like: the undisturbed run, which this one has to equal up to its first point.
        """
        self.n_steps = 0
        self.ended_s = 0.0
        self.moments: list[Moment] = []
        self.problems: list[str] = []
        self._scenario = scenario
        self._seed = seed
        self._kinds = kinds
        self._like = like
        self._records = not points
        self._due = list(points)
        self._done: list[Point] = []
        self._before = ""
        self._digest = 0
        self._trace: list[tuple[int, Event | Point]] = []
        self._n_checked = (0, 0)
        self._ending: list[tuple[float, Action]] = []
        self._is_whole = False
        self._scope = trio.CancelScope()
        self._bench = Bench()
        self._invariants = Invariants(self._bench)

    def run(self) -> Rehearsal:
        """Make the run, once, and return self.

        Raises:
          EngineFault: called inside a Trio run, or the explorer itself failed.
        """
        if trio.lowlevel.in_trio_run():
            raise EngineFault("the explorer makes Trio runs of its own: call it outside of trio.run, from a plain test")
        errors: list[BaseException] = []
        n_files = _n_open_files()
        with event_sink(self._on_event, trio.current_time):
            try:
                run_virtual(self._main, seed=self._seed, instruments=(self,))
            except Exception as exc:  # whatever comes out of a scenario is a finding, and told as one
                errors = list(_leaves(exc))
        if not self._is_whole:
            raise EngineFault("the explorer failed in the middle of a run; the log of trio.abc.Instrument says how")
        if not any(point.kind == "die" for point in self._done):
            self.problems += [f"it raised {_describe(error)}" for error in errors]
        else:
            self.problems += [f"it raised {_describe(error)}" for error in errors if not _is_death(error)]
        self.problems += self._invariants.check_end(self.ended_s)
        if (n_left := _n_open_files() - n_files) > 0:
            self.problems.append(f"{n_left} file descriptors are left open")
        self.problems += [f"{action.name!r} did not end it" for _, action in self._ending if not _gone(action)]
        self.problems += [
            f"no {point.action!r} is possible before step {point.step}" for point in self._due if point.action != ANY
        ]
        return self

    def points(self) -> Iterator[Point]:
        """Where this undisturbed run can be disturbed: each step, each action; a failing launch once a launch."""
        for step, moment in enumerate(self.moments, start=1):
            n_launches = self.moments[step].n_launches if step < len(self.moments) else moment.n_launches
            for action in moment.actions:
                if action != "launch next" or n_launches > moment.n_launches:
                    yield Point(step, action)

    def result(self) -> Run:
        """The run as a value."""
        return Run(
            scenario=scenario_name(self._scenario),
            seed=self._seed,
            points=tuple(self._done),
            before=self._before,
            n_steps=self.n_steps,
            seconds=self.ended_s,
            trace=tuple(Traced(step, what) for step, what in self._trace),
            problems=tuple(self.problems),
        )

    # --- the run ------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._limit, name="explorer")
                try:
                    with self._bench.engine_scope:
                        await self._scenario(self._bench)
                finally:
                    self.ended_s = trio.current_time()
                nursery.cancel_scope.cancel(reason="the scenario ended")

    async def _limit(self) -> None:
        seconds = MAX_S if self._like is None else self._like.ended_s + EXTRA_S
        await trio.sleep(seconds)
        self._give_up(f"it hangs; what it waits for after {seconds:g} s:\n{render_tree()}")

    def _give_up(self, problem: str) -> None:
        self.problems.append(problem)
        self._scope.cancel(reason=problem)

    # --- trio.abc.Instrument --------------------------------------------------------------------------------------

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count the step; disturb the run if one of its points is here."""
        self.n_steps += 1
        self._digest = zlib.crc32(task.name.encode(), self._digest)
        if self._records:
            actions = tuple(action.name for action in possible_actions(self._bench))
            n_launches = 0 if self._bench.launcher is None else self._bench.launcher.n_opened
            self.moments.append(Moment(self._digest, actions, n_launches))
        elif self._due and self._due[0].step == self.n_steps:
            self._disturb(self._due[0], task)
        most = MAX_STEPS if self._like is None else self._like.n_steps + EXTRA_STEPS
        if self.n_steps == most:
            self._give_up(f"it spins: {most} steps, the last one of {task.name}")

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Check the invariants if something happened in the step."""
        backend = self._bench.backend
        n_seen = len(self._trace), 0 if backend is None else len(backend.calls)
        if n_seen != self._n_checked:
            self._n_checked = n_seen
            found = self._invariants.check(trio.current_time())
            self.problems += [f"after step {self.n_steps} of {task.name}: {problem}" for problem in found]
        if self._ending and trio.current_time() > self._ending[0][0]:
            due_s, action = self._ending.pop(0)
            if not _gone(action):
                self.problems.append(f"{action.name!r} had not ended it when it should have, at {due_s:g} s")

    def after_run(self) -> None:
        """Trio drops an instrument that raises: this one is reached only if none of it did."""
        self._is_whole = True

    def _on_event(self, event: Event) -> None:
        self._digest = zlib.crc32(event.name.encode(), self._digest)
        self._trace.append((self.n_steps, event))
        self._invariants.on_event(event)

    def _disturb(self, point: Point, task: trio.lowlevel.Task) -> None:
        if self._like is not None and not self._done and self._digest != self._like.moments[point.step - 1].digest:
            self._give_up("its beginning differs from the undisturbed run: something in the scenario is random")
            return
        possible = [action for action in possible_actions(self._bench) if action.kind in self._kinds]
        named = [action for action in possible if point.action in (ANY, action.name)]
        if not named:
            return
        chosen = random.Random(f"{self._seed} {point.step}").choice(named)
        del self._due[0]
        self._done.append(Point(point.step, chosen.name))
        self._trace.append((point.step, self._done[-1]))
        self._before = self._before or task.name
        if chosen.is_gone is not None:
            self._ending.append((trio.current_time() + self._bench.end_s, chosen))
        chosen.do()


def scenario_name(scenario: Scenario) -> str:
    """ "FILE:FUNCTION", or the bare name of one that can't be imported."""
    name = scenario.__qualname__
    file = inspect.getsourcefile(scenario)
    return name if file is None or not name.isidentifier() else f"{os.path.relpath(file)}:{name}"


def _n_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _gone(action: Action) -> bool:
    return action.is_gone is None or action.is_gone()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is_death(error: BaseException) -> bool:
    return isinstance(error, EngineFault) and str(error).startswith("explorer:")


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
