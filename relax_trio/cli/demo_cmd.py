"""`relax-trio demo`: the quickstart. The built-in model, task and agent through the same path as `train`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from relax_trio.cli.common import DEMO, find_checkpoint, finish, open_run, warn, with_reference, write_config
from relax_trio.config.check import check_config
from relax_trio.config.option import option, positive
from relax_trio.config.parse import Resolved, parse_command
from relax_trio.config.tree import Config

if TYPE_CHECKING:
    from relax_trio.demo.story import Story

EVAL_NAME = "held_out"


@frozen(kw_only=True)
class Own:
    """Flags of this command."""

    steps: int | None = option(None, "Steps of the demo; short for --num-rollout.", unit="steps", check=positive)


def run(argv: Sequence[str]) -> int:
    """Make the model where it is missing, train it, tell what happens.

    Raises:
      RelaxTrioError: the configuration can't be run, or the run failed.
    """
    resolved, own = parse_command(argv, Own, defaults=_defaults(), defaults_origin="demo default")
    if own.steps is not None:
        rollout = evolve(resolved.config.rollout, num_rollout=own.steps)
        resolved = evolve(resolved, config=evolve(resolved.config, rollout=rollout))
    warn(check_config(_without_due_data(resolved.config), command="demo", origins=resolved.origins))
    from relax_trio.demo.story import Story, tell_ending, tell_opening, tell_warm_start
    from relax_trio.loop.setup import load_data
    from relax_trio.loop.start import run_command
    from relax_trio.loop.train import train

    tell_opening()
    name = resolved.config.backend.hf_checkpoint
    assert name is not None, "checked"
    checkpoint = find_checkpoint(name, progress=tell_warm_start)
    run_dir = open_run(resolved)
    resolved = _with_data(resolved, run_dir)
    write_config(resolved, run_dir)
    config = with_reference(resolved.config)
    data = load_data(config)
    assert config.rollout.num_rollout is not None, "the demo has a number of steps"
    story = Story(config.rollout.num_rollout)
    summary = run_command(
        lambda stop: train(config, data, checkpoint, run_dir, stop), lambda: _evidence(run_dir, story)
    )
    if not summary.n_steps:
        return finish(summary)
    tell_ending(run_dir, story, summary.checkpoint)
    return 0 if summary.stopped_by is None else 128 + summary.stopped_by


def _defaults() -> Mapping[str, object]:
    """The recipe as flags; every one of them can be given anew on the command line."""
    from relax_trio.demo.recipe import DemoRecipe

    recipe = DemoRecipe()
    return {
        "hf_checkpoint": DEMO,
        # Without site packages, which the agent needs none of, a process starts in half the time.
        "agent_command": shlex.join([sys.executable, "-I", "-S", str(agent_path())]),
        "agent_cwd": agent_path().parent,
        "input_key": "messages",
        "label_key": "label",
        "rollout_shuffle": True,
        "agentic_tool_call_parser": "qwen25",
        "num_rollout": recipe.n_steps,
        "n_samples_per_prompt": recipe.n_samples_per_prompt,
        "rollout_batch_size": recipe.rollout_batch_size,
        "rollout_temperature": recipe.temperature,
        "rollout_max_response_len": recipe.max_response_len,
        "rollout_max_context_len": recipe.max_context_len,
        "embedded_threads": 1,  # the agents need the other core
        "lr": recipe.lr,
        "lr_decay_style": recipe.lr_decay_style,
        "clip_grad": recipe.clip_grad,
        "eps_clip": recipe.eps_clip,
    }


def _without_due_data(config: Config) -> Config:
    """What can be checked before the held-out questions are written."""
    return config if config.eval.eval_prompt_data else evolve(config, eval=evolve(config.eval, eval_interval=None))


def agent_path() -> Path:
    """The quickstart's agent: beside the package in a checkout, inside it when installed from a wheel."""
    package = Path(__file__).resolve().parents[1]
    for home in (package.parent / "examples" / "quickstart", package / "demo" / "quickstart"):
        if (home / "agent.py").is_file():
            return home / "agent.py"
    raise AssertionError("the package ships the quickstart's agent")


def _with_data(resolved: Resolved, run_dir: Path) -> Resolved:
    """Write the questions into the run directory, where the user named none."""
    from relax_trio.demo.recipe import DemoRecipe
    from relax_trio.demo.task import write_dataset

    recipe, config = DemoRecipe(), resolved.config
    data_dir = run_dir / "data"
    data_dir.mkdir(exist_ok=True)
    if config.data.prompt_data is None:
        path = data_dir / "train.jsonl"
        write_dataset(path, n_rows=recipe.n_train_rows, seed=recipe.train_seed, held_out=False)
        config = evolve(config, data=evolve(config.data, prompt_data=str(path)))
    if not config.eval.eval_prompt_data:
        path = data_dir / "held_out.jsonl"
        write_dataset(path, n_rows=recipe.n_eval_rows, seed=recipe.eval_seed, held_out=True)
        names = (EVAL_NAME, str(path))
        interval = config.eval.eval_interval or config.rollout.num_rollout
        config = evolve(config, eval=evolve(config.eval, eval_prompt_data=names, eval_interval=interval))
    return evolve(resolved, config=config)


@contextmanager
def _evidence(run_dir: Path, story: Story) -> Iterator[None]:
    """The log goes to the run directory; the console gets the story."""
    import trio

    from relax_trio.events import event_sink
    from relax_trio.observe.log import install_run_log

    with (
        open(os.devnull, "w", encoding="utf-8") as quiet,
        install_run_log(run_dir, console=quiet, clock=trio.current_time),
        event_sink(story),
    ):
        yield
