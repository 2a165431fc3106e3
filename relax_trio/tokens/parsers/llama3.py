"""Tool calls as Llama 3 models write them: JSON objects behind `<|python_tag|>`, or as the whole turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from relax_trio.data.json import JSON_DECODER, JsonObject, JsonValue
from relax_trio.tokens.parsers.base import ParsedCall, Piece, as_call, skip_space, tool_names
from relax_trio.tokens.parsers.python_literal import bracket_parts, literal

_TAG: Final = "<|python_tag|>"
_NEXT: Final = re.compile(r'<\|python_tag\|>|(?=\{"name":)')
_LIKE_A_CALL: Final = re.compile(r"""\s*\{\s*["']name["']\s*:""")
_ARGUMENTS: Final = ("parameters", "arguments")
_MAX_FAILURES: Final = 64
"""Beginnings that are no call, each looked through to the end of the text; after so many the rest is text."""


@frozen(kw_only=True)
class Llama3Calls:
    """JSON objects with `name` and `parameters` (or `arguments`), separated by `;`.

    They begin behind the tag, or with the turn. Without the tag an object is a call only if it names a tool or has
    arguments, because a model may well answer with JSON. An object in Python's notation is taken as well.
    """

    implementation: str = "relax_trio"

    def pieces(self, text: str, tools: Sequence[JsonObject]) -> list[Piece]:
        """See `ToolCallParser.pieces`."""
        if _TAG not in text and not text.startswith("{"):
            return [Piece("text", text)]
        known = tool_names(tools)
        pieces: list[Piece] = []
        at = n_failures = 0
        begin = max(text.find(_TAG), 0)
        tagged = text.startswith(_TAG, begin)
        while n_failures < _MAX_FAILURES and begin >= 0:
            pieces.append(Piece("text", text[at:begin]))
            tag = _TAG if text.startswith(_TAG, begin) else ""
            start = skip_space(text, begin + len(tag))
            call, at = _read(text, start, None if tagged else known)
            if call is None:
                n_failures += 1
                odd = bool(tag) or (at == start and _LIKE_A_CALL.match(text, start) is not None)
                at = max(at, start, begin + 1)
                pieces.append(Piece("unparsed" if odd else "text", text[begin:at]))
            else:
                pieces += [Piece("markup", text[begin:start]), Piece("call", text[start:at], (call,))]
                separator = skip_space(text, at)
                if text.startswith(";", separator):
                    pieces.append(Piece("markup", text[at : separator + 1]))
                    at = separator + 1
            begin = _next(text, at, after_call=call is not None)
        return [*pieces, Piece("text", text[at:])]

    def alone(self, markup: str, mask: Callable[[str], str]) -> str:
        """See `TaggedJsonCalls.alone`."""
        return _TAG + mask(markup)


def _next(text: str, at: int, *, after_call: bool) -> int:
    """Where a call may begin next, or -1."""
    here = skip_space(text, at)
    if after_call and text.startswith("{", here):
        return here
    found = _NEXT.search(text, at)
    return -1 if found is None else found.start()


def _read(text: str, at: int, known: frozenset[str] | None) -> tuple[ParsedCall | None, int]:
    """The call that begins at `at`, or None, and the position behind what was read.

    `known`: names that make a call of an object without arguments; None: every name does.
    """
    try:
        value, after = _object(text, at)
        call = as_call(value)
    except (ValueError, RecursionError):
        return None, at
    if call is None or known is None or call.name in known:
        return call, after
    return (call if isinstance(value, dict) and not value.keys().isdisjoint(_ARGUMENTS) else None), after


def _object(text: str, at: int) -> tuple[JsonValue, int]:
    try:
        return JSON_DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        if not text.startswith("{", at):
            raise
        *_, end = bracket_parts(text, at)
        return literal(text[at : end + 1]), end + 1
