"""The model API without HTTP: fake agents send requests over connections that may break, front halves answer them.

A front half runs in a task of its own, as the server's does, so that an agent may exit before it is known that its last
reply arrived, and a request may outlive its client.
"""

from __future__ import annotations

import hashlib

import outcome
import trio
from attrs import define, evolve, field

from relax_trio.agent.fake import AgentExit, FakeAgent
from relax_trio.data.messages import Message
from relax_trio.data.request import CanonicalRequest, Completion
from relax_trio.errors import ProtocolError, SessionDiscarded
from relax_trio.runtime.call import Call
from relax_trio.runtime.directory import SessionTable

RETRY_S = 1.0
"""How long a client waits before it sends a request again whose connection broke."""


class ConnectionBroken(Exception):
    """The connection broke before the reply was there."""


@define(eq=False, kw_only=True)
class Exchange:
    """A request on its way, and its reply.

    Attributes:
      call: what the Session made of it; None before it was accepted.
      ended: set when the client has its reply, or has lost its connection.
    """

    credential: str = field(repr=False)
    request: CanonicalRequest
    call: Call | None = None
    ended: trio.Event = field(factory=trio.Event)
    _connection: trio.CancelScope = field(factory=trio.CancelScope)
    _reply: outcome.Value[Completion] | outcome.Error | None = None

    async def reply(self) -> Completion:
        """Wait for the reply.

        Raises:
          ProtocolError: the reply is an error.
          ConnectionBroken: there is none.

        Cancellation: the client is gone, so its connection breaks.
        """
        try:
            await self.ended.wait()
        finally:
            self.hang_up()
        if self._reply is None:
            raise ConnectionBroken
        return self._reply.unwrap()

    def hang_up(self, *, for_good: bool = False) -> None:
        """Break the connection, unless the reply is there.

        Args:
          for_good: the client stays away for longer than the retry grace.
        """
        if not self.ended.is_set():
            if for_good and self.call is not None:
                self.call.grace_s = 0.0
            self._connection.cancel(reason="the client hung up")

    async def serve(self, sessions: SessionTable) -> None:
        """The front half: hand the request over, wait, and see what becomes of the reply."""
        try:
            with self._connection:
                try:
                    self._reply = outcome.Value(await self._answer(sessions))
                except ProtocolError as exc:
                    self._reply = outcome.Error(exc)
                self.ended.set()
                if not self._connection.cancel_called:
                    await trio.lowlevel.cancel_shielded_checkpoint()  # the server learns of it later than the client
                    self._let_go(delivered=True)
        finally:
            self.ended.set()
            self._let_go(delivered=False)

    async def _answer(self, sessions: SessionTable) -> Completion:
        await trio.lowlevel.checkpoint()  # the request is read
        session = sessions.find(self.credential)
        if session is None:
            raise SessionDiscarded("no live Session has this id")
        self.call = session.submit(self.request)
        return await self.call.wait_done()

    def _let_go(self, *, delivered: bool) -> None:
        call, self.call = self.call, None
        if call is not None and delivered:
            call.delivered()
        elif call is not None:
            call.detach()


class FakeClient:
    """What fake agents talk to: `agent.client`. Runs as a service of the engine, like the server that it stands for.

    Attributes:
      live: exchanges whose front half runs, in the order they were sent.
    """

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        self._nursery: trio.Nursery | None = None
        self.live: list[Exchange] = []

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def send(self, agent: FakeAgent, request: CanonicalRequest) -> Exchange:
        """Send a request; a front half takes care of it from here on. Plain."""
        assert self._nursery is not None, "the client runs while agents do"
        exchange = Exchange(credential=agent.env["RELAX_SESSION_ID"], request=request)
        self._nursery.start_soon(self._serve, exchange, name=f"front half {agent.spec.place}")
        self.live.append(exchange)
        return exchange

    async def chat(self, agent: FakeAgent, *messages: Message, max_tokens: int | None = None) -> Message:
        """One turn, as a program with an SDK takes it.

        When its connection breaks, the request is sent again after `RETRY_S`, marked as a retry, as often as it takes.
        An error reply ends the agent, because most programs don't expect one.

        Raises:
          AgentExit: the reply is an error; its text is in the agent's log.

        Cancellation: the connection breaks.
        """
        request = make_request(*messages, max_tokens=max_tokens)
        while True:
            try:
                completion = await self.send(agent, request).reply()
            except ProtocolError as exc:
                agent.print(str(exc))
                raise AgentExit(1) from exc
            except ConnectionBroken:
                await trio.sleep(RETRY_S)
                request = evolve(request, retry=True)
            else:
                return completion.message

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await exchange.serve(self._sessions)
        finally:
            self.live.remove(exchange)


def make_request(*messages: Message, max_tokens: int | None = None, retry: bool = False) -> CanonicalRequest:
    """A request of this conversation; equal conversations have equal digests, as equal bodies do."""
    digest = hashlib.sha256(repr((messages, max_tokens)).encode()).digest()
    return CanonicalRequest(
        messages=messages, chat_template_kwargs={}, max_tokens=max_tokens, digest=digest, retry=retry
    )


def user(text: str) -> Message:
    """A user message."""
    return Message(role="user", content=text)


def prompt_of(agent: FakeAgent) -> Message:
    """The last message of the agent's row, as it would begin a conversation."""
    messages = agent.session_input["messages"]
    assert isinstance(messages, list), "a row with messages"
    last = messages[-1]
    assert isinstance(last, dict), "a message is an object"
    return user(str(last["content"]))
