"""The optimizer phase, as plain blocking code: rows come in any batches, optimizer steps are those of the whole.

What an optimizer step divides by (Sessions, or tokens) is known when its last row is there. So gradients and metrics
add up undivided, and are divided right before the step; how the rows were cut then changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError
from relax_trio.train.packing import (
    Batch,
    loss_normalizer,
    micro_batches,
    row_order,
    row_weights,
    split_optimizer_batches,
)
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.stats import PhaseReport, PhaseResult, StepStats, staleness
from relax_trio.train.targets import Targets, advantage_moments, make_targets
from relax_trio.train.update import Updater


def run_phase(updater: Updater, samples: Sequence[Sample], check_stop: Callable[[], None]) -> PhaseResult:
    """Train on all rows of a rollout step at once. Whatever is raised, the updater is as before.

    Args:
      updater: between two phases.
      samples: the rows.
      check_stop: raises to give the phase up; asked between micro-batches.

    Raises:
      TrainError: nothing to train on, or malformed rows.
    """
    phase = OpenPhase(updater)
    try:
        phase.consume(samples, check_stop)
        return phase.finish()
    except BaseException:
        phase.give_up()
        raise


@frozen(kw_only=True)
class _Share:
    """Rows of one call that go into the same optimizer step.

    Attributes:
      batches: none where no row has a trained token.
      normalizer, divisor: their part of the optimizer step's, see `StepStats`.
      n_sessions: Sessions among them, those without a trained token included.
    """

    batches: list[Batch]
    normalizer: int
    divisor: int
    n_sessions: int


class OpenPhase:
    """An optimizer phase between its first row and its end, which is `finish` or `give_up`.

    After any exception of `consume` or `finish` only `give_up` is allowed; model and optimizer are then as before the
    phase. Between calls the sum of the gradients (4 bytes a parameter) stays in memory.
    """

    def __init__(self, updater: Updater) -> None:
        """Open a phase of `updater`, which must not be in one."""
        updater.begin_phase()
        self._updater = updater
        self._settings = updater.settings
        self._report = PhaseReport()
        self._stats = StepStats()  # of the optimizer step whose rows are coming in
        self._n_sessions = 0  # that this optimizer step has, those without a trained token included
        self._seen: set[int] = set()

    def consume(self, samples: Sequence[Sample], check_stop: Callable[[], None]) -> None:
        """Train on some rows, and make the optimizer steps that are complete with them.

        With `deterministic` the rows of a call are trained in row order, whatever order they came in.

        Args:
          samples: the rows; all contexts of a Session in one call.
          check_stop: raises to give the phase up; asked between micro-batches.

        Raises:
          TrainError: malformed rows, rows of a Session that had its turn, or a part of an optimizer batch where
            advantages are whitened over the whole of it.

        The gap to rollout (`GAP_METRICS`) of the rows behind an optimizer step of this call is taken before it, as are
        the logprobs of the old policy where they aren't rollout's: these rows are scored once more for it, without
        gradients.
        """
        rows = row_order(samples) if self._settings.deterministic else list(samples)
        self._check_sessions(rows)
        shares = self._divide(rows)
        self._updater.check_vocabulary([batch for share in shares for batch in share.batches])
        self._report.n_samples += len(rows)
        self._report.staleness.join(staleness(rows, self._updater.n_phases))
        targets = [self._targets(share, check_stop, is_behind=position > 0) for position, share in enumerate(shares)]
        for position, (share, of_share) in enumerate(zip(shares, targets, strict=True)):
            stats = StepStats(
                normalizer=share.normalizer, divisor=share.divisor, advantages=advantage_moments(of_share)
            )
            self._updater.accumulate(of_share, stats, check_stop)
            if position == 0:
                # No weight has changed in this call, so the gap seen in training is as good as one taken apart.
                self._report.gap.join(stats.gap)
            self._stats.join(stats)
            self._n_sessions += share.n_sessions
            if self._n_sessions == self._settings.train.global_batch_size:
                self._step()

    def finish(self) -> PhaseResult:
        """Make the last optimizer step, if rows are left for one, and count the phase.

        Raises:
          TrainError: no row had a trained token.
        """
        self._step()
        if not self._report.steps:
            raise TrainError(f"none of the {self._report.n_samples} rows of the step has a trained token")
        result = self._report.result()
        self._updater.end_phase()
        return result

    def give_up(self) -> None:
        """Undo the whole phase."""
        self._updater.undo_phase()

    def _divide(self, rows: Sequence[Sample]) -> list[_Share]:
        """Pack rows for the optimizer step whose rows are coming in and for those behind it."""
        settings, train = self._settings, self._settings.train
        if train.normalize_advantages and self._n_sessions:
            raise TrainError("advantages are whitened over an optimizer batch; hand over all of its rows together")
        per_token = settings.per_token
        shares = split_optimizer_batches(rows, train.global_batch_size, n_begun=self._n_sessions)
        return [
            _Share(
                batches=micro_batches(share, row_weights(share, per_token=per_token), self._updater.batching),
                normalizer=loss_normalizer(share, per_token=per_token),
                divisor=loss_divisor(share, settings),
                n_sessions=len({sample.index for sample in share}),
            )
            for share in shares
        ]

    def _targets(self, share: _Share, check_stop: Callable[[], None], *, is_behind: bool) -> list[Targets]:
        """What the loss of a share is made of, under the weights as they are; `is_behind`: behind an optimizer step."""
        updater, train = self._updater, self._settings.train
        own = None
        if is_behind or (train.kl_coef and not train.takes_rollout_logprobs):
            own = updater.score(share.batches, check_stop)
        if own is not None and is_behind:
            for batch, logprobs in zip(share.batches, own, strict=True):
                self._report.gap.add(logprobs - batch.rollout_logprobs[batch.loss_mask].to(logprobs))
        ref = None if updater.reference is None else updater.reference.score(share.batches, check_stop)
        return make_targets(share.batches, self._settings, own=own, ref=ref)

    def _step(self) -> None:
        """Make the optimizer step of the rows so far; none where none of them has a trained token."""
        stats, self._stats, self._n_sessions = self._stats, StepStats(), 0
        if stats.n_tokens:
            self._report.steps.append((self._updater.step(stats), stats))

    def _check_sessions(self, rows: Sequence[Sample]) -> None:
        """Refuse a Session in parts: it weighs as one, and its optimizer step may be over."""
        again = next((sample for sample in rows if sample.index in self._seen), None)
        if again is not None:
            raise TrainError(
                f"session {again.place}: its contexts came in two batches of one optimizer phase; "
                "hand over all contexts of a Session together"
            )
        self._seen |= {sample.index for sample in rows}


def loss_divisor(samples: Sequence[Sample], settings: TrainerSettings) -> int:
    """What gradient and loss of these rows are divided by; it adds up over rows as `packing.loss_normalizer` does.

    Session mean: the Sessions that have a trained token. Token mean: the trained tokens. Dr. GRPO: Sessions times a
    constant, so that no Session counts by its length (Liu et al. 2025, arXiv:2503.20783, section 3.3).
    """
    if settings.estimator == "dr_grpo":
        return settings.token_budget * loss_normalizer(samples, per_token=False)
    return loss_normalizer(samples, per_token=settings.per_token)
