"""Reasoning as an opaque text: what a client keeps as a signature or as encrypted content, and sends back.

It hides nothing: the reasoning stands in it as base64 behind a mark and a checksum, so that it comes back whole from
clients that drop the readable text, and so that what another API has signed is not taken for ours. Nothing is
compressed: a text that a client sends can't grow.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

_MARK: Final = b"relax1"
_MARK_TEXT: Final = base64.b64encode(_MARK).decode()
_CHECK_BYTES: Final = 6


def seal(text: str) -> str:
    """`text` as an opaque text of the base64 alphabet; the same for the same text."""
    data = text.encode()
    return base64.b64encode(_MARK + _check(data) + data).decode()


def unseal(sealed: str) -> str | None:
    """The text that was sealed; None where `sealed` is not ours, or damaged. Never raises."""
    if not sealed.startswith(_MARK_TEXT):
        return None
    try:
        data = base64.b64decode(sealed, validate=True)[len(_MARK) :]
        check, data = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
        return data.decode() if check == _check(data) else None
    except ValueError:
        return None


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECK_BYTES]
