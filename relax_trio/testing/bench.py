"""A run over fakes: the runtime's own tree, with a fake backend, fake agents and no HTTP, for the virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio
from attrs import define, field

from relax_trio.agent.fake import AgentFunction, FakeAgentLauncher
from relax_trio.backend.admission import Admission
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.namespace import hook_args
from relax_trio.config.tree import Config, RewardConfig, RolloutConfig
from relax_trio.data.rows import RowStream
from relax_trio.data.task import TaskInput
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.directory import SessionTable
from relax_trio.runtime.session import Session
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.work import Work
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.sync.services import Services
from relax_trio.testing.client import FakeClient, user
from relax_trio.testing.codec import byte_codec, turn

LIMITS = TurnLimits(temperature=1.0, max_response_len=64, max_context_len=1024)
"""Of turns, unless a scenario has its own."""


class KnownSessions(SessionTable):
    """A directory that remembers who has been in it.

    Attributes:
      seen: every Session so far, in order of opening.
      open: those that are reachable.
    """

    def __init__(self, bench: Bench) -> None:
        super().__init__(lambda: bench.is_stopping)
        self.seen: list[Session] = []
        self.open: list[Session] = []

    @contextmanager
    def listed(self, session: Session) -> Iterator[None]:
        """See `SessionTable`."""
        self.seen.append(session)
        self.open.append(session)
        try:
            with super().listed(session):
                yield
        finally:
            self.open.remove(session)


@define(eq=False)
class Bench:
    """One run over fakes.

    Attributes:
      engine_scope: around the whole run; whoever runs a scenario enters it.
      work_scope: around the work, inside the services.
      end_s: how long the end of whatever is ended may take: the time that ending an agent takes.
      is_stopping: new requests are refused, as after a signal.
      backend, launcher, shared: of the open engine; None before.
      work: opened in it; at most one in a run.
      is_work_closed: every Group is accounted for.
    """

    engine_scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    work_scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    is_stopping: bool = field(default=False, init=False)
    end_s: float = field(default=0.0, init=False)
    sessions: KnownSessions = field(init=False)
    client: FakeClient = field(init=False)
    backend: FakeBackend | None = field(default=None, init=False)
    launcher: FakeAgentLauncher | None = field(default=None, init=False)
    shared: Shared | None = field(default=None, init=False)
    work: Work | None = field(default=None, init=False)
    is_work_closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.sessions = KnownSessions(self)
        self.client = FakeClient(self.sessions)

    @asynccontextmanager
    async def engine(
        self,
        agent: AgentFunction,
        *,
        backend: FakeBackend | None = None,
        start_s: float = 0.0,
        end_s: float = 0.0,
        launch_errors: Sequence[str | None] = (),
        n_permits: int = 1024,
        admission: Admission | None = None,
        agent_timeout_s: float = 1800.0,
        abort_grace_s: float = 10.0,
        retry_grace_s: float = 5.0,
    ) -> AsyncIterator[Shared]:
        """Own the services for the length of the block.

        Args:
          agent: what every Session's agent does; its `client` is this bench's.
          backend: default: every turn says "ok", at one token (one letter) a second.
          start_s, end_s, launch_errors: see `FakeAgentLauncher`.
          n_permits: attempts on the backend at once.
          admission: of attempts, not started yet; its readings come from its own source.
          agent_timeout_s, abort_grace_s, retry_grace_s: see `Shared`.
        """
        self.end_s = end_s
        self.backend = backend or FakeBackend(lambda attempt: turn("ok"), tokens_per_s=1.0)
        self.launcher = FakeAgentLauncher(
            agent, client=self.client, start_s=start_s, end_s=end_s, launch_errors=launch_errors
        )
        self.shared = Shared(
            backend=self.backend,
            codec=byte_codec(),
            launcher=self.launcher,
            cpu=InlineCpuPool(),
            sessions=self.sessions,
            base_url="http://127.0.0.1:1/agentic_api",
            attempt_permits=trio.CapacityLimiter(n_permits),
            admission=admission,
            agent_timeout_s=agent_timeout_s,
            abort_grace_s=abort_grace_s,
            retry_grace_s=retry_grace_s,
        )
        async with Services.open() as services:
            await services.start(self.backend.run, name="backend")
            if admission is not None:
                await services.start(admission.run, name="admission")
            await services.start(self.client.run, name="front halves")
            yield self.shared

    @asynccontextmanager
    async def open_work(
        self,
        config: RolloutConfig,
        *,
        rows: Sequence[TaskInput] | int = 16,
        reward: RewardConfig | None = None,
        limits: TurnLimits = LIMITS,
        n_steps: int | None = None,
        data_parallel_size: int = 1,
    ) -> AsyncIterator[Work]:
        """Own the work for the length of the block, which is left early when the work is stopped.

        Args:
          rows: the dataset, or how many rows it has.
          reward: names the reward hook, which is called as in a real run; default: what agents export.
          n_steps, data_parallel_size: see `Work`.
        """
        assert self.shared is not None, "a work needs an engine around it"
        assert self.work is None, "a bench has one work"
        settings = Config(rollout=config, reward=reward or RewardConfig())
        self.work = Work(
            shared=self.shared,
            config=config,
            limits=limits,
            rows=RowStream(rows=make_rows(rows) if isinstance(rows, int) else rows, seed=1, shuffle=False),
            scorer=RewardScorer(settings.reward, hook_args(settings), InlineCpuPool()),
            n_steps=n_steps,
            data_parallel_size=data_parallel_size,
        )
        with self.work_scope:
            try:
                async with self.work.open():
                    yield self.work
            finally:
                self.is_work_closed = True

    def stop(self) -> None:
        """End the work, as the first Ctrl-C does. Plain."""
        self.is_stopping = True
        self.work_scope.cancel(reason="stop")


def make_rows(count: int) -> tuple[TaskInput, ...]:
    """Rows `q0`, `q1`, …, each with its number as metadata `row`."""
    return tuple(
        TaskInput(
            row=number,
            source=f"rows.jsonl:{number + 1}",
            prompt=f"q{number}",
            messages=(user(f"q{number}"),),
            metadata={"row": number},
        )
        for number in range(count)
    )
