"""`PATH@[a:b]`: how a dataset and a slice of its rows are named. Not covered: reading it (data/dataset.py)."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

from relax_trio.errors import ConfigError

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<inside>[^\[\]]*)\]", re.DOTALL)
_BOUNDS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")


@frozen
class DatasetSpec:
    """A dataset file and the rows that are taken from it.

    Attributes:
      path: the file.
      start, stop: slice of the rows by the rules of Python lists; None: from the first, to the last.
    """

    path: Path
    start: int | None = None
    stop: int | None = None


def parse_dataset_spec(spec: str) -> DatasetSpec:
    """Split `PATH` or `PATH@[a:b]`; an existing file whose whole name is `spec` is taken as it is.

    Raises:
      ConfigError: there is something in the brackets that is no slice, or no path.
    """
    sliced = _SLICED.fullmatch(spec)
    if sliced is None or Path(spec).is_file():
        if not spec:
            raise ConfigError("a dataset must be PATH or PATH@[a:b], not an empty text")
        return DatasetSpec(Path(spec))
    bounds = _BOUNDS.fullmatch(sliced["inside"])
    if bounds is None:
        raise ConfigError(f"{spec}: [{sliced['inside']}] is no slice; write PATH@[a:b], e.g. {sliced['path']}@[0:100]")
    start, stop = (None if text is None else int(text) for text in bounds.groups())
    return DatasetSpec(Path(sliced["path"]), start, stop)
