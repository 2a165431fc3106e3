"""The run directory: everything that a run leaves behind.

    RUN_DIR/
      metrics.jsonl     one object per step (metrics.py)
      eval.jsonl        one object per evaluation
      run.log           every event, one line each (log.py)
      config.yaml       the resolved configuration
      reward.png        the reward curve (curve.py)
      rollout/          dumps of steps, when asked for (dump.py)
      checkpoints/      Hugging Face layout and resume state (train/)
      tensorboard/      event files, with --use-tensorboard (writers.py)
      sessions/         IO directories that were kept, one per Session

Owns the names and the making of the directory. Not covered: who writes into it.
"""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path

from relax_trio.errors import ConfigError, boundary

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
RUN_LOG_FILE = "run.log"
CONFIG_FILE = "config.yaml"
CURVE_FILE = "reward.png"
ROLLOUT_DIR = "rollout"
CHECKPOINTS_DIR = "checkpoints"
TENSORBOARD_DIR = "tensorboard"

DEFAULT_PARENT = Path("runs")


def make_run_dir(output_dir: Path | None, *, resume: bool = False, now: datetime | None = None) -> Path:
    """Make the run directory and return its absolute path. Never overwrites another run.

    Args:
      output_dir: `--output-dir`; None makes `runs/<date>-<time>`, with `-2`, `-3` … when that is taken.
      resume: the run goes on from a checkpoint, so that what is in `output_dir` is its own past.
      now: local time of the start, for the name.

    Raises:
      ConfigError: `output_dir` is a file, holds another run's files, or can't be made.
    """
    if output_dir is None:
        return _make_unique(f"{now or datetime.now():%Y%m%d-%H%M%S}")
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"--output-dir {output_dir}: is a file; name a directory")
    with boundary(ConfigError, f"--output-dir {output_dir}: cannot be made", OSError):
        output_dir.mkdir(parents=True, exist_ok=True)
        is_empty = next(output_dir.iterdir(), None) is None
    if not is_empty and not resume:
        raise ConfigError(
            f"--output-dir {output_dir}: is not empty; name a new directory, remove this one, or go on with the run "
            "that is in it by --load"
        )
    return output_dir.absolute()


def _make_unique(name: str) -> Path:
    with boundary(ConfigError, f"a run directory in {DEFAULT_PARENT.absolute()} cannot be made", OSError):
        DEFAULT_PARENT.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = DEFAULT_PARENT / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path.absolute()
    raise AssertionError("count() has no end")
