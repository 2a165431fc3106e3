"""`relax-trio rollout`: run steps without training and write their samples."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from relax_trio.cli.common import find_checkpoint, finish, open_run, run_evidence, warn, write_config
from relax_trio.config.check import check_config
from relax_trio.config.parse import parse_config


def run(argv: Sequence[str]) -> int:
    """Roll out.

    Raises:
      RelaxTrioError: the configuration can't be run, or the run failed.
    """
    resolved = parse_config(argv)
    config = resolved.config
    warn(check_config(config, command="rollout", origins=resolved.origins))
    from relax_trio.loop.rollout import rollout
    from relax_trio.loop.setup import load_data
    from relax_trio.loop.start import run_command
    from relax_trio.observe.rundir import ROLLOUT_DIR

    data = load_data(config)
    assert config.backend.hf_checkpoint is not None, "checked"
    checkpoint = find_checkpoint(config.backend.hf_checkpoint)
    run_dir = open_run(resolved)
    write_config(resolved, run_dir)
    if config.output.save_debug_rollout_data is None:
        template = str(run_dir / ROLLOUT_DIR / "{rollout_id}.jsonl")
        config = evolve(config, output=evolve(config.output, save_debug_rollout_data=template))
    return finish(run_command(lambda stop: rollout(config, data, checkpoint, run_dir, stop), run_evidence(run_dir)))
