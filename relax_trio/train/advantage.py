"""From the credit of a row to the advantage of its tokens. Owns no credit: rewards become credit in `reward/`."""

from __future__ import annotations

import math
from array import array

from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError


def token_advantages(sample: Sample) -> array[float]:
    """Spread the base credit of a row over its trained tokens, undivided: A_t = credit * mask_t.

    This is the outcome-supervised advantage of GRPO (Shao et al. 2024, arXiv:2402.03300, 4.1.2): every token of a
    response carries the response's normalized reward. Where the credit has one number for each assistant turn, the
    tokens of turn j carry the j-th: A_t = credit_j * mask_t.

    Returns:
      `array('d')`, R values aligned with `sample.loss_mask`; 0.0 where the mask is 0.

    Raises:
      TrainError: the row has no credit, one that is not finite, or not one for every turn.
    """
    credit = sample.advantage
    if credit is None:
        raise TrainError(f"session {sample.place}: a row without credit reached the trainer; compute credit first")
    if not all(math.isfinite(value) for value in (credit if isinstance(credit, tuple) else (credit,))):
        raise TrainError(f"session {sample.place}: its credit is {credit}; credit must be a finite number")
    if not isinstance(credit, tuple):
        return array("d", [credit if trained else 0.0 for trained in sample.loss_mask])
    if len(credit) != len(sample.turn_lens):
        raise TrainError(f"session {sample.place}: {len(credit)} credits for {len(sample.turn_lens)} assistant turns")
    advantages = array("d", bytes(8 * len(sample.loss_mask)))
    for value, start, length in zip(credit, sample.turn_starts, sample.turn_lens, strict=True):
        for position in range(start, start + length):
            if sample.loss_mask[position]:
                advantages[position] = value
    return advantages
