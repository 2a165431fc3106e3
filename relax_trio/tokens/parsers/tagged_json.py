"""Tool calls as Qwen2.5 and Hermes models write them: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from relax_trio.data.json import JSON_DECODER, JsonObject
from relax_trio.tokens.parsers.base import ParsedCall, Piece, as_call, skip_space


@frozen(kw_only=True)
class TaggedJsonCalls:
    """JSON calls between tags: an object with `name` and `arguments` (or `parameters`), or a list of such objects.

    The end tag is looked for behind the JSON, so that one inside a string ends nothing. Everything else stays text.

    Attributes:
      start, end: the tags, with a line break where the format puts one between tag and JSON.
      end_optional: the last call of a turn may lack its end tag.
    """

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    end_optional: bool = False
    implementation: str = "relax_trio"

    def pieces(self, text: str, tools: Sequence[JsonObject]) -> list[Piece]:
        """See `ToolCallParser.pieces`."""
        pieces: list[Piece] = []
        at = 0
        tag = self.start.rstrip()
        while (begin := text.find(tag, at)) >= 0:
            pieces.append(Piece("text", text[at:begin]))
            at = begin + len(tag)
            parsed = self._calls(text, begin + len(self.start)) if text.startswith(self.start, begin) else None
            if parsed is None:
                pieces.append(Piece("unparsed", text[begin:at]))
            else:
                calls, at = parsed
                pieces.append(Piece("call", text[begin:at], calls))
        return [*pieces, Piece("text", text[at:])]

    def _calls(self, text: str, at: int) -> tuple[tuple[ParsedCall, ...], int] | None:
        """The calls whose JSON begins at `at` and the position behind their end tag, or None."""
        try:
            value, after = JSON_DECODER.raw_decode(text, skip_space(text, at))
            calls = tuple(as_call(item) for item in (value if isinstance(value, list) else [value]))
        except (ValueError, RecursionError):
            return None
        known = tuple(call for call in calls if call is not None)
        if not known or len(known) < len(calls):
            return None
        tag = self.end.lstrip()
        closing = skip_space(text, after)
        begin = closing - (len(self.end) - len(tag))
        if begin >= after and text.startswith(self.end, begin):
            return known, closing + len(tag)
        return (known, len(text)) if self.end_optional and closing == len(text) else None

    def alone(self, markup: str, mask: Callable[[str], str]) -> str:
        """The calls of one piece for another parser of the format; `mask` hides tags inside of strings from it."""
        inner = markup.removeprefix(self.start).removesuffix(self.end.lstrip())
        return self.start + mask(inner.strip()) + self.end
