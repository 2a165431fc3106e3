"""`relax-trio config`: what a command line and its files come to. Checks names and types, starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attrs import frozen

from relax_trio.config.option import option
from relax_trio.config.parse import parse_command
from relax_trio.config.render import render_reference, render_tree


@frozen(kw_only=True)
class Own:
    """Flags of this command."""

    reference: bool = option(False, "Print the reference page of all flags as Markdown instead.")


def run(argv: Sequence[str]) -> int:
    """Print the resolved tree, or the reference page.

    Raises:
      ConfigError: a flag, a file or a value is wrong.
    """
    resolved, own = parse_command(argv, Own)
    sys.stdout.write(render_reference() if own.reference else render_tree(resolved))
    return 0
