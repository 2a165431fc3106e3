"""Which rows share a micro-batch under a budget of tokens. Knows lengths only: no Samples, no torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def balanced_bins(lens: Sequence[int], budget: int, *, multiple: int = 1) -> list[tuple[int, ...]]:
    """Divide rows among bins of at most `budget` tokens, as few as can be found, with loads as even as can be found.

    Longest row first into the bin with the least tokens (LPT, Graham 1969), with one bin more until all fit. Whoever
    runs the bins side by side waits for the fullest one, and the memory peak is that of the fullest one. A row beyond
    the budget has a bin to itself. The result is a function of the arguments: ties go to the earlier row and bin.

    Args:
      lens: tokens of each row, at least 1.
      budget: tokens a bin.
      multiple: the number of bins is a multiple of it; bins are empty where there are fewer rows than that takes.

    Returns:
      Positions of the rows of each bin, ascending; the fullest bin first.
    """
    order = sorted(range(len(lens)), key=lambda row: (-lens[row], row))
    alone = [(row,) for row in order if lens[row] > budget]
    rest = order[len(alone) :]
    n_bins = math.ceil(sum(lens[row] for row in rest) / budget)
    while True:
        n_bins += -(len(alone) + n_bins) % multiple
        bins = _longest_first(rest, lens, n_bins)
        if all(sum(lens[row] for row in rows) <= budget for rows in bins):
            break
        n_bins += 1
    shared = [tuple(sorted(rows)) for rows in bins]
    return sorted([*alone, *shared], key=lambda rows: (-sum(lens[row] for row in rows), rows))


def padded_bins(lens: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Divide rows among bins that stay within `budget` tokens when every row is padded to the longest of its bin.

    Longest rows first, as many together as fit. A row beyond the budget has a bin to itself.

    Returns:
      Positions of the rows of each bin, longest first.
    """
    bins: list[list[int]] = []
    for row in sorted(range(len(lens)), key=lambda row: (-lens[row], row)):
        if bins and (len(bins[-1]) + 1) * lens[bins[-1][0]] <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    return [tuple(rows) for rows in bins]


def _longest_first(rows: Sequence[int], lens: Sequence[int], n_bins: int) -> list[list[int]]:
    """Put each of `rows`, which come longest first, into the emptiest of `n_bins` bins."""
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    loads = [(0, number) for number in range(n_bins)]
    for row in rows:
        load, number = heapq.heappop(loads)
        bins[number].append(row)
        heapq.heappush(loads, (load + lens[row], number))
    return bins
