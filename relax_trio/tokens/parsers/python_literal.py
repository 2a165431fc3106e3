"""Python literals and calls in generated text, read as syntax trees; nothing is ever evaluated."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from typing import Final

from relax_trio.data.json import JsonValue

_BRACKETS: Final = {"(": ")", "[": "]", "{": "}"}
_TEXT: Final = r'"""(?:[^\\]|\\.)*?"""|' + r"'''(?:[^\\]|\\.)*?'''|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)*'"
_STRING: Final = re.compile(rf"(\w*)(?:{_TEXT})", re.DOTALL)
_TOKEN: Final = re.compile(rf"""{_TEXT}|[()\[\]{{}},'"]""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:[0-3]?[0-7]{1,2}|(.))", re.DOTALL)
_KNOWN_ESCAPES: Final = frozenset("\n\\'\"abfnrtvxuUN")
_MAX_DEPTH: Final = 100


def literal(text: str) -> JsonValue:
    """A literal in Python's notation as a JSON value: numbers, strings, True, None, lists, tuples, dictionaries.

    Raises:
      ValueError: it is none, or has no JSON form.
    """
    return literal_value(expression(text.strip()))


def expression(text: str) -> ast.expr:
    """The syntax tree of one expression. An unknown escape in a string keeps its backslash, as Python has it.

    Raises:
      ValueError: the text is no expression.
    """
    # Doubled here, because the compiler would warn of it on stderr.
    source = _STRING.sub(_keep_escapes, text)
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ValueError(f"no Python expression: {exc}") from exc


def _keep_escapes(found: re.Match[str]) -> str:
    return found[0] if "r" in found[1].lower() else _ESCAPE.sub(_double_unknown, found[0])


def _double_unknown(found: re.Match[str]) -> str:
    return found[0] if found[1] is None or found[1] in _KNOWN_ESCAPES else "\\" + found[0]


def literal_value(node: ast.expr, depth: int = 0) -> JsonValue:
    """The JSON value of a literal's syntax tree.

    Raises:
      ValueError: it is no literal, or has no JSON form.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Constant(value=float(value)) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)) if (
            math.isfinite(value) and not isinstance(value, bool)
        ):
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal_value(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): literal_value(item, depth + 1) for key, item in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
        case ast.Constant(value=None | bool() | int() | float() as scalar):
            return json.dumps(scalar, allow_nan=False)
    raise ValueError("the key of an object must be a string or a number")


def bracket_parts(text: str, at: int) -> Iterator[int]:
    """Positions of the commas directly inside the bracket that opens at `at`, then that of its closing bracket.

    Brackets and commas inside of strings don't count.

    Raises:
      ValueError: the bracket is not closed.
    """
    closers: list[str] = []
    for found in _TOKEN.finditer(text, at):
        token = found[0]
        if token in _BRACKETS:
            closers.append(_BRACKETS[token])
        elif token == ",":
            if len(closers) == 1:
                yield found.start()
        elif len(token) == 1:  # a closing bracket, or a quote that nothing closes
            if token != closers.pop():
                break
            if not closers:
                yield found.start()
                return
    raise ValueError("the bracket is not closed")
