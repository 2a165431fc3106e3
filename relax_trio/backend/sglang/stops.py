"""Stop strings that began before a leg did: the server looks for them in what it generates itself only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def cut_at_stop(decode: Decode, earlier: array[int], new: array[int], stops: Sequence[str]) -> tuple[int, str] | None:
    """Find a stop string that begins in `earlier` and is completed by `new`.

    Args:
      decode: token ids → text, special tokens included.
      earlier: tokens of the turn before the leg.
      new: tokens of the leg.

    Returns:
      How many of `new` are kept, the one that completes it included, and the string; None: there is none.
    """
    longest = max(map(len, stops), default=0)
    if longest < 2 or not earlier or not new:
        return None
    # A token may stand for less than a character, so a few more are looked at than the string has characters.
    tail = earlier[-(longest + _SLACK) :]
    n_before = len(decode(tail))
    for n_new in range(1, min(len(new), longest + _SLACK) + 1):
        text = decode(tail + new[:n_new])
        for stop in stops:
            at = text.find(stop, max(0, n_before - len(stop) + 1))
            if 0 <= at < n_before and at + len(stop) > n_before:
                return n_new, stop
    return None


_SLACK = 8
