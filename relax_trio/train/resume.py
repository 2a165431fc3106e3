"""What a checkpoint holds: a Hugging Face model with its tokenizer, and `trainer.pt` to go on training from.

Reads and writes plain files in a directory it is given; that the directory appears as a whole is checkpoint.py's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError

from relax_trio.data.json import JsonObject
from relax_trio.errors import ConfigError, TrainError, boundary
from relax_trio.train.checkpoint import prune, step_name, verify, write_checkpoint
from relax_trio.train.lora import ADAPTER_DIR, has_adapter, save_adapter
from relax_trio.train.pretrained import save_model
from relax_trio.train.update import Updater

TRAINER = "trainer.pt"

COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates",
    "*processor*.json",
    "*.py",
)
"""Files of a checkpoint that a copy of its model needs beside the weights: tokenizer, template, processor, code."""


def read_companions(source: Path) -> dict[str, bytes]:
    """Read the `COMPANIONS` of the checkpoint `source` by relative name: it may be gone when the next one is written.

    Raises:
      ConfigError: a file cannot be read.
    """
    with boundary(ConfigError, f"checkpoint {source}", OSError):
        found = [path for pattern in COMPANIONS for path in source.glob(pattern)]
        files = [file for path in found for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
        return {file.relative_to(source).as_posix(): file.read_bytes() for file in files}


@frozen(kw_only=True, eq=False)
class Payload:
    """What is saved of an updater, with whole tensors.

    Attributes:
      model: gives configuration and buffers.
      tensors: the plain model's parameters.
      adapter: the model's parameters by its own names, the adapter's among them; None without one.
      trainer: content of `TRAINER`.
    """

    model: torch.nn.Module
    tensors: Mapping[str, torch.Tensor]
    adapter: Mapping[str, torch.Tensor] | None
    trainer: dict[str, Any]


def make_payload(updater: Updater) -> Payload:
    """Gather what a checkpoint holds; every process of the updater's team has to call it.

    Raises:
      TrainError: a phase is open.
    """
    if updater.in_phase:
        raise TrainError("no checkpoint: the optimizer phase under way is neither complete nor undone")
    model, team = updater.policy.model, updater.team
    tensors = updater.weights.tensors
    assert tensors is not None, "a snapshot has tensors"
    adapter = team.whole(dict(model.named_parameters())) if has_adapter(model) else None
    trainer = {"updater": team.whole(updater.state()), "rng": _rng_state()}
    return Payload(model=model, tensors=tensors, adapter=adapter, trainer=trainer)


def write_payload(directory: Path, payload: Payload, companions: Mapping[str, bytes]) -> None:
    """Write model, tokenizer and trainer state into `directory`. Blocking.

    Args:
      directory: empty and existing.
      payload: from `make_payload`.
      companions: from `read_companions`.

    Raises:
      TrainError: a file could not be written.
    """
    with boundary(TrainError, f"checkpoint in {directory}", OSError, RuntimeError, SafetensorError):
        save_model(payload.model, directory, payload.tensors)
        if payload.adapter is not None:
            save_adapter(payload.model, payload.adapter, directory / ADAPTER_DIR)
        for name, content in companions.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        torch.save(payload.trainer, directory / TRAINER)


def save_updater(updater: Updater, companions: Mapping[str, bytes], directory: Path, state: JsonObject) -> Path:
    """Write the checkpoint of an updater under `directory`. Blocking; every process of its team has to call it.

    Returns:
      Where it is; only the first process writes it.

    Raises:
      TrainError: it could not be written, or a phase is open.
    """
    payload = make_payload(updater)
    if updater.team.rank:
        return directory / step_name(updater.n_phases)
    write = partial(write_payload, payload=payload, companions=companions)
    path = write_checkpoint(directory, updater.n_phases, write, state)
    keep = updater.settings.train.save_keep_last
    if keep is not None:
        prune(directory, keep)
    return path


def restore(updater: Updater, path: Path) -> None:
    """Continue where the checkpoint `path` was saved: optimizer, counters, torch's random state.

    Raises:
      ConfigError: the checkpoint is damaged, or of another model.
    """
    verify(path)
    file = path / TRAINER
    foreign = (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError, AttributeError, UnpicklingError)
    with boundary(ConfigError, f"{file} cannot be resumed from", *foreign):
        saved = torch.load(file, map_location="cpu", weights_only=True)
        updater.restore(saved["updater"])
        _set_rng_state(saved["rng"])


def _rng_state() -> dict[str, Any]:
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": gpus}


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if len(state["cuda"]) and len(state["cuda"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.cuda.set_rng_state_all(state["cuda"])
