"""Finding the name somebody meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when none is like it."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """`"; did you mean X?"` for the end of an error message, or "" when no known name is like `name`."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {prefix}{found}?"
