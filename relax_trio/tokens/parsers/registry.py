"""Parsers by the names SGLang gives them: SGLang's own classes where it is installed, else those of this package."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Final

from relax_trio.config.nearest import did_you_mean
from relax_trio.errors import ConfigError
from relax_trio.tokens.parsers.base import ReasoningParser, ToolCallParser
from relax_trio.tokens.parsers.llama3 import Llama3Calls
from relax_trio.tokens.parsers.pythonic import PythonicCalls
from relax_trio.tokens.parsers.qwen3_coder import Qwen3CoderCalls
from relax_trio.tokens.parsers.reasoning import TaggedReasoning
from relax_trio.tokens.parsers.sglang_calls import CallFormat, SglangCalls, SglangDetector, SglangReading
from relax_trio.tokens.parsers.sglang_load import FAULTS, Sglang, load_sglang, sglang_installed
from relax_trio.tokens.parsers.sglang_reasoning import SglangReasoning
from relax_trio.tokens.parsers.tagged_json import TaggedJsonCalls

_QWEN25: Final = TaggedJsonCalls(start="<tool_call>\n", end="\n</tool_call>")
_HERMES: Final = TaggedJsonCalls(end_optional=True)

REASONING_PARSERS: Final[Mapping[str, ReasoningParser]] = {
    "deepseek-r1": TaggedReasoning(always_opened=True),
    "qwen3": TaggedReasoning(),
    "qwen3-thinking": TaggedReasoning(always_opened=True),
}
"""Those of this package."""

TOOL_CALL_PARSERS: Final[Mapping[str, CallFormat]] = {
    "hermes": _HERMES,
    "llama3": Llama3Calls(),
    "pythonic": PythonicCalls(),
    "qwen": _QWEN25,
    "qwen25": _QWEN25,
    "qwen3_coder": Qwen3CoderCalls(),
}
"""Those of this package."""

_OWN_BY_DETECTOR: Final[Mapping[str, CallFormat]] = {
    "HermesDetector": _HERMES,
    "Llama32Detector": TOOL_CALL_PARSERS["llama3"],
    "PythonicDetector": TOOL_CALL_PARSERS["pythonic"],
    "Qwen25Detector": _QWEN25,
    "Qwen3CoderDetector": TOOL_CALL_PARSERS["qwen3_coder"],
}
"""Those of this package by the SGLang class of the same format, which SGLang knows under more names."""


def reasoning_parser(name: str | None, *, flag: str = "--agentic-reasoning-parser") -> ReasoningParser | None:
    """The parser of that name; None for None. Imports SGLang where it is installed.

    Raises:
      ConfigError: unknown name, with the nearest and all known ones; or SGLang, which alone knows it, can't be used.
    """
    if name is None:
        return None
    sglang, why_not = _sglang()
    known = [*REASONING_PARSERS, *(sglang.reasoning_detectors if sglang else ())]
    if name not in known:
        raise _unknown(f"{flag} {name}", "reasoning parser", name, known, why_not)
    if sglang is None or name not in sglang.reasoning_detectors:
        return REASONING_PARSERS[name]
    try:
        return SglangReasoning.load(sglang, name)
    except FAULTS as exc:
        raise ConfigError(f"{flag} {name}: SGLang's parser cannot be made: {exc}") from exc


def tool_call_parser(name: str | None, *, flag: str = "--agentic-tool-call-parser") -> ToolCallParser | None:
    """The parser of that name; None for None. Imports SGLang where it is installed.

    Raises:
      ConfigError: unknown name, with the nearest and all known ones; or SGLang, which alone knows it, can't be used.
    """
    if name is None:
        return None
    sglang, why_not = _sglang()
    known = [*TOOL_CALL_PARSERS, *(sglang.call_detectors if sglang else ())]
    if name not in known:
        raise _unknown(f"{flag} {name}", "tool-call parser", name, known, why_not)
    if sglang is None or name not in sglang.call_detectors:
        return TOOL_CALL_PARSERS[name]
    try:
        detector = SglangDetector.load(sglang, name)
    except FAULTS as exc:
        raise ConfigError(f"{flag} {name}: SGLang's parser cannot be made: {exc}") from exc
    own = _OWN_BY_DETECTOR.get(sglang.call_detectors[name].__name__)
    return SglangCalls(detector=detector) if own is None else SglangReading(own=own, detector=detector)


def _sglang() -> tuple[Sglang | None, str]:
    """SGLang, or None and why not."""
    if not sglang_installed():
        return None, "SGLang, which knows more, is not installed"
    try:
        return load_sglang(), ""
    except (*FAULTS, ImportError, OSError) as exc:
        why_not = f"SGLang, which knows more, is installed but cannot be imported: {exc}"
        warnings.warn(f"{why_not}; relax_trio's own parsers are used", RuntimeWarning, stacklevel=3)
        return None, why_not


def _unknown(given: str, what: str, name: str, known: Iterable[str], why_not: str) -> ConfigError:
    names = sorted(set(known))
    listed = f"known are {', '.join(names)}" + (f"; {why_not}" if why_not else "")
    return ConfigError(f"{given}: no such {what} ({listed}){did_you_mean(name, names)}")
