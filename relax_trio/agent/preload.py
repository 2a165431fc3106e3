"""The warm parent of `--agent-preload`: a service that keeps a Python with modules imported, for agents to be forked.

One warm parent lives at a time. When it dies, the next Session that needs one has another started; agents that were
forked from the first go on. Not covered: what a fork does (relax_trio/warden).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import trio
from attrs import define, field

from relax_trio.agent.environment import shared_environment
from relax_trio.config.plain_command import python_command
from relax_trio.config.tree import AgentConfig
from relax_trio.errors import AgentLaunchError, ConfigError
from relax_trio.events import emit
from relax_trio.sync.process import Child, PreloadRefused, Warden

LOG_NAME: Final = "preload.log"
"""File of the run directory with what preloaded modules print."""


@define(eq=False)
class _Start:
    """One start of a warm parent; `settled` once there is a parent or a failure."""

    parent: Child | None = None
    failure: str = ""
    settled: trio.Event = field(factory=trio.Event)

    @property
    def is_over(self) -> bool:
        """Whether nothing can be forked from it any more."""
        return bool(self.failure) or (self.parent is not None and self.parent.exit_status is not None)


class WarmParent:
    """The service, and where a launcher asks for the warm parent."""

    def __init__(self, warden: Warden, config: AgentConfig, run_dir: Path) -> None:
        """Nothing is started yet.

        Args:
          config: with `agent_preload`, and an `agent_command` that a warm parent can run.
          run_dir: takes the log of what modules print.

        Raises:
          ConfigError: the command is not PYTHON FILE|-m MODULE ARGS.
        """
        self._warden = warden
        self._config = config
        self._log_path = run_dir / LOG_NAME
        try:
            self.command = python_command(config.agent_command or "")
        except ValueError as exc:
            raise ConfigError(f"--agent-preload: --agent-command cannot be forked: {exc}") from exc
        self._start = _Start()
        self._wanted = trio.Event()

    async def run(
        self,
        parent_env: Mapping[str, str],
        base_url: str,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Keep a warm parent until this is cancelled; `started()` is called once the first has its modules imported.

        Args:
          parent_env: the engine's environment.
          base_url: of the model API, whose host agents reach without a proxy.

        Raises:
          ConfigError: at the start: a module cannot be imported or starts threads, or PYTHON cannot be started. Later
            that fails the Sessions which wait for a warm parent.

        Cancellation: the warm parent is killed; what it forked is not.
        """
        env = shared_environment(parent_env, config=self._config, base_url=base_url)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        await self._live(env, self._start, task_status.started)
        if self._start.failure:
            raise ConfigError(self._start.failure)
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            await self._live(env, self._start, lambda: None)

    async def living(self) -> Child:
        """Return the warm parent; where it died, have another started and wait for that.

        Raises:
          AgentLaunchError: it could not be started.
          EngineFault: the warden died.

        Cancellation: safe.
        """
        if self._start.is_over:
            self._start = _Start()
            self._wanted.set()
        start = self._start
        await start.settled.wait()
        if start.parent is None:
            raise AgentLaunchError(start.failure)
        return start.parent

    async def _live(self, env: Mapping[str, str], start: _Start, ready: Callable[[], None]) -> None:
        """Own one warm parent from its start to its death."""
        modules = self._config.preload_modules
        started_s = trio.current_time()
        try:
            async with self._warden.warm_parent(
                command=self.command,
                modules=modules,
                cwd=self._config.agent_cwd,
                env=env,
                log_path=self._log_path,
                name="warm parent",
                is_login_shell=self._config.agent_login_shell,
            ) as parent:
                start.parent = parent
                start.settled.set()
                seconds = trio.current_time() - started_s
                emit("warm_parent.started", pid=parent.pid, modules=",".join(modules), seconds=seconds)
                ready()
                status = await parent.wait_exit()
                emit("warm_parent.failed", pid=parent.pid, error=f"it ended with {status}")
        except (PreloadRefused, OSError) as exc:
            start.failure = f"--agent-preload: {exc}; what was printed is in {self._log_path}"
            start.settled.set()
