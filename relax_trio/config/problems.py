"""How several things that are wrong become one ConfigError, so that a user fixes them in one go."""

from __future__ import annotations

from collections.abc import Sequence

from relax_trio.errors import ConfigError


def raise_problems(problems: Sequence[str]) -> None:
    """Raise a ConfigError that lists `problems`; return when there are none.

    Raises:
      ConfigError: its text is the problem itself, or a list under a line with their number.
    """
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems:{lines}")
