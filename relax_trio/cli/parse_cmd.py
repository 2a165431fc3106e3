"""`relax-trio parse`: what the parsers make of a model's text: reasoning, content, calls, flags."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from relax_trio.config.option import option
from relax_trio.config.parse import parse_command
from relax_trio.data.json import JsonObject, parse_json
from relax_trio.data.normalize import normalize_tools
from relax_trio.errors import ConfigError, InvalidRequest, boundary
from relax_trio.tokens.parsers.base import ReasoningParser, ToolCallParser
from relax_trio.tokens.parsers.registry import reasoning_parser, tool_call_parser
from relax_trio.tokens.parsers.turn import FLAGS, TurnText, read_turn_text

_STDIN = "-"
_SWITCHES = ("--json", "--no-json", "--prompt-opens-reasoning", "--no-prompt-opens-reasoning")


@frozen(kw_only=True)
class Own:
    """Flags of this command; the text is a FILE, or comes from standard input."""

    tool_call_parser: str | None = option(
        None, "Tool-call parser; default: --agentic-tool-call-parser.", metavar="NAME"
    )
    reasoning_parser: str | None = option(
        None, "Reasoning parser; default: --agentic-reasoning-parser.", metavar="NAME"
    )
    tools: Path | None = option(
        None,
        "The request's tools as a JSON list. Without it every name is a tool's, and values written as text stay text.",
        metavar="FILE",
    )
    prompt_opens_reasoning: bool = option(False, "The generation prompt ends inside the reasoning.")
    json: bool = option(False, "Print one JSON object.")


def run(argv: Sequence[str]) -> int:
    """Parse one text and print what it comes to.

    Raises:
      ConfigError: a flag, a file or a parser's name is wrong.
    """
    words, source = _take_file(argv)
    resolved, own = parse_command(words, Own)
    rollout = resolved.config.rollout
    reasoning_name, reasoning_flag = own.reasoning_parser, "--reasoning-parser"
    if reasoning_name is None:
        reasoning_name, reasoning_flag = rollout.agentic_reasoning_parser, "--agentic-reasoning-parser"
    calls_name, calls_flag = own.tool_call_parser, "--tool-call-parser"
    if calls_name is None:
        calls_name, calls_flag = rollout.agentic_tool_call_parser, "--agentic-tool-call-parser"
    if reasoning_name is None and calls_name is None:
        raise ConfigError("name a parser: --tool-call-parser, --reasoning-parser or both")
    reasoning = reasoning_parser(reasoning_name, flag=reasoning_flag)
    calls = tool_call_parser(calls_name, flag=calls_flag)
    tools = () if own.tools is None else _read_tools(own.tools)
    read = read_turn_text(
        _read_text(source),
        reasoning_parser=reasoning,
        tool_call_parser=calls,
        tools=tools,
        opened=own.prompt_opens_reasoning,
        chat_template_kwargs={},
    )
    if own.tools is None:
        read = TurnText(
            content=read.content,
            reasoning=read.reasoning,
            calls=read.calls,
            flags=tuple(flag for flag in read.flags if flag != "unknown_tool"),
        )
    parsers = [("reasoning_parser", reasoning_name, reasoning), ("tool_call_parser", calls_name, calls)]
    sys.stdout.write(_as_json(read, parsers) if own.json else _as_text(read, parsers))
    return 0


def _take_file(argv: Sequence[str]) -> tuple[list[str], str]:
    """The words without the FILE, which stands first or last, and that FILE."""
    words = list(argv)
    if words and not words[0].startswith("--"):
        return words[1:], words[0]
    if len(words) > 1 and not words[-1].startswith("--"):
        before = words[-2]
        if not before.startswith("--") or "=" in before or before in _SWITCHES:
            return words[:-1], words[-1]
    return words, _STDIN


def _read_text(source: str) -> str:
    with boundary(ConfigError, f"{source} cannot be read", OSError, ValueError):
        data = sys.stdin.buffer.read() if source == _STDIN else Path(source).read_bytes()
        return data.decode()


def _read_tools(path: Path) -> tuple[JsonObject, ...]:
    with boundary(ConfigError, f"--tools {path} cannot be read", OSError, ValueError):
        raw = parse_json(path.read_bytes())
    try:
        return normalize_tools(raw)
    except InvalidRequest as exc:
        raise ConfigError(f"--tools {path}: {exc}") from exc


_Parsers = Sequence[tuple[str, str | None, ReasoningParser | ToolCallParser | None]]


def _as_json(read: TurnText, parsers: _Parsers) -> str:
    out: JsonObject = {
        "reasoning": read.reasoning,
        "content": read.content,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in read.calls],
        "flags": list(read.flags),
    }
    for key, name, parser in parsers:
        out[key] = None if parser is None else {"name": name, "implementation": parser.implementation}
    return json.dumps(out, ensure_ascii=False, indent=2) + "\n"


def _as_text(read: TurnText, parsers: _Parsers) -> str:
    calls = "\n".join(f"{call.name} {call.arguments}" for call in read.calls)
    flags = "\n".join(f"{flag}: {FLAGS[flag]}" for flag in read.flags)
    parts = [("reasoning", read.reasoning), ("content", read.content), ("calls", calls), ("flags", flags)]
    lines = []
    for title, text in parts:
        if text:
            lines += [title, *(f"  {line}" for line in text.splitlines())]
    lines += [
        f"{key.replace('_', '-')} {name}: {parser.implementation}"
        for key, name, parser in parsers
        if parser is not None
    ]
    return "\n".join(lines) + "\n"
