"""The reference policy: weights that are never trained, for the KL that keeps training near them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from attrs import frozen

from relax_trio.train.images import open_images
from relax_trio.train.packing import Batch, idle_batch
from relax_trio.train.policy import Distribution, Policy, make_policy
from relax_trio.train.pretrained import load_model
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.team import ALONE, Team, release


@frozen(eq=False)
class Reference:
    """A policy of which only logprobs are wanted. Its weights stay as they are.

    Attributes:
      policy: the model.
      distribution: what its logprobs are of: the same as the trained policy's.
      team: the processes that its weights are sharded over.
    """

    policy: Policy
    distribution: Distribution
    team: Team = ALONE

    @torch.no_grad()
    def score(self, batches: Sequence[Batch], check_stop: Callable[[], None]) -> list[torch.Tensor]:
        """Logprobs of the trained tokens, (K,) for each micro-batch.

        `check_stop` raises to give up; it is asked before each micro-batch.
        """
        found = []
        for batch in self.team.rounds(batches):
            check_stop()
            scored = self.policy.score(batch or idle_batch(), self.distribution)[0]
            if batch is not None:
                found.append(scored)
            release(self.policy)
        return self.team.spread(found, len(batches))


def load_reference(settings: TrainerSettings, hf_checkpoint: Path, team: Team = ALONE) -> Reference | None:
    """Load the reference that the settings ask for; None where no KL to it is taken. Blocking.

    Args:
      hf_checkpoint: where its weights are, unless `--ref-load` says otherwise.

    Raises:
      ConfigError: the checkpoint can't be loaded.
    """
    if not settings.train.needs_reference:
        return None
    model = load_model(settings.train.ref_load or hf_checkpoint, settings.device).requires_grad_(False)
    policy = make_policy(model, settings.train, open_images(hf_checkpoint), context_len=settings.context_len)
    team.shard(policy)
    return Reference(policy, settings.distribution, team)
