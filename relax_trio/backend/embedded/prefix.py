"""Keys and values of attempts that ended, kept for the next turn: found by Session, or by a shared opening.

Owns the copies and their eviction, least recently used first. Not covered: the rows of running attempts
(kv.py, rows.py).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from relax_trio.backend.embedded.kv import KvBlock

Tokens = NDArray[np.int32]
K = TypeVar("K")

OPENING_LEN = 16
"""Tokens that two Sessions must share before one looks at the other's cache."""

_MAX_TRIED = 8


@frozen(kw_only=True, eq=False)
class Kept:
    """The computed part of one attempt: `tokens` (N,) and their keys and values."""

    session_key: str
    tokens: Tokens
    block: KvBlock


class PrefixCache:
    """What ended attempts left: at most `max_tokens` tokens of it, all computed under the present weights."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.n_tokens = 0
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._by_session: dict[str, list[int]] = {}
        self._by_opening: dict[bytes, list[int]] = {}
        self._n_added = 0

    def add(self, kept: Kept) -> None:
        """Keep one more; entries of the same Session that it continues go, then the least recently used ones."""
        n_new = len(kept.tokens)
        if n_new == 0 or n_new > self.max_tokens:
            return
        for number in [*self._by_session.get(kept.session_key, ())]:
            old = self._kept[number]
            if common_len(old.tokens, kept.tokens) == len(old.tokens):
                self._drop(number)
        while self.n_tokens + n_new > self.max_tokens:
            self._drop(next(iter(self._kept)))
        number = self._n_added
        self._n_added += 1
        self._kept[number] = kept
        self.n_tokens += n_new
        self._by_session.setdefault(kept.session_key, []).append(number)
        self._by_opening.setdefault(_opening(kept.tokens), []).append(number)

    def find(self, session_key: str, tokens: Tokens) -> tuple[int, Kept | None]:
        """The entry that shares most opening tokens with `tokens`, and how many; (0, None) when there is none.

        The Session's own entries are all looked at, of others only the newest few with the same opening.
        """
        best_len, best = 0, None
        others = self._by_opening.get(_opening(tokens), ())
        for number in [*self._by_session.get(session_key, ()), *others[-_MAX_TRIED:]]:
            shared = common_len(self._kept[number].tokens, tokens)
            if shared > best_len:
                best_len, best = shared, number
        if best is None:
            return 0, None
        self._kept.move_to_end(best)
        return best_len, self._kept[best]

    def close_session(self, session_key: str) -> None:
        """Drop what the Session left."""
        for number in [*self._by_session.get(session_key, ())]:
            self._drop(number)

    def clear(self) -> None:
        """Drop everything: the weights changed."""
        self._kept.clear()
        self._by_session.clear()
        self._by_opening.clear()
        self.n_tokens = 0

    def _drop(self, number: int) -> None:
        kept = self._kept.pop(number)
        self.n_tokens -= len(kept.tokens)
        _remove(self._by_session, kept.session_key, number)
        _remove(self._by_opening, _opening(kept.tokens), number)


def common_len(a: Tokens, b: Tokens) -> int:
    """Length of the common opening of two token arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _opening(tokens: Tokens) -> bytes:
    return tokens[:OPENING_LEN].tobytes()


def _remove(index: dict[K, list[int]], key: K, number: int) -> None:
    numbers = index[key]
    numbers.remove(number)
    if not numbers:
        del index[key]
