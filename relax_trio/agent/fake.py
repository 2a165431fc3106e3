"""Agents that are async functions: the same contract as real ones, on any clock, without processes or files.

For lifecycle tests of the engine and of users' own hooks. Works under a virtual clock: no thread, no file.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import trio
from attrs import define, field, frozen

from relax_trio.agent.base import AgentHandle, AgentSpec
from relax_trio.agent.environment import agent_environment
from relax_trio.agent.output import UnknownKeys, parse_session_output
from relax_trio.agent.session_io import TAIL_BYTES
from relax_trio.config.tree import AgentConfig
from relax_trio.data.json import JsonObject, parse_json
from relax_trio.data.record import SessionOutput
from relax_trio.errors import AgentExecutionError, AgentLaunchError, AgentOutputError
from relax_trio.ids import PlaceId
from relax_trio.sync.cleanup import cleanup_scope


class AgentExit(Exception):
    """Raised by an agent function to exit at once with `code`; negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit {code}")
        self.code = code


@define(eq=False)
class FakeAgent:
    """What an agent function is given.

    Attributes:
      env: the environment a real agent would have (of an empty parent), the seven RELAX_ names included.
      session_input: content of `session_input.json`.
      client: whatever the launcher was given, e.g. something that submits requests to the Session.
      spec: what the Session started it with.
    """

    env: dict[str, str] = field(repr=False)
    session_input: JsonObject
    client: Any
    spec: AgentSpec
    output: bytes = b""
    log: str = ""

    def write_output(self, *records: JsonObject) -> None:
        """Write `session_output.json`: one object, or several as JSON Lines."""
        self.output = "\n".join(json.dumps(record) for record in records).encode()

    def print(self, text: str) -> None:
        """Append a line to run.log."""
        self.log += text + "\n"


@frozen(kw_only=True)
class FakeEnd:
    """How a fake agent's block was left."""

    place: PlaceId
    at_s: float
    exit_code: int | None
    has_failed: bool


AgentFunction = Callable[[FakeAgent], Awaitable[None]]


class FakeAgentLauncher:
    """`AgentLauncher` whose agents run `fn` in a task of their block.

    Attributes:
      started: places in the order of their start.
      ended: how each block was left, in that order.
      live: places whose block is open.
      n_opened: launches begun, those included that failed.
    """

    def __init__(
        self,
        fn: AgentFunction,
        *,
        client: Any = None,
        config: AgentConfig | None = None,
        start_s: float = 0.0,
        end_s: float = 0.0,
        launch_errors: Sequence[str | None] = (),
    ) -> None:
        """Make a launcher.

        Args:
          fn: the agent. Returning is exit 0, raising `AgentExit` any other, be it in a group of a nursery; another
            exception is a bug of the test and travels on as one. It is cancelled when its block is left.
          client: given to every agent as it is.
          config: flags that shape the environment.
          start_s: time from `open` to the agent's first step, in seconds.
          end_s: time that ending an agent takes, in seconds.
          launch_errors: for the first, second, … `open`: a text to fail with as AgentLaunchError, or None.
        """
        self._fn = fn
        self._client = client
        self._config = config or AgentConfig()
        self._start_s = start_s
        self._end_s = end_s
        self._launch_errors = list(launch_errors)
        self._unknown_keys = UnknownKeys()
        self.started: list[PlaceId] = []
        self.ended: list[FakeEnd] = []
        self.live: list[PlaceId] = []
        self.n_opened = 0
        self._handles: dict[PlaceId, _FakeHandle] = {}

    @property
    def running(self) -> list[PlaceId]:
        """Those of `live` whose agent has not exited."""
        return [place for place in self.live if self._handles[place].exit_code is None]

    def fail_next(self, error: str) -> None:
        """Let the next launch fail with `error` as AgentLaunchError, before those that were planned."""
        self._launch_errors.insert(0, error)

    def kill(self, place: PlaceId, code: int = -9) -> None:
        """Let a live agent exit with `code` where it stands. Unknown place, or exited already: nothing happens."""
        if place in self._handles:
            self._handles[place].kill(code)

    @asynccontextmanager
    async def open(self, spec: AgentSpec) -> AsyncIterator[AgentHandle]:
        """See `AgentLauncher.open`; what the block raises comes out bare, as from a real launcher."""
        self.n_opened += 1
        await trio.sleep(self._start_s)
        error = self._launch_errors.pop(0) if self._launch_errors else None
        if error is not None:
            raise AgentLaunchError(f"session {spec.place}: its agent could not be started: {error}")
        handle = self._make(spec)
        held = _Held()
        self.started.append(spec.place)
        self.live.append(spec.place)
        self._handles[spec.place] = handle
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(handle.run, self._fn, name=f"fake agent {spec.place}")
                with held:
                    yield handle
                nursery.cancel_scope.cancel(reason=f"end of agent {spec.place}")
        finally:
            if self._end_s > 0:
                with cleanup_scope(self._end_s + 1.0, f"fake agent {spec.place}"):
                    await trio.sleep(self._end_s)
            self.live.remove(spec.place)
            del self._handles[spec.place]
            self.ended.append(
                FakeEnd(
                    place=spec.place,
                    at_s=trio.current_time(),
                    exit_code=handle.exit_code,
                    has_failed=handle.has_failed,
                )
            )
        held.release()

    def _make(self, spec: AgentSpec) -> _FakeHandle:
        io_dir = Path("/fake") / spec.place.replace("/", "_")
        agent = FakeAgent(
            env=agent_environment({}, config=self._config, spec=spec, io_dir=io_dir),
            session_input=_through_json(spec.task.session_input()),
            client=self._client,
            spec=spec,
        )
        return _FakeHandle(agent, io_dir, self._unknown_keys)


@define(eq=False)
class _FakeHandle:
    """`AgentHandle` of a fake agent."""

    agent: FakeAgent
    io_dir: Path
    _unknown_keys: UnknownKeys
    exit_code: int | None = None
    has_failed: bool = False
    pid: int = 0
    _exited: trio.Event = field(factory=trio.Event)
    _life: trio.CancelScope = field(factory=trio.CancelScope)
    _killed_with: int | None = None

    async def run(self, fn: AgentFunction) -> None:
        """Run the agent function to its exit."""
        code = 0
        try:
            with self._life:
                await fn(self.agent)
        except AgentExit as exc:
            code = exc.code
        except BaseExceptionGroup as group:  # of a nursery in the agent function
            exits, rest = group.split(AgentExit)
            if exits is None:
                raise
            if rest is not None:
                raise rest from None  # a bug, or the end of the block in the same moment
            code = _first_exit(exits).code
        if self._life.cancelled_caught and self._killed_with is not None:
            code = self._killed_with
        self.exit_code = code
        self._exited.set()

    def kill(self, code: int) -> None:
        """Let the agent function end where it stands, with exit status `code`."""
        if self._killed_with is None:
            self._killed_with = code
            self._life.cancel(reason=f"agent {self.agent.spec.place} is killed: {_exit_words(code)}")

    async def wait(self) -> None:
        """See `AgentHandle.wait`."""
        await self._exited.wait()
        if self.exit_code != 0:
            self.has_failed = True
            raise AgentExecutionError(
                f"session {self.agent.spec.place}: the agent ended with {_exit_words(self.exit_code or 0)}",
                exit_code=self.exit_code,
                tail=self.log_tail(),
            )

    async def read_output(self) -> SessionOutput:
        """See `AgentHandle.read_output`."""
        await trio.lowlevel.checkpoint()
        try:
            parsed = parse_session_output(self.agent.output, place=self.agent.spec.place)
        except AgentOutputError as exc:
            self.has_failed = True
            raise AgentOutputError(str(exc), tail=self.log_tail()) from exc
        self._unknown_keys.warn(parsed.unknown_keys, self.agent.spec.place)
        return parsed.output

    def log_tail(self) -> str:
        """See `AgentHandle.log_tail`."""
        return self.agent.log.replace(self.agent.spec.credential, "<session id>")[-TAIL_BYTES:]

    def mark_failed(self) -> None:
        """See `AgentHandle.mark_failed`."""
        self.has_failed = True


class _Held:
    """Keeps what a block raises while its nursery closes, so that the nursery does not wrap it in a group."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._error = error
        return error is not None

    def release(self) -> None:
        """Raise it."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # no cycle through the traceback


def _first_exit(group: BaseExceptionGroup[AgentExit]) -> AgentExit:
    first = group.exceptions[0]
    return _first_exit(first) if isinstance(first, BaseExceptionGroup) else first


def _through_json(value: JsonObject) -> JsonObject:
    copy = parse_json(json.dumps(value))
    assert isinstance(copy, dict), "session input is an object"
    return copy


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
