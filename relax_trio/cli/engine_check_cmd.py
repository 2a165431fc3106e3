"""`relax-trio engine-check URL`: what an SGLang server can do of what this project needs, as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attrs import frozen

from relax_trio.config.check_backend import is_server_url
from relax_trio.config.option import option, positive
from relax_trio.config.parse import parse_command
from relax_trio.errors import ConfigError

_USAGE = "relax-trio engine-check http://HOST:PORT"


@frozen(kw_only=True)
class Own:
    """Flags of this command."""

    wait: float = option(10.0, "How long to wait until the server generates.", unit="s", check=positive)


def run(argv: Sequence[str]) -> int:
    """Print the table; 1 if the contract is broken somewhere.

    Raises:
      ConfigError: no URL.
      BackendError: the server does not answer.
    """
    if not argv or not is_server_url(argv[0]):
        raise ConfigError(f"name a server: {_USAGE}")
    url, *rest = argv
    _, own = parse_command(rest, Own)
    from relax_trio.backend.sglang.check import check_engine, table

    findings = check_engine(url, own.wait)
    sys.stdout.write(table(findings))
    return 1 if any(finding.verdict == "FAILED" for finding in findings) else 0
