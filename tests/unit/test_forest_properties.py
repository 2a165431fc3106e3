"""SessionForest against a naive reference on random conversation trees: see tests/reference_forest.py."""

from __future__ import annotations

import os
import random
from array import array
from collections import Counter

import pytest
from attrs import define, field
from builders_forest import spans
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_forest import (
    N_SAID,
    SCRIPT_BYTES,
    SILENT,
    TREES,
    Entry,
    Found,
    Reference,
    Script,
    Turn,
    deliver,
    encode,
    generate,
    logprobs,
    record,
    spell,
)

from relax_trio.data.record import ExportRecord, SessionOutput
from relax_trio.data.sample import Context, SampleStatus
from relax_trio.errors import AmbiguousLeaf, NoCommittedResponse, UnknownState
from relax_trio.forest.export import export_contexts, shared_trained_tokens
from relax_trio.forest.forest import Match, SessionForest

SOAK = int(os.environ.get("SOAK", "1"))
"""How many times the usual number of scripts is played; `tools/nightly` raises it."""

PARTS = 5 * SOAK
CASES = 1000
"""Scripts of one part: 2 x 5 x 1000 make 10,000. In parts, so that no test runs for long."""

FLOORS = {
    "8 turns deep": 0.15,
    "several trees": 0.2,
    "forked": 0.6,
    "repeated request": 0.3,
    "extended observation": 0.4,
    "edited history": 0.4,
    "overlapping turns": 0.5,
    "equal responses": 0.05,
    "undelivered leaf": 0.3,
    "rewritten observation": 0.002,
    "one leaf": 0.04,
    "unknown record": 0.5,
}
"""Least share of scripts in which a thing must have happened, so that the generator can't quietly grow tame."""

RESTORE_FLOORS = {"restored": 0.3, "restored twice in one request": 0.2, "choice of equal-looking siblings": 0.01}


@define
class Play:
    """A script on the forest and on the reference at once."""

    forest: SessionForest
    reference: Reference
    seen: Counter[str] = field(factory=Counter)
    twins: dict[tuple, object] = field(factory=dict)  # (response above, path, tokens) → observation node
    n_commits: int = 0

    def run(self, script: Script) -> None:
        waiting: list[tuple[int, Turn, Found, Match, tuple[int, ...]]] = []
        for clock in range(script.n_turns):
            turn = script.turn(clock, self.reference)
            match = self.forest.match(spell(turn.path), *TREES[turn.tree])
            found, _ = self.reference.find(turn.tree, turn.path)
            self.check_match(turn, found, match)
            deliver(found.response)
            self.note(turn, found)
            waiting.append((clock + turn.delay, turn, found, match, self.sent(turn, found)))
            for due in [entry for entry in waiting if entry[0] <= clock]:
                waiting.remove(due)
                self.commit(*due[1:])
            self.seen["overlapping turns"] += len(waiting) > 0
        for _, *due in waiting:
            self.commit(*due)

    def check_match(self, turn: Turn, found: Found, match: Match) -> None:
        if found.observation is not None:
            assert match.observation is found.observation.node
            assert match.parent is (found.observation.above.node if found.observation.above else self.forest.root)
        else:
            assert match.observation is None
            assert match.parent is (found.response.node if found.response else self.forest.root)
            assert match.new_messages == spell(turn.path[found.n_answered :])
        assert match.n_restored == found.n_restored

    def sent(self, turn: Turn, found: Found) -> tuple[int, ...]:
        """What the engine gets."""
        if found.observation is not None:
            return found.observation.tokens
        prefix = found.response.tokens if found.response else ()
        return prefix + encode(turn.path[found.n_answered :], turn.salt)

    def commit(self, turn: Turn, found: Found, match: Match, sent: tuple[int, ...]) -> None:
        self.n_commits += 1
        serial = 2 * self.n_commits + 1
        assert tuple(self.forest.tokens(match.observation or match.parent)) == sent[: match.parent.total_len] + (
            sent[match.parent.total_len :] if match.observation else ()
        )
        node = self.forest.commit(
            match,
            array("i", [] if match.observation else sent[match.parent.total_len :]),
            message=spell((turn.reply,))[0],
            token_ids=array("i", generate(serial, turn.n_tokens)),
            logprobs=array("d", logprobs(serial, turn.n_tokens)),
            versions=spans(turn.n_tokens),
            finish="stop",
        )
        entry = self.reference.responses.get((turn.tree, (*found.path, turn.reply)))
        if entry is not None:
            assert node is entry.node, "an equal response under one state is one node"
            self.seen["equal responses"] += 1
        else:
            entry = record(self.reference, turn, found, sent, serial, node)
            observation = self.reference.observations[turn.tree, found.path]
            observation.node = observation.node or node.parent
            self.seen["rewritten observation"] += observation.tokens != sent
            above = entry.above.order if entry.above else None
            assert self.twins.setdefault((above, turn.tree, found.path, sent), node.parent) is node.parent
        if turn.delivered:
            self.forest.mark_delivered(node)
            deliver(entry)

    def note(self, turn: Turn, found: Found) -> None:
        self.seen["repeated request"] += found.observation is not None
        self.seen["extended observation"] += any(
            (turn.tree, found.path[:k]) in self.reference.observations
            for k in range(found.n_answered + 1, len(turn.path))
        )
        self.seen["edited history"] += turn.edit in ("cut", "changed", "own answer")
        self.seen["restored"] += found.n_restored > 0
        self.seen["restored twice in one request"] += found.n_restored > 1
        self.seen["choice of equal-looking siblings"] += found.n_choices > 1


def exported(forest: SessionForest, *keys: tuple[int, tuple[int, ...]], dedup: bool = False) -> tuple[Context, ...]:
    records = tuple(
        ExportRecord(
            name=f"c{i}", messages=spell(path), tools=TREES[tree][0], chat_template_kwargs=TREES[tree][1], metadata={}
        )
        for i, (tree, path) in enumerate(keys)
    )
    return export_contexts(forest, SessionOutput(records=records, metadata={}), dedup_shared_turns=dedup)


def check_context(context: Context, entry: Entry) -> None:
    """Tokens are what was sent and returned; everything else lines up with them."""
    assert tuple(context.tokens) == entry.tokens
    assert context.prompt_len == entry.prompt_len
    assert tuple(context.loss_mask) == entry.mask
    assert tuple(context.logprobs) == entry.logprobs
    assert (context.turn_lens, context.turn_starts) == (entry.turn_lens, entry.turn_starts)
    assert context.messages == spell(entry.path)
    assert sum(span.n_tokens for span in context.versions) == sum(entry.turn_lens)


def check_export(play: Play, data: bytes) -> None:
    """Every committed state is reachable by its messages; leaves, and some of the others, hold what was recorded."""
    forest, reference = play.forest, play.reference
    states = reference.responses | reference.observations
    above = {id(entry.above) for entry in reference.responses.values()}
    leaves = {key: entry for key, entry in reversed(reference.responses.items()) if id(entry) not in above}
    some = [list(states)[number % len(states)] for number in data[5:9]]
    chosen = leaves | {key: states[key] for key in some if states[key].turn_lens}
    contexts = dict(zip(chosen, exported(forest, *chosen), strict=True))
    for key, entry in states.items():
        if key not in contexts:
            at = forest.find(spell(key[1]), *TREES[key[0]])
            assert (at.node, at.n_matched) == (entry.node, len(key[1]))
    for key, context in contexts.items():
        assert forest.nodes[context.node_id] is chosen[key].node
        whole = key in reference.responses
        assert context.status is (SampleStatus.COMPLETED if whole else SampleStatus.TRUNCATED)
        check_context(context, chosen[key])
    first = next(key for key, entry in reference.observations.items() if not entry.above)
    with pytest.raises(NoCommittedResponse):
        exported(forest, first)
    if len(leaves) > 1:
        check_dedup(play, leaves, [contexts[key] for key in leaves])
    check_implicit(play)


def check_dedup(play: Play, leaves: dict[tuple, Entry], plain: list[Context]) -> None:
    """Each generated token is trained in the first context that holds it; the rest is as without."""
    once = exported(play.forest, *leaves, dedup=True)
    trained: set[int] = set()
    for context, whole, entry in zip(once, plain, leaves.values(), strict=True):
        fresh = [n for step, n in zip(entry.lineage(), entry.turn_lens, strict=True) if step.order not in trained]
        trained.update(step.order for step in entry.lineage())
        assert sum(context.loss_mask) == sum(fresh)
        assert all(a <= b for a, b in zip(context.loss_mask, entry.mask, strict=True))
        assert (context.tokens, context.logprobs) == (whole.tokens, whole.logprobs)
    n_distinct = sum(entry.turn_lens[-1] for entry in play.reference.responses.values())
    assert sum(sum(context.loss_mask) for context in once) == n_distinct
    assert shared_trained_tokens(once) == 0
    assert shared_trained_tokens(plain) == sum(sum(entry.mask) for entry in leaves.values()) - n_distinct


def check_implicit(play: Play) -> None:
    received = [entry for entry in play.reference.responses.values() if entry.delivered]
    assert [node for node in play.forest.nodes if node.kind == "response" and node.delivered] == sorted(
        (entry.node for entry in received), key=lambda node: node.id
    )
    leaves = [entry for entry in received if all(other.above is not entry for other in received)]
    play.seen["undelivered leaf"] += any(not leaf.delivered for leaf in play.forest.leaves())
    play.seen["one leaf"] += len(leaves) == 1
    if len(leaves) == 1:
        (context,) = exported(play.forest)
        check_context(context, leaves[0])
    else:
        with pytest.raises(AmbiguousLeaf if leaves else NoCommittedResponse):
            exported(play.forest)


def check_records(play: Play, data: bytes) -> None:
    """Records that agents wrote with other habits: found as the reference finds them, or explained."""
    entries = list(play.reference.responses.values())
    for number in data[1:3]:
        entry = entries[number % len(entries)]
        path = tuple(SILENT.get(letter, letter) if number >> 4 else letter for letter in entry.path)
        if number % 3 == 0:
            path = (*path[: number % len(path)], N_SAID + number % 7)
        _, whole = play.reference.find(entry.tree, path)
        if whole is None:
            with pytest.raises(UnknownState, match=r"nearest committed state is node \d+"):
                exported(play.forest, (entry.tree, path))
        elif whole.turn_lens:
            check_context(exported(play.forest, (entry.tree, path))[0], whole)
        play.seen["unknown record"] += whole is None


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("unechoed", ["restore", "fork"])
def test_random_trees_match_as_the_reference_does_and_export_what_was_sent_and_returned(unechoed, part):
    seen: Counter[str] = Counter()
    mask = random.Random(part).randbytes(SCRIPT_BYTES)  # other scripts in each part, even from the same seed

    @settings(max_examples=CASES, deadline=None)
    @given(data=st.binary(min_size=SCRIPT_BYTES, max_size=SCRIPT_BYTES))
    def check(data):
        play = Play(SessionForest(unechoed_reasoning=unechoed), Reference(restores=unechoed == "restore"))
        data = bytes(a ^ b for a, b in zip(data, mask, strict=True))
        play.run(Script(data))
        check_export(play, data)
        check_records(play, data)
        responses = play.reference.responses.values()
        play.seen["8 turns deep"] += max(len(entry.turn_lens) for entry in responses) >= 8
        play.seen["several trees"] += len(play.forest.trees) > 1
        play.seen["forked"] += any(len(node.children) > 1 for node in play.forest.nodes[1:])
        seen.update({name for name, times in play.seen.items() if times})
        seen["scripts"] += 1

    check()
    floors = FLOORS | (RESTORE_FLOORS if unechoed == "restore" else {})
    shares = {name: seen[name] / seen["scripts"] for name in floors}
    assert seen["scripts"] >= CASES
    assert all(shares[name] >= floor for name, floor in floors.items()), shares
