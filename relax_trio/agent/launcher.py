"""The launcher of real agents: an IO directory and a process tree for the length of a block."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio
from attrs import define

from relax_trio.agent.base import AgentHandle, AgentSpec
from relax_trio.agent.environment import agent_environment
from relax_trio.agent.output import UnknownKeys, parse_session_output
from relax_trio.agent.preload import WarmParent
from relax_trio.agent.session_io import SessionIO
from relax_trio.agent.task_images import has_local_images, session_input
from relax_trio.config.tree import AgentConfig
from relax_trio.data.record import SessionOutput
from relax_trio.errors import AgentExecutionError, AgentLaunchError, AgentOutputError, boundary
from relax_trio.events import emit
from relax_trio.sync.cleanup import cleanup_scope
from relax_trio.sync.process import Child, ExitStatus, Warden

DIRECTORY_S = 20.0
"""Bound of moving or removing an IO directory, in seconds."""


class ProcessAgentLauncher:
    """Starts agents through the warden."""

    def __init__(self, warden: Warden, config: AgentConfig, run_dir: Path, temp_root: Path) -> None:
        """Nothing is started or written yet.

        Args:
          warden: running before the first `open`.
          config: of the agents; without `agent_command` (`serve`) nothing can be opened.
          run_dir: kept IO directories go to its `sessions`.
          temp_root: existing directory below which IO directories are made.

        Raises:
          ConfigError: `agent_preload` with a command that a warm parent cannot run.
        """
        self._warden = warden
        self._config = config
        is_warm = config.agent_command is not None and bool(config.agent_preload)
        self._warm_parent = WarmParent(warden, config, run_dir) if is_warm else None
        self._argv = ["/bin/bash", "-lc" if config.agent_login_shell else "-c", config.agent_command or ""]
        self._keep_dir = run_dir / "sessions"
        self._temp_root = temp_root.absolute()
        self._parent_env: Mapping[str, str] = dict(os.environ)
        self._unknown_keys = UnknownKeys()

    async def keep_warm(self, base_url: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The service behind `--agent-preload`, to be started before the first `open`; without the flag it waits idly.

        Raises:
          ConfigError: a module cannot be preloaded, at the start.

        Cancellation: ends the warm parent; agents go on.
        """
        if self._warm_parent is None:
            task_status.started()
            await trio.sleep_forever()
        else:
            await self._warm_parent.run(self._parent_env, base_url, task_status=task_status)

    @asynccontextmanager
    async def open(self, spec: AgentSpec) -> AsyncIterator[AgentHandle]:
        """See `AgentLauncher.open`."""
        if self._config.agent_command is None:
            raise AgentLaunchError(f"session {spec.place}: --agent-command is missing, so there is no agent to start")
        task = spec.task
        content = await trio.to_thread.run_sync(session_input, task) if has_local_images(task) else task.session_input()
        with boundary(AgentLaunchError, f"session {spec.place}: its IO directory could not be made", OSError):
            io = await SessionIO.make(self._temp_root, spec.place, content)
        has_failed = False
        try:
            env = agent_environment(self._parent_env, config=self._config, spec=spec, io_dir=io.path)
            warm_parent = await self._warm_parent.living() if self._warm_parent is not None else None
            async with AsyncExitStack() as stack:
                with boundary(AgentLaunchError, f"session {spec.place}: its agent could not be started", OSError):
                    child = await stack.enter_async_context(
                        self._warden.process(
                            argv=self._argv if self._warm_parent is None else self._warm_parent.command,
                            cwd=self._config.agent_cwd,
                            env=env,
                            log_path=io.log_path,
                            name=f"agent {spec.place}",
                            term_grace_s=self._config.agent_term_grace,
                            log_bytes=self._config.agent_log_bytes,
                            warm_parent=warm_parent,
                        )
                    )
                agent = _ProcessAgent(spec, io, child, self._unknown_keys, trio.current_time())
                try:
                    yield agent
                finally:
                    has_failed = agent.has_failed
        finally:
            with cleanup_scope(DIRECTORY_S, f"IO directory of session {spec.place}"):
                await self._settle_directory(io, has_failed)

    async def _settle_directory(self, io: SessionIO, has_failed: bool) -> None:
        policy = self._config.keep_session_dirs
        if policy == "always" or (policy == "failed" and has_failed):
            kept = await io.keep(self._keep_dir)
            if kept is not None:
                emit("session_dir.kept", place=io.place, path=str(kept))
        else:
            await io.remove()


@define(eq=False)
class _ProcessAgent:
    """`AgentHandle` of a real agent."""

    _spec: AgentSpec
    _io: SessionIO
    _child: Child
    _unknown_keys: UnknownKeys
    _started_s: float
    has_failed: bool = False

    @property
    def pid(self) -> int:
        """See `AgentHandle.pid`."""
        return self._child.pid

    @property
    def io_dir(self) -> Path:
        """See `AgentHandle.io_dir`."""
        return self._io.path

    async def wait(self) -> None:
        """See `AgentHandle.wait`."""
        status = await self._child.wait_exit()
        if status.returncode != 0:
            self.has_failed = True
            seconds = trio.current_time() - self._started_s
            raise AgentExecutionError(
                f"session {self._spec.place}: the agent ended with {describe_exit(status)} after {seconds:.1f} s",
                exit_code=status.returncode,
                tail=self.log_tail(),
            )

    async def read_output(self) -> SessionOutput:
        """See `AgentHandle.read_output`."""
        try:
            parsed = await self._io.read_output(lambda data: parse_session_output(data, place=self._spec.place))
        except AgentOutputError as exc:
            self.has_failed = True
            raise AgentOutputError(str(exc), tail=self.log_tail()) from exc
        self._unknown_keys.warn(parsed.unknown_keys, self._spec.place)
        return parsed.output

    def log_tail(self) -> str:
        """See `AgentHandle.log_tail`; the agent's credential is blotted out."""
        return self._io.log_tail(secret=self._spec.credential)

    def mark_failed(self) -> None:
        """See `AgentHandle.mark_failed`."""
        self.has_failed = True


def describe_exit(status: ExitStatus) -> str:
    """`status` in words, with what a shell's code above 128 stands for."""
    if status.code is not None and 128 < status.code < 160:
        return f"{status} (a shell's word for {ExitStatus(signal=status.code - 128)})"
    return str(status)
