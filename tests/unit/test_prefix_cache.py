"""Kept prefixes: the longest common opening wins, the least recently used goes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.backend.embedded.kv import KvBlock
from relax_trio.backend.embedded.prefix import OPENING_LEN, Kept, PrefixCache, common_len


def tokens(*ids):
    return np.array(ids, np.int32)


def kept(session, ids):
    values = torch.zeros(1, len(ids), 2)
    return Kept(session_key=session, tokens=tokens(*ids), block=KvBlock(values, values))


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_len_counts_equal_opening_tokens(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_len(tokens(*a), tokens(*b)) == expected


def test_a_fork_is_cut_back_to_what_is_shared():
    cache = PrefixCache(100)
    cache.add(kept("s", [1, 2, 3, 4]))
    found = cache.find("s", tokens(1, 2, 9, 9, 9))
    assert found[0] == 2
    assert found[1].tokens.tolist() == [1, 2, 3, 4]


def test_the_branch_that_shares_most_wins():
    cache = PrefixCache(100)
    cache.add(kept("s", [1, 2, 3]))
    cache.add(kept("s", [1, 2, 7, 8]))
    assert cache.find("s", tokens(1, 2, 7, 5))[0] == 3
    assert cache.find("s", tokens(4))[0] == 0


def test_an_entry_that_is_continued_is_replaced():
    cache = PrefixCache(100)
    cache.add(kept("s", [1, 2, 3]))
    cache.add(kept("s", [1, 2, 3, 4, 5]))
    assert cache.n_tokens == 5


def test_another_session_is_found_by_a_long_enough_opening_only():
    cache = PrefixCache(100)
    opening = list(range(OPENING_LEN))
    cache.add(kept("s", [*opening, 50, 51]))
    assert cache.find("t", tokens(*opening, 50, 60))[0] == OPENING_LEN + 1
    assert cache.find("t", tokens(*opening[:-1], 99))[0] == 0


def test_the_least_recently_used_goes_first():
    cache = PrefixCache(6)
    cache.add(kept("a", [1, 1, 1]))
    cache.add(kept("b", [2, 2, 2]))
    cache.find("a", tokens(1, 1))
    cache.add(kept("c", [3, 3]))
    assert cache.find("b", tokens(2, 2))[0] == 0
    assert cache.find("a", tokens(1, 1))[0] == 2
    assert cache.n_tokens == 5


def test_what_is_larger_than_the_cache_is_not_kept():
    cache = PrefixCache(3)
    cache.add(kept("a", [1, 1]))
    cache.add(kept("b", [2, 2, 2, 2]))
    assert cache.n_tokens == 2


def test_a_closed_session_and_a_clear_leave_nothing():
    cache = PrefixCache(100)
    cache.add(kept("a", [1, 2]))
    cache.add(kept("b", [1, 2]))
    cache.close_session("a")
    cache.close_session("a")
    assert cache.find("b", tokens(1, 2))[0] == 2
    cache.clear()
    assert (cache.n_tokens, cache.find("b", tokens(1, 2))[0]) == (0, 0)
