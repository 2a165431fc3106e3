"""What an agent hands back: the parsed `session_output.json`."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message

Reward: TypeAlias = "float | JsonObject | None"
"""A number, an object with a primary reward and helper metrics, or none."""


@frozen(kw_only=True)
class ExportRecord:
    """One context that the agent selected for training, by its messages."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()
    chat_template_kwargs: JsonObject
    metadata: JsonObject
    reward: Reward = None


@frozen(kw_only=True)
class SessionOutput:
    """The agent's output.

    Attributes:
      records: explicit export when not empty; else the unique committed conversation is exported.
      metadata, reward: of the implicit export.
    """

    records: tuple[ExportRecord, ...] = ()
    metadata: JsonObject
    reward: Reward = None
