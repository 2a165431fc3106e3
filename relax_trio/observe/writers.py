"""Metrics for other systems: TensorBoard and Weights & Biases, each an extra.

They get the same numbers under the same names as metrics.jsonl, which stays the record of the run. Not covered: what
the numbers are (metrics.py).
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs

from relax_trio.config.tree import Config
from relax_trio.errors import ConfigError
from relax_trio.observe.metrics import MetricValue
from relax_trio.observe.rundir import TENSORBOARD_DIR
from relax_trio.sync.cleanup import MAX_CLEANUP_S, cleanup_scope
from relax_trio.sync.cpu import CpuPool


class StepWriter(Protocol):
    """Takes the metrics of steps; its calls return at once, and a system that is out of reach fails none."""

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Take the numbers of one step; None is left out."""
        ...

    def close(self) -> None:
        """Hand over what was taken. Blocking."""
        ...


class TensorBoardWriter:
    """Writes event files into RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        """Open the files; what an earlier run wrote of steps from `first_step` on is hidden."""
        tensorboard: Any = _imported("--use-tensorboard", "torch.utils.tensorboard", "tensorboard")
        self._writer = tensorboard.SummaryWriter(str(run_dir / TENSORBOARD_DIR), purge_step=first_step or None)

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """See `StepWriter.write`."""
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See `StepWriter.close`."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases, by its own client; a resumed run goes on in it."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Begin the run. Blocking.

        Only the numbers of rollout, reward and training are told of the configuration: commands and environments may
        hold what nobody else should see.

        Raises:
          ConfigError: the client isn't installed, or refuses.
        """
        wandb: Any = _imported("--use-wandb", "wandb", "wandb")
        output = config.output
        try:
            self._run = wandb.init(
                project=output.wandb_project,
                group=output.wandb_group,
                mode=output.wandb_mode,
                name=run_dir.name,
                id=run_dir.name,
                resume="allow",
                dir=str(run_dir),
                config={name: _plain(getattr(config, name)) for name in ("rollout", "reward", "train")},
            )
        except (wandb.Error, OSError) as exc:
            raise ConfigError(f"--use-wandb: the run can't be begun: {exc}; try --wandb-mode offline") from exc

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """See `StepWriter.write`."""
        # The client's own step may only grow; evaluations come after the step they belong to.
        self._run.log({**{name: value for name, value in metrics.items() if value is not None}, "step": step})

    def close(self) -> None:
        """See `StepWriter.close`."""
        self._run.finish()


@asynccontextmanager
async def open_writers(
    config: Config, run_dir: Path, first_step: int, cpu: CpuPool
) -> AsyncIterator[tuple[StepWriter, ...]]:
    """Own the writers that the configuration asks for, for the length of the block.

    Raises (on entering):
      ConfigError: see the writers.

    Cancellation: they are closed in at most `MAX_CLEANUP_S`; what is not handed over by then is lost to them, not to
    metrics.jsonl.
    """
    writers: list[StepWriter] = []
    try:
        if config.output.use_tensorboard:
            writers.append(await cpu.run(TensorBoardWriter, run_dir, first_step))
        if config.output.use_wandb:
            writers.append(await cpu.run(WandbWriter, config, run_dir))
        yield tuple(writers)
    finally:
        with cleanup_scope(MAX_CLEANUP_S, "metrics writers"):
            for writer in writers:
                await cpu.run(writer.close)


def _imported(flag: str, module: str, extra: str) -> object:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(f"{flag} needs the package {extra} ({exc}); install relax-trio[{extra}]") from exc


def _plain(section: attrs.AttrsInstance) -> dict[str, object]:
    """A section of the configuration as numbers and texts."""
    values = attrs.asdict(section)
    return {name: value if isinstance(value, bool | int | float) else str(value) for name, value in values.items()}
