"""Builders for lifecycle tests: a byte codec, fake agents that talk to their Session in place, whole works."""

from __future__ import annotations

from array import array
from contextlib import asynccontextmanager
from types import SimpleNamespace

import trio
from attrs import evolve
from builders_tokens import THINKING_PROMPT, make_codec

from relax_trio.agent.fake import AgentExit, FakeAgentLauncher
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.tree import RewardConfig, RolloutConfig
from relax_trio.data.messages import Message
from relax_trio.data.request import CanonicalRequest
from relax_trio.data.rows import RowStream
from relax_trio.data.task import TaskInput
from relax_trio.errors import ProtocolError
from relax_trio.ids import GroupId, PlaceId
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.directory import SessionTable
from relax_trio.runtime.session import Session
from relax_trio.runtime.shared import Shared, TurnLimits
from relax_trio.runtime.work import Work
from relax_trio.sync.cpu import InlineCpuPool
from relax_trio.tokens.codec import ParsedTurn
from relax_trio.tokens.vision import NoVision

STOP = 0


class ByteCodec:
    """A codec whose tokens are UTF-8 bytes plus one, with 0 as the end of turn."""

    stop_token_ids = (STOP,)
    vision = NoVision()

    def encode_text(self, text):
        return [byte + 1 for byte in text.encode()]

    def encode_opening(self, messages, tools, kwargs, *, images=()):
        return array("i", self.encode_text("".join(f"<{m.role}>{m.content}" for m in messages) + "<assistant>"))

    def encode_observation(self, messages, tools, kwargs, *, turn, turn_ids, earlier=(), images=()):
        ids = self.encode_opening(messages, tools, kwargs)
        return ids if turn_ids and turn_ids[-1] == STOP else array("i", [STOP]) + ids

    def decode(self, token_ids):
        return bytes(max(0, t - 1) for t in token_ids if t != STOP).decode("utf-8", "replace")

    def token_text(self, token_id):
        return self.decode([token_id])

    def read_turn(self, token_ids, *, prefill="", stopped, tools, state, stop_string, chat_template_kwargs=None):
        message = Message(role="assistant", content=prefill + self.decode(token_ids))
        return ParsedTurn(message=message, finish="stop" if stopped else "length")


def answer(text: str) -> list[int]:
    """Ids of one turn that says `text` and stops."""
    return [*ByteCodec().encode_text(text), STOP]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def make_request(*messages: Message, **fields) -> CanonicalRequest:
    return CanonicalRequest(messages=messages, chat_template_kwargs={}, **fields)


def make_tasks(count: int) -> tuple[TaskInput, ...]:
    return tuple(
        TaskInput(row=i, source=f"rows.jsonl:{i + 1}", prompt=f"q{i}", messages=(user(f"q{i}"),), metadata={"row": i})
        for i in range(count)
    )


class Client:
    """What a fake agent talks to: its Session, found by its credential as the API would."""

    def __init__(self, sessions: SessionTable) -> None:
        self.sessions = sessions

    def submit(self, agent, request: CanonicalRequest):
        session = self.sessions.find(agent.env["RELAX_SESSION_ID"])
        assert session is not None, "a live agent has a live Session"
        return session.submit(request)

    async def chat(self, agent, *messages: Message) -> Message:
        """One turn; an error answer ends the agent, as it would end a program that doesn't expect one."""
        call = self.submit(agent, make_request(*messages))
        try:
            completion = await call.wait_done()
        except ProtocolError as exc:
            agent.print(str(exc))
            raise AgentExit(1) from exc
        call.delivered()
        return completion.message


async def one_turn_agent(agent):
    """Ask once, take reward 1."""
    await agent.client.chat(agent, user(agent.session_input["messages"][0]["content"]))
    agent.write_output({"reward": 1.0})


LIMITS = TurnLimits(temperature=1.0, max_response_len=64, max_context_len=1024)


@asynccontextmanager
async def open_shared(agent_fn=one_turn_agent, *, backend=None, launcher=None, **fields):
    """A `Shared` with fakes, its backend running for the length of the block."""
    backend = backend or FakeBackend(lambda attempt: answer("ok"), tokens_per_s=1.0)
    sessions = SessionTable(lambda: False)
    launcher = launcher or FakeAgentLauncher(agent_fn, client=Client(sessions))
    shared = Shared(
        backend=backend,
        codec=ByteCodec(),
        launcher=launcher,
        cpu=InlineCpuPool(),
        sessions=sessions,
        base_url="http://127.0.0.1:1/agentic_api",
        attempt_permits=trio.CapacityLimiter(1024),
        **fields,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        yield shared
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_leased_session(backend, codec, limits):
    """A leased Session over a backend that it runs."""
    lease = trio.Event()
    lease.set()
    async with open_shared(backend=backend) as shared:
        session = Session(
            place=PlaceId("G0/0"),
            group=GroupId("G0"),
            index=0,
            mode="train",
            task=make_tasks(1)[0],
            limits=limits,
            shared=evolve(shared, codec=codec),
            lease=lease,
        )
        async with session.open():
            yield session


@asynccontextmanager
async def open_codec_session(texts):
    """A leased Session with a real tokenizer and a template that opens the reasoning; its turns say `texts`."""
    codec = make_codec(THINKING_PROMPT)
    end = codec.encode_text("<|im_end|>")
    backend = FakeBackend([[*codec.encode_text(text), *end] for text in texts])
    limits = TurnLimits(temperature=1.0, max_response_len=200, max_context_len=100_000)
    async with open_leased_session(backend, codec, limits) as session:
        yield session


@asynccontextmanager
async def open_work(agent_fn=one_turn_agent, *, n_rows=8, backend=None, shared_fields=None, reward=None, **rollout):
    """A `Work` over fakes; yields it with its shared things reachable as `work.shared`."""
    config = RolloutConfig(**{"rollout_batch_size": 2, "n_samples_per_prompt": 2, **rollout})
    async with open_shared(agent_fn, backend=backend, **(shared_fields or {})) as shared:
        work = Work(
            shared=shared,
            config=config,
            limits=LIMITS,
            rows=RowStream(rows=make_tasks(n_rows), seed=1, shuffle=False),
            scorer=reward or RewardScorer(RewardConfig(), SimpleNamespace(), InlineCpuPool()),
        )
        async with work.open():
            yield work
        assert not shared.launcher.live, "no agent outlives the work"
        assert work.residents.n_permits_used == 0, "every permit came back"
