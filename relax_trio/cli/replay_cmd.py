"""`relax-trio replay`: a recorded step once more, from rewards to loss, beside what was recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from relax_trio.cli.common import find_checkpoint, with_reference
from relax_trio.config.option import not_negative, option
from relax_trio.config.parse import parse_command
from relax_trio.config.tree import Config
from relax_trio.errors import ConfigError

if TYPE_CHECKING:
    from relax_trio.loop.replay import Weights


@frozen(kw_only=True)
class Own:
    """Flags of this command; the run directory comes first."""

    rollout: int = option(0, "Step to replay.", metavar="N", check=not_negative)


def run(argv: Sequence[str]) -> int:
    """Replay one step of a run; exit status 1 where a stage differs.

    Raises:
      ConfigError: the run directory lacks what is needed.
    """
    if not argv or argv[0].startswith("-"):
        raise ConfigError("relax-trio replay RUN_DIR --rollout N: name the run directory first")
    run_dir = Path(argv[0])
    from relax_trio.observe.rundir import CONFIG_FILE

    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir}: is no run directory: it has no {CONFIG_FILE}")
    resolved, own = parse_command(["--config", str(run_dir / CONFIG_FILE), *argv[1:]], Own)
    return _replay(with_reference(resolved.config), run_dir, own.rollout)


def _replay(config: Config, run_dir: Path, rollout_id: int) -> int:
    import trio

    from relax_trio.loop.replay import replay
    from relax_trio.observe.dump import dump_path, read_rollout_dump
    from relax_trio.observe.metrics import read_metrics
    from relax_trio.observe.rundir import ROLLOUT_DIR
    from relax_trio.sync.cpu import ThreadCpuPool

    template = config.output.save_debug_rollout_data or str(run_dir / ROLLOUT_DIR / "{rollout_id}.jsonl")
    dump = read_rollout_dump(dump_path(template, rollout_id))
    record = next((r for r in read_metrics(run_dir) if r.get("rollout_id") == rollout_id), None)
    if record is None:
        raise ConfigError(f"{run_dir}: has no metrics of step {rollout_id}")
    weights = _weights(config, run_dir, rollout_id)
    stages = trio.run(replay, config, dump, record, weights, _n_rollout(config), ThreadCpuPool(1))
    for stage in stages:
        sys.stdout.write(f"{stage.name:<9} {stage.text}{'' if stage.difference is None else ': DIFFERS'}\n")
    last = stages[-1]
    if last.difference is None:
        return 0
    sys.stdout.write(f"first difference in {last.name}: {last.difference}\n")
    return 1


def _n_rollout(config: Config) -> int | None:
    """Steps of the run, where a learning rate decays over them."""
    if config.rollout.num_rollout is not None or config.train.lr_decay_style == "constant":
        return config.rollout.num_rollout
    from relax_trio.loop.setup import load_data, n_rollout_steps

    return n_rollout_steps(config, load_data(config).rows)


def _weights(config: Config, run_dir: Path, rollout_id: int) -> Weights | str:
    """Where the weights are that step `rollout_id` began with, or why they aren't anywhere."""
    from relax_trio.loop.replay import Weights
    from relax_trio.observe.rundir import CHECKPOINTS_DIR
    from relax_trio.train.checkpoint import step_name, verify

    assert config.backend.hf_checkpoint is not None, "a run has one"
    if rollout_id == 0:
        return Weights(hf_checkpoint=find_checkpoint(config.backend.hf_checkpoint), resume=None)
    homes = [config.train.save or run_dir / CHECKPOINTS_DIR, *([config.train.load] if config.train.load else [])]
    name = step_name(rollout_id)
    paths = [path for home in homes for path in (home / name, home)]
    found = next((path for path in paths if path.name == name and path.is_dir()), None)
    if found is None:
        return f"there is no checkpoint of before step {rollout_id} in {homes[0]}; --save-interval 1 writes one a step"
    verify(found)
    return Weights(hf_checkpoint=find_checkpoint(config.backend.hf_checkpoint), resume=found)
