"""Conversations as clients hold them, through a Session with a real tokenizer and template.

What the engine was sent and returned is what the forest holds, whatever a client does with its history.
"""

from __future__ import annotations

import itertools
import json
from array import array
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, evolve
from builders_runtime import make_tasks, open_shared
from builders_tokens import LOOK, make_codec

from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import Config, RolloutConfig
from relax_trio.data.messages import Message
from relax_trio.data.normalize import normalize_messages, normalize_tools
from relax_trio.data.record import ExportRecord, SessionOutput
from relax_trio.data.request import CanonicalRequest
from relax_trio.data.sample import SampleStatus
from relax_trio.errors import InvalidRequest
from relax_trio.forest.export import export_contexts, shared_trained_tokens
from relax_trio.ids import GroupId, PlaceId
from relax_trio.runtime.engine import _shared
from relax_trio.runtime.session import Session
from relax_trio.runtime.shared import TurnLimits

CALL = '<tool_call>\n{"name": "look", "arguments": {"b": 1.0, "a": "x"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def user(text):
    return {"role": "user", "content": text}


def results(message, *contents):
    """A result for each call of `message`."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(message["tool_calls"], contents, strict=True)
    ]


def unechoed(message):
    return {key: value for key, value in message.items() if key != "reasoning_content"}


@define
class Chat:
    """A client of one Session: JSON goes in, JSON comes out."""

    session: Session
    backend: FakeBackend

    @property
    def forest(self):
        return self.session.forest

    def submit(self, messages, *, tools=(), kwargs=None, **fields):
        request = CanonicalRequest(
            messages=normalize_messages(json.loads(json.dumps(messages))),
            tools=normalize_tools(list(tools)),
            chat_template_kwargs=kwargs or {},
            **fields,
        )
        return self.session.submit(request)

    async def ask(self, messages, **fields):
        """One turn; the assistant message as the client gets it."""
        call = self.submit(messages, **fields)
        completion = await call.wait_done()
        call.delivered()
        return {"content": None, **completion.message.to_chat()}

    def check_tokens(self):
        """Every node holds the tokens that its attempt was sent and that came back."""
        sent = {attempt.rid: attempt.token_ids for attempt in self.backend.attempts}
        for call in (call for call in self.session.calls if call.node is not None):
            (attempt,) = call.attempts
            assert self.forest.tokens(call.node) == sent[attempt.rid] + call.node.token_ids

    def text(self, number):
        """What the engine was sent for the attempt of that number."""
        return self.session.shared.codec.decode(self.backend.attempts[number].token_ids)


def leased_session(shared):
    lease = trio.Event()
    lease.set()
    return Session(
        place=PlaceId("G0/0"),
        group=GroupId("G0"),
        index=0,
        mode="train",
        task=make_tasks(1)[0],
        limits=TurnLimits(temperature=1.0, max_response_len=500, max_context_len=100_000),
        shared=shared,
        lease=lease,
    )


@asynccontextmanager
async def open_chat(*texts, **fields):
    """A leased Session whose turns say `texts`, and its client. Checks the tokens in the end."""
    codec = make_codec()
    end = codec.encode_text("<|im_end|>")
    backend = FakeBackend([[*codec.encode_text(text), *end] for text in texts])
    async with open_shared(backend=backend, **fields) as shared:
        session = leased_session(evolve(shared, codec=codec))
        async with session.open():
            chat = Chat(session, backend)
            yield chat
            chat.check_tokens()


def export(chat, *records, dedup=False):
    output = SessionOutput(
        records=tuple(
            ExportRecord(
                name=f"c{i}", messages=normalize_messages(messages), chat_template_kwargs={}, metadata={}, **fields
            )
            for i, (messages, fields) in enumerate(records)
        ),
        metadata={},
    )
    return export_contexts(chat.forest, output, dedup_shared_turns=dedup)


async def test_thought_calls_results_and_answer_are_one_line_of_exact_tokens(autojump_clock):
    async with open_chat(f"{THOUGHT}let me see\n{CALL}\n{CALL}", "it is 42", "bye") as chat:
        history = [{"role": "system", "content": "be kind"}, user("hello")]
        history.append(await chat.ask(history, tools=[LOOK]))
        history += results(history[-1], "1", "2")
        history.append(await chat.ask(history, tools=[LOOK]))
        history.append(user("thanks"))
        history.append(await chat.ask(history, tools=[LOOK]))
        (context,) = export(chat)
        (leaf,) = chat.forest.exportable_leaves()
        codec = chat.session.shared.codec
    assert [node.kind for node in chat.forest.lineage(leaf)] == ["observation", "response"] * 3
    assert context.messages == normalize_messages(history)
    whole = codec.template.render(context.messages, (LOOK,), {}, add_generation_prompt=False)
    written = codec.decode(context.tokens)
    as_generated = whole.replace('{"a": "x", "b": 1}', '{"b": 1.0, "a": "x"}')
    assert written == as_generated.removesuffix("\n")
    trained = array("i", [t for t, m in zip(context.tokens[context.prompt_len :], context.loss_mask, strict=True) if m])
    assert codec.decode(trained) == "".join(
        f"{text}<|im_end|>" for text in (f"{THOUGHT}let me see\n{CALL}\n{CALL}", "it is 42", "bye")
    )


@pytest.mark.parametrize("dropped", [(0, 1), (0,), (1,), ()])
async def test_reasoning_that_a_client_drops_stays_in_the_line(autojump_clock, dropped):
    async with open_chat(f"{THOUGHT}one", f"{THOUGHT}two", "three") as chat:
        history = [user("a")]
        for number in range(2):
            answer = await chat.ask(history)
            history += [unechoed(answer) if number in dropped else answer, user("go on")]
        await chat.ask(history)
        assert len(chat.forest.exportable_leaves()) == 1
        assert chat.forest.n_restored == len(dropped)
        assert chat.text(2).count("<think>") == 2


async def test_under_fork_an_answer_without_its_reasoning_is_another_conversation(autojump_clock):
    async with open_chat(f"{THOUGHT}one", "two", unechoed_reasoning="fork") as chat:
        answer = await chat.ask([user("a")])
        await chat.ask([user("a"), unechoed(answer), user("b")])
        assert len(chat.forest.exportable_leaves()) == 2
        assert "<think>" not in chat.text(1)


async def test_edited_reasoning_is_another_conversation(autojump_clock):
    async with open_chat(f"{THOUGHT}one", "two") as chat:
        answer = await chat.ask([user("a")])
        await chat.ask([user("a"), answer | {"reasoning_content": "other"}, user("b")])
        assert len(chat.forest.exportable_leaves()) == 2
        assert "<think>\nother" in chat.text(1)


@pytest.mark.parametrize("content", [None, "", [], "absent"])
async def test_an_empty_tool_result_is_the_same_however_it_is_written(autojump_clock, content):
    async with open_chat(CALL, "ok", "again", "done") as chat:
        asked = await chat.ask([user("a")], tools=[LOOK])
        (given,) = results(asked, "")
        (written,) = results(asked, content)
        if content == "absent":
            del written["content"]
        answer = await chat.ask([user("a"), asked, given], tools=[LOOK])
        await chat.ask([user("a"), asked, written], tools=[LOOK])
        await chat.ask([user("a"), asked, written, answer, user("b")], tools=[LOOK])
        assert [len(node.children) for node in chat.forest.nodes if node.kind == "observation"] == [1, 2, 1]


async def test_parallel_results_are_one_observation_and_may_also_come_one_by_one(autojump_clock):
    async with open_chat(f"{CALL}\n{CALL}", "both", "first", "second") as chat:
        asked = await chat.ask([user("a")], tools=[LOOK])
        one, two = results(asked, "1", "2")
        await chat.ask([user("a"), asked, one, two], tools=[LOOK])
        answer = await chat.ask([user("a"), asked, one], tools=[LOOK])
        await chat.ask([user("a"), asked, one, answer, two], tools=[LOOK])
        assert chat.text(1).count("<|im_start|>user") == 2  # the template puts both results into one turn
        assert len(chat.forest.exportable_leaves()) == 2


async def test_system_messages_in_the_middle_keep_their_place(autojump_clock):
    async with open_chat("one", "two", "three") as chat:
        history = [user("a")]
        for note in ("be brief", "be kind"):
            history += [await chat.ask(history), {"role": "system", "content": note}, user("b")]
        await chat.ask(history)
        assert len(chat.forest.exportable_leaves()) == 1
        roles = [message.role for message in chat.forest.messages(chat.forest.leaves()[0])]
    assert roles == ["user", "assistant", "system", "user", "assistant", "system", "user", "assistant"]


async def test_concurrent_requests_share_what_they_were_sent(autojump_clock):
    async with open_chat("one", "two", "three") as chat:
        calls = [chat.submit([user("a")]) for _ in range(3)]
        for call in calls:
            await call.wait_done()
        assert len({call.node.parent for call in calls}) == 1
        assert len(chat.forest.leaves()) == 3


async def test_fork_reset_and_other_tools_are_branches_and_trees(autojump_clock):
    async with open_chat("one", "two", "three", "four", "five", "six") as chat:
        answer = await chat.ask([user("a")])
        longer = [user("a"), answer, user("b")]
        await chat.ask(longer)
        await chat.ask([user("a"), answer, user("c")])
        await chat.ask([user("new")])
        await chat.ask(longer, tools=[LOOK])
        await chat.ask(longer, kwargs={"x": 1})
        assert len(chat.forest.trees) == 3
        assert [child.messages[-1].content for child in chat.forest.nodes[2].children] == ["b", "c"]
        assert len(chat.forest.root.children) == 4


async def test_a_request_that_ends_with_the_assistant_is_refused_and_leaves_no_trace(autojump_clock):
    async with open_chat("one") as chat:
        answer = await chat.ask([user("a")])
        before = len(chat.forest.nodes)
        with pytest.raises(InvalidRequest, match="the last message is from the assistant") as caught:
            await chat.submit([user("a"), answer]).wait_done()
        assert (caught.value.status, caught.value.param) == (400, "messages[1]")
        assert len(chat.forest.nodes) == before


async def test_a_marked_retry_is_one_turn_and_an_unmarked_repeat_another(autojump_clock):
    async with open_chat("one", "two") as chat:
        lost = chat.submit([user("a")], digest=b"d")
        await lost.wait_done()
        lost.detach()
        again = chat.submit([user("a")], digest=b"d", retry=True)
        assert again is lost
        again.delivered()
        assert len(chat.forest.leaves()) == 1
        await chat.ask([user("a")], digest=b"d")
        assert len(chat.forest.leaves()) == 2
        assert len(chat.backend.attempts) == 2


async def test_a_turn_cut_by_its_own_limit_goes_on_from_its_tokens(autojump_clock):
    async with open_chat("a long answer", "more") as chat:
        call = chat.submit([user("a")], max_tokens=2, logprobs=True)
        completion = await call.wait_done()
        call.delivered()
        assert (completion.finish, completion.usage.completion_tokens) == ("length", 2)
        assert [(one.token_id, one.logprob) for one in completion.logprobs] == list(
            zip(call.node.token_ids, call.node.logprobs, strict=True)
        )
        assert export(chat)[0].status is SampleStatus.TRUNCATED
        await chat.ask([user("a"), completion.message.to_chat(), user("go on")])
        (context,) = export(chat)
        assert context.status is SampleStatus.COMPLETED
        assert context.turn_lens[0] == 2
        assert "<|im_end|>\n<|im_start|>user\ngo on" in chat.text(1)  # the end that the cut turn lacks is supplied


async def test_each_of_a_hundred_turns_extends_what_the_engine_saw(autojump_clock):
    n_turns = 100
    async with open_chat(*(f"{THOUGHT}answer {i}" for i in range(n_turns))) as chat:
        history = [user("start")]
        for number in range(n_turns):
            answer = await chat.ask(history)
            history += [unechoed(answer) if number % 3 else answer, user(f"turn {number}")]
        attempts = chat.backend.attempts
        for before, after in itertools.pairwise(attempts):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
        (context,) = export(chat)
        assert not any(call.request.messages for call in chat.session.calls), "else they hold the square of a history"
    assert len(context.turn_lens) == n_turns


async def test_shared_turns_are_trained_in_each_context_or_once(autojump_clock):
    async with open_chat("one", "two", "three") as chat:
        answer = await chat.ask([user("a")])
        branches = []
        for text in "bc":
            history = [user("a"), answer, user(text)]
            branches.append(([*history, await chat.ask(history)], {}))
        first = chat.forest.nodes[2]
        plain, once = export(chat, *branches), export(chat, *branches, dedup=True)
    assert shared_trained_tokens(plain) == len(first.token_ids)
    assert shared_trained_tokens(once) == 0
    assert [context.tokens for context in once] == [context.tokens for context in plain]
    assert sum(once[1].loss_mask) == sum(plain[1].loss_mask) - len(first.token_ids)


async def test_the_flags_of_the_forest_reach_the_sessions():
    def shared(**fields):
        config = Config(rollout=RolloutConfig(**fields))
        return _shared(config, None, None, None, None, None, "http://127.0.0.1:1", None)

    assert not shared().dedup_shared_turns
    assert shared(dedup_shared_turns=True).dedup_shared_turns
    assert shared(agentic_unechoed_reasoning="fork").unechoed_reasoning == "fork"


async def test_a_session_exports_by_the_flag_and_counts_what_is_trained_again(autojump_clock):
    async def agent(agent):
        chat = agent.client.chat
        said = [Message(role="user", content=text) for text in "abc"]
        first = await chat(agent, said[0])
        lines = []
        for number, text in enumerate(said[1:]):
            answer = await chat(agent, said[0], first, text)
            history = [message.to_chat() for message in (said[0], first, text, answer)]
            lines.append(json.dumps({"name": f"c{number}", "messages": history}))
        agent.output = "\n".join(lines).encode()

    trained = {}
    for dedup in (False, True):
        async with open_shared(agent, dedup_shared_turns=dedup) as shared:
            result = await leased_session(shared).run()
            trained[dedup] = [sum(context.loss_mask) for context in result.contexts], result.report.n_shared_tokens
    assert trained == {False: ([6, 6], 3), True: ([6, 3], 0)}
