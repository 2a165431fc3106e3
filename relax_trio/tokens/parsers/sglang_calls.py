"""SGLang's tool-call parsers behind the interface of this package, with the rules that they do not keep.

For formats that this package reads itself, its own parser finds where a call stands and SGLang's class reads it. For
all others SGLang's class finds the calls, and call_spans.py where they stand. Either way the text is cut up here, so
that what SGLang drops stays content.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from attrs import evolve, field, frozen

from relax_trio.data.json import JsonObject, JsonValue, parse_json
from relax_trio.data.normalize import clean_text
from relax_trio.tokens.parsers.base import ParsedCall, Piece, ToolCallParser, call_arguments, map_strings, tool_names
from relax_trio.tokens.parsers.call_spans import place_calls
from relax_trio.tokens.parsers.sglang_load import FAULTS, Sglang

_WORD: Final = re.compile(r"[A-Za-z_][\w.-]{0,63}")
_MARK: Final = re.compile(r"\A[^\\*+()?]*[<\[][^\\*+()?]*\Z")
_MAX_WORDS: Final = 200
_MASKS: Final = 0xF0000
"""First of the private characters that stand for tags inside of strings while SGLang reads a call."""
_HIDDEN: Final = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
_HIDDEN_TOKENS: Final = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
_WHOLE_LIST: Final = re.compile(r"\[.*\]", re.DOTALL)


class CallFormat(ToolCallParser, Protocol):
    """A parser of this package for a format that SGLang has a class for too."""

    def alone(self, markup: str, mask: Callable[[str], str]) -> str:
        """The calls of one piece for another parser of the format; `mask` hides tags inside of strings from it."""
        ...


@frozen(kw_only=True)
class SglangDetector:
    """One of SGLang's detector classes, asked what calls it finds in a text.

    Attributes:
      name: the parser's name.
      implementation: see `ToolCallParser`.
      marks: fixed texts of its format's markup.
    """

    name: str
    implementation: str
    marks: tuple[str, ...] = ()
    _sglang: Sglang = field(repr=False)

    @classmethod
    def load(cls, sglang: Sglang, name: str) -> SglangDetector:
        """Make one detector, to learn the marks of its format and that it can be made.

        Raises:
          ValueError: it needs something that is not known here.
        """
        detector = sglang.call_parser([], name).detector
        implementation = f"SGLang {sglang.version} ({type(detector).__name__})"
        return cls(name=name, implementation=implementation, marks=_marks(detector), sglang=sglang)

    def tools(self, tools: Iterable[JsonObject], more: Iterable[str] = ()) -> list[Any]:
        """SGLang's tools, and for each name in `more` one without parameters: SGLang drops calls to other tools."""
        named = [_bare_tool(name) for name in more]
        return [self._tool(tool) for tool in (*copy.deepcopy(list(tools)), *named)]

    def _tool(self, tool: JsonObject) -> Any:
        try:
            return self._sglang.make_tool(tool)
        except FAULTS:  # a schema that SGLang does not take: its calls are known, their arguments stay untyped
            (name,) = tool_names([tool]) or ("",)
            return self._sglang.make_tool(_bare_tool(name))

    def see(self, text: str, tools: Sequence[Any]) -> tuple[ParsedCall, ...]:
        """The calls that the detector finds; none where it fails. Calls without a name or JSON arguments are none."""
        try:
            detector = self._sglang.call_parser(tools, self.name).detector
            if hasattr(detector, "tool_call_regex") and type(detector).__name__ == "PythonicDetector":
                # Its own expression takes exponential time in the number of arguments.
                detector.tool_call_regex = _WHOLE_LIST
            found = detector.detect_and_parse(text, list(tools)).calls
        except FAULTS:
            return ()
        return tuple(call for item in found if (call := _as_call(item.name, item.parameters)) is not None)

    def begins(self, text: str) -> bool:
        """Whether the text holds what a call begins with."""
        try:
            return bool(self._sglang.call_parser([], self.name).detector.has_tool_call(text))
        except FAULTS:
            return False


def _bare_tool(name: str) -> JsonObject:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def _as_call(name: object, parameters: object) -> ParsedCall | None:
    if not isinstance(name, str) or not name or not isinstance(parameters, str):
        return None
    try:
        arguments, is_object = call_arguments(parse_json(parameters))
    except (ValueError, RecursionError):
        return None
    return ParsedCall(name=clean_text(name), arguments=arguments, is_object=is_object)


def _marks(detector: object) -> tuple[str, ...]:
    """The texts that a detector and its module know as tokens of the format, told from other texts by their look."""
    spaces = (vars(detector), vars(type(detector)), vars(sys.modules[type(detector).__module__]))
    texts = [value for space in spaces for name, value in space.items() if type(value) is str and name != "__doc__"]
    return tuple(dict.fromkeys(text for text in texts if len(text) > 2 and _MARK.search(text)))


@frozen(kw_only=True)
class SglangReading:
    """SGLang's reading of the calls that a parser of this package finds.

    Where SGLang's class reads another number of calls, those of this package stand; so do arguments that are no object,
    which SGLang loses where they are empty.
    """

    own: CallFormat
    detector: SglangDetector

    @property
    def implementation(self) -> str:
        """See `ToolCallParser.implementation`."""
        return self.detector.implementation

    def pieces(self, text: str, tools: Sequence[JsonObject]) -> list[Piece]:
        """See `ToolCallParser.pieces`."""
        pieces = self.own.pieces(text, tools)
        if not any(piece.calls for piece in pieces):
            return pieces
        unknown = {call.name for piece in pieces for call in piece.calls} - tool_names(tools)
        known = self.detector.tools(tools, sorted(unknown))
        return [self._read(piece, known) if piece.calls else piece for piece in pieces]

    def _read(self, piece: Piece, tools: Sequence[Any]) -> Piece:
        masks = {tag: chr(_MASKS + index) for index, tag in enumerate((*_HIDDEN, *_HIDDEN_TOKENS))}
        if any(mask in piece.text for mask in masks.values()):
            return piece
        read = self.detector.see(self.own.alone(piece.text, lambda text: _replace(text, masks)), tools)
        if len(read) != len(piece.calls):
            return piece
        shown = {mask: tag for tag, mask in masks.items()}
        calls = [_unmasked(call, shown) for call in read]
        both = zip(piece.calls, calls, strict=True)
        return evolve(piece, calls=tuple(seen if own.is_object and seen.is_object else own for own, seen in both))


def _replace(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def _unmasked(call: ParsedCall, shown: Mapping[str, str]) -> ParsedCall:
    value: JsonValue = map_strings(parse_json(call.arguments), lambda text: _replace(text, shown))
    arguments, is_object = call_arguments(value)
    return ParsedCall(name=_replace(call.name, shown), arguments=arguments, is_object=is_object)


@frozen(kw_only=True)
class SglangCalls:
    """The calls that SGLang's class finds, in formats that this package does not read itself."""

    detector: SglangDetector

    @property
    def implementation(self) -> str:
        """See `ToolCallParser.implementation`."""
        return self.detector.implementation

    def pieces(self, text: str, tools: Sequence[JsonObject]) -> list[Piece]:
        """See `ToolCallParser.pieces`."""
        if not self.detector.begins(text):
            return [Piece("text", text)]
        pieces = self._place(text, self.detector.tools(tools))
        rest = "".join(piece.text for piece in pieces if not piece.calls)
        if self.detector.begins(rest):
            found = _WORD.findall(rest)[:_MAX_WORDS]
            words = {part for word in found for part in (word, word.rpartition(".")[2])} - {*tool_names(tools), ""}
            more = self._place(text, self.detector.tools(tools, sorted(words)))
            if _n_calls(more) > _n_calls(pieces):
                return more
        return pieces

    def _place(self, text: str, tools: Sequence[Any]) -> list[Piece]:
        def see(part: str) -> tuple[ParsedCall, ...]:
            return self.detector.see(part, tools)

        return place_calls(text, see, self.detector.marks) if see(text) else [Piece("unparsed", text)]


def _n_calls(pieces: Iterable[Piece]) -> int:
    return sum(len(piece.calls) for piece in pieces)
