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
from relax_trio.forest import matching
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


def test_tool_results_may_come_one_by_one_or_together():
    forest = SessionForest()
    asked = assistant(None, calls=(look_call("c1"), look_call("c2")))
    node = turn(forest, [user("a")], asked, tools=(LOOK,))
    history = [user("a"), asked]
    both = turn(forest, [*history, result("1", "c1"), result("2", "c2")], "r", tools=(LOOK,))
    alone = forest.match([*history, result("1", "c1")], (LOOK,), {})
    assert (alone.parent, alone.observation, alone.new_messages) == (node, None, (result("1", "c1"),))
    one = commit(forest, alone, assistant("r"))
    again = forest.match([*history, result("1", "c1"), result("2", "c2")], (LOOK,), {})
    assert again.observation is both.parent
    split = forest.match([*history, result("1", "c1"), assistant("r"), result("2", "c2")], (LOOK,), {})
    assert (split.parent, split.new_messages) == (one, (result("2", "c2"),))


def test_an_agents_own_answer_is_part_of_the_observation_behind_the_last_generated_turn():
    forest = SessionForest()
    node = turn(forest, [user("a")], "r")
    history = [user("a"), assistant("r"), user("b"), assistant("mine"), user("c")]
    match = forest.match(history, (), {})
    assert (match.parent, match.new_messages) == (node, tuple(history[2:]))
    commit(forest, match, assistant("s"))
    assert forest.match(history[:3], (), {}).new_messages == (user("b"),)


def test_a_generated_turn_is_never_encoded_again_where_an_observation_held_its_text_before():
    """Few-shot examples first; then the model itself answers as an example did."""
    forest = SessionForest()
    turn(forest, [user("a"), assistant("r"), user("b")], "s")
    node = turn(forest, [user("a")], "r")
    longer = forest.match([user("a"), assistant("r"), user("b"), user("c")], (), {})
    assert (longer.parent, longer.new_messages) == (node, (user("b"), user("c")))
    same = forest.match([user("a"), assistant("r"), user("b")], (), {})
    assert same.parent is forest.root
    assert same.observation is forest.nodes[1]


def test_hundreds_of_turns_are_one_lineage():
    forest = SessionForest()
    history = [user("0")]
    for step in range(1, 400):
        match = forest.match(history, (), {})
        assert len(match.new_messages) == 1
        node = commit(forest, match, assistant(f"r{step}", reasoning="hm"), token_ids=(5000 + step,))
        history += [assistant(f"r{step}", reasoning="hm" if step % 3 else None), user(f"u{step}")]
    assert forest.exportable_leaves() == (node,)
    assert len(forest.lineage(node)) == len(forest.nodes) - 1 == 2 * 399
    assert [token for token in forest.tokens(node) if token > 5000] == [5000 + step for step in range(1, 400)]
    assert forest.n_restored == 399 // 3 - 1  # the last one was not sent back


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


def test_tools_may_change_and_change_back():
    forest = SessionForest()
    history = [user("a"), assistant("r"), user("b")]
    node = turn(forest, [user("a")], "r")
    assert forest.match(history, (LOOK,), {}).parent is forest.root
    turn(forest, history, "s", tools=(LOOK,))
    assert forest.match(history, (), {}).parent is node
    assert forest.match(history, (), {"x": True}).parent is forest.root
    turn(forest, history, "s", kwargs={"x": True})
    assert forest.match(history, (), {"x": 1}).parent is forest.root
    assert len(forest.trees) == 3


def test_first_requests_at_the_same_time_are_of_one_tree():
    forest = SessionForest()
    matches = [forest.match([user(text)], (LOOK,), {}) for text in "ab"]
    one, two = (commit(forest, match, assistant("r")) for match in matches)
    assert one.tree is two.tree is forest.trees[0]


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
    a, b = message_hash(user("a")), message_hash(user("b"))
    start = root_state((), {})
    assert chain(start, [a, b])[-1] != chain(start, [b, a])[-1]
    assert chain(start, [a, b]) == [start, *chain(chain(start, [a])[-1], [b])]
    assert (
        len({root_state((), {}), root_state((LOOK,), {}), root_state((), {"x": 1}), root_state((LOOK, LOOK), {})}) == 4
    )


def test_a_history_that_was_read_before_is_compared_and_only_what_is_new_is_hashed(monkeypatch):
    hashed = []
    monkeypatch.setattr(matching, "message_hash", lambda message: hashed.append(message) or message_hash(message))
    forest = SessionForest()
    lines = [[f"start {number}"] for number in range(8)]
    for step in range(6):
        for said in lines:
            messages = [user(text) if i % 2 == 0 else assistant(text) for i, text in enumerate(said)]  # new objects
            hashed.clear()
            match = forest.match(messages, (), {})
            assert hashed == messages[-3:]  # behind the answer that the last request ended with
            commit(forest, match, assistant(f"{said[0]} {step}"))
            said += [f"{said[0]} {step}", f"on {step}"]


def test_asking_where_a_request_stands_changes_nothing():
    forest = SessionForest()
    turn(forest, [user("a")], assistant("r", reasoning="hm"), delivered=False)
    before = json.dumps(forest_json(forest))
    sent = [user("a"), assistant("r"), user("b")]
    assert forest.find(sent, (), {}).n_restored == 1
    assert (json.dumps(forest_json(forest)), forest.n_restored) == (before, 0)
    assert forest.match(sent, (), {}).n_restored == 1
    assert forest.n_restored == 1


def prefilled(forest, messages, prefill, reply):
    return commit(forest, forest.match(messages, (), {}).prefilled(prefill), reply)


@pytest.mark.parametrize("plain_first", [False, True])
def test_a_turn_that_the_client_began_has_an_observation_of_its_own(plain_first):
    forest = SessionForest()
    plain = turn(forest, [user("a")], "hi") if plain_first else None
    begun = prefilled(forest, [user("a")], "he", assistant("hello"))
    assert forest.match([user("a")], (), {}).observation is (plain.parent if plain_first else None)
    plain = plain or turn(forest, [user("a")], "hi")
    assert begun.parent is not plain.parent
    assert (begun.parent.prefill, plain.parent.prefill) == ("he", "")
    assert forest.match([user("a"), assistant("hello"), user("b")], (), {}).parent is begun
    assert forest.match([user("a"), assistant("hi"), user("b")], (), {}).parent is plain
    assert prefilled(forest, [user("a")], "he", assistant("hey")).parent.prefill == "he"
    assert forest.messages(begun) == (user("a"), assistant("hello"))


def test_equal_beginnings_share_an_observation_and_equal_turns_a_response():
    forest = SessionForest()
    one = prefilled(forest, [user("a")], "he", assistant("hello"))
    two = prefilled(forest, [user("a")], "he", assistant("hey"))
    assert one.parent is two.parent
    assert prefilled(forest, [user("a")], "he", assistant("hello")) is one
    assert one.n_equal == 1
    assert len(forest.nodes) == 4


@pytest.mark.parametrize("read_first", [False, True])
def test_a_turn_that_the_client_began_is_restored_without_its_reasoning(read_first):
    forest = SessionForest()
    sent = [user("a"), assistant("hello"), user("b")]
    written = turn(forest, [user("a")], "hello") if read_first else None
    if written:
        assert forest.match(sent, (), {}).parent is written
    begun = prefilled(forest, [user("a")], "he", assistant("hello", reasoning="hm"))
    assert forest.match(sent, (), {}).parent is (written or begun)
    assert forest.match([sent[0], begun.messages[0], sent[2]], (), {}).parent is begun


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


@pytest.mark.parametrize("content", ["", "a", "--", "1:a", "日本", None])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_the_short_way_to_a_messages_hash_gives_what_the_long_one_does(role, content):
    message = Message(role=role, content=content)
    assert message_hash(message) == visible_hash(message)
    assert message_hash(message) != message_hash(Message(role="tool", content=content, tool_call_id="c"))
