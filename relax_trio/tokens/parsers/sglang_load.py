"""SGLang's parser classes, imported where SGLang is installed and only when a parser is named: it takes seconds."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import frozen

FAULTS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What code that others wrote may raise on a text that it did not foresee; a turn's text is never an error here."""

_CALLS: Final = "sglang.srt.function_call.function_call_parser"
_REASONING: Final = "sglang.srt.parser.reasoning_parser"
_LOGGERS: Final = ("sglang.srt.function_call", "sglang.srt.parser")


@frozen(kw_only=True)
class Sglang:
    """What is used of an installed SGLang.

    Attributes:
      version: of the installed package.
      call_detectors: detector classes of tool calls by parser name.
      reasoning_detectors: detector classes of reasoning by parser name.
      call_parser: SGLang's `FunctionCallParser`, made as `call_parser(tools, name)`.
      reasoning_parser: SGLang's `ReasoningParser`.
      make_tool: makes SGLang's `Tool` of a function tool's JSON.
    """

    version: str
    call_detectors: Mapping[str, type]
    reasoning_detectors: Mapping[str, type]
    call_parser: Callable[..., Any]
    reasoning_parser: Callable[..., Any]
    make_tool: Callable[[Any], Any]


def sglang_installed() -> bool:
    """Whether the package is there; imports nothing."""
    return importlib.util.find_spec("sglang") is not None


@functools.cache
def load_sglang() -> Sglang:
    """Import the parser classes.

    Their log is silenced: they complain of every text that is no call, which here is a turn like any other.

    Raises:
      ImportError, OSError, RuntimeError, AttributeError: SGLang is not installed, or not in a state to be used.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SGLang's own dependencies
        calls = importlib.import_module(_CALLS)
        reasoning = importlib.import_module(_REASONING)
        version = importlib.import_module("sglang.version").__version__
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return Sglang(
        version=str(version),
        call_detectors=calls.FunctionCallParser.ToolCallParserEnum,
        reasoning_detectors=reasoning.ReasoningParser.DetectorMap,
        call_parser=calls.FunctionCallParser,
        reasoning_parser=reasoning.ReasoningParser,
        make_tool=calls.Tool.model_validate,
    )
