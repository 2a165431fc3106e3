"""Parsers by the names SGLang gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from relax_trio.errors import ConfigError
from relax_trio.tokens.parsers.base import ReasoningParser, ToolCallParser
from relax_trio.tokens.parsers.qwen25 import TaggedJsonCalls
from relax_trio.tokens.parsers.reasoning import TaggedReasoning

_T = TypeVar("_T")

REASONING_PARSERS: Final[Mapping[str, ReasoningParser]] = {
    "deepseek-r1": TaggedReasoning(always_opened=True),
    "qwen3": TaggedReasoning(),
}
TOOL_CALL_PARSERS: Final[Mapping[str, ToolCallParser]] = {
    "hermes": TaggedJsonCalls(),
    "qwen25": TaggedJsonCalls(),
}


def reasoning_parser(name: str | None) -> ReasoningParser | None:
    """The parser named by `--agentic-reasoning-parser`; None for None.

    Raises:
      ConfigError: unknown name; lists the known ones.
    """
    return _named(REASONING_PARSERS, name, "reasoning parser", "--agentic-reasoning-parser")


def tool_call_parser(name: str | None) -> ToolCallParser | None:
    """The parser named by `--agentic-tool-call-parser`; None for None.

    Raises:
      ConfigError: unknown name; lists the known ones.
    """
    return _named(TOOL_CALL_PARSERS, name, "tool-call parser", "--agentic-tool-call-parser")


def _named(known: Mapping[str, _T], name: str | None, what: str, flag: str) -> _T | None:
    if name is None:
        return None
    if name not in known:
        raise ConfigError(f"{flag} {name}: no such {what}; known are {', '.join(sorted(known))}")
    return known[name]
