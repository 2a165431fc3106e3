"""Rows of a rollout step → optimizer batches → micro-batches, with the loss weight of every trained token.

Covered: which rows share an optimizer step, how much each token counts, the order of rows, rows one after the other
without padding or one above the other with it. Not covered: the loss itself, devices, attention (attention.py).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
from attrs import evolve, frozen

from relax_trio.data.image import EncodedImage
from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError
from relax_trio.train.advantage import token_advantages
from relax_trio.train.binning import balanced_bins, padded_bins

PAD_ID = 0
"""Fills rows on the right. Causal attention never looks there from a real token, so any valid id does."""


@frozen(kw_only=True)
class MicroBatching:
    """How the rows of an optimizer step are divided among forward passes.

    Attributes:
      size: most rows of a micro-batch, without `max_tokens`.
      max_tokens: most tokens of a micro-batch, which then takes any number of rows; a longer row is alone in one.
      packed: rows stand one after the other without padding; only with `max_tokens`.
      multiple: processes that share the micro-batches: as many a process, where `packed` and there are rows enough.
    """

    size: int = 8
    max_tokens: int | None = None
    packed: bool = False
    multiple: int = 1

    def bins(self, lens: Sequence[int]) -> list[tuple[int, ...]]:
        """Positions of the rows of each micro-batch, for rows of `lens` tokens."""
        if self.max_tokens is None:
            order = sorted(range(len(lens)), key=lambda row: -lens[row])
            return [tuple(order[start : start + self.size]) for start in range(0, len(order), self.size)]
        if self.packed:
            return balanced_bins(lens, self.max_tokens, multiple=self.multiple)
        return padded_bins(lens, self.max_tokens)


@frozen(kw_only=True, eq=False)
class Batch:
    """One micro-batch of R rows: right-padded (B = R rows of T tokens), or packed (B = 1, rows one after the other).

    A value at [b, t] belongs to the token at [b, t]; the logits that predict it stand at t - 1. The first token of a
    row is never trained, so in a packed batch too they are of the same row. K is the number of trained tokens.

    Attributes:
      ids: (B, T) int64, `PAD_ID` on the right.
      loss_mask: (B, T) bool, True exactly on trained tokens.
      rollout_logprobs: (B, T) float64, log probability of the token when it was sampled; 0.0 off the mask.
      advantages: (B, T) float64, 0.0 off the mask.
      weights: (B, T) float64, weight of the token in the undivided loss, see `row_weights`; 0.0 off the mask.
      rows: for each of the R rows its position among the rows that were packed.
      sessions: for each of the R rows the logical index of its Session.
      row_lens: tokens of each of the R rows.
      is_packed: rows stand one after the other, T = sum of `row_lens`.
      images: of each of the R rows, those behind its last trained token too; empty where no row has one.
    """

    ids: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    rows: tuple[int, ...]
    sessions: tuple[int, ...]
    row_lens: tuple[int, ...]
    is_packed: bool = False
    images: tuple[tuple[EncodedImage, ...], ...] = ()

    @property
    def token_rows(self) -> torch.Tensor:
        """(K,) int64: for each trained token which of the R rows it is of, in row-major order of `loss_mask`."""
        if not self.is_packed:
            return self.loss_mask.nonzero()[:, 0]
        of_place = torch.repeat_interleave(torch.tensor(self.row_lens, dtype=torch.int64))  # (T,)
        return of_place[self.loss_mask[0]]

    @property
    def positions(self) -> torch.Tensor:
        """(1, T) or (B, T) int64: place of each token in its row."""
        if not self.is_packed:
            return torch.arange(self.ids.shape[1])[None].expand(self.ids.shape)
        return torch.cat([torch.arange(n) for n in (0, *self.row_lens)])[None]


def row_order(samples: Sequence[Sample]) -> list[Sample]:
    """Sort by dataset row, then Group, then Session; contexts keep their order.

    The row comes first because the Group's number isn't the same in every run: which Group takes a row again after a
    failure depends on which failed first. Numbers only tell apart Groups of one row, which is in a step twice where
    an epoch ends.
    """
    return sorted(samples, key=lambda sample: (sample.row, sample.group_index, sample.index))


def split_optimizer_batches(
    samples: Sequence[Sample], global_batch_size: int | None, *, n_begun: int = 0
) -> list[list[Sample]]:
    """Divide rows among optimizer steps.

    Sessions are taken in the order of their first row, `global_batch_size` of them a step; all contexts of a Session
    stay together, because they share one normalizer. With one context a Session that counts samples. The last
    optimizer step takes what is left.

    Args:
      samples: rows of the step, or of a part of it.
      global_batch_size: Sessions per optimizer step; None: all in one.
      n_begun: Sessions that the first optimizer step has already from earlier parts; below `global_batch_size`.
    """
    by_session: dict[int, list[Sample]] = {}
    for sample in samples:
        by_session.setdefault(sample.index, []).append(sample)
    sessions = list(by_session.values())
    n = len(sessions)
    starts = range(0) if global_batch_size is None else range(global_batch_size - n_begun, n, global_batch_size)
    shares = [sessions[start:end] for start, end in pairwise([0, *starts, n])]
    return [[sample for rows in share for sample in rows] for share in shares if share]


def row_weights(samples: Sequence[Sample], *, per_token: bool) -> list[float]:
    """Weight of each trained token of each row in the undivided loss of an optimizer step.

    The loss is sum_t w_t * L_t / `loss_normalizer`, and both parts add up over rows that come one after the other.
    Session mean (default): w = 1 / N_s, with N_s the trained tokens of all contexts of the row's Session. However a
    Session is divided into contexts, it weighs 1.
    Token mean (`per_token`): w = 1.

    Args:
      samples: rows, with all contexts of their Sessions.

    Returns:
      One weight per row; 0.0 for a row without trained tokens.
    """
    n_of_row = [sum(sample.loss_mask) for sample in samples]
    if per_token:
        return [1.0 if n else 0.0 for n in n_of_row]
    n_of_session = _trained_of_session(samples)
    return [1.0 / n_of_session[sample.index] if n else 0.0 for sample, n in zip(samples, n_of_row, strict=True)]


def loss_normalizer(samples: Sequence[Sample], *, per_token: bool) -> int:
    """What the undivided loss of these rows is divided by: the sum of the weights of all trained tokens.

    Session mean: the Sessions that have a trained token. Token mean: the trained tokens.
    """
    n_of_session = _trained_of_session(samples)
    return sum(n_of_session.values()) if per_token else sum(1 for n in n_of_session.values() if n)


def micro_batches(samples: Sequence[Sample], weights: Sequence[float], batching: MicroBatching) -> list[Batch]:
    """Divide the rows of one optimizer step among micro-batches.

    Rows of like length share a padded micro-batch, so that little is padded; packed ones have none. Ties keep their
    order, so that the result is a function of the arguments. Rows without trained tokens are left out, as is all that
    follows a row's last trained token: neither can change the loss.

    Args:
      samples: the rows.
      weights: one per row, from `row_weights` over the same rows.
      batching: their division.

    Raises:
      TrainError: a row's lengths disagree, a value is not finite, or it has no credit.
    """
    for sample in samples:
        check_sample(sample)
    trained = [position for position, sample in enumerate(samples) if any(sample.loss_mask)]
    lens = [_trained_len(samples[position]) for position in trained]
    put = _pack if batching.packed else _pad
    return [
        _with_images(
            put(samples, weights, tuple(trained[place] for place in places), tuple(lens[place] for place in places)),
            samples,
        )
        for places in batching.bins(lens)
        if places
    ]


def idle_batch() -> Batch:
    """A micro-batch of one row without a trained token, for a process that has to take part without rows."""
    return _empty((1, 2), (), (), (2,), is_packed=False)


def check_sample(sample: Sample) -> None:
    """Refuse a row that breaks the alignment of tokens, mask and logprobs.

    Raises:
      TrainError: naming the Session and what disagrees.
    """
    n = sample.response_length
    who = f"session {sample.place}"
    if len(sample.loss_mask) != n or len(sample.rollout_log_probs) != n:
        raise TrainError(
            f"{who}: response_length is {n}, but there are {len(sample.loss_mask)} mask values and "
            f"{len(sample.rollout_log_probs)} rollout logprobs"
        )
    prompt_len = len(sample.tokens) - n
    if prompt_len < 0 or (prompt_len == 0 and n and sample.loss_mask[0]):
        raise TrainError(f"{who}: {len(sample.tokens)} tokens leave no prompt before a response of {n}")


def _trained_of_session(samples: Sequence[Sample]) -> Counter[int]:
    """Session → trained tokens of its rows among `samples`."""
    n_of_session: Counter[int] = Counter()
    for sample in samples:
        n_of_session[sample.index] += sum(sample.loss_mask)
    return n_of_session


def _trained_len(sample: Sample) -> int:
    """Tokens of the row up to its last trained one."""
    last = max(t for t, trained in enumerate(sample.loss_mask) if trained)
    return len(sample.tokens) - sample.response_length + last + 1


def _pad(samples: Sequence[Sample], weights: Sequence[float], rows: tuple[int, ...], lens: tuple[int, ...]) -> Batch:
    batch = _empty((len(rows), max(lens)), rows, _sessions(samples, rows), lens, is_packed=False)
    for b, (row, n) in enumerate(zip(rows, lens, strict=True)):
        _fill(batch, b, slice(0, n), samples[row], weights[row])
    return batch


def _pack(samples: Sequence[Sample], weights: Sequence[float], rows: tuple[int, ...], lens: tuple[int, ...]) -> Batch:
    batch = _empty((1, sum(lens)), rows, _sessions(samples, rows), lens, is_packed=True)
    begin = 0
    for row, n in zip(rows, lens, strict=True):
        _fill(batch, 0, slice(begin, begin + n), samples[row], weights[row])
        begin += n
    return batch


def _with_images(batch: Batch, samples: Sequence[Sample]) -> Batch:
    images = tuple(samples[row].images for row in batch.rows)
    return evolve(batch, images=images) if any(images) else batch


def _sessions(samples: Sequence[Sample], rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(samples[row].index for row in rows)


def _empty(
    shape: tuple[int, int], rows: tuple[int, ...], sessions: tuple[int, ...], lens: tuple[int, ...], *, is_packed: bool
) -> Batch:
    return Batch(
        ids=torch.full(shape, PAD_ID, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        rollout_logprobs=torch.zeros(shape, dtype=torch.float64),
        advantages=torch.zeros(shape, dtype=torch.float64),
        weights=torch.zeros(shape, dtype=torch.float64),
        rows=rows,
        sessions=sessions,
        row_lens=lens,
        is_packed=is_packed,
    )


def _fill(batch: Batch, b: int, place: slice, sample: Sample, weight: float) -> None:
    """Write the first tokens of a row into `place` of row b of the tensors."""
    n = place.stop - place.start
    prompt_len = len(sample.tokens) - sample.response_length
    # Copies into packed arrays: hooks may have left lists, and torch reads the arrays' memory.
    batch.ids[b, place] = torch.frombuffer(array("i", sample.tokens), dtype=torch.int32)[:n]
    response = slice(place.start + prompt_len, place.stop)
    n_response = n - prompt_len
    mask = torch.frombuffer(bytearray(sample.loss_mask), dtype=torch.uint8)[:n_response] != 0
    logprobs = torch.frombuffer(array("d", sample.rollout_log_probs), dtype=torch.float64)[:n_response]
    if not bool(torch.isfinite(logprobs).all()):
        raise TrainError(f"session {sample.place}: a rollout logprob is not finite")
    batch.loss_mask[b, response] = mask
    batch.rollout_logprobs[b, response] = logprobs * mask
    batch.advantages[b, response] = torch.frombuffer(token_advantages(sample), dtype=torch.float64)[:n_response]
    batch.weights[b, response] = mask.double() * weight
