"""One dataset row as the run uses it."""

from __future__ import annotations

from attrs import frozen

from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import Message


@frozen(kw_only=True)
class TaskInput:
    """A row, ready to be given to the Sessions of a Group.

    Attributes:
      row: index of the row in its dataset (from 0, after the slice).
      source: where it came from, "FILE:LINE", for errors.
      prompt: the row's prompt as written (a string or a message list), for hooks and dumps.
      messages: the prompt as canonical messages; empty for a metadata-only row.
      label: the row's label, None without `--label-key`.
      metadata: the row's metadata object, empty when absent.
    """

    row: int
    source: str
    prompt: JsonValue
    messages: tuple[Message, ...]
    label: JsonValue = None
    metadata: JsonObject

    def session_input(self) -> JsonObject:
        """Content of `session_input.json`."""
        out: JsonObject = {}
        if self.messages:
            out["messages"] = [message.to_chat() for message in self.messages]
        if self.metadata:
            out["metadata"] = self.metadata
        return out
