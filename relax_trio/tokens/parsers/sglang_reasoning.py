"""SGLang's reasoning parsers behind the interface of this package, with the rules that they do not keep.

Reasoning stands at the beginning of a turn. Markup of a call does not end it, unless the format has a token of its own
that does. A split that lost text is no split: then all of it is content.
"""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, Final

from attrs import field, frozen

from relax_trio.data.json import JsonObject
from relax_trio.tokens.parsers.base import ReasoningSplit
from relax_trio.tokens.parsers.sglang_load import FAULTS, Sglang

_TOKEN: Final = re.compile(r"<\|[^<>]*\|?>|<[^<>\s]*\|>|\[/?[A-Z_]+\]|◁/?\w+▷")
_HEADER: Final = re.compile(r"<\|(?:channel|start|open|close)\|>[^<]*")
"""A token and the words that name what begins or ends with it."""


@frozen(kw_only=True)
class SglangReasoning:
    """One of SGLang's reasoning detectors.

    Attributes:
      name: the parser's name.
      start, end: see `ReasoningParser`.
      tagged: all there is to the format is the two tags.
    """

    name: str
    implementation: str
    start: str
    end: str
    tagged: bool
    _sglang: Sglang = field(repr=False)

    @classmethod
    def load(cls, sglang: Sglang, name: str) -> SglangReasoning:
        """Make one detector, to learn its tags and that it can be made.

        Raises:
          ValueError: it needs something that is not known here.
        """
        detector = sglang.reasoning_parser(name, stream_reasoning=False).detector
        return cls(
            name=name,
            implementation=f"SGLang {sglang.version} ({type(detector).__name__})",
            start=str(detector.think_start_token or "<think>"),
            end=str(detector.think_end_token or "</think>"),
            tagged=_is_tagged(type(detector)),
            sglang=sglang,
        )

    def split(self, text: str, *, opened: bool, chat_template_kwargs: JsonObject) -> ReasoningSplit:
        """See `ReasoningParser.split`."""
        whole = ReasoningSplit(reasoning=None, content=text)
        try:
            detector = self._detector(opened, chat_template_kwargs)
            body = text.lstrip() if self.tagged else text
            if self.tagged and not (detector.force_reasoning or body.startswith(detector.think_start_token)):
                return whole
            found = detector.detect_and_parse(body)
            reasoning, content = str(found.reasoning_text or ""), str(found.normal_text or "")
            marks = _marks(text, detector)
        except FAULTS:
            return whole
        lost = _letters(text) - _letters(reasoning) - _letters(content) - _letters(marks)
        if lost or (not reasoning.strip() and content == text):
            return whole
        return ReasoningSplit(reasoning=reasoning.strip() or None, content=content.strip())

    def _detector(self, opened: bool, chat_template_kwargs: JsonObject) -> Any:
        detector = self._sglang.reasoning_parser(
            self.name,
            stream_reasoning=False,
            force_reasoning=True if opened else None,
            request=SimpleNamespace(chat_template_kwargs=dict(chat_template_kwargs)),
        ).detector
        token = getattr(detector, "tool_start_token", None)
        if token is not None and "|" not in token:
            detector.tool_start_token = None
        return detector


def _is_tagged(detector: type) -> bool:
    """Whether a detector class takes over SGLang's plain way of splitting at two tags."""
    base = next((cls for cls in detector.__mro__ if cls.__name__ == "BaseReasoningFormatDetector"), detector)
    return all(
        getattr(detector, name, None) is getattr(base, name, None)
        for name in ("detect_and_parse", "_detect_and_parse_impl")
    )


def _marks(text: str, detector: Any) -> str:
    """All markup in the text, one after the other."""
    own = [detector.think_start_token, detector.think_end_token, getattr(detector, "think_start_self_label", "")]
    found = [token * text.count(token) for token in own if token]
    return "".join([*found, *_HEADER.findall(text), *_TOKEN.findall(text)])


def _letters(text: str) -> Counter[str]:
    """How often each character but blanks occurs."""
    return Counter("".join(text.split()))
