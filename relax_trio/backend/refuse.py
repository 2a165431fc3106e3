"""What every engine refuses before it starts on an attempt. Not covered: what only one kind of engine can't do."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from relax_trio.backend.base import Attempt
from relax_trio.errors import BackendRejected
from relax_trio.ids import Rid


def refuse_unfit(attempt: Attempt, *, running: Container[Rid], max_context_len: int, vocab_len: int | None) -> None:
    """Check an attempt against what is running and what the model takes.

    Args:
      running: names of the attempts under way.
      max_context_len: most tokens of prefix and completion.
      vocab_len: number of token ids; None: unknown, not checked.

    Raises:
      BackendRejected: it can't be served; the message says why.
    """
    rid, sampling, n_prefix = attempt.rid, attempt.sampling, len(attempt.token_ids)
    if rid in running:
        raise BackendRejected(f"attempt {rid}: an attempt of that name is running")
    if n_prefix < 1 or sampling.max_new_tokens < 1:
        raise BackendRejected(f"attempt {rid}: needs at least one prefix token and room for one new token")
    if n_prefix + sampling.max_new_tokens > max_context_len:
        raise BackendRejected(
            f"attempt {rid}: {n_prefix} prefix tokens and {sampling.max_new_tokens} new ones exceed the context of "
            f"{max_context_len} tokens"
        )
    ids = np.frombuffer(attempt.token_ids, dtype=np.intc)  # a hundredth of what min and max over the array cost
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocab_len is not None and high >= vocab_len):
        odd = low if low < 0 else high
        raise BackendRejected(f"attempt {rid}: token id {odd} is outside the vocabulary of {vocab_len}")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise BackendRejected(f"attempt {rid}: temperature must be at least 0 and top_p in (0, 1]")
    if not all(sampling.stop):
        raise BackendRejected(f"attempt {rid}: an empty stop string ends nothing; leave it out")
