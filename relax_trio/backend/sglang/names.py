"""Names for what this process leaves on a server for a while: other runs may use the server, so none is given twice."""

from __future__ import annotations

import secrets
from itertools import count

_TAG = secrets.token_hex(4)
_numbers = count(1)


def new_name() -> str:
    """A name that neither this process nor another one has given before."""
    return f"relax-trio-{_TAG}-{next(_numbers)}"
