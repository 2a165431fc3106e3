"""Reasoning between a start and an end tag."""

from __future__ import annotations

from attrs import frozen

from relax_trio.data.json import JsonObject
from relax_trio.tokens.parsers.base import ReasoningSplit


@frozen(kw_only=True)
class TaggedReasoning:
    """Reasoning at the beginning of a turn, between `start` and `end`.

    Without an end tag the whole turn is reasoning: the model was cut off in the middle of it. Blanks around the two
    parts are dropped, as templates write their own; so is a start tag that is written twice.

    Attributes:
      always_opened: the turn begins inside the reasoning even if neither prompt nor model wrote the start tag.
    """

    start: str = "<think>"
    end: str = "</think>"
    always_opened: bool = False
    implementation: str = "relax_trio"

    def split(self, text: str, *, opened: bool, chat_template_kwargs: JsonObject) -> ReasoningSplit:
        """See `ReasoningParser.split`."""
        body = text.lstrip()
        if not (opened or self.always_opened or body.startswith(self.start)):
            return ReasoningSplit(reasoning=None, content=text)
        while body.startswith(self.start):
            body = body[len(self.start) :]
        reasoning, _, content = body.partition(self.end)
        return ReasoningSplit(reasoning=reasoning.strip() or None, content=content.strip())
