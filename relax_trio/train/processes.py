"""The trainer of several processes, as the engine sees it: started by the warden, told what to do over sockets.

Each process gets every command and answers it; the first one's answer counts. A process that dies, or fails where the
others don't, ends the trainer: the rest would wait for it for ever. What they do together is team.py's, what each does
rank.py's.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from relax_trio.backend.base import WeightSource
from relax_trio.data.json import JsonObject
from relax_trio.data.sample import Sample
from relax_trio.errors import ConfigError, TrainError
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.sync.cleanup import MAX_CLEANUP_S, cleanup_scope
from relax_trio.sync.process import Child, Warden
from relax_trio.train.base import version_of
from relax_trio.train.commands import LENGTH, Done, Failed, Job
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.stats import PhaseResult
from relax_trio.train.weights import read_source

STRAGGLER_S = 30.0
"""How long the others may take to fail too, once one process has failed."""

_LOG_TAIL = 2000


@define(eq=False)
class _Link:
    """The connection to one process. What a cancelled call left half done, the next one goes on with.

    Attributes:
      rank: its number.
      child: its process.
      log_path: what it prints.
    """

    rank: int
    child: Child
    log_path: Path
    _socket: trio.socket.SocketType
    _unsent: bytes = b""
    _received: bytearray = field(factory=bytearray)

    def put(self, body: bytes) -> None:
        """Have one message sent by the next `flush`."""
        self._unsent += LENGTH.pack(len(body)) + body

    async def flush(self) -> None:
        """Send what was put, from where a cancelled call left off.

        Raises:
          TrainError: the process has ended.
        """
        try:
            while self._unsent:
                n = await self._socket.send(self._unsent)
                self._unsent = self._unsent[n:]
        except OSError as exc:
            raise TrainError(self.end_report()) from exc

    async def receive(self) -> Any:
        """The next message.

        Raises:
          TrainError: the process has ended.
        """
        while len(self._received) < LENGTH.size or len(self._received) < self._wanted:
            try:
                data = await self._socket.recv(1 << 20)
            except OSError as exc:
                raise TrainError(self.end_report()) from exc
            if not data:
                raise TrainError(self.end_report())
            self._received += data
        body = bytes(self._received[LENGTH.size : self._wanted])
        del self._received[: self._wanted]
        return pickle.loads(body)

    def close(self) -> None:
        """Let the process end."""
        self._socket.close()

    def end_report(self) -> str:
        """How it ended, as far as is known, with the end of its log."""
        status = "" if self.child.exit_status is None else f" with {self.child.exit_status}"
        return f"trainer process {self.rank} ended{status}; the end of its log follows\n{_log_tail(self.log_path)}"

    @property
    def _wanted(self) -> int:
        return LENGTH.size + int(LENGTH.unpack(self._received[: LENGTH.size])[0])


class ProcessTrainer:
    """`Trainer` over child processes; made by `open_process_trainer`."""

    def __init__(self, links: Sequence[_Link]) -> None:
        """Take over connections to processes that have not been told anything yet."""
        self._links = links
        self._n_phases = 0
        self._weights = WeightSource(tensors={})
        self._broken: str | None = None

    @property
    def weight_version(self) -> WeightVersion:
        """See `Trainer.weight_version`."""
        return version_of(self._n_phases)

    async def step(self, rollout_id: int, samples: Sequence[Sample]) -> dict[str, float]:
        """See `Trainer.step`. Cancellation: asked for between micro-batches; waits until all processes have stopped."""
        return _tell(rollout_id, await self._ask("step", list(samples)))

    @asynccontextmanager
    async def phase(self, rollout_id: int) -> AsyncIterator[ProcessPhase]:
        """See `Trainer.phase`. Cancellation: as in `step`; undoing is shielded."""
        await self._ask("open")
        phase = ProcessPhase(self)
        try:
            yield phase
            assert phase.is_whole, "a phase whose consume was cancelled or failed has to be left by that exception"
            result = await self._ask("finish")
        except BaseException:  # a cancellation, too: whatever leaves a phase early, it is undone
            if self._broken is None:
                with cleanup_scope(MAX_CLEANUP_S, f"optimizer phase of rollout step {rollout_id}"):
                    await self._ask("give_up")
            raise
        phase.result = _tell(rollout_id, result)

    def weights(self) -> WeightSource:
        """See `Trainer.weights`."""
        return self._weights

    async def save(self, directory: Path, state: JsonObject) -> Path:
        """See `Trainer.save`. Cancellation: once begun, waits for the writing."""
        path: Path = await self._ask("save", directory, state)
        emit("checkpoint.saved", version=self.weight_version, path=str(path))
        return path

    async def begin(self, job: Job) -> None:
        """Have the processes load what they train.

        Raises:
          ConfigError: a checkpoint that is none, or too few GPUs.
          TrainError: a process died.
        """
        await self._ask(job)

    async def _ask(self, *command: object) -> Any:
        """Have all processes carry out a command; returns what it gave.

        Cancellation: the processes are told to stop, and waited for; they have stopped, or carried it out.
        """
        if self._broken is not None:
            raise TrainError(f"the trainer has failed before: {self._broken}")
        body = pickle.dumps(command)
        for link in self._links:
            link.put(body)
        try:
            for link in self._links:
                await link.flush()
            replies = await self._replies()
        except trio.Cancelled:
            await self._stop()
            raise
        return self._value(replies)

    async def _stop(self) -> None:
        """After a cancelled command: have it given up, and take note of what came of it."""
        self._broken = "its processes did not stop in time"
        with cleanup_scope(MAX_CLEANUP_S, "trainer processes"):
            self._links[0].put(pickle.dumps(("stop",)))
            try:
                for link in self._links:
                    await link.flush()
                replies = await self._replies()
            except TrainError as exc:
                self._broken = str(exc)
            else:
                self._broken = None
                self._note(replies)

    async def _replies(self) -> list[Done | Failed]:
        """One reply of each process.

        Raises:
          TrainError: a process died, or failed where another didn't; the trainer is broken.
        """
        replies: dict[int, Done | Failed] = {}
        died: list[TrainError] = []

        async def take(link: _Link, scope: trio.CancelScope) -> None:
            try:
                replies[link.rank] = reply = await link.receive()
            except TrainError as exc:
                died.append(exc)
                scope.cancel(reason="a trainer process ended")
                return
            if isinstance(reply, Failed):
                scope.deadline = min(scope.deadline, trio.current_time() + STRAGGLER_S)

        async with trio.open_nursery() as nursery:
            for link in self._links:
                nursery.start_soon(take, link, nursery.cancel_scope, name=f"reply of trainer process {link.rank}")
        if died or len(replies) < len(self._links):
            failure = next((reply.message for reply in replies.values() if isinstance(reply, Failed)), "")
            self._broken = str(died[0]) if died else failure
            raise TrainError(self._broken + (f"\n{failure}" if died and failure else ""))
        return [replies[link.rank] for link in self._links]

    def _value(self, replies: Sequence[Done | Failed]) -> Any:
        self._note(replies)
        failed = next((reply for reply in replies if isinstance(reply, Failed)), None)
        if failed is not None:
            raise ConfigError(failed.message) if failed.kind == "config" else TrainError(failed.message)
        first = replies[0]
        assert isinstance(first, Done), "what hasn't failed is done"
        return first.value

    def _note(self, replies: Sequence[Done | Failed]) -> None:
        """Take over version and weights."""
        if len({type(reply) for reply in replies}) > 1 or len({reply.n_phases for reply in replies}) > 1:
            self._broken = "its processes are no longer of one mind"
            raise TrainError(next(reply.message for reply in replies if isinstance(reply, Failed)))
        first = replies[0]
        self._n_phases = first.n_phases
        if isinstance(first, Done) and first.weights is not None:
            self._weights = read_source(first.weights)
            first.weights.unlink()  # what was loaded stays readable


@define(eq=False)
class ProcessPhase:
    """`Phase` of a `ProcessTrainer`.

    Attributes:
      is_whole: every call so far has ended in order.
      result: metrics, once the block was left in order.
    """

    _trainer: ProcessTrainer
    is_whole: bool = field(default=True, init=False)
    result: dict[str, float] | None = field(default=None, init=False)

    async def consume(self, samples: Sequence[Sample]) -> None:
        """See `Phase.consume`."""
        assert self.is_whole, "a phase whose consume was cancelled or failed takes no rows"
        self.is_whole = False
        await self._trainer._ask("consume", list(samples))
        self.is_whole = True

    @property
    def metrics(self) -> dict[str, float]:
        """See `Phase.metrics`."""
        assert self.result is not None, "metrics of a phase that has not ended in order"
        return self.result


@asynccontextmanager
async def open_process_trainer(
    settings: TrainerSettings,
    hf_checkpoint: Path,
    *,
    n: int,
    warden: Warden,
    run_dir: Path,
    temp_root: Path,
    seed: int,
    resume: Path | None = None,
) -> AsyncIterator[ProcessTrainer]:
    """Own `n` trainer processes for the length of the block.

    Args:
      settings, hf_checkpoint, resume: as for `trainer.open_trainer`.
      n: processes.
      warden: starts and ends them.
      run_dir: gets what they print, as `trainer-R.log`.
      temp_root: where the processes meet and hand over weights.
      seed: of torch in each of them.

    Raises (on entering):
      ConfigError: see `open_trainer`.
      TrainError: a process died.

    Cancellation: the processes are ended.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-", dir=temp_root) as home:
        scratch = Path(home)
        async with AsyncExitStack() as stack:
            links = await _start(stack, n, warden, run_dir)
            trainer = ProcessTrainer(links)
            job = Job(settings=settings, hf_checkpoint=hf_checkpoint, resume=resume, scratch=scratch, seed=seed)
            await trainer.begin(job)
            yield trainer


async def _start(stack: AsyncExitStack, n: int, warden: Warden, run_dir: Path) -> list[_Link]:
    """Start the processes and wait until each has connected; nobody else is let in."""
    # A name without a file: a path in a deep directory is longer than a socket's may be.
    name = f"relax-trio-trainer-{secrets.token_hex(8)}"
    logs = [run_dir / f"trainer-{rank}.log" for rank in range(n)]
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        await listener.bind("\0" + name)
        listener.listen(n)
        children = []
        for rank, log_path in enumerate(logs):
            argv = [sys.executable, "-m", "relax_trio.train.rank", name, str(rank), str(n)]
            process = warden.process(
                argv=argv, cwd=Path.cwd(), env=_environment(os.environ), log_path=log_path, name=f"trainer-{rank}"
            )
            children.append(await stack.enter_async_context(process))
        links: dict[int, _Link] = {}
        async with trio.open_nursery() as nursery:
            for rank, child in enumerate(children):
                nursery.start_soon(_watch, rank, child, logs[rank], links)
            while len(links) < n:
                connection, _ = await listener.accept()
                pid = _peer_pid(connection)
                rank = next((rank for rank, child in enumerate(children) if child.pid == pid), -1)
                if rank < 0:
                    connection.close()
                    continue
                link = links[rank] = _Link(rank, children[rank], logs[rank], connection)
                stack.callback(link.close)
                await link.receive()
            nursery.cancel_scope.cancel(reason="all trainer processes have connected")
    return [links[rank] for rank in range(n)]


async def _watch(rank: int, child: Child, log_path: Path, links: Mapping[int, _Link]) -> None:
    """Raise when a process ends before it has connected."""
    await child.wait_exit()
    if rank not in links:
        raise TrainError(
            f"trainer process {rank} ended with {child.exit_status} before it was ready\n{_log_tail(log_path)}"
        )


def _log_tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
    except OSError as exc:
        return f"({exc})"


def _peer_pid(connection: trio.socket.SocketType) -> int:
    """Process at the other end of a Unix socket."""
    return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Ours, as Python needs it to find this package again."""
    return {**env, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _tell(rollout_id: int, result: PhaseResult) -> dict[str, float]:
    """The metrics of a completed phase; its skipped optimizer steps are told as events."""
    for optimizer_step in result.skipped:
        emit("optimizer_step.skipped", rollout=rollout_id, step=optimizer_step, reason="gradient is not finite")
    return result.metrics
