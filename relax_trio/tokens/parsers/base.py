"""What a parser of generated text is, and what it answers.

A parser of tool calls cuts a text into pieces whose texts together are the text again, so that nothing can be lost:
what is not the markup of a call is content. A call is taken as the model wrote it, known tool or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, TypeAlias

from attrs import frozen

from relax_trio.data.json import JsonObject, JsonValue, canonical_json
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


PieceKind: TypeAlias = Literal["text", "unparsed", "markup", "call"]


@frozen
class Piece:
    """A stretch of a text and what it is.

    Attributes:
      kind: "text" is content; "unparsed" is content that begins like a call and is none; "markup" belongs to the calls
        beside it, such as a wrapper's tag or a separator; "call" is the markup of `calls`.
      text: as generated.
      calls: in the order written; nonempty exactly where the kind is "call".
    """

    kind: PieceKind
    text: str
    calls: tuple[ParsedCall, ...] = ()


@frozen(kw_only=True)
class ToolCallSplit:
    """A turn's content with its calls taken out.

    Attributes:
      content: text outside of calls; unchanged where no call was parsed, else without blanks at its ends.
      calls: in the order written.
      n_unparsed: pieces that begin like a call, are none and stayed in `content`.
    """

    content: str
    calls: tuple[ParsedCall, ...]
    n_unparsed: int


class ReasoningParser(Protocol):
    """Takes a turn's reasoning from its text. Stateless."""

    @property
    def implementation(self) -> str:
        """Whose code answers, for people."""
        ...

    @property
    def start(self) -> str:
        """Markup that opens reasoning; a generation prompt that ends with it open has opened it for the model."""
        ...

    @property
    def end(self) -> str:
        """Markup that closes reasoning."""
        ...

    def split(self, text: str, *, opened: bool, chat_template_kwargs: JsonObject) -> ReasoningSplit:
        """Split a turn's text. Never raises: what is no reasoning is content.

        Args:
          text: the turn, without its stop token.
          opened: the prompt has opened the reasoning already.
          chat_template_kwargs: the lineage's template arguments; some formats depend on them.
        """
        ...


class ToolCallParser(Protocol):
    """Takes the calls from a turn's content. Stateless."""

    @property
    def implementation(self) -> str:
        """Whose code answers, for people."""
        ...

    def pieces(self, text: str, tools: Sequence[JsonObject]) -> list[Piece]:
        """Cut a turn's content into pieces. Never raises: what is no call is content.

        Args:
          text: the content.
          tools: the lineage's function tools, whose schemas type arguments that are written as plain text.

        Returns:
          Pieces whose texts together are `text`.
        """
        ...


def split_calls(parser: ToolCallParser, text: str, tools: Sequence[JsonObject]) -> ToolCallSplit:
    """Parse a turn's content: its calls, and what remains of it."""
    pieces = parser.pieces(text, tools)
    calls = tuple(call for piece in pieces for call in piece.calls)
    n_unparsed = sum(piece.kind == "unparsed" for piece in pieces)
    content = "".join(piece.text for piece in pieces if piece.kind in ("text", "unparsed"))
    return ToolCallSplit(content=content.strip() if calls else text, calls=calls, n_unparsed=n_unparsed)


def as_call(value: JsonValue) -> ParsedCall | None:
    """A call that is written as a JSON object with a nonempty `name`, or None.

    The arguments stand under `parameters` or `arguments`; where both do, `parameters` counts unless it is empty.

    Raises:
      ValueError: the arguments have no JSON form.
    """
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    given = value.get("parameters", {})
    if not given and "arguments" in value:
        given = value["arguments"]
    arguments, is_object = call_arguments(given)
    return ParsedCall(name=clean_text(name), arguments=arguments, is_object=is_object)


def call_arguments(value: JsonValue) -> tuple[str, bool]:
    """Arguments as a value → their text, and whether they are an object.

    A scalar or a list becomes its JSON text, so that `"x"` stays recognizable as a string.

    Raises:
      ValueError: the value has no JSON form.
    """
    if isinstance(value, dict):
        return canonical_arguments(value), True
    return (clean_text(canonical_json(value)) if isinstance(value, str) else canonical_arguments(value)), False


def tool_names(tools: Iterable[JsonObject]) -> frozenset[str]:
    """Names of function tools."""
    functions = (tool.get("function") for tool in tools)
    names = (function.get("name") for function in functions if isinstance(function, dict))
    return frozenset(name for name in names if isinstance(name, str))


def map_strings(value: JsonValue, change: Callable[[str], str]) -> JsonValue:
    """`value` with `change` made to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return value


def skip_space(text: str, at: int) -> int:
    """The first position from `at` on that holds no blank."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
