"""Names of things. A bare `str` in a signature is a text, never an identity."""

from __future__ import annotations

import secrets
from typing import NewType

GroupId = NewType("GroupId", str)
"""Public name of a Group: "G17" for training, "E3" for eval."""

PlaceId = NewType("PlaceId", str)
"""Public name of a position in a Group: "G17/2". The only name of a Session in logs, dumps, views and errors."""

Credential = NewType("Credential", str)
"""The Session id its agent holds (`RELAX_SESSION_ID`). A secret: never logged, dumped or shown."""

RequestId = NewType("RequestId", str)
"""Name of a request within its Session: "r3"."""

Rid = NewType("Rid", str)
"""Backend name of one attempt, unique in the run: "G17/2-0.r3.1" (place, try, request, attempt)."""

WeightVersion = NewType("WeightVersion", str)
"""The string an engine reports for the weights that produced a token."""

StateHash = NewType("StateHash", bytes)
"""SHA-256 chain value that identifies a conversation state (32 bytes)."""

NodeId = NewType("NodeId", int)
"""Index of a node in its SessionForest, in order of commit; 0 is the technical root."""


def group_id(number: int, *, evaluation: bool = False) -> GroupId:
    """Make the public name of a Group from its running number."""
    return GroupId(f"{'E' if evaluation else 'G'}{number}")


def place_id(group: GroupId, index: int) -> PlaceId:
    """Make the public name of position `index` (from 0) in `group`."""
    return PlaceId(f"{group}/{index}")


def new_credential() -> Credential:
    """Make an unguessable Session id: 192 random bits."""
    return Credential("rs-" + secrets.token_urlsafe(24))
