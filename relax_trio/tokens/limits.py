"""How many tokens one turn may generate."""

from __future__ import annotations

from relax_trio.errors import ContextLengthExceeded


def turn_budget(*, n_prompt: int, max_context_len: int, turn_limit: int | None, request_max: int | None) -> int:
    """Most tokens the turn may generate, all its attempts together: at least 1.

    Args:
      n_prompt: tokens of the lineage and the observation, training view.
      max_context_len: most tokens of prompt and completion together.
      turn_limit: the run's limit per turn (`--rollout-max-response-len`), None: no limit of its own.
      request_max: the request's own limit, None: none. It can only lower the budget.

    Raises:
      ContextLengthExceeded: the prompt leaves no room for a single token.
    """
    if n_prompt >= max_context_len:
        raise ContextLengthExceeded(n_prompt=n_prompt, max_context_len=max_context_len)
    limits = [limit for limit in (turn_limit, request_max) if limit is not None]
    return max(1, min([max_context_len - n_prompt, *limits]))
