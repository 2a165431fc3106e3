"""Whether the agent's command can be run at all, found out without running it.

Refuses only what is sure to fail: a command that bash cannot parse, a first word that bash cannot find, a Python or
bash script that isn't there. Whatever a shell could still make work is let through.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from relax_trio.config.plain_command import python_command
from relax_trio.config.tree import AgentConfig

BASH = "/bin/bash"

_PLAIN = re.compile(r"[A-Za-z0-9_./+@%:,-]+")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=")
_INTERPRETER = re.compile(r"(?P<python>python(\d+(\.\d+)?)?)|(?P<shell>bash)")
_GOES_ON = re.compile(r"[;|&\n]")
_LOOKUP_S = 10.0


def command_problems(agent: AgentConfig) -> list[str]:
    """What is wrong with `--agent-command`, given its directory and environment (empty: nothing found)."""
    command = agent.agent_command
    if command is None or not command.strip():
        return ["--agent-command is missing: say what starts the agent, e.g. --agent-command 'python agent.py'"]
    if not os.access(BASH, os.X_OK):
        return [f"--agent-command runs through {BASH}, which this machine does not have"]
    if agent.agent_preload and (problem := _preload_problem(command)) is not None:
        return [problem]
    environment = {**os.environ, **agent.agent_env}
    # A startup file can turn on syntax, functions and search paths that cannot be known from here.
    if agent.agent_login_shell or "BASH_ENV" in environment or not agent.agent_cwd.is_dir():
        return []
    return _syntax_problems(command, environment) or _word_problems(command, agent.agent_cwd, environment)


def _preload_problem(command: str) -> str | None:
    try:
        python_command(command)
    except ValueError as exc:
        needed = "PYTHON FILE|-m MODULE ARGS without shell syntax"
        return f"--agent-preload needs --agent-command to be {needed}, but {exc}; change it, or don't preload"
    return None


def _syntax_problems(command: str, environment: Mapping[str, str]) -> list[str]:
    if "shopt" in command or "alias" in command:  # both change how the lines after them are parsed
        return []
    done = _bash(["-n", "-c", command], None, environment)
    if done is None or done.returncode == 0:
        return []
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return [f"--agent-command cannot be parsed by bash: {said[0].removeprefix(f'{BASH}: ') if said else command}"]


def _word_problems(command: str, cwd: Path, environment: Mapping[str, str]) -> list[str]:
    if _GOES_ON.search(command.replace("&&", "")):  # what comes after a failed word may make up for it
        return []
    try:
        words = shlex.split(command)
    except ValueError:  # quoting that bash knows and shlex does not
        return []
    while words and ((assigned := _ASSIGNMENT.match(words[0])) or words[0] == "exec"):
        if assigned and assigned["name"] == "PATH":
            return []
        words.pop(0)
    if not words or words[0].startswith("-") or not _PLAIN.fullmatch(words[0]):
        return []
    first = words[0]
    if not _bash_finds(first, cwd, environment):
        if "/" in first and (cwd / first).is_file():
            return [f"--agent-command: {first} is not executable; chmod +x it or name its interpreter"]
        where = f"in {cwd}" if "/" in first else "on PATH"
        return [f"--agent-command: {first} is not found {where}; check the word, --agent-cwd and PATH"]
    return _script_problems(words, cwd)


def _bash_finds(word: str, cwd: Path, environment: Mapping[str, str]) -> bool:
    """True if bash knows `word` as a file, builtin, keyword or exported function; nothing of it is run."""
    done = _bash(["-c", 'type -t -- "$1"', "bash", word], cwd, environment)
    return done is None or done.returncode == 0


def _bash(
    arguments: list[str], cwd: Path | None, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[bytes] | None:
    """Run bash, or None when it doesn't answer: then nothing is known, and nothing is refused."""
    try:
        return subprocess.run(
            [BASH, *arguments],
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOOKUP_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _script_problems(words: list[str], cwd: Path) -> list[str]:
    interpreter = _INTERPRETER.fullmatch(Path(words[0]).name)
    if interpreter is None or len(words) < 2 or not _PLAIN.fullmatch(words[1]):
        return []
    suffix = ".py" if interpreter["python"] else ".sh"
    script = words[1]
    # bash looks for a script without a slash on PATH too; only a plain path in the directory is sure.
    if not script.endswith(suffix) or script.startswith("-") or (interpreter["shell"] and "/" not in script):
        return []
    return [] if (cwd / script).exists() else [f"--agent-command: {script} is not found in {cwd}; check --agent-cwd"]
