"""Logprobs of recorded tokens under given weights: the check that what was recorded is what the model says."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import evolve

from relax_trio.data.sample import Sample
from relax_trio.train.images import open_images
from relax_trio.train.packing import MicroBatching, micro_batches
from relax_trio.train.policy import Distribution, Policy
from relax_trio.train.pretrained import default_device, load_model


def recompute_logprobs(
    model_or_checkpoint: torch.nn.Module | Policy | Path,
    samples: Sequence[Sample],
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = -1,
    micro_batch_size: int = 8,
) -> list[array[float]]:
    """Compute the logprob of every trained token anew, without gradients. Blocking; for a worker thread.

    Args:
      model_or_checkpoint: a causal LM (left in evaluation mode), a policy, or a checkpoint directory, which is loaded
        in float32.
      samples: the rows; their `advantage` isn't looked at.
      temperature, top_p, top_k: as the rollout sampled; temperature 0 means the plain softmax, as in rollout.
      micro_batch_size: rows per forward pass.

    Returns:
      For each row an `array('d')` of R values aligned with its `rollout_log_probs`; 0.0 where the mask is 0.

    Raises:
      ConfigError: the checkpoint cannot be loaded.
      TrainError: a row's lengths disagree.
    """
    given = model_or_checkpoint
    if isinstance(given, Path):
        policy = Policy(load_model(given, default_device()), images=open_images(given))
    else:
        policy = given if isinstance(given, Policy) else Policy(given)
    greedy = temperature == 0
    distribution = Distribution() if greedy else Distribution(temperature=temperature, top_p=top_p, top_k=top_k)
    rows = [evolve(sample, advantage=0.0) for sample in samples]
    found = [array("d", [0.0]) * sample.response_length for sample in samples]
    for batch in micro_batches(rows, [1.0] * len(rows), MicroBatching(size=micro_batch_size)):
        with torch.no_grad():
            logprobs = policy.score(batch, distribution)[0].double().cpu()  # (K,) row by row
        values = iter(logprobs.tolist())
        for row in batch.rows:
            for t, trained in enumerate(samples[row].loss_mask):
                if trained:
                    found[row][t] = next(values)
    return found


def logprob_gap(samples: Sequence[Sample], logprobs: Sequence[array[float]]) -> float:
    """Largest |recomputed − recorded| over all trained tokens, in nats; 0.0 if there are none."""
    return max(
        (
            abs(new - old)
            for sample, row in zip(samples, logprobs, strict=True)
            for new, old, trained in zip(row, sample.rollout_log_probs, sample.loss_mask, strict=True)
            if trained
        ),
        default=0.0,
    )
