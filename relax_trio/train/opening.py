"""From a checkpoint on disk to an updater: model, adapter, policy, reference, what a resumed run goes on from."""

from __future__ import annotations

from pathlib import Path

from relax_trio.errors import ConfigError
from relax_trio.train.images import open_images
from relax_trio.train.lora import ADAPTER_DIR, add_adapter, load_adapter
from relax_trio.train.policy import make_policy
from relax_trio.train.pretrained import load_model
from relax_trio.train.reference import load_reference
from relax_trio.train.resume import restore
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.team import ALONE, Team
from relax_trio.train.update import Updater


def open_updater(settings: TrainerSettings, hf_checkpoint: Path, resume: Path | None, team: Team = ALONE) -> Updater:
    """Load the model and make its updater. Blocking; for a worker thread.

    With an adapter a resumed run takes the weights under it from `hf_checkpoint`: in the checkpoint's it is merged.

    Args:
      settings: what is trained, and how.
      hf_checkpoint: weights to begin from; the reference's too, unless `--ref-load` names others.
      resume: one of our checkpoints to go on from instead.
      team: the processes that train it together; each of them calls this.

    Raises:
      ConfigError: a checkpoint that is no checkpoint, damaged, of another model or another adapter.
    """
    train = settings.train
    adapter = None if resume is None else resume / ADAPTER_DIR
    if adapter is not None and adapter.is_dir() != (train.lora_rank is not None):
        has = "has an adapter" if adapter.is_dir() else "has no adapter"
        raise ConfigError(f"checkpoint {resume} {has}: --lora-rank has to be as in the run that it is of")
    source = hf_checkpoint if resume is None or train.lora_rank is not None else resume
    images = open_images(hf_checkpoint)
    if images is not None and (train.lora_rank is not None or team.n > 1):
        flag = "--trainer-processes" if train.lora_rank is None else "--lora-rank"
        raise ConfigError(f"{flag}: a model with images is trained whole, in one process; leave the flag out")
    model = load_model(source, settings.device)
    if train.lora_rank is not None:
        add_adapter(model, train)
        if adapter is not None:
            load_adapter(model, adapter)
    policy = make_policy(model, train, images, context_len=settings.context_len)
    team.shard(policy)
    updater = Updater(policy, settings, load_reference(settings, hf_checkpoint, team), team)
    if resume is not None:
        restore(updater, resume)
    return updater
