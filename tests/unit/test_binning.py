"""Rows → bins under a budget of tokens: every row once, within the budget, evenly."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from relax_trio.train.binning import balanced_bins, padded_bins

lens_lists = st.lists(st.integers(1, 40), max_size=30)
budgets = st.integers(1, 60)


@given(lens_lists, budgets, st.integers(1, 4))
def test_balanced_bins_hold_every_row_once_and_only_a_row_beyond_the_budget_exceeds_it(lens, budget, multiple):
    bins = balanced_bins(lens, budget, multiple=multiple)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lens)))
    assert len(bins) % multiple == 0
    for rows in bins:
        assert sum(lens[row] for row in rows) <= budget or len(rows) == 1
        assert list(rows) == sorted(rows)
    assert balanced_bins(list(lens), budget, multiple=multiple) == bins


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(20, 80))
def test_balanced_bins_are_few_and_even(lens, budget):
    """Greedy filling needs at most twice the bins that volume asks for; LPT's loads differ by one row at most."""
    bins = balanced_bins(lens, budget)
    loads = [sum(lens[row] for row in rows) for rows in bins]
    assert len(bins) <= 2 * math.ceil(sum(lens) / budget)
    assert loads == sorted(loads, reverse=True)
    assert loads[0] - loads[-1] <= max(lens)


def test_bins_are_filled_up_to_the_multiple_with_empty_ones():
    assert balanced_bins([5, 3], 8, multiple=4) == [(0,), (1,), (), ()]
    assert balanced_bins([], 8, multiple=4) == []


def test_long_rows_stand_alone_and_short_ones_share():
    assert balanced_bins([9, 4, 3, 1], 8) == [(0,), (1, 2, 3)]
    assert balanced_bins([4, 4, 4, 4], 8) == [(0, 2), (1, 3)]


@given(lens_lists, budgets)
def test_padded_bins_hold_every_row_once_within_the_budget(lens, budget):
    bins = padded_bins(lens, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lens)))
    for rows in bins:
        assert len(rows) * max(lens[row] for row in rows) <= budget or len(rows) == 1
