"""`relax-trio train`: train the user's model on the user's data with the user's agent."""

from __future__ import annotations

from collections.abc import Sequence

from relax_trio.cli.common import find_checkpoint, finish, open_run, run_evidence, warn, with_reference, write_config
from relax_trio.config.check import check_config
from relax_trio.config.parse import parse_config


def run(argv: Sequence[str]) -> int:
    """Train.

    Raises:
      RelaxTrioError: the configuration can't be run, or the run failed.
    """
    resolved = parse_config(argv)
    config = resolved.config
    warn(check_config(config, command="train", origins=resolved.origins))
    from relax_trio.loop.setup import load_data
    from relax_trio.loop.start import run_command
    from relax_trio.loop.train import train

    data = load_data(config)
    assert config.backend.hf_checkpoint is not None, "checked"
    checkpoint = find_checkpoint(config.backend.hf_checkpoint)
    config = with_reference(config)
    run_dir = open_run(resolved)
    write_config(resolved, run_dir)
    return finish(run_command(lambda stop: train(config, data, checkpoint, run_dir, stop), run_evidence(run_dir)))
