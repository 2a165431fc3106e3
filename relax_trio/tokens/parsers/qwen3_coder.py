"""Tool calls as Qwen3-Coder models write them: `<function=name>` with `<parameter=key>` inside `<tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.normalize import clean_text
from relax_trio.tokens.parsers.base import ParsedCall, Piece, call_arguments, skip_space
from relax_trio.tokens.parsers.schema import parameter_schemas, typed_value

_START: Final = "<tool_call>"
_END: Final = "</tool_call>"
_TAG: Final = re.compile(rf"{_START}|{_END}")
_FUNCTION: Final = re.compile(r"<function=([^<>\n]+)>|</function>")
_PARAMETER: Final = re.compile(r"<parameter=([^<>\n]+)>|</parameter>")
_VALUE_BEFORE: Final = re.compile(r"(?:</parameter>|<function=[^<>\n]+>)\s*\Z")
_BLOCK_BEHIND: Final = re.compile(r"\s*(?:</tool_call>|<tool_call>|<function=|\Z)")
_PARAMETER_BEHIND: Final = re.compile(r"\s*(?:<parameter=|\Z)")
_CONTEXT_LEN: Final = 1000
"""Characters before a tag that are looked at to tell whether it closes something or is part of a value."""


@frozen(kw_only=True)
class Qwen3CoderCalls:
    """Calls written as tags, whose values are plain text that the tool's schema types.

    A tag inside a value ends nothing, as far as that can be told: opening and closing tags are counted, a value ends
    only where a parameter or the function's end follows, a function only behind a value. A `</tool_call>`, or a
    `</parameter>` right before the next tag, may be missing. A function that is not closed was cut off, and one that
    holds something besides parameters is malformed: neither is a call.
    """

    implementation: str = "relax_trio"

    def pieces(self, text: str, tools: Sequence[JsonObject]) -> list[Piece]:
        """See `ToolCallParser.pieces`."""
        pieces: list[Piece] = []
        at = 0
        while (begin := text.find(_START, at)) >= 0:
            pieces.append(Piece("text", text[at:begin]))
            block, at = _block(text, begin, tools)
            pieces += block
        return [*pieces, Piece("text", text[at:])]

    def alone(self, markup: str, mask: Callable[[str], str]) -> str:
        """See `TaggedJsonCalls.alone`."""
        function = _function(markup, 0)
        if function is None:
            return markup
        name, parameters, _ = function
        inner = "".join(f"<parameter={key}>{mask(value)}</parameter>" for key, value in parameters)
        return f"{_START}\n<function={name}>{inner}</function>\n{_END}"


def _block(text: str, begin: int, tools: Sequence[JsonObject]) -> tuple[list[Piece], int]:
    """Pieces of the block whose start tag stands at `begin`, and the position behind it."""
    inside = begin + len(_START)
    start = text.find("<function=", inside)
    tag = _TAG.search(text, inside)
    if start < 0 or (tag is not None and tag.start() < start):
        return [Piece("unparsed", _START)], inside
    before = text[inside:start]
    pieces = [Piece("markup", _START), Piece("text" if before.strip() else "markup", before)]
    at = start
    while text.startswith("<function=", start):
        function = _function(text, start)
        if function is None:
            break
        name, parameters, end = function
        pieces.append(Piece("markup", text[at:start]))
        pieces.append(Piece("call", text[start:end], (_call(name, parameters, tools),)))
        at, start = end, skip_space(text, end)
    if len(pieces) == 2:
        return [Piece("unparsed", text[begin:start])], start
    if text.startswith(_END, start):
        return [*pieces, Piece("markup", text[at : start + len(_END)])], start + len(_END)
    if text.startswith("<function=", start):
        return [*pieces, Piece("unparsed", text[at : start + 1])], start + 1
    return pieces, at


def _function(text: str, at: int) -> tuple[str, list[tuple[str, str]], int] | None:
    """Name and parameters of the function that begins at `at`, and the position behind it; None where it is none."""
    start = _FUNCTION.match(text, at)
    end = None if start is None else _function_end(text, start.end())
    if start is None or end is None:
        return None
    parameters = _parameters(text[start.end() : end.start()])
    return None if parameters is None else (start[1], parameters, end.end())


def _function_end(text: str, at: int) -> re.Match[str] | None:
    """The tag that closes the function whose inside begins at `at`, or None.

    It is the one that stands behind a value; where none does, the first, or rather the first that a block's end
    follows, as long as no other function begins before it.
    """
    if text.find("</function>", at) < 0:
        return None
    depth, nested = 1, False
    likely = first = None
    for tag in _FUNCTION.finditer(text, at):
        if tag[1] is not None:
            depth, nested = depth + 1, True
            continue
        if not nested:
            first = first or tag
            likely = likely or (tag if _BLOCK_BEHIND.match(text, tag.end()) else None)
        if depth > 1:
            depth -= 1
        elif _VALUE_BEFORE.search(text[max(0, tag.start() - _CONTEXT_LEN) : tag.start()]):
            return tag
    return likely or first


def _parameters(body: str) -> list[tuple[str, str]] | None:
    """Parameters of a function's inside in order, each with its text as written; None where there is something else."""
    parameters = []
    at = 0
    while (at := skip_space(body, at)) < len(body):
        start = _PARAMETER.match(body, at)
        if start is None or start[1] is None:
            return None
        end = _value_end(body, start.end())
        if end is None:
            return None
        parameters.append((start[1], body[start.end() : end[0]]))
        at = end[1]
    return parameters


def _value_end(body: str, at: int) -> tuple[int, int] | None:
    """Where the value that begins at `at` ends and where what follows begins; None where that cannot be told."""
    depth = 1
    tags = list(_PARAMETER.finditer(body, at))
    for tag in tags:
        if tag[1] is not None:
            depth += 1
        elif depth > 1:
            depth -= 1
        elif _PARAMETER_BEHIND.match(body, tag.end()):
            return tag.start(), tag.end()
    end = tags[0].start() if tags else len(body)
    return None if tags and tags[0][1] is None else (end, end)


def _call(name: str, parameters: Sequence[tuple[str, str]], tools: Sequence[JsonObject]) -> ParsedCall:
    schemas = parameter_schemas(tools, name)
    values: dict[str, JsonValue] = {
        key: typed_value(text.removeprefix("\n").removesuffix("\n"), schemas, key) for key, text in parameters
    }
    arguments, is_object = call_arguments(values)
    return ParsedCall(name=clean_text(name), arguments=arguments, is_object=is_object)
