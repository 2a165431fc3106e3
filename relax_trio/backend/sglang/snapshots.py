"""Checkpoint directories of weight versions, for servers that load from disk or have to be started again.

A version's directory has the first checkpoint's files, linked, and weights of its own. It is removed once another
version is published and nobody holds it. Not covered: the trainer's checkpoints, which are kept.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from relax_trio.backend.base import WeightSource
from relax_trio.backend.sglang.adapters import SavedAdapter, Shapes, check_adapter, write_adapter
from relax_trio.backend.sglang.fleet import Server
from relax_trio.errors import ConfigError, WeightSyncError, boundary
from relax_trio.ids import WeightVersion

if TYPE_CHECKING:
    import torch

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.safetensors.index.json", "*.bin.index.json")
_N_SHOWN = 5


class Snapshots:
    """The version that servers are to have, as a directory.

    Args:
      root: directory for snapshots; made when the first is written.
      checkpoint: the directory that the run begins with; stays as it is.
      version: its version.
      adapter: what is on top of it, where only an adapter changes.
    """

    def __init__(
        self, root: Path, checkpoint: Path, version: WeightVersion, adapter: SavedAdapter | None = None
    ) -> None:
        self._root = root
        self._checkpoint = checkpoint.absolute()
        self._shapes = checkpoint_shapes(self._checkpoint)
        self._holders: Counter[Path] = Counter()
        self._written: set[Path] = set()
        self._limiter = trio.CapacityLimiter(1)
        self.path = self._checkpoint
        self.version = version
        self.adapter = adapter

    async def publish(self, version: WeightVersion, source: WeightSource) -> None:
        """Make `source` the version that servers are to have.

        Raises:
          WeightSyncError: a tensor is missing, unknown or misshapen, or the directory can't be written.

        Cancellation: waits until what has begun is written.
        """
        path = self._root / f"weights-{version}"
        if source.tensors is not None:
            check_tensors({name: tuple(t.shape) for name, t in source.tensors.items()}, self._shapes, version)
            self._written.add(path)
            await trio.to_thread.run_sync(self._write, path, source.tensors, limiter=self._limiter)
        elif source.path is not None:
            shapes = await trio.to_thread.run_sync(checkpoint_shapes, source.path, limiter=self._limiter)
            if shapes is None:
                raise WeightSyncError(f"weights {version!r}: {source.path} holds no safetensors checkpoint")
            check_tensors(shapes, self._shapes, version)
            path = source.path.absolute()
        else:
            raise WeightSyncError("a weight source needs tensors or a path; this one has neither")
        old, self.path, self.version = self.path, path, version
        self._drop(old)

    async def publish_adapter(self, version: WeightVersion, source: WeightSource) -> SavedAdapter:
        """Make the adapter of `source` what servers are to have on top of the checkpoint, which stays the same.

        Raises:
          WeightSyncError: there is none, it does not fit the checkpoint, or it can't be written.

        Cancellation: waits until what has begun is written.
        """
        adapter = source.adapter
        if adapter is None:
            raise WeightSyncError(f"weights {version!r}: only adapters are handed over, and this source has none")
        check_adapter(adapter, self._shapes, version)
        path = (self._root / f"adapter-{version}").absolute()
        self._written.add(path)
        await trio.to_thread.run_sync(write_adapter, adapter, path, limiter=self._limiter)
        old, self.adapter = self.adapter, SavedAdapter(version=version, path=path)
        if old is not None and old.path != path and old.path in self._written:
            shutil.rmtree(old.path, ignore_errors=True)
        return self.adapter

    async def refuse_other_model(self, server: Server) -> None:
        """Refuse a server of somebody else whose model has other shapes: it would die of the weights.

        What it serves is looked at where that is a directory on this machine, too.

        Raises:
          ConfigError: names a weight that differs.
        """
        served = Path(server.info.model_path)
        if self._shapes is None or not served.is_absolute() or not (served / "config.json").is_file():
            return
        theirs = await trio.to_thread.run_sync(checkpoint_shapes, served, limiter=self._limiter) or {}
        common = theirs.keys() & self._shapes.keys()
        odd = sorted(name for name in common or theirs if theirs[name] != self._shapes.get(name))
        if odd:
            raise ConfigError(
                f"{server.name} serves another model: {odd[0]} is {theirs[odd[0]]} in {served}, and "
                f"{self._shapes.get(odd[0], 'none')} in {self._checkpoint} (--hf-checkpoint)"
            )

    @contextmanager
    def held(self) -> Iterator[Path]:
        """The current directory, which stays for the length of the block."""
        path = self.path
        self._holders[path] += 1
        try:
            yield path
        finally:
            self._holders[path] -= 1
            self._drop(path)

    def remove(self) -> None:
        """Remove what was written: no server needs it any more."""
        for path in self._written:
            shutil.rmtree(path, ignore_errors=True)

    def _drop(self, path: Path) -> None:
        if path != self.path and not self._holders[path] and path in self._written:
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        with boundary(WeightSyncError, f"snapshot {path} could not be written", OSError, SafetensorError):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            weights = {file for pattern in _WEIGHT_FILES for file in self._checkpoint.glob(pattern)}
            for file in self._checkpoint.iterdir():
                if file.is_file() and file not in weights:
                    (path / file.name).symlink_to(file)
            on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(on_cpu, path / "model.safetensors", metadata={"format": "pt"})


def checkpoint_shapes(path: Path) -> Shapes | None:
    """Name → shape of a checkpoint's tensors, from the headers of its files; None where there are no safetensors.

    An output layer that is tied to the embedding may be saved or not; it is left out.

    Raises:
      WeightSyncError: a file can't be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with boundary(WeightSyncError, f"checkpoint {path} cannot be read", OSError, ValueError, SafetensorError):
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                names = opened.keys()  # all that it has of a mapping
                shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in names})
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if isinstance(config, dict) and config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes or None


def check_tensors(given: Shapes, wanted: Shapes | None, version: WeightVersion) -> None:
    """Refuse weights that don't fit: a server takes an unknown name for a success and ignores it.

    Raises:
      WeightSyncError: names the first that are missing, unknown or misshapen.
    """
    if wanted is None:
        return
    tied = {"lm_head.weight"} - wanted.keys()
    for what, names in (
        ("lack", wanted.keys() - given.keys()),
        ("have unknown", given.keys() - wanted.keys() - tied),
        ("have misshapen", {name for name in given.keys() & wanted.keys() if given[name] != wanted[name]}),
    ):
        if names:
            shown = ", ".join(sorted(names)[:_N_SHOWN]) + (
                f" and {len(names) - _N_SHOWN} more" * (len(names) > _N_SHOWN)
            )
            raise WeightSyncError(f"weights {version!r} {what} {shown}; the servers keep their old weights")
