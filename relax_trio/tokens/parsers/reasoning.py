"""Reasoning between a start and an end tag."""

from __future__ import annotations

from attrs import frozen

from relax_trio.tokens.parsers.base import ReasoningSplit


@frozen(kw_only=True)
class TaggedReasoning:
    """Reasoning at the beginning of a turn, between `start` and `end`.

    Without an end tag the whole turn is reasoning: the model was cut off in the middle of it. Whitespace around the two
    parts is dropped, as templates write their own.

    Attributes:
      always_opened: the turn begins inside the reasoning even if neither prompt nor model wrote the start tag.
    """

    start: str = "<think>"
    end: str = "</think>"
    always_opened: bool = False

    def split(self, text: str, *, opened: bool) -> ReasoningSplit:
        """See `ReasoningParser.split`."""
        body = text.lstrip()
        if body.startswith(self.start):
            body = body[len(self.start) :]
        elif not (opened or self.always_opened):
            return ReasoningSplit(reasoning=None, content=text)
        reasoning, _, content = body.partition(self.end)
        return ReasoningSplit(reasoning=reasoning.strip() or None, content=content.strip())
