"""Bookmarks change what a request costs, never how it is read: a forest that keeps them beside one that keeps none."""

from __future__ import annotations

import random

from builders_forest import commit
from builders_tokens import assistant, user
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_trio.forest.bookmarks import Bookmarks
from relax_trio.forest.forest import SessionForest


class NoBookmarks(Bookmarks):
    def add(self, mark, *, behind):
        pass


def forgetful() -> SessionForest:
    forest = SessionForest()
    forest._index._bookmarks = NoBookmarks()
    return forest


def answer(rnd):
    return assistant(rnd.choice("rs"), reasoning=rnd.choice([None, "hm", "ho"]))


def request(rnd, known):
    """A history that was said before, maybe without reasoning, maybe edited, maybe with an answer of another model."""
    sent = list(rnd.choice(known))
    if rnd.random() < 0.5:
        sent = [assistant(m.content) if m.role == "assistant" and rnd.random() < 0.5 else m for m in sent]
    if rnd.random() < 0.15:
        sent[rnd.randrange(len(sent) - 1) if len(sent) > 1 else 0] = user("b")
    if rnd.random() < 0.2:
        sent += [answer(rnd), user("a")]
    return sent


def reading(match, forest):
    observation = None if match.observation is None else match.observation.id
    delivered = [node.delivered for node in forest.nodes]
    return match.parent.id, observation, match.new_messages, match.new_states, match.n_restored, delivered


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_a_request_is_read_as_if_none_had_come_before_it(seed):
    rnd = random.Random(seed)
    forests = (SessionForest(), forgetful())
    pending, known = [], [[user("a")]]
    for _ in range(30):
        if pending and rnd.random() < 0.5:
            sent, matches = pending.pop(rnd.randrange(len(pending)))
            reply, delivered = answer(rnd), rnd.random() < 0.6
            nodes = [commit(*one, reply, delivered=delivered) for one in zip(forests, matches, strict=True)]
            assert nodes[0].id == nodes[1].id
            known = [*known[-11:], [*sent, reply, user(rnd.choice("ab"))]]
        else:
            sent = request(rnd, known)
            matches = [forest.match(sent, (), {}) for forest in forests]
            with_marks, without = map(reading, matches, forests)
            assert with_marks == without
            assert forests[0].n_restored == forests[1].n_restored
            pending.append((sent, matches))
