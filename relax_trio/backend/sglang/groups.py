"""Weights by broadcast: this process and the ranks of one server in a process group of torch, one group a server.

Rank 0 is this process. Each part is said twice: over HTTP, so that the server receives, and in the group, by a worker
thread. A server on GPUs is reached by NCCL, one on the CPU by Gloo. A group ends with its server; a server that was
started again gets a new one.

torch's calls block and can't be interrupted, so the thread never waits inside one where it need not: it looks whether
the group was given up. When a server is lost or refuses, or the run is cancelled, it is left alone and ends by itself:
while a group forms, because the store that ranks meet at is gone; while it broadcasts, at its next look. What torch has
begun by then ends when the peer's connection does, or after `GROUP_S`. Nothing waits for it, nor does the run's end.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import trio
from attrs import define

from relax_trio.backend.sglang.fleet import Server
from relax_trio.backend.sglang.names import new_name
from relax_trio.errors import BackendError, BackendUnavailable, ConfigError, boundary
from relax_trio.events import emit
from relax_trio.ids import WeightVersion

if TYPE_CHECKING:
    import torch

GROUP_S = 120.0
"""Bound of forming a group and of each broadcast."""

_POLL_S = 0.001
_N_THREADS = 16


@define(eq=False, kw_only=True)
class UpdateGroup:
    """The group with one server.

    Attributes:
      name: unique on the server.
      device: where tensors are broadcast from.
      address: of this machine, as the server reaches it.
      store: where the ranks meet; None once it is not needed any more.
      process_group: of torch; None until it is formed.
      is_broken: a call failed or was left alone; it is not used again.
    """

    name: str
    device: str
    address: str
    store: Any
    process_group: Any = None
    is_broken: bool = False
    _is_sending: bool = False

    def form(self, port: int, n_ranks: int) -> None:
        """Join the group as rank 0. Blocking, at most `GROUP_S`.

        Args:
          port: of the store.

        Raises:
          RuntimeError: torch's: not all ranks came, or the connection failed.
        """
        # type: ignore: torch's compiled part has them, of which its types don't tell
        from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

        world, kind, timeout = 1 + n_ranks, "cuda" if self.device != "cpu" else "cpu", timedelta(seconds=GROUP_S)
        # A client of its own, whose waits end with the store.
        client = TCPStore(self.address, port, world, is_master=False, timeout=timeout, wait_for_workers=False)
        # The keys of torch's own groups of one backend: the server's end is made by torch.
        store = PrefixStore(f"{kind}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, client)))
        if kind == "cpu":
            gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as above
            gloo._timeout = timeout
            gloo._devices = [ProcessGroupGloo.create_device(hostname=self.address)]
            self.process_group = ProcessGroupGloo(store, 0, world, gloo)
        else:
            from torch.distributed import ProcessGroupNCCL  # which a torch for the CPU does not have

            nccl = ProcessGroupNCCL.Options()
            # NCCL's watchdog ends this whole process when time is up; the deadline of `broadcast` comes first.
            nccl._timeout = timedelta(days=1)
            self.process_group = ProcessGroupNCCL(store, 0, world, nccl)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors to all ranks, in order. Blocking, at most `GROUP_S`.

        Raises:
          RuntimeError: a rank is gone, or did not take part in time, or the group was given up.
        """
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        deadline = monotonic() + GROUP_S
        self._is_sending = True
        here = [tensor.detach().to(self.device).contiguous() for tensor in tensors]
        for work in [self.process_group.broadcast([tensor], options) for tensor in here]:
            while not work.is_completed():
                if self.is_broken or monotonic() > deadline:
                    raise RuntimeError(f"the broadcast did not end within {GROUP_S:g} s")
                sleep(_POLL_S)
            work.wait()
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        self._is_sending = False

    def abort(self) -> None:
        """Use it no more. Idempotent."""
        if self.is_broken:
            return
        self.is_broken = True
        self.store = None
        if self.process_group is not None and self.device != "cpu":
            self.process_group.abort()
        elif self._is_sending:
            # Gloo can't abort, and its destructor waits for what has begun, at the end of the run at the latest.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.process_group))


class UpdateGroups:
    """A run's groups, one with each server that was sent something; see the module."""

    def __init__(self) -> None:
        self._groups: dict[Server, UpdateGroup] = {}
        self._limiter = trio.CapacityLimiter(_N_THREADS)

    async def send(self, server: Server, bucket: Sequence[tuple[str, torch.Tensor]], version: WeightVersion) -> None:
        """Broadcast named tensors to a server, which loads them. Its cache is not flushed by that.

        Raises:
          BackendUnavailable: the server is gone, or the group can't be formed or used within `GROUP_S`.
          BackendRejected: the server refuses.
          ConfigError: there is no GPU here, but the server runs on some.

        Cancellation: acts at once; the group is given up.
        """
        group = await self._group_with(server)
        client, names = server.client, [name for name, _ in bucket]
        tensors = [tensor for _, tensor in bucket]
        call = partial(
            client.receive_broadcast,
            names,
            [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            [tuple(tensor.shape) for tensor in tensors],
            group=group.name,
            version=version,
        )
        await self._both(server, group, call, partial(group.broadcast, tensors))

    async def close(self) -> None:
        """Have servers that live on forget their groups; failures are harmless.

        Cancellation: the rest is given up.
        """
        groups, self._groups = self._groups, {}
        for server, group in groups.items():
            if server.lost is None and not group.is_broken:
                try:
                    await server.client.leave_group(group.name)
                except BackendError as exc:
                    emit("group.close_failed", server=server.name, error=str(exc))
                await server.client.aclose()  # closed by its keeper before, and opened again by this
            group.abort()

    async def _group_with(self, server: Server) -> UpdateGroup:
        for gone in [other for other, group in self._groups.items() if other.lost is not None or group.is_broken]:
            self._groups.pop(gone).abort()
        if server not in self._groups:
            self._groups[server] = await self._form(server)
        return self._groups[server]

    async def _form(self, server: Server) -> UpdateGroup:
        device, world = sender_device(server), 1 + server.info.n_ranks
        address, store = await trio.to_thread.run_sync(_open_store, server.client.url, world, limiter=self._limiter)
        group, port = UpdateGroup(name=new_name(), device=device, address=address, store=store), store.port
        del store  # the group's is the only one, so that the ranks' waits end with it
        kind: Literal["gloo", "nccl"] = "gloo" if device == "cpu" else "nccl"
        call = partial(server.client.join_group, group.name, address, port, world, kind)
        await self._both(server, group, call, partial(group.form, port, server.info.n_ranks))
        return group

    async def _both(
        self, server: Server, group: UpdateGroup, call: Callable[[], Awaitable[None]], part: Callable[[], None]
    ) -> None:
        """Do both halves of a thing at once: the server's, by `call`, and this process's, by `part` in a thread.

        Where one fails, the other is left alone and the group given up.

        Raises:
          BackendError: of the call; or the server is gone, or torch failed.
        """
        failures: list[BackendError] = []
        done: list[str] = []

        async def ask(scope: trio.CancelScope) -> None:
            try:
                await call()
            except BackendError as exc:
                failures.append(exc)
                scope.cancel(reason=f"{server.name} takes no part")
            else:
                done.append("call")

        async def take_part(scope: trio.CancelScope) -> None:
            try:
                await trio.to_thread.run_sync(part, abandon_on_cancel=True, limiter=self._limiter)
            except RuntimeError as exc:
                failures.append(BackendUnavailable(f"{server.name}: broadcasting weights failed: {exc}"))
                scope.cancel(reason="this process takes no part")
            else:
                done.append("part")

        async def watch(scope: trio.CancelScope) -> None:
            await server.gone.wait()
            failures.append(BackendUnavailable(f"{server.name} is gone: {server.lost}"))
            scope.cancel(reason=f"{server.name} is gone")

        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(watch, watching.cancel_scope, name=f"{server.name}: loss")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, nursery.cancel_scope, name=f"{server.name}: its part")
                    nursery.start_soon(take_part, nursery.cancel_scope, name=f"{server.name}: our part")
                watching.cancel_scope.cancel(reason="both parts have ended")
        finally:
            if len(done) < 2:
                group.abort()
        if failures:
            raise failures[0]


def _open_store(url: str, world: int) -> tuple[str, Any]:
    """A store for the ranks of a group to meet, at an address and a free port that the server at `url` reaches."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # of torch's compiled part, which has no types

    address = address_towards(url)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    what = f"a weight update group for {url}"
    # torch by itself would listen on every interface
    with boundary(BackendUnavailable, what, RuntimeError, OSError), socket.socket(family) as bound:
        bound.bind((address, 0))
        bound.listen()
        return address, TCPStore(
            address,
            bound.getsockname()[1],
            world,
            is_master=True,
            timeout=timedelta(seconds=GROUP_S),
            wait_for_workers=False,
            master_listen_fd=os.dup(bound.fileno()),
        )


def require_group(server: Server) -> None:
    """Refuse a server whose ranks can't join a group.

    Raises:
      ConfigError: says why, and what to use.
    """
    info = server.info
    if info.n_replicas > 1 or info.n_stages > 1:
        raise ConfigError(
            f"{server.name} runs with --dp-size {info.n_replicas} and --pp-size {info.n_stages}; SGLang's weight "
            "update group takes tensor-parallel ranks only: use --sglang-weight-transfer disk"
        )
    sender_device(server)


def sender_device(server: Server) -> str:
    """Device that tensors for a server are broadcast from.

    Raises:
      ConfigError: the server is on GPUs, and there is none here.
    """
    import torch

    if server.info.device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{server.name} runs on {server.info.device}, but this process has no GPU to broadcast from; use "
            "--sglang-weight-transfer disk or tensor"
        )
    return f"cuda:{torch.cuda.current_device()}"


def address_towards(url: str) -> str:
    """Address of this machine that the server at `url` reaches it by: of the interface that packets there leave by.

    Raises:
      BackendUnavailable: there is no way there.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            address: str = probe.getsockname()[0]
    except OSError as exc:
        raise BackendUnavailable(f"{url}: can't be reached: {exc}") from exc
    return address
