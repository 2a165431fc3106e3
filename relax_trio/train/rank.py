"""One trainer process: takes commands from the engine, and carries them out together with its team.

    python -m relax_trio.train.rank NAME RANK N

Commands and replies are pickled tuples behind their length; each process gets every command and answers it once. All
that may differ between processes is who has which rows. Ends when the engine closes the socket.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.device_mesh import init_device_mesh

from relax_trio.data.json import JsonObject
from relax_trio.data.sample import Sample
from relax_trio.errors import ConfigError, TrainError
from relax_trio.train.commands import LENGTH, Done, Failed, Job
from relax_trio.train.opening import open_updater
from relax_trio.train.phase import OpenPhase, run_phase
from relax_trio.train.resume import read_companions, save_updater
from relax_trio.train.stats import PhaseResult
from relax_trio.train.team import ALONE, Team
from relax_trio.train.update import Updater
from relax_trio.train.weights import write_source


class _Stopped(Exception):
    """The engine wants the phase given up."""


class _Engine:
    """The engine's end of the socket, seen from here."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> tuple[Any, ...] | None:
        """The next command; None once the engine is gone."""
        head = self._exactly(LENGTH.size)
        body = None if head is None else self._exactly(LENGTH.unpack(head)[0])
        if body is None:
            return None
        command: tuple[Any, ...] = pickle.loads(body)
        return command

    def send(self, reply: object) -> None:
        body = pickle.dumps(reply)
        self._connection.sendall(LENGTH.pack(len(body)) + body)

    def wants_stop(self) -> bool:
        """Whether a command came in while one is carried out: that can only be the one to stop."""
        readable, _, _ = select.select([self._connection], [], [], 0)
        return bool(readable)

    def _exactly(self, n: int) -> bytes | None:
        parts = []
        while n:
            part = self._connection.recv(min(n, 1 << 20))
            if not part:
                return None
            parts.append(part)
            n -= len(part)
        return b"".join(parts)


class _Rank:
    """A process of the team between its first command and its last."""

    def __init__(self, engine: _Engine, updater: Updater, job: Job) -> None:
        self._engine = engine
        self._updater = updater
        self._job = job
        self._companions = read_companions(job.resume or job.hf_checkpoint)
        self._opened: OpenPhase | None = None
        self._n_published = 0

    def serve(self) -> None:
        """Carry out commands until the engine is gone."""
        commands: dict[str, Callable[..., Any]] = {
            "step": self.step,
            "open": self.open,
            "consume": self.consume,
            "finish": self.finish,
            "give_up": self.give_up,
            "save": self.save,
        }
        while (command := self._engine.receive()) is not None:
            name, *args = command
            if name != "stop":  # it came too late: the command it was for has ended
                self._engine.send(self._carry_out(commands[name], args))

    def step(self, samples: Sequence[Sample]) -> PhaseResult:
        return run_phase(self._updater, samples, self._check_stop)

    def open(self) -> None:
        self._opened = OpenPhase(self._updater)

    def consume(self, samples: Sequence[Sample]) -> None:
        self._phase.consume(samples, self._check_stop)

    def finish(self) -> PhaseResult:
        return self._phase.finish()

    def give_up(self) -> None:
        self._phase.give_up()

    def save(self, directory: Path, state: JsonObject) -> Path:
        return save_updater(self._updater, self._companions, directory, state)

    def publish(self) -> Path | None:
        """Write the weights of now for the engine, who removes the file."""
        if self._updater.team.rank:
            return None
        self._n_published += 1
        path = self._job.scratch / f"weights-{self._n_published}.safetensors"
        write_source(self._updater.weights, path)
        return path

    @property
    def _phase(self) -> OpenPhase:
        assert self._opened is not None, "a phase is opened first"
        return self._opened

    def _carry_out(self, command: Callable[..., Any], args: Sequence[Any]) -> Done | Failed:
        before = self._updater.n_phases
        try:
            value = command(*args)
        except _Stopped:
            return Failed("stopped", "", self._updater.n_phases)
        except TrainError as exc:
            return Failed("train", str(exc), self._updater.n_phases)
        except (RuntimeError, IndexError) as exc:  # what torch raises for want of memory, or over odd rows
            return Failed("train", f"{type(exc).__name__}: {exc}", self._updater.n_phases)
        weights = self.publish() if self._updater.n_phases != before else None
        return Done(None if self._updater.team.rank else value, self._updater.n_phases, weights)

    def _check_stop(self) -> None:
        """Ask the first process whether the engine wants to stop: all have to stop at the same place, or none."""
        wants = torch.tensor([int(self._updater.team.rank == 0 and self._engine.wants_stop())])
        if self._updater.team.n > 1:
            dist.broadcast(wants, src=0)
        if wants.item():
            raise _Stopped


def main(name: str, rank: int, n: int) -> None:
    """Connect to the engine's socket of that name, join the team, load, serve."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect("\0" + name)
        engine = _Engine(connection)
        engine.send(rank)
        first = engine.receive()
        if first is None:
            return
        job: Job = first[0]
        try:
            team, device = _join(job.scratch, rank, n)
            torch.manual_seed(job.seed)
            updater = open_updater(evolve(job.settings, device=device), job.hf_checkpoint, job.resume, team)
            served = _Rank(engine, updater, job)
        except ConfigError as exc:
            engine.send(Failed("config", str(exc), 0))
            return
        engine.send(Done(None, updater.n_phases, served.publish()))
        served.serve()
        if n > 1:
            dist.destroy_process_group()


def _join(scratch: Path, rank: int, n: int) -> tuple[Team, torch.device]:
    """Meet the other processes; one GPU each, or the CPU's cores divided.

    Raises:
      ConfigError: there are GPUs, but too few.
    """
    n_gpus = torch.cuda.device_count()
    if 0 < n_gpus < n:
        raise ConfigError(f"--trainer-processes {n}: there are {n_gpus} GPUs, and each process needs one")
    device = torch.device("cuda", rank) if n_gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // n))
    if n == 1:
        return ALONE, device
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=(scratch / "meeting").as_uri(), rank=rank, world_size=n)
    return Team(rank, n, init_device_mesh(device.type, (n,))), device


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
