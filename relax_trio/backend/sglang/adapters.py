"""Low-rank adapters on servers that keep the weights under them: one name a version, which every request carries.

A leg keeps the adapter that it was sent with until it ends, whatever is loaded meanwhile, and the server's prefix cache
knows adapters apart: so what an adapter's tokens are of is known by its name alone. The server is told the version too,
and its word is held against the name. Not covered: when an adapter is changed (exchange), how it is trained.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen
from safetensors import SafetensorError
from safetensors.torch import save_file

from relax_trio.backend.base import AdapterWeights
from relax_trio.backend.sglang.fleet import LoadedAdapter, Server
from relax_trio.backend.sglang.names import new_name
from relax_trio.backend.sglang.wire import Leg
from relax_trio.errors import (
    BackendError,
    BackendProtocolError,
    BackendRejected,
    ConfigError,
    WeightSyncError,
    boundary,
)
from relax_trio.events import emit
from relax_trio.ids import WeightVersion

Shapes = Mapping[str, tuple[int, ...]]

_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@frozen(kw_only=True)
class SavedAdapter:
    """An adapter as a directory in PEFT's layout."""

    version: WeightVersion
    path: Path


async def load_adapter(
    server: Server, version: WeightVersion, path: Path, adapter: AdapterWeights | None, serialized: str | None
) -> None:
    """Load an adapter under a new name, have answers tell its version, and name it in every request from here on.

    Args:
      path: its directory, which the server reads unless it is given `adapter` and its `serialized` tensors.

    Raises:
      BackendError: refused, or no answer.

    Cancellation: the server may have it without a use for it.
    """
    name = f"{new_name()}-{version}"  # this run, too, may load a version twice
    if adapter is None or serialized is None:
        await server.client.load_adapter(name, path)
    else:
        await server.client.load_adapter_tensors(name, adapter.config, serialized, server.info.n_ranks)
    old, server.adapter = server.adapter, LoadedAdapter(name=name, version=version)
    if old is not None:
        server.unused_adapters.append(old.name)
    await server.client.set_weight_version(version)


async def unload_unused(server: Server) -> None:
    """Have a server forget adapters that no leg names any more; one without an answer is tried again next time."""
    for name in tuple(server.unused_adapters):
        try:
            await server.client.unload_adapter(name)
        except BackendRejected as exc:  # e.g. it has been unloaded after all, when nobody waited for it any more
            emit("adapter.unload_failed", server=server.name, adapter=name, error=str(exc))
        except BackendError as exc:
            emit("adapter.unload_failed", server=server.name, adapter=name, error=str(exc))
            continue
        server.unused_adapters.remove(name)


def check_version(leg: Leg, adapter: LoadedAdapter | None, what: str) -> None:
    """Hold what a server says of a leg's tokens against the adapter that the leg named.

    Raises:
      BackendProtocolError: it names another version: somebody else changed it.
    """
    if adapter is None:
        return
    odd = next((span.version for span in leg.versions if span.version != adapter.version), None)
    if odd is not None:
        raise BackendProtocolError(f"{what}: its tokens are of adapter {adapter.version!r}, the server says {odd!r}")


def require_adapters(server: Server, rank: int) -> None:
    """Refuse a server that can't take an adapter of `rank`.

    Raises:
      ConfigError: says which flag it lacks.
    """
    limit = server.info.max_adapter_rank
    if limit is None:
        raise ConfigError(
            f"{server.name} takes no adapters: start it with --enable-lora --max-lora-rank {rank} "
            "--lora-target-modules all, or use --sglang-lora-transfer merged"
        )
    if limit < rank:
        raise ConfigError(
            f"{server.name} takes adapters up to rank {limit} (--max-lora-rank), but --lora-rank is {rank}"
        )
    if server.info.n_replicas > 1:
        raise ConfigError(
            f"{server.name} runs {server.info.n_replicas} data-parallel replicas (--dp-size), and SGLang gives these "
            "no adapters while it runs; use --sglang-lora-transfer merged"
        )


def check_adapter(adapter: AdapterWeights, base: Shapes | None, version: WeightVersion) -> None:
    """Refuse an adapter that does not fit: a server may take an unknown name for a success and ignore it.

    Args:
      base: name → shape of the weights under it; None: not known, so that only pairs and ranks are checked.

    Raises:
      WeightSyncError: names the first matrix that is odd.
    """
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in adapter.tensors.items():
        found = _MATRIX.fullmatch(name)
        if found is None:
            raise WeightSyncError(f"adapter {version!r} has {name}, which is no matrix of a low-rank adapter")
        pairs.setdefault(found[1], {})[found[2]] = tuple(tensor.shape)
    for module, pair in pairs.items():
        a, b = pair.get("A", ()), pair.get("B", ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise WeightSyncError(f"adapter {version!r}: the matrices of {module} have shapes {a} and {b}")
        if base is not None and base.get(f"{module}.weight") != (b[0], a[1]):
            has = base.get(f"{module}.weight", "no such weight")
            raise WeightSyncError(f"adapter {version!r} is for a {module} of {(b[0], a[1])}, the checkpoint has {has}")
    if not pairs:
        raise WeightSyncError(f"adapter {version!r} is empty")


def write_adapter(adapter: AdapterWeights, path: Path) -> None:
    """Write an adapter into `path` in PEFT's layout, in place of what is there. Blocking.

    Raises:
      WeightSyncError: it could not be written.
    """
    with boundary(WeightSyncError, f"adapter {path} could not be written", OSError, SafetensorError):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
        save_file(on_cpu, path / "adapter_model.safetensors", metadata={"format": "pt"})
        (path / "adapter_config.json").write_text(json.dumps(adapter.config, indent=2), encoding="utf-8")
