"""Rows → optimizer batches → micro-batches: nothing lost, nothing moved, nothing weighed twice."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.data.sample import Sample
from relax_trio.errors import TrainError
from relax_trio.ids import GroupId, PlaceId
from relax_trio.train.advantage import token_advantages
from relax_trio.train.packing import (
    MicroBatching,
    loss_normalizer,
    micro_batches,
    row_order,
    row_weights,
    split_optimizer_batches,
)


def make_sample(mask, *, prompt_len=2, index=0, group_index=0, row=0, advantage=1.0, first_id=1, logprob=-0.5):
    n = len(mask)
    return Sample(
        prompt="",
        response="",
        label=None,
        tokens=array("i", range(first_id, first_id + prompt_len + n)),
        response_length=n,
        loss_mask=bytearray(mask),
        rollout_log_probs=array("d", [logprob * (t + 1) if m else 0.0 for t, m in enumerate(mask)]),
        reward=None,
        metadata={},
        index=index,
        group_index=group_index,
        status="completed",
        weight_versions=(),
        place=PlaceId(f"G{group_index}/{index}"),
        group=GroupId(f"G{group_index}"),
        name=None,
        row=row,
        messages=(),
        turn_lens=(),
        turn_starts=(),
        advantage=advantage,
    )


masks = st.lists(st.integers(0, 1), min_size=0, max_size=12)


@st.composite
def row_lists(draw):
    rows = draw(st.lists(st.tuples(masks, st.integers(0, 3), st.floats(-2, 2), st.integers(1, 4)), max_size=12))
    return [
        make_sample(mask, index=index, advantage=advantage, prompt_len=prompt_len, first_id=100 * i)
        for i, (mask, index, advantage, prompt_len) in enumerate(rows)
    ]


def trained_tokens(samples, weights):
    """Every trained token as (id, rollout logprob, advantage, weight)."""
    return sorted(
        (s.tokens[len(s.tokens) - s.response_length + t], s.rollout_log_probs[t], s.advantage, weights[i])
        for i, s in enumerate(samples)
        for t, m in enumerate(s.loss_mask)
        if m
    )


@given(row_lists(), st.integers(1, 5))
def test_micro_batches_hold_every_trained_token_once_with_its_own_values(samples, size):
    weights = row_weights(samples, per_token=False)
    batches = micro_batches(samples, weights, MicroBatching(size=size))
    packed = []
    for batch in batches:
        m = batch.loss_mask
        assert m.shape == batch.ids.shape == batch.weights.shape == batch.advantages.shape
        assert len(batch.rows) == m.shape[0] <= size
        assert not m[:, 0].any(), "the first token has no logits before it"
        for values in (batch.rollout_logprobs, batch.advantages, batch.weights):
            assert not values[~m].any()
        columns = (batch.ids[m], batch.rollout_logprobs[m], batch.advantages[m], batch.weights[m])
        packed += list(zip(*(c.tolist() for c in columns), strict=True))
    assert sorted(packed) == trained_tokens(samples, weights)


@given(row_lists(), st.integers(1, 5))
def test_micro_batches_come_longest_first_and_end_at_the_last_trained_token(samples, size):
    batches = micro_batches(samples, [1.0] * len(samples), MicroBatching(size=size))
    lens = [int(torch.nonzero(row).max()) + 1 for batch in batches for row in batch.loss_mask]
    assert lens == sorted(lens, reverse=True)
    assert [batch.ids.shape[1] for batch in batches] == lens[::size]
    rows = [row for batch in batches for row in batch.rows]
    assert sorted(rows) == [i for i, s in enumerate(samples) if any(s.loss_mask)]
    assert [b.rows for b in micro_batches(samples, [1.0] * len(samples), MicroBatching(size=size))] == [
        b.rows for b in batches
    ]


@given(row_lists())
def test_session_mean_gives_every_session_the_same_weight_however_many_contexts_it_has(samples):
    weights = row_weights(samples, per_token=False)
    of_session = defaultdict(float)
    for sample, weight in zip(samples, weights, strict=True):
        if any(sample.loss_mask):
            of_session[sample.index] += weight * sum(sample.loss_mask)
    for total in of_session.values():
        assert total == pytest.approx(1)
    assert loss_normalizer(samples, per_token=False) == len(of_session)


@given(row_lists())
def test_token_mean_gives_every_token_the_same_weight(samples):
    assert row_weights(samples, per_token=True) == [float(any(s.loss_mask)) for s in samples]
    assert loss_normalizer(samples, per_token=True) == sum(sum(s.loss_mask) for s in samples)


def test_two_contexts_of_a_session_share_the_normalizer_of_one():
    whole = [make_sample([1, 1, 1, 1], index=0), make_sample([1, 1], index=1)]
    halves = [make_sample([1, 1, 0, 0], index=0), make_sample([0, 0, 1, 1], index=0), make_sample([1, 1], index=1)]
    assert row_weights(whole, per_token=False) == [1 / 4, 1 / 2]
    assert row_weights(halves, per_token=False) == [1 / 4, 1 / 4, 1 / 2]
    assert loss_normalizer(whole, per_token=False) == loss_normalizer(halves, per_token=False) == 2


@given(row_lists(), st.booleans(), st.randoms(use_true_random=False))
def test_weights_and_normalizers_of_parts_are_those_of_the_whole(samples, per_token, random):
    """For parts that hold whole Sessions: the rows may then come in any batches."""
    n_parts = 3
    part_of = {index: random.randrange(n_parts) for index in {s.index for s in samples}}
    parts = [[s for s in samples if part_of[s.index] == part] for part in range(n_parts)]
    whole = {id(s): w for s, w in zip(samples, row_weights(samples, per_token=per_token), strict=True)}
    for part in parts:
        assert row_weights(part, per_token=per_token) == [whole[id(s)] for s in part]
    assert sum(loss_normalizer(part, per_token=per_token) for part in parts) == loss_normalizer(
        samples, per_token=per_token
    )


def test_optimizer_batches_keep_the_contexts_of_a_session_together():
    rows = [make_sample([1], index=i) for i in (5, 3, 5, 4, 3)]
    batches = split_optimizer_batches(rows, 2)
    assert [[s.index for s in batch] for batch in batches] == [[5, 5, 3, 3], [4]]
    assert split_optimizer_batches(rows, None) == [[rows[0], rows[2], rows[1], rows[4], rows[3]]]
    assert split_optimizer_batches([], None) == split_optimizer_batches([], 2) == []


@given(st.lists(st.lists(st.integers(1, 3), max_size=5), max_size=5), st.sampled_from([None, 1, 2, 3, 7]))
def test_optimizer_batches_of_parts_are_those_of_the_whole(parts, size):
    """`parts` gives for each part the number of contexts of each of its Sessions."""
    numbers = iter(range(100))
    rows = [[make_sample([1], index=next(numbers)) for n in part] for part in parts]
    rows = [
        [s for s, n in zip(row, part, strict=True) for _ in range(n)] for row, part in zip(rows, parts, strict=True)
    ]
    joined, n_begun = [[]], 0
    for part in rows:
        for share in split_optimizer_batches(part, size, n_begun=n_begun):
            joined[-1] += share
            n_begun += len({s.index for s in share})
            if n_begun == size:
                joined.append([])
                n_begun = 0
    assert [batch for batch in joined if batch] == split_optimizer_batches([s for part in rows for s in part], size)


def test_row_order_does_not_depend_on_which_group_failed_first_and_took_its_row_again():
    def step(group_of_row):
        return [
            make_sample([1], row=row, group_index=group, index=2 * group + place, advantage=float(place))
            for row, group in group_of_row.items()
            for place in (0, 1)
        ]

    orders = [
        [(s.row, s.advantage) for s in row_order(step(group_of_row))]
        for group_of_row in ({2: 2, 0: 3, 1: 4}, {2: 2, 1: 3, 0: 4})
    ]
    assert orders[0] == orders[1] == [(row, place) for row in (0, 1, 2) for place in (0.0, 1.0)]


def test_row_order_tells_groups_of_one_row_apart_by_number_and_keeps_contexts_in_export_order():
    a, b = make_sample([1], group_index=0, index=1, advantage=1.0), make_sample([1], group_index=0, index=1)
    c, d = make_sample([1], group_index=1, index=2), make_sample([1], group_index=0, index=0)
    assert row_order([c, a, b, d]) == [d, a, b, c]


def test_token_advantages_cover_exactly_the_trained_tokens():
    assert token_advantages(make_sample([1, 0, 1], advantage=-1.5)).tolist() == [-1.5, 0.0, -1.5]


@pytest.mark.parametrize("credit", [None, math.nan, math.inf])
def test_a_row_without_finite_credit_is_refused_by_place(credit):
    with pytest.raises(TrainError, match="session G4/7"):
        token_advantages(make_sample([1], group_index=4, index=7, advantage=credit))


def test_rows_that_disagree_with_themselves_are_refused_by_place():
    short_mask = make_sample([1, 1])
    short_mask.loss_mask = bytearray([1])
    no_prompt = make_sample([1, 1], prompt_len=0)
    too_long = make_sample([1, 1])
    too_long.tokens = array("i", [1])
    endless = make_sample([1, 1], logprob=math.inf)
    for sample in (short_mask, no_prompt, too_long, endless):
        with pytest.raises(TrainError, match="session G0/0"):
            micro_batches([sample], [1.0], MicroBatching())


def test_lists_that_a_hook_left_in_a_sample_are_packed_like_arrays():
    sample = make_sample([0, 1])
    (before,) = micro_batches([sample], [1.0], MicroBatching())
    sample.tokens, sample.loss_mask = list(sample.tokens), list(sample.loss_mask)
    sample.rollout_log_probs = list(sample.rollout_log_probs)
    (after,) = micro_batches([sample], [1.0], MicroBatching())
    assert torch.equal(before.ids, after.ids)
    assert torch.equal(before.rollout_logprobs, after.rollout_logprobs)
