"""What a parser of generated text is.

Two rules hold for all of them, and are kept here or by the caller rather than trusted to each: no text is lost (what is
not a call or reasoning is content), and a call is taken as the model wrote it, known tool or not.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from relax_trio.data.json import JsonValue, canonical_json
from relax_trio.data.normalize import canonical_arguments, clean_text


@frozen(kw_only=True)
class ReasoningSplit:
    """A turn's text in two: `reasoning` is None where there is none, `content` is the rest ("" where nothing is)."""

    reasoning: str | None
    content: str


@frozen(kw_only=True)
class ParsedCall:
    """One call as the model wrote it.

    Attributes:
      name: function name, nonempty.
      arguments: canonical JSON of an object, or JSON text of what the model gave instead.
      is_object: the arguments are a JSON object.
    """

    name: str
    arguments: str
    is_object: bool


@frozen(kw_only=True)
class ToolCallSplit:
    """A turn's content with its calls taken out.

    Attributes:
      content: text outside parsed calls; unchanged where no call was parsed.
      calls: in the order written.
      n_unparsed: pieces of call markup that were no call and stayed in `content`.
    """

    content: str
    calls: tuple[ParsedCall, ...]
    n_unparsed: int


class ReasoningParser(Protocol):
    """Takes a turn's reasoning from its text. Stateless."""

    @property
    def start(self) -> str:
        """Markup that opens reasoning; a generation prompt that ends with it open has opened it for the model."""
        ...

    @property
    def end(self) -> str:
        """Markup that closes reasoning."""
        ...

    def split(self, text: str, *, opened: bool) -> ReasoningSplit:
        """Split a turn's text; `opened`: the prompt has opened the reasoning already."""
        ...


class ToolCallParser(Protocol):
    """Takes the calls from a turn's content. Stateless."""

    @property
    def marker(self) -> str:
        """Markup that begins a call."""
        ...

    def split(self, text: str) -> ToolCallSplit:
        """Parse a turn's content. Never raises: text that is no call stays content."""
        ...


def call_arguments(value: JsonValue) -> tuple[str, bool]:
    """Arguments as written by a model inside JSON → their text, and whether they are an object.

    A scalar or a list becomes its JSON text, so that `"x"` stays recognizable as a string.

    Raises:
      ValueError: the value has no JSON form.
    """
    if isinstance(value, dict):
        return canonical_arguments(value), True
    return (clean_text(canonical_json(value)) if isinstance(value, str) else canonical_arguments(value)), False
