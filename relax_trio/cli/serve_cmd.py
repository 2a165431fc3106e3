"""`relax-trio serve`: open the model API without a run, for trying an agent by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from relax_trio.cli.common import find_checkpoint, warn
from relax_trio.config.check import check_config
from relax_trio.config.option import option, positive
from relax_trio.config.parse import parse_command
from relax_trio.errors import ConfigError, boundary


@frozen(kw_only=True)
class Own:
    """Flags of this command."""

    answers: Path | None = option(
        None, "Script of answers instead of a model: JSON Lines, docs/serve.md.", metavar="FILE"
    )
    sessions: int = option(1, "Sessions to open.", check=positive)
    forest_out: Path | None = option(None, "Write the forest as JSON to FILE on exit.", metavar="FILE")


def run(argv: Sequence[str]) -> int:
    """Serve until stopped; a stop by signal is the normal end.

    Raises:
      RelaxTrioError: the configuration can't be run, or the engine failed.
    """
    resolved, own = parse_command(argv, Own)
    config = resolved.config
    if own.answers is not None and not own.answers.is_file():
        raise ConfigError(f"--answers {own.answers}: no such file")
    if own.forest_out is not None:
        with boundary(ConfigError, f"--forest-out {own.forest_out} can't be written", OSError):
            own.forest_out.open("a").close()
    warn(check_config(config, command="serve", origins=resolved.origins, scripted=own.answers is not None))
    from relax_trio.loop.serve import serve
    from relax_trio.loop.start import run_command

    assert config.backend.hf_checkpoint is not None, "checked"
    checkpoint = find_checkpoint(config.backend.hf_checkpoint)
    run_command(
        lambda stop: serve(
            config,
            checkpoint,
            answers=own.answers,
            n_sessions=own.sessions,
            forest_out=own.forest_out,
            stop=stop,
        ),
        _console,
    )
    return 0


@contextmanager
def _console() -> Iterator[None]:
    """Tell events on stderr; there is no run directory."""
    import sys

    import trio

    from relax_trio.events import event_sink
    from relax_trio.observe.log import ConsoleSink

    with event_sink(ConsoleSink(sys.stderr), trio.current_time):
        yield
