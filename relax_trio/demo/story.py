"""Tells the demo to a person: what is made, what happens in each step, what came out, what to try next.

Fed by the run's events; prints to stdout. Not covered: the run itself (loop/), the curve's drawing (observe/curve).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TextIO

from attrs import define, field

from relax_trio.data.json import JsonObject
from relax_trio.events import Event
from relax_trio.observe.curve import draw_curve_png, draw_curve_text
from relax_trio.observe.metrics import read_metrics
from relax_trio.observe.rundir import CURVE_FILE, METRICS_FILE

_BAR_LEN = 24
_PROGRESS_EVERY = 20


@define(eq=False)
class Story:
    """An event sink that prints what a person wants to follow.

    Attributes:
      n_steps: steps of the run.
      evals: mean reward of each greedy evaluation, in order.
    """

    n_steps: int
    out: TextIO = sys.stdout
    evals: list[float] = field(factory=list)
    _is_unheard: bool = False

    def __call__(self, event: Event) -> None:
        """Print the events that are part of the story."""
        fields = event.fields
        if event.name == "eval.scored":
            self._evaluated(fields)
        elif event.name == "step.completed":
            self._stepped(fields)
        elif event.name == "accounting_start" and fields.get("rollout") == 0:
            self._say("\nEach step: questions are asked several times over, every try is an agent process of its own,")
            self._say("and tries that did better than their siblings are made likelier.\n")
        elif event.name == "session.failed":
            self._say(f"  (session {fields['place']} failed: {str(fields['error']).splitlines()[0]})")
        elif event.name == "run.stopping":
            self._say(f"\nStopping on {fields['signal']}; the last complete step is kept, and {fields['hint']}.")

    def _evaluated(self, fields: dict[str, str | int | float | bool | None]) -> None:
        reward = fields["reward"]
        when = "before training" if fields["steps"] == 0 else f"after {fields['steps']} steps"
        if not isinstance(reward, int | float):
            self._say(f"Held-out questions {when}: every Session failed")
            return
        self.evals.append(float(reward))
        self._say(f"Held-out questions, answered greedily, {when}: {reward:.0%} right")

    def _stepped(self, fields: dict[str, str | int | float | bool | None]) -> None:
        reward, number = fields["reward"], fields["rollout"]
        assert isinstance(reward, int | float), "a step is trained on rewards"
        assert isinstance(number, int), "a step has a number"
        bar = "█" * round(_BAR_LEN * min(1.0, max(0.0, reward)))
        self._say(
            f"  step {number + 1:>2}/{self.n_steps}  mean reward {reward:.2f} {bar:<{_BAR_LEN}} "
            f"rollout {fields['rollout_s']:.1f} s, training {fields['train_s']:.1f} s"
        )

    def _say(self, text: str) -> None:
        if self._is_unheard:
            return
        try:
            print(text, file=self.out, flush=True)
        except OSError:
            self._is_unheard = True  # the reader of the pipe is gone; the run goes on, its log has everything


def tell_opening(out: TextIO = sys.stdout) -> None:
    """Say what the demo is."""
    print(
        "A small language model learns to use a tool.\n\n"
        "The task: arithmetic questions such as (37 + 45) * 12. The agent (examples/quickstart/agent.py) is a program\n"
        "of its own: it asks the model over HTTP, runs the calculator when the model calls it, sends the result back\n"
        "and goes on until the model answers. Reward 1 for the right answer, else 0.\n",
        file=out,
        flush=True,
    )


def tell_warm_start(step: int, n_steps: int, loss: float, out: TextIO = sys.stdout) -> None:
    """Progress of making the checkpoint: now and then a line."""
    if step in (1, n_steps) or step % _PROGRESS_EVERY == 0:
        print(f"  warm start {step:>3}/{n_steps}, loss {loss:.3f}", file=out, flush=True)


def tell_ending(run_dir: Path, story: Story, checkpoint: Path | None, out: TextIO = sys.stdout) -> None:
    """Draw the reward curve here and as a PNG; say what came out and what to try next."""
    records = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    rewards = [_number(record, "rollout/raw_reward") for record in records]
    width = min(100, shutil.get_terminal_size((90, 24)).columns)
    print("\n" + draw_curve_text(rewards, title="Mean reward of each step", width=width), file=out)
    curve = run_dir / CURVE_FILE
    draw_curve_png(curve, rewards, title="relax-trio demo: mean reward of each step")
    gaps = [_number(record, "train/rollout_logprob_abs_diff") for record in records]
    finite = [gap for gap in gaps if gap is not None]
    known = [reward for reward in rewards if reward is not None]
    if known:
        print(f"\nMean reward of a step: {known[0]:.2f} at first, {known[-1]:.2f} at last.", file=out)
    if len(story.evals) > 1:
        print(f"Held-out, greedy: {story.evals[0]:.2f} before, {story.evals[-1]:.2f} after.", file=out)
    if finite and len(finite) == len(gaps):
        print(
            f"The trainer computed the logprob of every trained token anew; it differed from the engine's by at most "
            f"{max(finite):.1e}.",
            file=out,
        )
    print(f"\nRun directory: {run_dir}", file=out)
    print(f"  {curve.name}, metrics.jsonl, eval.jsonl, run.log, config.yaml", file=out)
    if checkpoint is not None:
        shown = checkpoint.relative_to(run_dir) if checkpoint.is_relative_to(run_dir) else checkpoint
        print(f"  the trained model: {shown} (a Hugging Face checkpoint)", file=out)
    print(_NEXT.format(model=checkpoint or "demo"), file=out, flush=True)


def _number(record: JsonObject, name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None


_NEXT = """
Try next:
  relax-trio demo --lr 0                     the control: nothing is learned
  relax-trio demo --deterministic            the same numbers every time
  relax-trio serve --hf-checkpoint {model}
                                             talk to the trained model yourself (docs/serve.md)
  relax-trio train --help                    your own model, data and agent"""
