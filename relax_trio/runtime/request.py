"""The life of one request, read from top to bottom. Runs in the Session's nursery, never in the HTTP handler."""

from __future__ import annotations

import hashlib
import time
from array import array
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from relax_trio.backend.admission import Reservation
from relax_trio.backend.base import Attempt, AttemptResult, SamplingParams
from relax_trio.data.image import EncodedImage
from relax_trio.data.messages import Message
from relax_trio.data.request import CanonicalRequest, Completion, TokenLogprob, Usage
from relax_trio.data.sample import VersionSpan
from relax_trio.errors import (
    BackendError,
    BackendProtocolError,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    PromptRefused,
)
from relax_trio.events import emit
from relax_trio.forest.forest import Match
from relax_trio.forest.node import Node
from relax_trio.ids import Rid, StateHash
from relax_trio.runtime.call import AttemptRecord, Call, Flight
from relax_trio.tokens.limits import turn_budget

if TYPE_CHECKING:
    from relax_trio.runtime.session import Session

LONG_TEXT_CHARS = 20_000
"""Encoding or decoding more than this goes to a worker thread: about 5 ms of loop time."""


_NOTHING = AttemptResult(token_ids=array("i"), logprobs=array("d"), finish="abort", versions=())
"""What is left of an attempt that was given up."""


@define(kw_only=True)
class Turn:
    """One turn while it grows.

    Attributes:
      match: the state it continues.
      observation_ids: tokens of the new messages, empty where the observation is committed already.
      prefix: lineage and observation, P ids.
      new_images, images: what stands for the placeholders among `observation_ids`, and among `prefix`.
      token_ids, logprobs, versions: what attempts have generated so far.
      budget: most tokens of the turn.
      seed: sampling seed of the turn, the same for all its attempts.
    """

    match: Match
    observation_ids: array[int]
    prefix: array[int]
    budget: int
    seed: int | None
    new_images: tuple[EncodedImage, ...] = ()
    images: tuple[EncodedImage, ...] = ()
    token_ids: array[int] = field(factory=lambda: array("i"))
    logprobs: array[float] = field(factory=lambda: array("d"))
    versions: list[VersionSpan] = field(factory=list)
    cached_len: int = 0
    stop_string: str | None = None

    def keep(self, result: AttemptResult) -> None:
        """Append an attempt's tokens; consecutive spans of one version become one."""
        if not self.token_ids:
            self.cached_len = result.cached_len
        self.token_ids.extend(result.token_ids)
        self.logprobs.extend(result.logprobs)
        for span in result.versions:
            if self.versions and self.versions[-1].version == span.version:
                span = VersionSpan(version=span.version, n_tokens=self.versions.pop().n_tokens + span.n_tokens)
            self.versions.append(span)
        self.stop_string = result.stop_string


async def run_request(call: Call, session: Session) -> Completion:
    """Serve one request to its committed turn.

    Raises:
      ProtocolError: refused (400) or failed (500, 503); the forest is unchanged.

    Cancellation: the attempt in flight is aborted, nothing is committed.
    """
    shared = session.shared
    turn = await _begin(call.request, session)
    call.begun.set()
    call.waiting_for = "lease"
    await session.lease.wait()
    finish = None
    while finish is None:
        result = await _next_attempt(call, session, turn)
        turn.keep(result)
        finish = _finish(turn, result, (*shared.codec.stop_token_ids, *session.limits.stop_token_ids))
        if finish is None:
            call.attempts[-1].went_round = True
    call.waiting_for = "commit"
    return await _commit(call, session, turn, stopped=finish == "stop")


async def park_request(call: Call, session: Session) -> None:
    """Ask the backend for what the attempt in flight has, and wait until it is back. The gate is shut already.

    An attempt that is not back within `abort_grace_s` is cancelled, and its tokens are lost; the request keeps those of
    earlier attempts and goes round again.

    Cancellation: the abort stands, the wait ends.
    """
    flight, shared = call.flight, session.shared
    if flight is None:
        return
    with trio.move_on_after(shared.abort_grace_s):
        try:
            await shared.backend.abort(flight.rid)
        except BackendError as exc:
            emit("attempt.abort_failed", rid=flight.rid, place=session.place, error=str(exc))
        await flight.landed.wait()
    if not flight.landed.is_set():
        emit("attempt.abort_timeout", rid=flight.rid, place=session.place, seconds=shared.abort_grace_s)
        flight.scope.cancel(reason=f"attempt {flight.rid} was not back {shared.abort_grace_s:g} s after its abort")
        await flight.landed.wait()


async def _begin(request: CanonicalRequest, session: Session) -> Turn:
    """Match the parent state and encode what is new."""
    shared = session.shared
    match = session.forest.match(request.messages, request.tools, request.chat_template_kwargs)
    known = match.observation
    if known is not None and not request.prefill:
        observation_ids, images = array("i"), known.images
        prefix = session.forest.tokens(known)
    else:
        if known is None:
            observation_ids, images = await encode_new(request, match.parent, match.new_messages, session)
        else:
            observation_ids, images = array("i", known.token_ids), known.images
        if request.prefill:
            match = match.prefilled(request.prefill)
            observation_ids += shared.codec.encode_prefill(request.prefill, request.chat_template_kwargs)
        prefix = session.forest.tokens(match.parent)
        prefix.extend(observation_ids)
    limits = session.limits
    budget = turn_budget(
        n_prompt=len(prefix),
        max_context_len=min(limits.max_context_len, shared.backend.max_context_len),
        turn_limit=limits.max_response_len,
        request_max=request.max_tokens,
    )
    seed = _seed(request, session, match.state)
    return Turn(
        match=match,
        observation_ids=observation_ids,
        prefix=prefix,
        new_images=images,
        images=session.forest.images(match.parent) + images,
        budget=budget,
        seed=seed,
    )


async def encode_new(
    request: CanonicalRequest, parent: Node, messages: tuple[Message, ...], session: Session
) -> tuple[array[int], tuple[EncodedImage, ...]]:
    """`array('i')` of the request's `messages` behind `parent`, a response or the technical root, and their images.

    Raises:
      InvalidRequest: the chat template refuses them, or an image can't be served.
    """
    shared = session.shared
    codec = shared.codec
    images = await session.images.of(messages, codec.vision, shared.cpu)
    tools, kwargs = request.tools, request.chat_template_kwargs

    def encode() -> array[int]:
        if parent.kind != "response":
            return codec.encode_opening(messages, tools, kwargs, images=images)
        return codec.encode_observation(
            messages,
            tools,
            kwargs,
            turn=parent.messages[-1],
            turn_ids=parent.token_ids,
            earlier=request.messages[: parent.n_messages - 1],
            images=images,
        )

    if text_len(messages) > LONG_TEXT_CHARS:
        return await shared.cpu.run(encode), images
    return encode(), images


async def _next_attempt(call: Call, session: Session, turn: Turn) -> AttemptResult:
    """Wait for the gate, admission and a permit, and run an attempt.

    Parked requests stand at the gate, never in the line of admission and never with a lease or a permit.
    """
    while True:
        call.waiting_for = "gate"
        await session.wait_may_generate()
        call.waiting_for = "admission"
        async with _admission(session, turn) as is_admitted:
            if not is_admitted:
                continue
            call.waiting_for = "permit"
            async with session.shared.attempt_permits:
                if session.may_generate:  # the gate may have shut in the meantime
                    call.waiting_for = "backend"
                    return await _attempt(call, session, turn)


def _admission(session: Session, turn: Turn) -> AbstractAsyncContextManager[bool]:
    """Admission of the next attempt at `turn`, entered by waiting for it; True at once where it is off."""
    admission = session.shared.admission
    if admission is None:
        return nullcontext(True)
    wanted = Reservation(
        session=session.name,
        n_prefix=len(turn.prefix) + len(turn.token_ids),
        n_new=turn.budget - len(turn.token_ids),
        is_train=session.mode == "train",
        is_protected=session.is_protected,
    )
    return admission.admit(wanted)


async def _attempt(call: Call, session: Session, turn: Turn) -> AttemptResult:
    """Run one backend attempt for what is left of the turn."""
    shared, limits = session.shared, session.limits
    rid = Rid(f"{session.name}.{call.request_id}.{len(call.attempts) + 1}")
    record = AttemptRecord(rid=rid, version=shared.backend.weight_version, started_s=trio.current_time())
    call.attempts.append(record)
    attempt = Attempt(
        rid=rid,
        token_ids=turn.prefix + turn.token_ids,
        sampling=SamplingParams(
            temperature=limits.temperature,
            top_p=limits.top_p,
            top_k=limits.top_k,
            max_new_tokens=turn.budget - len(turn.token_ids),
            stop=(*limits.stop, *call.request.stop),
            stop_token_ids=(*shared.codec.stop_token_ids, *limits.stop_token_ids),
            seed=turn.seed,
        ),
        session_key=session.name,
        response_start=len(turn.prefix),
        images=turn.images,
    )
    flight = call.flight = Flight(rid=rid)
    result = _NOTHING
    try:
        with flight.scope:
            result = await shared.backend.generate(attempt)
    except PromptRefused as exc:
        record.finish = "failed"
        raise InvalidRequest(str(exc), param="messages") from exc
    except BackendError as exc:
        record.finish = "failed"
        emit("attempt.failed", rid=rid, error=str(exc), retryable=exc.retryable)
        if not exc.retryable and not isinstance(exc, BackendProtocolError):
            raise InternalError(f"the engine refused request {call.request_id} of {session.place}: {exc}") from exc
        session.fail(exc)
        raise EngineUnavailable(f"the engine failed while it served {session.place}: {exc}") from exc
    finally:
        record.ended_s, record.is_paused = trio.current_time(), False
        call.flight = None
        flight.landed.set()
    record.finish, record.n_tokens = result.finish, len(result.token_ids)
    return result


def _finish(turn: Turn, result: AttemptResult, stop_token_ids: tuple[int, ...]) -> str | None:
    """Why the turn is finished, or None when an aborted attempt has to go round again.

    An attempt aborted when the limit was just reached, or whose last token ends the turn, is complete.
    """
    if result.finish != "abort":
        return result.finish
    if turn.token_ids and turn.token_ids[-1] in stop_token_ids:
        return "stop"
    return "length" if len(turn.token_ids) >= turn.budget else None


async def _commit(call: Call, session: Session, turn: Turn, *, stopped: bool) -> Completion:
    """Parse the turn, commit it without a checkpoint in between, and make the completion."""
    request, codec = call.request, session.shared.codec
    parsed = codec.read_turn(
        turn.token_ids,
        stopped=stopped,
        tools=request.tools,
        prefill=request.prefill,
        state=turn.match.state,
        stop_string=turn.stop_string,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    node = session.forest.commit(
        turn.match,
        turn.observation_ids,
        message=parsed.message,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        versions=tuple(turn.versions),
        finish=parsed.finish,
        stop_string=turn.stop_string,
        images=turn.new_images,
    )
    call.node = node
    flags = list(parsed.flags)
    if request.tool_choice not in ("auto", "none") and parsed.finish != "tool_calls":
        flags.append("tool_choice_not_met")
    for flag in flags:
        session.flags[flag] += 1
        emit("turn.flagged", place=session.place, request=call.request_id, flag=flag)
    return Completion(
        request_id=call.request_id,
        node_id=node.id,
        message=node.messages[-1],
        finish=parsed.finish,
        stop_sequence=turn.stop_string,
        usage=Usage(
            prompt_tokens=len(turn.prefix), completion_tokens=len(turn.token_ids), cached_tokens=turn.cached_len
        ),
        logprobs=_logprobs(session, turn) if request.logprobs else None,
        created_unix=int(time.time()),
    )


def _logprobs(session: Session, turn: Turn) -> tuple[TokenLogprob, ...]:
    codec = session.shared.codec
    return tuple(
        TokenLogprob(token=codec.token_text(token_id), token_id=token_id, logprob=logprob)
        for token_id, logprob in zip(turn.token_ids, turn.logprobs, strict=True)
    )


def _seed(request: CanonicalRequest, session: Session, state: StateHash) -> int | None:
    """The turn's sampling seed: the client's, or one derived from (run, mode, row, sample, state, repeat).

    The repeat count makes an unmarked repeat of a body sample afresh.
    """
    if request.seed is not None or session.limits.seed is None:
        return request.seed
    key = f"{session.limits.seed}/{session.mode}/{session.task.row}/{session.sample}/{session.repeats(state)}"
    digest = hashlib.sha256(key.encode() + state).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def text_len(messages: tuple[Message, ...]) -> int:
    """Characters of text in `messages`: decides whether encoding them goes to a worker thread."""
    total = 0
    for message in messages:
        total += sum(map(len, message.texts))
        total += len(message.reasoning_content or "")
        total += sum(len(call.arguments) for call in message.tool_calls)
    return total
