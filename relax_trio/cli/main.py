"""The `relax-trio` command: finds the subcommand, prints help, turns failures into messages and exit statuses.

Owns no work. A subcommand `x-y` is the module `relax_trio.cli.x_y_cmd` with `run(argv) -> int`, imported when it is
called; it must import quickly and leave torch to the inside of `run`. Flags of its own stand in a frozen attrs class
`Own` there, declared with `option()` and parsed by `parse_command(argv, Own)`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType, ModuleType

import relax_trio
from relax_trio.config.nearest import did_you_mean
from relax_trio.errors import ConfigError, RelaxTrioError

COMMANDS = MappingProxyType(
    {
        "demo": "Train a small built-in model on a task that needs a tool; no download, no GPU.",
        "train": "Train a model on your data with your agent.",
        "rollout": "Run rollout steps without training and write their samples.",
        "serve": "Open the model API without a run, for trying an agent by hand.",
        "template": "Say what a chat template (CHECKPOINT_OR_FILE) does with each kind of turn.",
        "replay": "Compute a recorded step (RUN_DIR --rollout N) again, from rewards to loss, and name what differs.",
        "parse": "Show what the parsers make of a model's text: reasoning, content, calls.",
        "engine-check": "Try out what an SGLang server (URL) can do of what this project needs.",
        "config": "Print the resolved configuration and where each value came from.",
    }
)

_OPENMP = MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"})
"""Set before torch is loaded: idle OpenMP threads sleep instead of spinning, because agents need the same cores."""

EXIT_FAILED = 1
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
      argv: the words after `relax-trio`; default: those of the process.

    Returns:
      Exit status: 0 done, 1 failed, 64 usage or configuration, 130 interrupted; what the subcommand returns otherwise.

    Raises:
      BaseException: anything that is a bug of relax_trio, for its traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for name, value in _OPENMP.items():
        os.environ.setdefault(name, value)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except RelaxTrioError as exc:
        return _report([exc])
    except BaseExceptionGroup as group:
        interrupts, rest = group.split(KeyboardInterrupt)
        expected, bugs = (None, None) if rest is None else rest.split(RelaxTrioError)
        if bugs is not None:
            raise
        if interrupts is not None:
            return EXIT_INTERRUPTED
        return _report(_leaves(expected))


def _dispatch(words: list[str]) -> int:
    if not words:
        sys.stderr.write(_overview())
        return EXIT_USAGE
    name, *rest = words
    if name in ("--help", "-h"):
        sys.stdout.write(_overview())
        return 0
    if name == "--version":
        sys.stdout.write(f"relax-trio {relax_trio.__version__}\n")
        return 0
    if name not in COMMANDS:
        if name.startswith("-"):
            raise ConfigError(f"name a command before {name}: {', '.join(COMMANDS)}")
        raise ConfigError(f"unknown command {name}{did_you_mean(name, COMMANDS) or '; see relax-trio --help'}")
    module = importlib.import_module(f"relax_trio.cli.{name.replace('-', '_')}_cmd")
    if "--help" in rest or "-h" in rest:
        sys.stdout.write(_command_help(name, module))
        return 0
    _see_working_directory()
    run: Callable[[Sequence[str]], int] = module.run
    return run(rest)


def _see_working_directory() -> None:
    """Let hooks be imported from the working directory, as `python -m` does; behind everything that is installed."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "".join(f"  {name:<{width}}  {summary}\n" for name, summary in COMMANDS.items())
    return (
        "usage: relax-trio COMMAND [--config FILE] [--flag VALUE …]\n\n"
        "Agentic reinforcement learning for one machine.\n\n"
        f"{commands}\n"
        "relax-trio COMMAND --help lists the flags of a command; relax-trio --version prints the version.\n"
    )


def _command_help(name: str, module: ModuleType) -> str:
    from relax_trio.config.render import render_help  # here, so that the overview comes at once
    from relax_trio.config.spec import section_specs

    own = vars(module).get("Own")
    return render_help(f"relax-trio {name}", COMMANDS[name], () if own is None else section_specs(own, ""))


def _report(errors: Sequence[RelaxTrioError]) -> int:
    """Say on stderr what went wrong; the exit status that goes with it."""
    for error in errors:
        sys.stderr.write(f"relax-trio: {error}\n")
    return EXIT_USAGE if all(isinstance(error, ConfigError) for error in errors) else EXIT_FAILED


def _leaves(group: BaseExceptionGroup[RelaxTrioError] | None) -> list[RelaxTrioError]:
    leaves: list[RelaxTrioError] = []
    for exc in () if group is None else group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            leaves += _leaves(exc)
        else:
            leaves.append(exc)
    return leaves
