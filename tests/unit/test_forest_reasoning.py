"""Answers that come back without their reasoning: which response each is taken as, and at what cost."""

from __future__ import annotations

import pytest
from builders_forest import commit, turn
from builders_tokens import LOOK, assistant, look_call, result, user

from relax_trio.forest.forest import SessionForest
from relax_trio.forest.hashing import root_state
from relax_trio.forest.matching import StateIndex

THOUGHT = assistant("r", reasoning="hm")


def test_a_response_sent_back_without_reasoning_is_restored_counted_and_said_once(events):
    forest = SessionForest()
    one = turn(forest, [user("a")], THOUGHT)
    match = forest.match([user("a"), assistant("r"), user("b")], (), {})
    assert (match.parent, match.new_messages, match.n_restored) == (one, (user("b"),), 1)
    assert forest.n_restored == 1
    two = commit(forest, match, assistant("s", reasoning="hm2"))
    assert forest.messages(two)[1] == THOUGHT
    turn(forest, [user("a"), assistant("r"), user("b"), assistant("s"), user("c")], "t")
    assert forest.n_restored == 2
    assert [event.name for event in events] == ["reasoning.restored"]
    assert len(forest.leaves()) == 1


def test_what_one_client_left_out_is_not_restored_in_a_history_that_has_it():
    forest = SessionForest()
    early = forest.match([user("a")], (), {})
    known = forest.match([user("a"), THOUGHT, user("b")], (), {})
    answer = commit(forest, known, assistant("s"))
    commit(forest, early, THOUGHT)
    sent = [user("b"), assistant("s"), user("c")]
    for first, n_restored in ((assistant("r"), 1), (THOUGHT, 0), (assistant("r"), 1)):
        match = forest.match([user("a"), first, *sent], (), {})
        assert (match.parent, match.new_messages, match.n_restored) == (answer, (user("c"),), n_restored)


def test_fork_follows_the_strict_identity():
    forest = SessionForest(unechoed_reasoning="fork")
    turn(forest, [user("a")], THOUGHT)
    match = forest.match([user("a"), assistant("r"), user("b")], (), {})
    assert (match.parent, match.n_restored) == (forest.root, 0)


@pytest.mark.parametrize(
    "sent", [assistant("r", reasoning="other"), assistant("R"), assistant("r", calls=(look_call(),))]
)
def test_only_absent_reasoning_is_restored(sent):
    forest = SessionForest()
    turn(forest, [user("a")], THOUGHT)
    assert forest.match([user("a"), sent, user("b")], (), {}).parent is forest.root


def test_a_response_as_written_comes_before_a_restored_one():
    forest = SessionForest()
    turn(forest, [user("a")], THOUGHT)
    plain = turn(forest, [user("a")], "r")
    match = forest.match([user("a"), assistant("r"), user("b")], (), {})
    assert (match.parent, match.n_restored) == (plain, 0)


def test_a_client_may_leave_reasoning_out_of_some_turns_only():
    forest = SessionForest()
    turn(forest, [user("a")], THOUGHT)
    node = turn(forest, [user("a"), THOUGHT, user("b")], assistant("s", reasoning="hm2"))
    for first in (THOUGHT, assistant("r")):
        for second in (assistant("s", reasoning="hm2"), assistant("s")):
            match = forest.match([user("a"), first, user("b"), second, user("c")], (), {})
            assert match.parent is node
            assert match.n_restored == (first is not THOUGHT) + (second.reasoning_content is None)
            assert (
                match.state == forest.match([user("a"), THOUGHT, user("b"), node.messages[0], user("c")], (), {}).state
            )


def test_the_longest_reading_wins_over_a_later_sibling_that_looks_the_same():
    forest = SessionForest()
    turn(forest, [user("a")], assistant("r", reasoning="one"))
    node = turn(forest, [user("a"), assistant("r"), user("b")], "s")
    later = turn(forest, [user("a")], assistant("r", reasoning="two"))
    match = forest.match([user("a"), assistant("r"), user("b"), assistant("s"), user("c")], (), {})
    assert (match.parent, match.new_messages) == (node, (user("c"),))
    assert forest.match([user("a"), assistant("r"), user("x")], (), {}).parent is later


def test_a_turn_reads_only_what_is_new_of_a_history_whose_reasoning_is_left_out(monkeypatch):
    forest, history, steps, n_read = SessionForest(), [user("0")], [], 0
    real = StateIndex._read

    def counted(*args):
        nonlocal n_read
        n_read += 1
        return real(*args)

    monkeypatch.setattr(StateIndex, "_read", counted)
    for step in range(50):
        n_read = 0
        commit(forest, forest.match(history, (), {}), assistant(f"r{step}", reasoning="hm"))
        steps.append(n_read)
        history += [assistant(f"r{step}"), user(f"u{step}")]
    assert steps[0] == 0
    assert set(steps[2:]) == {3}  # an observation and a response that were new at the last turn, and what is new now
    assert forest.n_restored == 49


def test_what_is_committed_in_the_midst_of_a_known_history_is_read():
    forest = SessionForest()
    turn(forest, [user("a")], "r")
    turn(forest, [user("a")], THOUGHT)
    slow = forest.match([user("a"), assistant("r"), user("b")], (), {})
    restored = turn(forest, [user("a"), THOUGHT, user("b")], assistant("s", reasoning="hm2"))
    sent = [user("a"), assistant("r"), user("b"), assistant("s"), user("c")]
    assert forest.match(sent, (), {}).parent is restored
    written = commit(forest, slow, assistant("s"))
    assert forest.match(sent, (), {}).parent is written


def test_a_bookmark_outlives_what_other_conversations_commit():
    forest = SessionForest()
    history = [user("a")]
    for step in range(4):
        turn(forest, history, assistant(f"r{step}", reasoning="hm"))
        history += [assistant(f"r{step}"), user(f"u{step}")]
    forest.match(history, (), {})
    turn(forest, [user("b")], assistant("s", reasoning="hm"))
    turn(forest, [user("b"), assistant("s"), user("b2")], assistant("s2", reasoning="hm"))
    recognized = forest._index.recognize(forest.root, root_state((), {}), history)
    assert list(recognized.messages) == [user("u3")]


@pytest.mark.parametrize("first", ["r", THOUGHT], ids=["written", "thought"])
@pytest.mark.parametrize("second", ["r", THOUGHT], ids=["written", "thought"])
@pytest.mark.parametrize("read_first", [False, True])
def test_a_second_way_to_read_a_beginning_is_found_whenever_it_comes(first, second, read_first):
    forest = SessionForest()
    sent = [user("a"), assistant("r"), user("b")]
    node = turn(forest, [user("a")], first)
    if read_first:
        assert forest.match(sent, (), {}).parent is node
    later = turn(forest, [user("a")], second)
    wanted = node if first == "r" else later
    assert forest.match(sent, (), {}).parent is wanted


def test_many_conversations_go_on_side_by_side():
    forest = SessionForest()
    lines = [[user(f"start {number}")] for number in range(20)]
    for step in range(5):
        for history in lines:
            node = turn(forest, history, assistant(f"r{step}", reasoning="hm"))
            assert node.n_messages == len(history) + 1
            history += [assistant(f"r{step}"), user("on")]
    assert len(forest.exportable_leaves()) == 20
    assert forest.n_restored == 20 * 4


def test_only_what_was_generated_is_restored():
    forest = SessionForest()
    turn(forest, [user("a"), THOUGHT, user("b")], "s")
    match = forest.match([user("a"), assistant("r"), user("b"), assistant("s"), user("c")], (), {})
    assert (match.parent, match.n_restored) == (forest.root, 0)


def test_of_several_the_last_delivered_is_restored():
    forest = SessionForest()
    turn(forest, [user("a")], assistant("r", reasoning="one"))
    two = turn(forest, [user("a")], assistant("r", reasoning="two"))
    turn(forest, [user("a")], assistant("r", reasoning="three"), delivered=False)
    assert forest.match([user("a"), assistant("r"), user("b")], (), {}).parent is two


def test_an_undelivered_response_is_restored_where_there_is_no_other():
    forest = SessionForest()
    turn(forest, [user("a")], assistant("r", reasoning="one"), delivered=False)
    two = turn(forest, [user("a")], assistant("r", reasoning="two"), delivered=False)
    assert forest.match([user("a"), assistant("r"), user("b")], (), {}).parent is two
    assert two.delivered


def test_calls_are_restored_by_their_ids():
    forest = SessionForest()
    turn(forest, [user("a")], assistant(None, reasoning="one", calls=(look_call("c1"),)), tools=(LOOK,))
    two = turn(forest, [user("a")], assistant(None, reasoning="two", calls=(look_call("c2"),)), tools=(LOOK,))
    turn(forest, [user("a")], assistant(None, reasoning="three", calls=(look_call("c3"),)), tools=(LOOK,))
    sent = [user("a"), assistant(None, calls=(look_call("c2"),)), result("1", "c2")]
    assert forest.match(sent, (LOOK,), {}).parent is two


def test_reasoning_alone_is_restored_from_empty_content():
    forest = SessionForest()
    one = turn(forest, [user("a")], assistant(None, reasoning="hm"))
    assert forest.match([user("a"), assistant(""), user("b")], (), {}).parent is one


def test_a_longer_prefix_as_written_beats_a_restored_one():
    forest = SessionForest()
    whole = [user("a"), assistant("r"), user("b")]
    early = turn(forest, whole, "s")
    turn(forest, [user("a")], THOUGHT)
    match = forest.match(whole, (), {})
    assert (match.observation, match.n_restored) == (early.parent, 0)
    assert forest.match([*whole, assistant("s"), user("c")], (), {}).parent is early
