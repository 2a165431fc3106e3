"""The root of the tree: services outlive the work that cleans up through them, and one place ends it all.

engine
├─ services: warden, backend, http server, signals   (stopped in reverse order, after the work)
└─ work: what the block inside `open_engine` does within `engine.work_scope`
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field

from relax_trio.agent.launcher import ProcessAgentLauncher
from relax_trio.api.app import make_app
from relax_trio.api.serve import ApiServer
from relax_trio.backend.base import Backend
from relax_trio.config.tree import Config
from relax_trio.events import emit
from relax_trio.runtime.directory import SessionTable
from relax_trio.runtime.shared import Shared
from relax_trio.sync.cpu import CpuPool
from relax_trio.sync.process import Warden
from relax_trio.sync.services import Services
from relax_trio.tokens.codec import ChatCodec

MAX_INFLIGHT_ATTEMPTS = 1024
HURRIED_EXIT_S = 10.0


@define(eq=False, kw_only=True)
class Engine:
    """The running services and what Sessions share.

    Attributes:
      shared: what every Session gets.
      work_scope: the scope of all work; the engine alone cancels it, when it is told to stop.
      operator_token: opens the operator's views.
      stopped_by: the signal that stopped the run, None while nothing did.
    """

    shared: Shared
    warden: Warden
    operator_token: str
    work_scope: trio.CancelScope = field(factory=trio.CancelScope)
    stopped_by: signal.Signals | None = None

    def stop(self, by: signal.Signals) -> None:
        """End the work gracefully: agents first, then the services."""
        self.stopped_by = by
        self.shared.sessions.closing = True
        self.work_scope.cancel(reason=f"{by.name}")
        emit("run.stopping", signal=by.name)

    async def watch_signals(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stop gracefully on the first SIGINT or SIGTERM; on the second, kill what is left and exit at once."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            task_status.started()
            async for number in received:
                if self.stopped_by is None:
                    self.stop(signal.Signals(number))
                    continue
                emit("run.hurried", signal=signal.Signals(number).name)
                with trio.move_on_after(HURRIED_EXIT_S):
                    await self.warden.kill_all()
                os._exit(128 + number)


@asynccontextmanager
async def open_engine(
    config: Config, *, backend: Backend, codec: ChatCodec, cpu: CpuPool, run_dir: Path
) -> AsyncIterator[Engine]:
    """Start the services, own them for the length of the block, stop them in reverse order.

    Raises (on entering):
      ConfigError: the port is in use.
      EngineFault: a service failed to start.

    Cancellation: the block is left; every process is gone and the temporary directory removed afterwards.
    """
    temp_root = Path(tempfile.mkdtemp(prefix="relax-trio-"))
    try:
        async with Services.open() as services:
            warden = Warden()
            await services.start(warden.run, name="warden")
            await services.start(backend.run, name="backend")
            sessions = SessionTable()
            operator_token = secrets.token_urlsafe(24)
            app = make_app(sessions, config=config.server, operator_token=operator_token, cpu=cpu)
            base_url = await services.start(ApiServer(app, config.server).run, name="http server")
            launcher = ProcessAgentLauncher(warden, config.agent, run_dir=run_dir, temp_root=temp_root)
            shared = _shared(config, backend, codec, launcher, cpu, sessions, base_url)
            engine = Engine(shared=shared, warden=warden, operator_token=operator_token)
            await services.start(engine.watch_signals, name="signals")
            emit("engine.started", url=base_url)
            try:
                yield engine
            finally:
                sessions.closing = True
    finally:
        shutil.rmtree(temp_root, ignore_errors=True)


def _shared(
    config: Config,
    backend: Backend,
    codec: ChatCodec,
    launcher: ProcessAgentLauncher,
    cpu: CpuPool,
    sessions: SessionTable,
    base_url: str,
) -> Shared:
    return Shared(
        backend=backend,
        codec=codec,
        launcher=launcher,
        cpu=cpu,
        sessions=sessions,
        base_url=base_url,
        attempt_permits=trio.CapacityLimiter(MAX_INFLIGHT_ATTEMPTS),
        retry_grace_s=config.server.agentic_retry_grace,
        agent_timeout_s=config.agent.agent_timeout,
        unechoed_reasoning="restore" if config.rollout.agentic_unechoed_reasoning == "restore" else "fork",
        dedup_shared_turns=config.rollout.dedup_shared_turns,
    )
