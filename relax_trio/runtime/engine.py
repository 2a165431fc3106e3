"""The root of the tree: services outlive the work that cleans up through them, and one place ends it all.

engine
├─ services: warden, backend, http server   (stopped in reverse order, after the work)
└─ work: what the block inside `open_engine` does
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio
from attrs import frozen

from relax_trio.agent.launcher import ProcessAgentLauncher
from relax_trio.api.app import make_app
from relax_trio.api.serve import ApiServer
from relax_trio.backend.admission import Admission
from relax_trio.backend.base import Backend
from relax_trio.config.tree import Config
from relax_trio.events import emit
from relax_trio.runtime.directory import SessionTable
from relax_trio.runtime.shared import Shared
from relax_trio.runtime.stop import Stop
from relax_trio.sync.cpu import CpuPool
from relax_trio.sync.process import STOP_S, Warden
from relax_trio.sync.services import Services
from relax_trio.tokens.codec import ChatCodec

MAX_INFLIGHT_ATTEMPTS = 1024


@frozen(kw_only=True)
class Engine:
    """The running services.

    Attributes:
      shared: what every Session gets.
      operator_token: opens the operator's views.
      warden: starts and ends processes.
      temp_root: removed when the engine has ended.
    """

    shared: Shared
    operator_token: str
    warden: Warden
    temp_root: Path


@asynccontextmanager
async def open_engine(
    config: Config,
    *,
    stop: Stop,
    backend: Backend,
    codec: ChatCodec,
    cpu: CpuPool,
    run_dir: Path,
    warden: Warden | None = None,
    admission: Admission | None = None,
) -> AsyncIterator[Engine]:
    """Start the services, own them for the length of the block, stop them in reverse order.

    Args:
      stop: is told whom to ask to kill every process.
      run_dir: where directories of Sessions are kept.
      warden: owner of processes, not started yet, where the backend has some.
      admission: of attempts to that backend, not started yet; None: off.

    Raises (on entering):
      ConfigError: the port is in use, or a module of `--agent-preload` cannot be preloaded.
      EngineFault: a service failed to start.

    Cancellation: the block is left; every process is gone and the temporary directory removed afterwards.
    """
    temp_root = Path(tempfile.mkdtemp(prefix="relax-trio-"))
    try:
        async with Services.open() as services:
            warden = warden or Warden()
            await services.start(warden.run, name="warden", stop_s=STOP_S)
            stop.killer, stop.temp_root = warden, temp_root
            await services.start(backend.run, name="backend")
            if admission is not None:
                await services.start(admission.run, name="admission")
            sessions = SessionTable(lambda: stop.stopped_by is not None)
            operator_token = secrets.token_urlsafe(24)
            app = make_app(
                sessions,
                config=config.server,
                operator_token=operator_token,
                cpu=cpu,
                template_variables=codec.template.variables,
            )
            base_url = await services.start(ApiServer(app, config.server).run, name="http server")
            launcher = ProcessAgentLauncher(warden, config.agent, run_dir=run_dir, temp_root=temp_root)
            await services.start(partial(launcher.keep_warm, base_url), name="warm parent", stop_s=STOP_S)
            shared = _shared(config, backend, codec, launcher, cpu, sessions, base_url, admission)
            emit("engine.started", url=base_url)
            yield Engine(shared=shared, operator_token=operator_token, warden=warden, temp_root=temp_root)
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
    admission: Admission | None,
) -> Shared:
    return Shared(
        backend=backend,
        codec=codec,
        launcher=launcher,
        cpu=cpu,
        sessions=sessions,
        base_url=base_url,
        attempt_permits=trio.CapacityLimiter(MAX_INFLIGHT_ATTEMPTS),
        admission=admission,
        retry_grace_s=config.server.agentic_retry_grace,
        agent_timeout_s=config.agent.agent_timeout,
        abort_grace_s=config.rollout.agentic_abort_grace,
        unechoed_reasoning="restore" if config.rollout.agentic_unechoed_reasoning == "restore" else "fork",
        dedup_shared_turns=config.rollout.dedup_shared_turns,
    )
