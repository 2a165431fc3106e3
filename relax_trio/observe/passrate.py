"""pass@k over logical Sessions. A Session passes when its primary reward is 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

from relax_trio.data.sample import Sample
from relax_trio.errors import CreditError
from relax_trio.reward.value import primary_reward


def pass_rates(samples: Sequence[Sample], *, reward_key: str | None, by_row: bool) -> dict[str, float]:
    """Make `pass@1`, `pass@2`, `pass@4`, … up to the Sessions that every question has.

        pass@k = mean over questions of 1 - C(n - c, k) / C(n, k)

    with n Sessions of a question, c of them passing: the unbiased estimator of Chen et al. 2021, arXiv:2107.03374,
    section 2.1. A Session whose contexts carry no reward is missing: it is counted as `pass_missing` and not among n.

    Args:
      by_row: Sessions of one dataset row answer one question (evaluation); else those of one Group.

    Raises:
      CreditError: several contexts of a Session carry a reward; a reward object that `reward_key` doesn't open.
    """
    passed: dict[object, list[bool]] = {}
    n_missing = 0
    for rows in _sessions(samples):
        carrying = [sample for sample in rows if sample.reward is not None]
        if len(carrying) > 1:
            raise CreditError(
                f"session {rows[0].place}: {len(carrying)} of its contexts carry a reward; with --log-passrate exactly "
                "one may, the one that stands for the Session"
            )
        if not carrying:
            n_missing += 1
            continue
        question = rows[0].row if by_row else rows[0].group
        passed.setdefault(question, []).append(primary_reward(carrying[0], reward_key) == 1)
    out: dict[str, float] = {"pass_missing": n_missing}
    n_least = min((len(each) for each in passed.values()), default=0)
    for k in (2**power for power in range(n_least.bit_length())):
        out[f"pass@{k}"] = math.fsum(_pass_at(k, each) for each in passed.values()) / len(passed)
    return out


def _pass_at(k: int, passed: Sequence[bool]) -> float:
    n_failed = len(passed) - sum(passed)
    return 1.0 - math.comb(n_failed, k) / math.comb(len(passed), k)


def _sessions(samples: Sequence[Sample]) -> list[list[Sample]]:
    by_place: dict[str, list[Sample]] = {}
    for sample in samples:
        by_place.setdefault(sample.place, []).append(sample)
    return list(by_place.values())
