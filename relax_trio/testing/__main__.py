"""The explorer from a shell: every scenario of a file, one of them, or one run of it again."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType

from relax_trio.testing.explorer import explore, replay
from relax_trio.testing.rehearsal import Scenario
from relax_trio.testing.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Explore, or replay, what the command line names; the last line sums it up.

    Returns:
      Exit status: 1 when anything was violated, else 0.
    """
    arguments = _parser().parse_args(argv)
    addresses = [address for where in arguments.scenarios for address in _addresses(where)]
    if arguments.at:
        if len(addresses) != 1:
            raise SystemExit("--at repeats a run of one scenario: name one, as FILE:FUNCTION")
        run = replay(_load(addresses[0]), *arguments.at, seed=arguments.seed)
        print(run.story())
        return 1 if run.problems else 0
    report = partial(_explore, seed=arguments.seed, sample=arguments.sample, pairs=arguments.pairs)
    n_runs, n_violations = 0, 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for found in pool.map(report, addresses):
            print(found, flush=True)
            n_runs, n_violations = n_runs + found.n_runs, n_violations + len(found.violations)
    print(f"{len(addresses)} scenarios, {n_runs} runs, {n_violations} violations")
    return 1 if n_violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m relax_trio.testing", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("scenarios", nargs="+", metavar="FILE[:FUNCTION]", help="a file explores all of its scenarios")
    add("--seed", type=int, default=0, help="of the schedule and of the sample (default: 0)")
    add("--sample", type=int, help="disturb at so many points (default: at all)")
    add("--pairs", type=int, default=0, help="so many runs more with two disturbances (default: 0)")
    add("--jobs", type=int, default=1, help="scenarios explored at once, each in a process (default: 1)")
    add(
        "--at", action="append", metavar="'STEP ACTION'", help="repeat the run that was disturbed here; may be repeated"
    )
    return parser


def _explore(address: str, *, seed: int, sample: int | None, pairs: int) -> Report:
    return explore(_load(address), seed=seed, sample=sample, pairs=pairs)


def _addresses(where: str) -> list[str]:
    """FILE:FUNCTION for each scenario that `where` names."""
    file, _, name = where.partition(":")
    return [where] if name else [f"{file}:{found}" for found in _scenarios(_module(file))]


def _load(address: str) -> Scenario:
    file, _, name = address.partition(":")
    scenario: Scenario | None = getattr(_module(file), name, None)
    if scenario is None:
        raise SystemExit(f"{file} has no scenario {name}")
    return scenario


def _module(file: str) -> ModuleType:
    """Import a file by its name, as Python would from its directory."""
    path = Path(file).resolve()
    if not path.is_file():
        raise SystemExit(f"no file {file}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _scenarios(module: ModuleType) -> Iterator[str]:
    """Names of the async functions of `module` that take a `bench` and nothing else."""
    for name, value in vars(module).items():
        is_own = inspect.iscoroutinefunction(value) and value.__module__ == module.__name__
        if is_own and list(inspect.signature(value).parameters) == ["bench"]:
            yield name


if __name__ == "__main__":
    sys.exit(main())
