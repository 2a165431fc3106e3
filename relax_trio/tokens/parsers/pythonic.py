"""Tool calls as Llama 4 models write them: a Python list of calls, `[f(x=1), g(y="a")]`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from relax_trio.data.json import JsonObject
from relax_trio.data.normalize import clean_text
from relax_trio.tokens.parsers.base import ParsedCall, Piece, PieceKind, call_arguments, tool_names
from relax_trio.tokens.parsers.python_literal import bracket_parts, expression, literal_value

_LIST: Final = re.compile(r"(?:<\|python_start\|>)?(?=\[([A-Za-z]\w*)\((\)|[A-Za-z]\w*=|\Z)?)")
_END_TAG: Final = "<|python_end|>"
_NAME: Final = re.compile(r"[A-Za-z]\w*")
_MAX_UNCLOSED: Final = 16
"""Lists that nothing closes are each looked through to the end of the text; after so many the rest is text."""


@frozen(kw_only=True)
class PythonicCalls:
    """Calls in Python's notation, in lists anywhere in the text; read as syntax, never evaluated.

    A call has a plain name and keyword arguments that are literals. One that has not stays text and takes none of its
    neighbours along.
    """

    implementation: str = "relax_trio"

    def pieces(self, text: str, tools: Sequence[JsonObject]) -> list[Piece]:
        """See `ToolCallParser.pieces`."""
        known = tool_names(tools)
        pieces: list[Piece] = []
        at = n_unclosed = 0
        while n_unclosed < _MAX_UNCLOSED and (found := _LIST.search(text, at)):
            pieces.append(Piece("text", text[at : found.start()]))
            failed: PieceKind = "unparsed" if found[2] is not None or found[1] in known else "text"
            try:
                commas = list(bracket_parts(text, found.end()))
            except ValueError:
                n_unclosed += 1
                at = found.end() + 1
                pieces.append(Piece(failed, text[found.start() : at]))
                continue
            at = commas[-1] + 1
            items = _items(text, found.end(), commas)
            if not any(piece.kind == "call" for piece in items):
                pieces.append(Piece(failed, text[found.start() : at]))
                continue
            pieces += [Piece("markup", text[found.start() : found.end()]), *items]
            if text.startswith(_END_TAG, at):
                at += len(_END_TAG)
                pieces.append(Piece("markup", _END_TAG))
        return [*pieces, Piece("text", text[at:])]

    def alone(self, markup: str, mask: Callable[[str], str]) -> str:
        """See `TaggedJsonCalls.alone`."""
        return f"[{mask(markup)}]"


def _items(text: str, begin: int, ends: Sequence[int]) -> list[Piece]:
    """Pieces of a list whose bracket opens at `begin`; `ends`: its commas and its closing bracket."""
    pieces = []
    for end in ends:
        item = text[begin + 1 : end]
        blanks = len(item) - len(item.lstrip())
        pieces.append(Piece("markup", text[begin] + item[:blanks]))
        call = _call(item.strip())
        if call is not None:
            pieces.append(Piece("call", item.strip(), (call,)))
        elif item.strip():
            pieces.append(Piece("unparsed", item.strip()))
        pieces.append(Piece("markup", item[blanks:][len(item.strip()) :]))
        begin = end
    return [*pieces, Piece("markup", text[begin])]


def _call(text: str) -> ParsedCall | None:
    try:
        node = expression(text)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            return None
        names = [keyword.arg or "" for keyword in node.keywords]
        if not all(_NAME.fullmatch(name) for name in (node.func.id, *names)):
            return None
        values = [literal_value(keyword.value) for keyword in node.keywords]
        arguments, is_object = call_arguments(dict(zip(names, values, strict=True)))
    except ValueError:
        return None
    return ParsedCall(name=clean_text(node.func.id), arguments=arguments, is_object=is_object)
