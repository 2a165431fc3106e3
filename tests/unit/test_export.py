"""Implicit and explicit export: what is selected, and what the errors say."""

from __future__ import annotations

from array import array

import pytest
from builders_forest import commit, encode, turn
from builders_tokens import LOOK, assistant, look_call, result, system, user

from relax_trio.data.record import ExportRecord, SessionOutput
from relax_trio.data.sample import SampleStatus
from relax_trio.errors import AmbiguousLeaf, EngineFault, NoCommittedResponse, UnknownState
from relax_trio.forest.export import export_contexts, shared_trained_tokens
from relax_trio.forest.forest import SessionForest
from relax_trio.forest.lineage import assemble

IMPLICIT = SessionOutput(metadata={"won": True}, reward=0.5)


def record(messages, *, name="main", tools=(), kwargs=None, metadata=None, reward=None):
    return ExportRecord(
        name=name,
        messages=tuple(messages),
        tools=tools,
        chat_template_kwargs=kwargs or {},
        metadata=metadata or {},
        reward=reward,
    )


def export(forest, *records, dedup=False):
    return export_contexts(forest, SessionOutput(records=records, metadata={}), dedup_shared_turns=dedup)


def two_turns():
    forest = SessionForest()
    turn(forest, [user("a")], "r", token_ids=(7, 8))
    turn(forest, [user("a"), assistant("r"), user("b")], "s", token_ids=(9,))
    return forest


def test_the_only_leaf_is_exported_with_mask_and_logprobs():
    (context,) = export_contexts(two_turns(), IMPLICIT, dedup_shared_turns=False)
    assert (context.name, context.metadata, context.reward) == (None, {"won": True}, 0.5)
    assert context.messages == (user("a"), assistant("r"), user("b"), assistant("s"))
    assert context.tokens == encode((user("a"),)) + array("i", [7, 8]) + encode((user("b"),)) + array("i", [9])
    assert context.prompt_len == 3
    assert list(context.loss_mask) == [1, 1, 0, 0, 0, 1]
    assert list(context.logprobs) == [-0.5, -1.5, 0.0, 0.0, 0.0, -0.5]
    assert (context.turn_lens, context.turn_nodes) == ((2, 1), (2, 4))
    assert [span.n_tokens for span in context.versions] == [2, 1]
    assert context.status is SampleStatus.COMPLETED


def test_a_last_turn_cut_by_its_limit_is_truncated_and_an_earlier_one_is_not():
    forest = SessionForest()
    turn(forest, [user("a")], "r", finish="length")
    assert export_contexts(forest, IMPLICIT, dedup_shared_turns=False)[0].status is SampleStatus.TRUNCATED
    turn(forest, [user("a"), assistant("r"), user("b")], "s")
    assert export_contexts(forest, IMPLICIT, dedup_shared_turns=False)[0].status is SampleStatus.COMPLETED


def test_nothing_committed_or_nothing_delivered():
    forest = SessionForest()
    with pytest.raises(NoCommittedResponse, match="no model call"):
        export_contexts(forest, IMPLICIT, dedup_shared_turns=False)
    turn(forest, [user("a")], "r", delivered=False)
    with pytest.raises(NoCommittedResponse, match="reached the agent"):
        export_contexts(forest, IMPLICIT, dedup_shared_turns=False)


def test_an_undelivered_retry_leaves_the_export_unambiguous():
    forest = two_turns()
    turn(forest, [user("a"), assistant("r"), user("b")], "other", delivered=False)
    (context,) = export_contexts(forest, IMPLICIT, dedup_shared_turns=False)
    assert context.node_id == 4


def test_several_leaves_are_named():
    forest = two_turns()
    turn(forest, [user("question two")], assistant(None, calls=(look_call(),)), tools=(LOOK,))
    with pytest.raises(AmbiguousLeaf) as caught:
        export_contexts(forest, IMPLICIT, dedup_shared_turns=False)
    assert "2 conversations" in str(caught.value)
    assert "node 4 (4 messages, from 'a' to 's')" in str(caught.value)
    assert "node 6 (2 messages, from 'question two' to 'call look')" in str(caught.value)


def test_records_select_states_by_name_and_order():
    forest = two_turns()
    turn(forest, [user("q")], "other", tools=(LOOK,), kwargs={"x": 1})
    first, second = export(
        forest,
        record([user("q"), assistant("other")], name="side", tools=(LOOK,), kwargs={"x": 1.0}, metadata={"m": 1}),
        record([user("a"), assistant("r")], reward={"score": 1}),
    )
    assert (first.name, first.metadata, first.node_id) == ("side", {"m": 1}, 6)
    assert (second.name, second.reward, second.node_id) == ("main", {"score": 1}, 2)


def test_a_record_that_ends_in_an_observation_is_truncated_and_holds_its_tokens():
    (context,) = export(two_turns(), record([user("a"), assistant("r"), user("b")]))
    assert context.status is SampleStatus.TRUNCATED
    assert list(context.loss_mask) == [1, 1, 0, 0, 0]
    with pytest.raises(NoCommittedResponse, match="record 'main' ends before the first response"):
        export(two_turns(), record([user("a")]))


def test_a_record_without_reasoning_finds_its_response_as_a_request_would():
    forest = SessionForest()
    turn(forest, [user("a")], assistant("r", reasoning="hm"))
    (context,) = export(forest, record([user("a"), assistant("r")]))
    assert context.messages[1].reasoning_content == "hm"


def test_shared_turns_are_counted_or_trained_once():
    forest = two_turns()
    turn(forest, [user("a"), assistant("r"), user("c")], "t", token_ids=(5, 6, 7))
    records = [
        record([user("a"), assistant("r"), user("b"), assistant("s")], name="one"),
        record([user("a"), assistant("r"), user("c"), assistant("t")], name="two"),
    ]
    plain = export(forest, *records)
    assert [sum(context.loss_mask) for context in plain] == [3, 5]
    assert shared_trained_tokens(plain) == 2
    once = export(forest, *records, dedup=True)
    assert [list(context.loss_mask) for context in once] == [[1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert shared_trained_tokens(once) == 0
    assert [context.tokens for context in once] == [context.tokens for context in plain]


def error_of(forest, *args, **how):
    with pytest.raises(UnknownState) as caught:
        export(forest, record(*args, **how))
    return str(caught.value)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [user("a"), assistant("R")],
            ["node 2 (2 messages)", "messages[1].content: the record has 'R'", "'r' (byte 0)"],
        ),
        ([user("a"), assistant("r"), user("B")], ["node 3", "messages[2].content: the record has 'B'"]),
        ([user("A")], ["messages[0].content"]),
        ([system(), user("a")], ["messages[0].role: the record has 'system', the committed state 'user'"]),
        ([user("a"), assistant("r"), user("b"), assistant("s"), user("c")], ["goes on with messages[4] (user 'c')"]),
        (
            [user("a"), assistant("r", reasoning="x")],
            ["messages[1].reasoning_content: the record has 'x', the committed state has none"],
        ),
    ],
)
def test_an_unknown_state_shows_the_nearest_one_and_the_first_difference(messages, words):
    text = error_of(two_turns(), messages)
    assert text.startswith("record 'main' equals no committed state: ")
    for word in words:
        assert word in text


def test_differences_inside_tool_calls_name_the_field_and_byte():
    forest = SessionForest()
    asked = assistant(None, calls=(look_call(), look_call("c2", '{"at":"' + "x" * 100 + '"}')))
    turn(forest, [user("a")], asked, tools=(LOOK,))
    other = assistant(None, calls=(look_call(), look_call("c2", '{"at":"' + "x" * 90 + 'y"}')))
    text = error_of(forest, [user("a"), other], tools=(LOOK,))
    assert "messages[1].tool_calls[1].function.arguments" in text
    assert "(byte 97)" in text
    assert len(text) < 400
    wrong_id = assistant(None, calls=(look_call("c9"), asked.tool_calls[1]))
    assert "messages[1].tool_calls[0].id: the record has 'c9'" in error_of(forest, [user("a"), wrong_id], tools=(LOOK,))
    turn(forest, [user("a"), asked, result("1")], "r", tools=(LOOK,))
    moved = [user("a"), asked, result("1", "c2"), assistant("r")]
    assert "messages[2].tool_call_id" in error_of(forest, moved, tools=(LOOK,))


def test_absent_reasoning_is_not_called_the_difference_where_it_would_be_restored():
    forest = SessionForest()
    turn(forest, [user("a")], assistant("r", reasoning="hm", calls=(look_call(),)), tools=(LOOK,))
    text = error_of(forest, [user("a"), assistant("r")], tools=(LOOK,))
    assert "messages[1].tool_calls[0].function.name: the committed state has 'look', the record has none" in text


def test_absent_reasoning_is_the_difference_where_nothing_else_is():
    """Of an agent's own message it is not restored, under `fork` of none."""
    own = [user("a"), assistant("r", reasoning="hm"), user("b")]
    forest = SessionForest()
    turn(forest, own, "s")
    silent = [own[0], assistant("r"), own[2], assistant("s")]
    said = "messages[1].reasoning_content: the committed state has 'hm', the record has none"
    assert said in error_of(forest, silent)
    forest = SessionForest(unechoed_reasoning="fork")
    turn(forest, [user("a")], assistant("r", reasoning="hm"))
    assert said in error_of(forest, [user("a"), assistant("r")])


def test_the_nearest_state_is_looked_for_in_all_of_a_tree():
    forest = SessionForest()
    matches = [forest.match([user(text)], (), {}) for text in ("one", "two")]  # both before there is any tree
    for match in matches:
        commit(forest, match, assistant("r"))
    assert "node 4 (2 messages); first difference: messages[1].content" in error_of(
        forest, [user("two"), assistant("R")]
    )


def test_of_equally_near_states_the_most_similar_one_is_shown():
    forest = two_turns()
    turn(forest, [user("a"), assistant("r"), user("bcd")], "s")
    turn(forest, [user("a"), assistant("r"), result("bcx")], "s")
    text = error_of(forest, [user("a"), assistant("r"), user("bce"), assistant("s")])
    assert "node 6 (4 messages); first difference: messages[2].content" in text
    assert "(byte 2)" in text
    assert "node 5 (3 messages)" in error_of(forest, [user("a"), assistant("r"), user("bce")])


def test_the_first_differing_byte_is_found_in_long_texts_and_counted_in_utf_8():
    forest = SessionForest()
    turn(forest, [user("ü" * 300_000 + "x")], "r")
    text = error_of(forest, [user("ü" * 300_000 + "y"), assistant("r")])
    assert "(byte 600000)" in text
    assert len(text) < 400


def test_an_undelivered_response_can_be_named():
    """The agent knows its text, so it was received, whatever the transport saw."""
    forest = two_turns()
    turn(forest, [user("a"), assistant("r"), user("b")], "other", delivered=False)
    (context,) = export(forest, record([user("a"), assistant("r"), user("b"), assistant("other")]))
    assert context.node_id == 5


def test_two_records_may_name_one_state():
    contexts = export(two_turns(), *(record([user("a"), assistant("r")], name=name) for name in ("one", "two")))
    assert [context.node_id for context in contexts] == [2, 2]
    assert shared_trained_tokens(contexts) == 2


def test_a_record_that_holds_only_what_was_trained_trains_nothing_again():
    whole = record([user("a"), assistant("r"), user("b"), assistant("s")], name="whole")
    part = record([user("a"), assistant("r")], name="part")
    contexts = export(two_turns(), whole, part, dedup=True)
    assert [sum(context.loss_mask) for context in contexts] == [3, 0]


def test_other_tools_or_arguments_are_said_instead_of_a_message():
    forest = SessionForest()
    turn(forest, [user("a")], "r", tools=(LOOK,), kwargs={"x": 1})
    text = error_of(forest, [user("a"), assistant("r")])
    assert "node 2 (2 messages, 2 in common); first difference: tools: the record has '[]'" in text
    assert "chat_template_kwargs: the record has '{}'" in text
    assert "nothing was committed" in error_of(SessionForest(), [user("a")])


def test_a_record_inside_an_observation_says_that_nothing_was_committed_there():
    forest = SessionForest()
    turn(forest, [system("s"), user("a")], "r")
    assert "the record ends before its messages[1] (user 'a'), where nothing was committed" in error_of(
        forest, [system("s")]
    )


def test_a_lineage_that_does_not_line_up_is_an_engine_fault():
    forest = two_turns()
    lineage = forest.lineage(forest.leaves()[0])
    with pytest.raises(EngineFault, match="joined at"):
        assemble([lineage[0], *lineage[2:]])
    with pytest.raises(EngineFault, match="begins with an observation"):
        assemble(lineage[1:])
    lineage[-1].logprobs.append(0.0)
    with pytest.raises(EngineFault, match="logprobs"):
        assemble(lineage)
