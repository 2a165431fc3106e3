"""What an agent asks (`CanonicalRequest`) and what it gets (`Completion`), free of any protocol."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import frozen

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.ids import NodeId, RequestId

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@frozen(kw_only=True)
class CanonicalRequest:
    """One model request after its dialect was taken off.

    Attributes:
      messages: complete history of one conversation branch, normalized.
      tools: nested function tools as the template gets them.
      chat_template_kwargs: template arguments of the branch.
      model: echoed, selects nothing.
      max_tokens: the turn's own limit in tokens, None: the run's.
      stop: stop strings of this turn.
      seed: sampling seed of this turn.
      logprobs: the client wants the generated tokens' logprobs.
      tool_choice: "auto", "none", "required" or a function name; accepted, not enforced.
      digest: SHA-256 of path and body as sent; equal for a re-sent request.
      retry: the client marked the request as a retry (`x-stainless-retry-count` > 0).
      skipped: kinds of items and hosted tools that were left out because nothing here serves them, each once.
      prefill: text with which the client has begun the turn; the model goes on from there. "" for none.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()
    chat_template_kwargs: JsonObject
    model: str = "model"
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    tool_choice: str = "auto"
    digest: bytes = b""
    retry: bool = False
    skipped: tuple[str, ...] = ()
    prefill: str = ""


@frozen(kw_only=True)
class Usage:
    """Token counts of one completion: the lineage before the turn, the turn, and the part served from cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@frozen(kw_only=True)
class TokenLogprob:
    """One generated token as shown to a client that asked for logprobs: its text, id and natural-log probability."""

    token: str
    token_id: int
    logprob: float


@frozen(kw_only=True)
class Completion:
    """A committed turn, ready to be rendered in the request's dialect.

    Attributes:
      request_id: name of the request in its Session.
      node_id: the response node it was committed as.
      message: the canonical assistant message.
      finish: why the turn ended, in Chat words.
      stop_sequence: the stop string that ended it, if one did.
      usage: token counts.
      logprobs: one entry per generated token when asked for, else None.
      created_unix: wall-clock second of the commit.
    """

    request_id: RequestId
    node_id: NodeId
    message: Message
    finish: FinishReason
    stop_sequence: str | None = None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None
    created_unix: int
