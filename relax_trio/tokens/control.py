"""Control tokens of a tokenizer as they stand in text: what ends turns and opens messages."""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import frozen

_LOOKS_LIKE = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z][A-Z_]+\]|\[gMASK\]")


@frozen
class Found:
    """A control token in a text: where it begins, its text, where it ends."""

    at: int
    text: str
    end: int


class ControlTokens:
    """Finds control tokens in text; where several begin at one place, the longest.

    Args:
      texts: the control tokens; empty ones are left out.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        ordered = sorted(self.texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")

    def find(self, text: str, at: int = 0) -> Found | None:
        """The first control token that begins at `at` or later."""
        match = self._pattern.search(text, at)
        return None if match is None else Found(match.start(), match.group(), match.end())

    def find_all(self, text: str) -> list[Found]:
        """Every control token, in order."""
        return [Found(match.start(), match.group(), match.end()) for match in self._pattern.finditer(text)]

    def at(self, text: str, at: int) -> str | None:
        """The control token that begins exactly at `at`."""
        match = self._pattern.match(text, at)
        return None if match is None else match.group()


def control_tokens_in(source: str) -> frozenset[str]:
    """What looks like a control token in a template's source; for a template without its tokenizer."""
    return frozenset(_LOOKS_LIKE.findall(source))
