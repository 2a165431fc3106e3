"""The framing between the engine and the warden."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from relax_trio.warden.wire import Unpacker, pack


@given(st.lists(st.text(), max_size=5), st.lists(st.integers(1, 40), min_size=1))
def test_messages_survive_any_cutting_of_the_stream(texts, cuts):
    orders = [{"op": "spawn", "id": n, "argv": [text], "env": {"A": "\udcff"}} for n, text in enumerate(texts)]
    stream = b"".join(pack(order) for order in orders)
    unpacker = Unpacker()
    bodies, start, turn = [], 0, 0
    while start < len(stream):
        end = start + cuts[turn % len(cuts)]
        bodies += unpacker.feed(stream[start:end])
        start, turn = end, turn + 1

    assert [json.loads(body) for body in bodies] == orders
