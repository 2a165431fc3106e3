"""The environment of an agent, as a pure function of the parent's, the configuration and the Session."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from relax_trio.agent.base import AgentSpec
from relax_trio.config.tree import AgentConfig

INPUT_NAME: Final = "session_input.json"
OUTPUT_NAME: Final = "session_output.json"

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
"""Hosts that no proxy is asked for: the model API listens there."""

MINIMAL_NAMES: Final = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "TMPDIR", "TZ", "LD_LIBRARY_PATH"}
)
"""What `--agent-env-clear` keeps of the parent's environment, besides the `LC_…` names and `--agent-env-pass`."""

_RESERVED: Final = "RELAX_"
_SECRET: Final = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def agent_environment(
    parent: Mapping[str, str], *, config: AgentConfig, spec: AgentSpec, io_dir: Path
) -> dict[str, str]:
    """Build the whole environment of one agent: `shared_environment`, then the seven `RELAX_…` names.

    Args:
      parent: the engine's environment.
      config: the flags of `shared_environment`.
      spec: the Session; its credential becomes RELAX_SESSION_ID.
      io_dir: the Session's IO directory, absolute.
    """
    env = shared_environment(parent, config=config, base_url=spec.base_url)
    env.update(
        RELAX_INPUT_JSON=str(io_dir / INPUT_NAME),
        RELAX_OUTPUT_JSON=str(io_dir / OUTPUT_NAME),
        RELAX_SESSION_IO_DIR=str(io_dir),
        RELAX_BASE_URL=spec.base_url,
        RELAX_SESSION_ID=spec.credential,
        RELAX_ROLLOUT_MODE=spec.mode,
        RELAX_GROUP_ID=spec.group,
    )
    return env


def shared_environment(parent: Mapping[str, str], *, config: AgentConfig, base_url: str) -> dict[str, str]:
    """Build what all agents of a run have in common.

    In this order, later ones win: the parent's without `RELAX_…` and without names that hold KEY, TOKEN, SECRET or
    PASSWORD in any case (`agent_env_pass` lets a name through; `agent_env_clear` keeps only `MINIMAL_NAMES`); the
    loopback hosts and the model API's host added to NO_PROXY and no_proxy; `agent_env`.
    """
    passed = frozenset(config.agent_env_pass)
    env = {name: value for name, value in parent.items() if _is_inherited(name, passed, config.agent_env_clear)}
    env["NO_PROXY"] = env["no_proxy"] = _no_proxy(env, base_url)
    env.update(config.agent_env)
    return env


def _is_inherited(name: str, passed: frozenset[str], clear: bool) -> bool:
    if name.startswith(_RESERVED):
        return False
    if name in passed:
        return True
    if clear:
        return name in MINIMAL_NAMES or name.startswith("LC_")
    return _SECRET.search(name) is None


def _no_proxy(env: Mapping[str, str], base_url: str) -> str:
    """Both spellings' entries in one list, since tools differ in which they read, and the hosts of the model API."""
    entries = [entry.strip() for name in ("no_proxy", "NO_PROXY") for entry in env.get(name, "").split(",")]
    host = urlsplit(base_url).hostname or ""
    return ",".join(dict.fromkeys(entry for entry in (*entries, *LOOPBACK, host) if entry))
