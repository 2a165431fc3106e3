"""From the credit of a row to the advantage of its tokens. Owns no credit: rewards become credit in `reward/`."""

from __future__ import annotations

import math
from array import array

from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError


def token_advantages(sample: Sample) -> array[float]:
    """Spread the base credit of a row over its trained tokens, undivided: A_t = credit * mask_t.

    This is the outcome-supervised advantage of GRPO (Shao et al. 2024, arXiv:2402.03300, 4.1.2): every token of a
    response carries the response's normalized reward.

    Returns:
      `array('d')`, R values aligned with `sample.loss_mask`; 0.0 where the mask is 0.

    Raises:
      TrainError: the row has no credit, or one that is not finite.
    """
    credit = sample.advantage
    if credit is None:
        raise TrainError(f"session {sample.place}: a row without credit reached the trainer; compute credit first")
    if not math.isfinite(credit):
        raise TrainError(f"session {sample.place}: its credit is {credit}; credit must be a finite number")
    return array("d", [credit if trained else 0.0 for trained in sample.loss_mask])
