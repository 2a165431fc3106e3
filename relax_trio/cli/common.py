"""What commands that run something share: warnings, the checkpoint by its name, the run directory, how a run ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from relax_trio.config.parse import Resolved
from relax_trio.config.tree import Config

if TYPE_CHECKING:
    from relax_trio.loop.train import RunSummary

DEMO = "demo"


def warn(warnings: tuple[str, ...]) -> None:
    """Say warnings on stderr."""
    for warning in warnings:
        print(f"relax-trio: warning: {warning}", file=sys.stderr)


def find_checkpoint(name: str, progress: Callable[[int, int, float], None] | None = None) -> Path:
    """The directory that `--hf-checkpoint` names; `demo` is made and cached at first use.

    Args:
      progress: told (step, steps, loss) while it is made.
    """
    if name != DEMO:
        return Path(name)
    from relax_trio.demo.checkpoint import ensure_demo_checkpoint  # loads torch

    return ensure_demo_checkpoint(progress=progress)


def with_reference(config: Config) -> Config:
    """The configuration with `--ref-load` as a directory, where it names the built-in model."""
    ref_load = config.train.ref_load
    if ref_load is None:
        return config
    return evolve(config, train=evolve(config.train, ref_load=find_checkpoint(str(ref_load))))


def open_run(resolved: Resolved) -> Path:
    """Make the run directory; one that holds files is taken only by the run that goes on in it.

    Raises:
      ConfigError: the directory is another run's, or can't be made.
    """
    from relax_trio.observe.rundir import make_run_dir

    config = resolved.config
    return make_run_dir(config.output.output_dir, resume=_goes_on_in(config))


def _goes_on_in(config: Config) -> bool:
    """Whether `--load` names a checkpoint of the very run whose directory `--output-dir` is."""
    from relax_trio.train.checkpoint import find_latest, load_state

    load, output_dir = config.train.load, config.output.output_dir
    checkpoint = None if load is None or output_dir is None else find_latest(load)
    if checkpoint is None or output_dir is None:
        return False
    return load_state(checkpoint).get("run_dir") == str(output_dir.absolute())


def write_config(resolved: Resolved, run_dir: Path) -> None:
    """Write the resolved configuration into the run directory; `--config` takes it again."""
    from relax_trio.config.render import render_yaml
    from relax_trio.observe.rundir import CONFIG_FILE

    (run_dir / CONFIG_FILE).write_text(render_yaml(resolved), encoding="utf-8")


def run_evidence(run_dir: Path) -> Callable[[], AbstractContextManager[None]]:
    """Log and progress of a run, opened inside its Trio run."""
    import trio

    from relax_trio.loop.progress import show_progress
    from relax_trio.observe.log import install_run_log

    @contextmanager
    def evidence() -> Iterator[None]:
        with install_run_log(run_dir, clock=trio.current_time), show_progress():
            yield

    return evidence


def finish(summary: RunSummary) -> int:
    """Say how the run ended; its exit status."""
    from relax_trio.loop.start import say

    steps = "1 step is" if summary.n_steps == 1 else f"{summary.n_steps} steps are"
    say(f"{steps} complete; the run directory is {summary.run_dir}")
    if summary.checkpoint is not None:
        say(f"checkpoint: {summary.checkpoint}  (go on with --load {summary.checkpoint.parent})")
    return 0 if summary.stopped_by is None else 128 + summary.stopped_by
