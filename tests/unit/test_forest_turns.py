"""SessionForest by example: each conversation shape, and what it does to the tree."""

from __future__ import annotations

import json
from array import array

import pytest
import trio.testing
from builders_forest import commit, encode, spans, turn
from builders_tokens import LOOK, assistant, look_call, result, system, user

from relax_trio.data.messages import ImagePart, Message, TextPart, ToolCall
from relax_trio.errors import EngineFault, InvalidRequest
from relax_trio.forest.forest import SessionForest
from relax_trio.forest.hashing import chain, message_hash, root_state, visible_hash
from relax_trio.forest.view import forest_json


def shape(forest):
    return [(node.id, node.parent and node.parent.id, node.kind) for node in forest.nodes]


def test_a_linear_conversation_is_one_lineage():
    forest = SessionForest()
    history = [user("a")]
    for step in range(3):
        node = turn(forest, history, f"r{step}", token_ids=(10 + step, 20 + step))
        history += [assistant(f"r{step}"), user(f"u{step}")]
    assert [n.kind for n in forest.lineage(node)] == ["observation", "response"] * 3
    assert forest.leaves() == forest.exportable_leaves() == (node,)
    assert forest.messages(node) == tuple(history[:-1])
    wanted = encode((user("a"),)) + array("i", [10, 20]) + encode((user("u0"),)) + array("i", [11, 21])
    assert forest.tokens(node) == wanted + encode((user("u1"),)) + array("i", [12, 22])
    assert node.total_len == len(forest.tokens(node))


def test_the_parent_is_the_root_or_a_response_and_the_suffix_is_new():
    forest = SessionForest()
    first = forest.match([system(), user("a")], (), {})
    assert (first.parent, first.observation, first.new_messages) == (forest.root, None, (system(), user("a")))
    node = commit(forest, first, assistant("r"))
    second = forest.match([system(), user("a"), assistant("r"), user("b")], (), {})
    assert (second.parent, second.observation, second.new_messages) == (node, None, (user("b"),))


def test_the_same_request_again_branches_from_its_observation():
    forest = SessionForest()
    one = turn(forest, [user("a")], "r1")
    again = forest.match([user("a")], (), {})
    assert again.observation is one.parent
    assert again.parent is forest.root
    assert again.state == one.parent.state
    two = commit(forest, again, assistant("r2"))
    assert two.parent is one.parent
    assert forest.leaves() == (one, two)


def test_messages_behind_an_observation_are_encoded_anew_with_it():
    forest = SessionForest()
    node = turn(forest, [user("a")], "r")
    turn(forest, [user("a"), assistant("r"), user("b")], "s")
    match = forest.match([user("a"), assistant("r"), user("b"), user("c")], (), {})
    assert (match.parent, match.observation, match.new_messages) == (node, None, (user("b"), user("c")))


def test_an_edited_answer_starts_a_new_tree_from_the_root():
    forest = SessionForest()
    turn(forest, [user("a")], "r")
    match = forest.match([user("a"), assistant("R"), user("b")], (), {})
    assert match.parent is forest.root
    assert match.new_messages == (user("a"), assistant("R"), user("b"))


@pytest.mark.parametrize("change", [{"tools": (LOOK,)}, {"kwargs": {"enable_thinking": False}}])
def test_other_tools_or_template_arguments_are_another_tree(change):
    forest = SessionForest()
    turn(forest, [user("a")], "r")
    other = turn(forest, [user("a")], "r", **change)
    assert other.parent.parent is forest.root
    assert len(forest.trees) == 2
    assert len(forest.leaves()) == 2


def test_key_order_of_tools_and_arguments_does_not_matter():
    forest = SessionForest()
    shuffled = {"function": dict(reversed(LOOK["function"].items())), "type": "function"}
    one = turn(forest, [user("a")], "r", tools=(LOOK,), kwargs={"x": 1, "y": 2})
    assert forest.match([user("a")], (shuffled,), {"y": 2.0, "x": 1}).observation is one.parent


def test_equal_responses_are_one_state_and_the_first_ones_tokens_stand():
    forest = SessionForest()
    one = turn(forest, [user("a")], "r", token_ids=(1, 2), delivered=False)
    two = turn(forest, [user("a")], "r", token_ids=(3, 4, 5))
    assert two is one
    assert (one.n_equal, list(one.token_ids), one.delivered) == (1, [1, 2], True)
    assert len(forest.nodes) == 3


def test_concurrent_siblings_share_the_observation():
    forest = SessionForest()
    matches = [forest.match([user("a")], (), {}) for _ in range(3)]
    nodes = [commit(forest, match, assistant(f"r{i}")) for i, match in enumerate(matches)]
    assert len({node.parent.id for node in nodes}) == 1
    assert shape(forest) == [(0, None, "root"), (1, 0, "observation"), *((i, 1, "response") for i in (2, 3, 4))]


def test_a_template_that_prints_the_time_gets_two_observations_rather_than_wrong_tokens():
    forest = SessionForest()
    early, late = (forest.match([user("a")], (), {}) for _ in range(2))
    one = commit(forest, early, assistant("r1"))
    two = forest.commit(
        late,
        array("i", [1, 2, 3, 4]),
        message=assistant("r2"),
        token_ids=array("i", [5]),
        logprobs=array("d", [-1.0]),
        versions=spans(1),
        finish="stop",
    )
    assert forest.tokens(two) == array("i", [1, 2, 3, 4, 5])
    assert forest.tokens(one)[:3] == encode((user("a"),))


def test_parallel_tool_results_are_one_observation():
    forest = SessionForest()
    asked = assistant(None, calls=(look_call("c1"), look_call("c2")))
    turn(forest, [user("a")], asked, tools=(LOOK,))
    node = turn(forest, [user("a"), asked, result("1", "c1"), result("", "c2")], "r", tools=(LOOK,))
    assert node.parent.messages == (result("1", "c1"), result("", "c2"))
    assert len(forest.lineage(node)) == 4


@pytest.mark.parametrize("known", [True, False])
def test_a_request_that_ends_with_the_assistant_is_refused(known):
    forest = SessionForest()
    turn(forest, [user("a")], "r")
    with pytest.raises(InvalidRequest, match="append a user or tool message") as caught:
        forest.match([user("a"), assistant("r" if known else "other")], (), {})
    assert caught.value.param == "messages[1]"
    with pytest.raises(InvalidRequest):
        forest.match([], (), {})


def test_matching_changes_no_node():
    forest = SessionForest()
    turn(forest, [user("a")], "r")
    before = json.dumps(forest_json(forest))
    for messages in ([user("a")], [user("b")], [user("a"), assistant("r"), user("c")], [user("a"), user("b")]):
        forest.match(messages, (), {})
        forest.find(messages, (), {})
    assert json.dumps(forest_json(forest)) == before


async def test_a_turn_never_checkpoints():
    forest = SessionForest()
    with trio.testing.assert_no_checkpoints():
        turn(forest, [user("a")], "r")


def test_a_turn_whose_lengths_disagree_is_an_engine_fault():
    forest = SessionForest()
    match = forest.match([user("a")], (), {})
    good = {"message": assistant("r"), "token_ids": array("i", [1, 2]), "logprobs": array("d", [-1.0, -1.0])}
    bad = [
        {"versions": spans(1)},
        {"versions": spans(2), "logprobs": array("d", [-1.0])},
        {"versions": spans(2), "logprobs": array("d", [-1.0, float("nan")])},
        {"versions": spans(2), "message": user("a")},
    ]
    for change in bad:
        with pytest.raises(EngineFault):
            forest.commit(match, encode((user("a"),)), finish="stop", **{**good, **change})
    assert len(forest.nodes) == 1


# --- delivery --------------------------------------------------------------------------------------------------


def test_an_undelivered_response_is_a_leaf_but_not_exportable():
    forest = SessionForest()
    one = turn(forest, [user("a")], "r")
    two = turn(forest, [user("a"), assistant("r"), user("b")], "s", delivered=False)
    assert forest.leaves() == (two,)
    assert forest.exportable_leaves() == (one,)
    forest.mark_delivered(two)
    assert forest.exportable_leaves() == (two,)


def test_a_later_request_proves_delivery_even_if_it_fails():
    forest = SessionForest()
    one = turn(forest, [user("a")], "r", delivered=False)
    assert forest.exportable_leaves() == ()
    forest.match([user("a")], (), {})
    assert forest.exportable_leaves() == ()
    forest.match([user("a"), assistant("r"), user("b")], (), {})
    assert forest.exportable_leaves() == (one,)


# --- reasoning -------------------------------------------------------------------------------------------------

THOUGHT = assistant("r", reasoning="hm")


def test_a_response_sent_back_without_reasoning_is_restored_counted_and_said_once(events):
    forest = SessionForest()
    one = turn(forest, [user("a")], THOUGHT)
    match = forest.match([user("a"), assistant("r"), user("b")], (), {})
    assert (match.parent, match.new_messages, match.n_restored) == (one, (user("b"),), 1)
    assert not events
    two = commit(forest, match, assistant("s", reasoning="hm2"))
    assert forest.messages(two)[1] == THOUGHT
    turn(forest, [user("a"), assistant("r"), user("b"), assistant("s"), user("c")], "t")
    assert forest.n_restored == 2
    assert [event.name for event in events] == ["reasoning.restored"]
    assert len(forest.leaves()) == 1


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


def test_of_several_the_last_delivered_is_restored():
    forest = SessionForest()
    turn(forest, [user("a")], assistant("r", reasoning="one"))
    two = turn(forest, [user("a")], assistant("r", reasoning="two"))
    turn(forest, [user("a")], assistant("r", reasoning="three"), delivered=False)
    assert forest.match([user("a"), assistant("r"), user("b")], (), {}).parent is two


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


# --- hashing ---------------------------------------------------------------------------------------------------


def test_every_field_of_a_message_is_part_of_its_hash():
    call = look_call()
    variants = [
        user("a"),
        system("a"),
        user("b"),
        assistant("a"),
        assistant("a", reasoning=""),
        assistant("a", reasoning="b"),
        assistant("ab"),
        assistant("a", calls=(call,)),
        assistant("a", calls=(ToolCall(id="c2", name="look", arguments=call.arguments),)),
        assistant("a", calls=(ToolCall(id="c1", name="loo", arguments="k" + call.arguments),)),
        assistant("a", calls=(call, call)),
        result("a", "c1"),
        result("a", "c2"),
        Message(role="tool", content="a"),
        Message(role="user", content=(TextPart("a"),)),
        Message(role="user", content=(ImagePart("a"),)),
        Message(role="user", content=(TextPart("a"), TextPart(""))),
    ]
    assert len({message_hash(message) for message in variants}) == len(variants)
    assert visible_hash(assistant("a", reasoning="b")) == message_hash(assistant("a"))


def test_the_chain_depends_on_order_and_root():
    a, b = user("a"), user("b")
    start = root_state((), {})
    assert chain(start, [a, b])[-1] != chain(start, [b, a])[-1]
    assert chain(start, [a, b]) == [*chain(start, [a]), *chain(chain(start, [a])[-1], [b])]
    assert (
        len({root_state((), {}), root_state((LOOK,), {}), root_state((), {"x": 1}), root_state((LOOK, LOOK), {})}) == 4
    )


# --- view ------------------------------------------------------------------------------------------------------


def test_the_view_lines_up_tokens_masks_and_logprobs():
    forest = SessionForest()
    turn(forest, [user("a")], "r", tools=(LOOK,), delivered=False)
    view = json.loads(json.dumps(forest_json(forest)))
    observation, response = view["nodes"]
    assert (observation["id"], observation["parent"], observation["kind"]) == (1, None, "observation")
    assert observation["messages"] == [{"role": "user", "content": "a"}]
    assert observation["tools"] == [LOOK]
    assert observation["loss_mask"] == [0, 0, 0]
    assert observation["logprobs"] == [0.0, 0.0, 0.0]
    assert (response["id"], response["parent"], response["kind"]) == (2, 1, "response")
    assert (response["token_ids"], response["loss_mask"]) == ([7, 8, 9], [1, 1, 1])
    assert response["logprobs"] == [-0.5, -1.5, -2.5]
    assert response["delivered"] is False
    assert (view["leaves"], view["exportable_leaves"]) == ([2], [])
