"""Filters of whole Groups: which are worth training on.

A filter is a hook `def keep(args, samples) -> bool | object with .keep and .reason`, named by
`--dynamic-sampling-filter-path`. `check_reward_nonzero_std` comes with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from attrs import frozen

from relax_trio.errors import RewardError
from relax_trio.reward.view import HookSample


@frozen(kw_only=True)
class Keep:
    """What a filter says of a Group; `reason` is told where it isn't kept."""

    keep: bool
    reason: str | None = None


def check_reward_nonzero_std(args: SimpleNamespace, samples: Sequence[HookSample]) -> Keep:
    """Keep Groups whose rewards differ: equal rewards give no gradient. DAPO, arXiv:2503.14476, section 3.2.

    Sessions count once each; a reward object counts by `--reward-key`.
    """
    rewards = {sample.index: _primary(sample, args.reward_key) for sample in samples if sample.reward is not None}
    if len(set(rewards.values())) > 1:
        return Keep(keep=True)
    return Keep(keep=False, reason=f"all rewards are {next(iter(rewards.values()), None)}")


def read_verdict(value: object, what: str) -> Keep:
    """What a filter returned, as a `Keep`.

    Args:
      what: whose verdict it is, the beginning of the error.

    Raises:
      RewardError: neither a bool nor an object with a bool `keep`.
    """
    keep = _flag(value)
    if keep is None:
        keep = _flag(getattr(value, "keep", None))
    if keep is None:
        raise RewardError(
            f"{what} returned {value!r}; a filter returns True, False, or an object with .keep and .reason"
        )
    reason = getattr(value, "reason", None)
    return Keep(keep=keep, reason=None if reason is None else str(reason))


def _flag(value: object) -> bool | None:
    """Python's bool of a flag; NumPy and torch give comparisons a type of their own. None where it is no flag."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        value = item()
    return value if isinstance(value, bool) else None


def _primary(sample: HookSample, reward_key: str | None) -> object:
    return sample.reward.get(reward_key or "") if isinstance(sample.reward, dict) else sample.reward
