"""Tool calls as Qwen2.5 and Hermes models write them: a JSON object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import json
from typing import Final

from attrs import frozen

from relax_trio.data.json import JsonValue
from relax_trio.data.normalize import clean_text
from relax_trio.tokens.parsers.base import ParsedCall, ToolCallSplit, call_arguments


def _refuse_constant(text: str) -> JsonValue:
    raise ValueError(f"{text} is not a JSON number")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


@frozen(kw_only=True)
class TaggedJsonCalls:
    """JSON calls between tags.

    A call is an object with a nonempty `name` and perhaps `arguments` (or `parameters`), closed by the end tag. The end
    tag is looked for behind the JSON, so that one inside a string ends nothing. Everything else stays text.
    """

    marker: str = "<tool_call>"
    end: str = "</tool_call>"

    def split(self, text: str) -> ToolCallSplit:
        """See `ToolCallParser.split`."""
        calls: list[ParsedCall] = []
        pieces: list[str] = []
        n_unparsed, at = 0, 0
        while (begin := text.find(self.marker, at)) >= 0:
            pieces.append(text[at:begin])
            parsed = self._call(text, begin + len(self.marker))
            if parsed is None:
                n_unparsed += 1
                at = begin + len(self.marker)
                pieces.append(self.marker)
            else:
                call, at = parsed
                calls.append(call)
        pieces.append(text[at:])
        content = "".join(pieces).strip() if calls else text
        return ToolCallSplit(content=content, calls=tuple(calls), n_unparsed=n_unparsed)

    def _call(self, text: str, at: int) -> tuple[ParsedCall, int] | None:
        """The call whose JSON begins at `at` and the position behind its end tag, or None."""
        try:
            value, after = _DECODER.raw_decode(text, _skip_space(text, at))
            call = _as_call(value)
        except (ValueError, RecursionError):
            return None
        after = _skip_space(text, after)
        if call is None or not text.startswith(self.end, after):
            return None
        return call, after + len(self.end)


def _as_call(value: JsonValue) -> ParsedCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    given = value["arguments"] if "arguments" in value else value.get("parameters", {})
    arguments, is_object = call_arguments(given)
    return ParsedCall(name=clean_text(name), arguments=arguments, is_object=is_object)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
