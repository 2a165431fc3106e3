"""What an exploration found, as values and as text for a person."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from relax_trio.events import Event, format_line

N_BEFORE, N_AFTER = 12, 30
"""Events that are shown before and after the first disturbance."""


@frozen
class Point:
    """A moment of a run and what is done there.

    Attributes:
      step: number of the task step, from 1, before which it is done.
      action: name of the action, see actions.py.
    """

    step: int
    action: str

    @classmethod
    def parse(cls, text: str) -> Point:
        """From `str(point)`: "143 drop G1".

        Raises:
          ValueError: it is something else.
        """
        step, _, action = text.partition(" ")
        if not (step.isdecimal() and action):
            raise ValueError(f"{text!r} is no point; write a step and an action, as in '143 drop G1'")
        return cls(int(step), action)

    @property
    def kind(self) -> str:
        """First word of the action."""
        return self.action.partition(" ")[0]

    def __str__(self) -> str:
        return f"{self.step} {self.action}"


@frozen
class Traced:
    """An event of a run, or a disturbance, and the task step that it happened in."""

    step: int
    what: Event | Point

    def __str__(self) -> str:
        if isinstance(self.what, Point):
            return f"{self.step:>7}            >>> {self.what.action}"
        return f"{self.step:>7} {self.what.at:>10.3f} {format_line(self.what)}"


@frozen(kw_only=True)
class Run:
    """One run of a scenario.

    Attributes:
      scenario: where it is, "FILE:FUNCTION"; its name alone where it can't be imported from there.
      seed: of the schedule.
      points: where it was disturbed, in order; none: the undisturbed run.
      before: name of the task whose step was next at the first point.
      n_steps: task steps.
      seconds: on the virtual clock.
      trace: every event.
      problems: what was wrong, in order.
    """

    scenario: str
    seed: int
    points: tuple[Point, ...]
    before: str
    n_steps: int
    seconds: float
    trace: tuple[Traced, ...]
    problems: tuple[str, ...]

    @property
    def replay(self) -> str:
        """One line that repeats exactly this run: for a shell, or for Python where it can't be imported."""
        if ":" in self.scenario:
            at = "".join(f' --at "{point}"' for point in self.points)
            return f"python -m relax_trio.testing {self.scenario} --seed {self.seed}{at or ' --sample 0'}"
        at = "".join(f', "{point}"' for point in self.points)
        return f"print(relax_trio.testing.replay({self.scenario}{at}, seed={self.seed}))"

    def __str__(self) -> str:
        """Its problems and the events around the first disturbance; the last events where there was none."""
        at = next(
            (i for i, traced in enumerate(self.trace) if isinstance(traced.what, Point)), len(self.trace) - N_AFTER
        )
        return self._text(self.trace[max(0, at - N_BEFORE) : at + N_AFTER])

    def story(self) -> str:
        """The same with every event."""
        return self._text(self.trace)

    def _text(self, shown: Sequence[Traced]) -> str:
        done = "; ".join(f"{point.action!r} before step {point.step}" for point in self.points) or "undisturbed"
        lines = [
            f"{self.scenario}, seed {self.seed}: {done}; {self.n_steps} steps, {self.seconds:g} virtual seconds",
            *(f"  problem: {problem}" for problem in self.problems),
            *([f"  the step was that of task {self.before!r}"] if self.points else []),
            *(f"  {traced}" for traced in shown),
            f"  replay: {self.replay}",
        ]
        return "\n".join(lines)


@frozen(kw_only=True)
class Report:
    """What an exploration found.

    Attributes:
      n_steps: task steps of the undisturbed run.
      n_points: points at which it could be disturbed.
      n_runs: runs made, the undisturbed one included.
      violations: runs with problems; the exploration ends early when there are many.
      real_s: seconds that it took.
    """

    scenario: str
    seed: int
    n_steps: int
    n_points: int
    n_runs: int
    violations: tuple[Run, ...]
    real_s: float

    def __str__(self) -> str:
        line = (
            f"{self.scenario}, seed {self.seed}: {self.n_steps} steps, {self.n_points} points, {self.n_runs} runs, "
            f"{len(self.violations)} violations, {1000 * self.real_s / self.n_runs:.1f} ms a run"
        )
        return "\n".join([line, *map(str, self.violations)])
