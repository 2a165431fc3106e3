"""`--agent-command` as the words of a Python program, which is what a warm parent can run (`--agent-preload`).

Quotes that only hold a word together are allowed. Whatever else a shell would act on is not, because no shell does.
"""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_WORDS = re.compile(
    r"""
    (?: [ \t]+
      | '[^']*'                     # holds a word together
      | "[^"$`\\]*"
      | [\w./+@%:,^=\]!-]           # stands for itself; `#` and `~` don't at the start of a word, so never here
    )*""",
    re.VERBOSE,
)
_SHOWN_LEN = 40
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


def python_command(command: str) -> list[str]:
    """Cut PYTHON FILE|-m MODULE ARGS into words, as a shell would.

    Raises:
      ValueError: it is none; says why.
    """
    command = command.strip()
    plain = _WORDS.match(command)
    assert plain is not None, "the pattern matches nothing at least"
    if rest := command[plain.end() :]:
        raise ValueError(f"{rest[:_SHOWN_LEN]!r} is shell syntax")
    words = shlex.split(command)
    if not words:
        raise ValueError("it is empty")
    if _ASSIGNMENT.match(words[0]):
        raise ValueError(f"{words[0]} is shell syntax; --agent-env sets a variable")
    if not _PYTHON.fullmatch(PurePath(words[0]).name):
        raise ValueError(f"{words[0]} is no Python")
    if len(words) < 2 or not words[1]:
        raise ValueError(f"{words[0]} has no FILE")
    if words[1] == "-m" and len(words) < 3:
        raise ValueError("-m has no MODULE")
    if words[1].startswith("-") and words[1] != "-m":
        raise ValueError(f"{words[1]} is an option of Python's; --agent-env PYTHON…=… does the same for most")
    return words
