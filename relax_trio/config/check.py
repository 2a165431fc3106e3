"""The rules that one field cannot know: files, commands, ports, sizes that contradict each other.

Called once, before anything is started. Runs nothing of the user's but the module of a hook. Not covered: the content
of datasets (data/dataset.py) and of the checkpoint.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import Literal, TypeAlias

from relax_trio.config.check_algorithm import algorithm_problems, algorithm_warnings
from relax_trio.config.check_backend import backend_problems, backend_warnings
from relax_trio.config.check_command import command_problems
from relax_trio.config.check_files import (
    checkpoint_problems,
    cwd_problems,
    dataset_problems,
    output_problems,
)
from relax_trio.config.check_pause import pause_problems
from relax_trio.config.check_sizes import (
    eval_problems,
    length_problems,
    rollout_size_problems,
    train_size_problems,
    train_warnings,
)
from relax_trio.config.check_weights import weight_problems
from relax_trio.config.eval_spec import eval_specs
from relax_trio.config.hook_path import import_hook
from relax_trio.config.problems import raise_problems
from relax_trio.config.tree import AgentConfig, Config, ServerConfig
from relax_trio.errors import ConfigError

Command: TypeAlias = Literal["train", "rollout", "serve", "demo"]

_NO_ORIGINS: Mapping[str, str] = {}


def check_config(
    config: Config,
    *,
    command: Command,
    origins: Mapping[str, str] = _NO_ORIGINS,
    scripted: bool = False,
) -> tuple[str, ...]:
    """Refuse a configuration that cannot be run.

    Args:
      command: what is about to be started: `serve` needs no agent and no data, `demo` may make its data itself,
        and it trains as `train` does.
      origins: of `Resolved`; keeps a default from contradicting what the user chose.
      scripted: the model's answers come from a script, so that of the checkpoint only the tokenizer is needed.

    Returns:
      Warnings, one sentence each.

    Raises:
      ConfigError: lists every problem found, with the flags it is about.
    """
    trains = command in ("train", "demo")
    problems = checkpoint_problems(config.backend.hf_checkpoint, weights=not scripted)
    problems += _port_problems(config.server)
    problems += [] if scripted else backend_problems(config)
    problems += [] if command == "serve" else pause_problems(config, trains=trains)
    problems += [] if scripted else weight_problems(config, trains=trains)
    problems += rollout_size_problems(config)
    problems += length_problems(config)
    problems += output_problems(config, trains=trains)
    if command != "serve":
        if command != "demo" or config.data.prompt_data is not None:
            problems += dataset_problems("--prompt-data", config.data.prompt_data)
        problems += _agent_problems(config.agent)
        problems += _hook_problems(config)
        problems += _eval_problems(config)
    if trains:
        problems += train_size_problems(config, origins)
        problems += algorithm_problems(config, origins)
    if not config.rollout.use_agentic_rollout:
        problems.append("--no-use-agentic-rollout: agentic rollout is the only path; leave the flag out")
    raise_problems(problems)
    return tuple(_warnings(config, trains=trains))


def _agent_problems(agent: AgentConfig) -> list[str]:
    reserved = sorted(key for key in agent.agent_env if key.startswith("RELAX_"))
    problems = [f"--agent-env {key}: RELAX_ names are set for the agent and cannot be given" for key in reserved]
    return problems + cwd_problems(agent.agent_cwd) + command_problems(agent)


def _hook_problems(config: Config) -> list[str]:
    if config.reward.custom_rm_path is None:
        return []
    try:
        import_hook("--custom-rm-path", config.reward.custom_rm_path)
    except ConfigError as exc:
        return [str(exc)]
    return []


def _eval_problems(config: Config) -> list[str]:
    problems = eval_problems(config)
    try:
        specs = eval_specs(config)
    except ConfigError:
        return problems  # it is one of them
    for spec in specs:
        problems += dataset_problems(f"--eval-prompt-data {spec.name}", spec.path)
    return problems


def _port_problems(server: ServerConfig) -> list[str]:
    """What keeps the server from listening; the port is tried and let go again."""
    where = f"--host {server.host} --port {server.port}"
    if server.port > 65535:
        return [f"--port {server.port}: the greatest port is 65535"]
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            # As the server does it: connections of an earlier run that are still closing don't block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (socket.gaierror, UnicodeError) as exc:
        return [f"--host {server.host}: is no address: {exc}"]
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            return [f"{where}: the port is in use; choose another, or 0 for a free one"]
        return [f"{where}: cannot be listened on: {os.strerror(exc.errno or 0)}"]
    return []


def _warnings(config: Config, *, trains: bool) -> list[str]:
    warnings = train_warnings(config) + algorithm_warnings(config) if trains else []
    warnings += backend_warnings(config)
    if config.rollout.custom_generate_function_path is not None:
        warnings.append("--custom-generate-function-path is ignored: the agent process generates")
    if config.eval.eval_prompt_data and config.eval.eval_interval is None:
        warnings.append("--eval-prompt-data is given without --eval-interval: nothing is evaluated")
    return warnings
