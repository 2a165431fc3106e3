"""The logical Sessions that the trained tokens of a micro-batch are of: what looks at whole sequences asks here.

GSPO's ratio and off-policy sequence masking take means over a sequence. A sequence is a Session: all trained tokens of
all its contexts, wherever they are packed. So dividing a Session into contexts changes none of these means, as it
changes none of the other formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from attrs import define

from relax_trio.train.packing import Batch


@define(eq=False, kw_only=True)
class Sequences:
    """The S Sessions of a micro-batch's K trained tokens.

    Attributes:
      sessions: logical index of each, in the order of its first row.
      of_token: (K,) int64, which of them each token is of.
      n_tokens: (S,) float64, trained tokens of each in the whole optimizer batch.
      away_ratio: (S,) float64, sum of new minus old logprob over its tokens in other micro-batches.
      away_drift: (S,) float64, likewise of new minus rollout logprob.
      is_divided: whether a Session has tokens in other micro-batches.
    """

    sessions: tuple[int, ...]
    of_token: torch.Tensor
    n_tokens: torch.Tensor
    away_ratio: torch.Tensor
    away_drift: torch.Tensor
    is_divided: bool = False

    def means(self, values: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
        """Mean over the Session of each token, (K,), without gradient.

        Args:
          values: (K,).
          away: (S,) sum of the same over tokens in other micro-batches.
        """
        return ((self.sums(values) + away.to(values)) / self.n_tokens.to(values))[self.of_token.to(values.device)]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the tokens here of each Session, (S,), without gradient."""
        own = values.detach()
        return own.new_zeros(len(self.sessions)).index_add(0, self.of_token.to(own.device), own)


def make_sequences(batches: Sequence[Batch]) -> list[Sequences]:
    """The Sessions of each micro-batch of one optimizer batch; nothing is known of other micro-batches' logprobs yet.

    Args:
      batches: all that hold tokens of their Sessions.
    """
    n_of_session: Counter[int] = Counter()
    found = []
    for batch in batches:
        sessions = tuple(dict.fromkeys(batch.sessions))
        place = torch.tensor([sessions.index(session) for session in batch.sessions], dtype=torch.int64)
        of_token = place[batch.token_rows]
        counts = torch.bincount(of_token, minlength=len(sessions))
        n_of_session.update(dict(zip(sessions, counts.tolist(), strict=True)))
        zeros = torch.zeros(len(sessions), dtype=torch.float64)
        found.append(
            Sequences(
                sessions=sessions, of_token=of_token, n_tokens=counts.double(), away_ratio=zeros, away_drift=zeros
            )
        )
    for sequences in found:
        n_tokens = torch.tensor([n_of_session[session] for session in sequences.sessions], dtype=torch.float64)
        sequences.is_divided = bool((n_tokens > sequences.n_tokens).any())
        sequences.n_tokens = n_tokens.clamp(min=1.0)
    return found


def tell_away(sequences: Sequence[Sequences], ratios: Sequence[torch.Tensor], drifts: Sequence[torch.Tensor]) -> None:
    """Tell each micro-batch what the others found of its Sessions.

    Args:
      sequences: of every micro-batch that shares a Session with another one.
      ratios, drifts: (K,) of each, new minus old and new minus rollout logprobs under the weights of now.
    """
    for name, values in (("away_ratio", ratios), ("away_drift", drifts)):
        own = [s.sums(value.double().cpu()) for s, value in zip(sequences, values, strict=True)]
        totals: dict[int, torch.Tensor] = {}
        for s, sums in zip(sequences, own, strict=True):
            for session, value in zip(s.sessions, sums, strict=True):
                totals[session] = totals.get(session, torch.zeros((), dtype=torch.float64)) + value
        for s, sums in zip(sequences, own, strict=True):
            setattr(s, name, torch.stack([totals[session] for session in s.sessions]) - sums)
