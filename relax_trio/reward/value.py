"""What counts as a reward, and which of its numbers is the primary one."""

from __future__ import annotations

import math
from numbers import Integral, Real

from relax_trio.data.json import JsonObject, JsonValue, canonical_json
from relax_trio.data.record import Reward
from relax_trio.data.sample import Sample
from relax_trio.errors import CreditError, RewardError


def checked_reward(value: object, what: str) -> float | JsonObject:
    """Validate a reward: a finite number, or an object whose numbers are finite.

    Numbers of other libraries (NumPy scalars) become Python's. An object may hold texts, flags and nested values beside
    its numbers; they are kept for dumps and not counted in metrics.

    Args:
      what: whose reward it is, the beginning of the error.

    Raises:
      RewardError: a bool, NaN, infinity, text, empty object, or something that JSON does not have.
    """
    if isinstance(value, dict):
        return _checked_object(value, what)
    number = _number(value)
    if number is None:
        raise RewardError(f"{what} is {_shown(value)}; a reward is a number or an object of numbers")
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}; a reward must be finite")
    return number


def primary_reward(sample: Sample, reward_key: str | None) -> float:
    """The number that credit and `rollout/raw_reward` are made from.

    A number stands for itself, whether or not `reward_key` is set.

    Raises:
      CreditError: no reward, or an object without `--reward-key`, without that key, or with no finite number there.
    """
    reward: Reward = sample.reward
    if reward is None:
        raise CreditError(f"session {sample.place} has no reward")
    if not isinstance(reward, dict):
        return float(reward)
    found = ", ".join(sorted(reward)) or "none"
    if reward_key is None:
        raise CreditError(
            f"session {sample.place}: its reward is an object; name its primary reward by --reward-key (keys: {found})"
        )
    if reward_key not in reward:
        raise CreditError(f"session {sample.place}: its reward has no {reward_key!r} (--reward-key); keys: {found}")
    number = _number(reward[reward_key])
    if number is None or not math.isfinite(number):
        raise CreditError(
            f"session {sample.place}: its reward's {reward_key!r} is {_shown(reward[reward_key])}, not a finite number"
        )
    return float(number)


def numeric_fields(value: JsonObject) -> dict[str, float]:
    """The top-level numbers of an object; flags are no numbers."""
    numbers = {key: _number(item) for key, item in value.items()}
    return {key: float(number) for key, number in numbers.items() if number is not None}


def _checked_object(value: dict[object, object], what: str) -> JsonObject:
    if not value:
        raise RewardError(f"{what} is an empty object; a reward object holds at least its primary number")
    out: JsonObject = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise RewardError(f"{what} has the key {_shown(key)}; keys of a reward object are texts")
        number = _number(item)
        if number is not None and not math.isfinite(number):
            raise RewardError(f"{what} has {key!r}: {number}; numbers of a reward must be finite")
        out[key] = _json_item(item, f"{what} has {key!r}") if number is None else number
    return out


def _json_item(item: object, what: str) -> JsonValue:
    try:
        canonical_json(item)  # type: ignore[arg-type]  # finds out whether it is JSON
    except (TypeError, ValueError, RecursionError) as exc:
        raise RewardError(f"{what}, which is not JSON: {exc}") from None
    return item  # type: ignore[return-value]  # it was


def _number(value: object) -> int | float | None:
    """Python's number of a value, None where it is none; True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Integral):
        return _bounded(int(value))
    return float(value)


def _bounded(value: int) -> int | float:
    """An int that a float can't hold counts as infinite."""
    try:
        float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
