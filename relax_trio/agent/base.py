"""The seam between a Session and its agent process."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol

from attrs import field, frozen

from relax_trio.data.record import SessionOutput
from relax_trio.data.task import TaskInput
from relax_trio.ids import Credential, GroupId, PlaceId


@frozen(kw_only=True)
class AgentSpec:
    """What one agent process is started with.

    Attributes:
      place: public name, for errors and titles.
      group: value of RELAX_GROUP_ID.
      credential: value of RELAX_SESSION_ID.
      base_url: value of RELAX_BASE_URL.
      mode: value of RELAX_ROLLOUT_MODE.
      task: content of `session_input.json`.
    """

    place: PlaceId
    group: GroupId
    credential: Credential = field(repr=False)
    base_url: str
    mode: Literal["train", "eval"]
    task: TaskInput


class AgentHandle(Protocol):
    """A started agent. Owned by the `open_agent` block that made it."""

    @property
    def pid(self) -> int:
        """Process id of the leader (0 for a fake)."""
        ...

    @property
    def io_dir(self) -> Path:
        """The Session's IO directory; exists until the block is left."""
        ...

    async def wait(self) -> None:
        """Wait until the agent is done: returns on exit status 0.

        Raises:
          AgentExecutionError: other exit status or signal, with the tail of run.log.

        Cancellation: safe; the process goes on until the block is left.
        """
        ...

    async def read_output(self) -> SessionOutput:
        """Parse `session_output.json`; call it after `wait` returned.

        Raises:
          AgentOutputError: unreadable; says which record and why.
        """
        ...

    def log_tail(self) -> str:
        """The last 8 KiB of run.log, for an error message."""
        ...

    def mark_failed(self) -> None:
        """The Session failed: `--keep-session-dirs failed` keeps its directory when the block is left."""
        ...


class AgentLauncher(Protocol):
    """Starts agents."""

    def open(self, spec: AgentSpec) -> AbstractAsyncContextManager[AgentHandle]:
        """Own one agent process for the length of an `async with` block.

        Raises (on entering):
          AgentLaunchError: the directory or the process could not be made.

        Leaving the block, for whatever reason, ends the whole process tree (SIGTERM, grace, SIGKILL), waits until no
        member is left, then moves or removes the IO directory. That clean-up is shielded and bounded.
        """
        ...
