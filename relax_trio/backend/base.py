"""What every backend offers and what crosses the seam. Knows tokens only: no messages, no Sessions, no HTTP."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import trio
from attrs import field, frozen

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject
from relax_trio.data.sample import VersionSpan
from relax_trio.ids import Rid, WeightVersion

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class SamplingParams:
    """How one attempt samples.

    Attributes:
      temperature: 0 is greedy; logprobs are those of the distribution sampled from (temperature, top-p and top-k
        applied); under greedy those of the plain softmax at temperature 1.
      top_p, top_k: nucleus mass; k likeliest (-1: all).
      max_new_tokens: limit of this attempt, at least 1.
      stop: stop strings; generation ends with the token that completes one, which is kept.
      stop_token_ids: generation ends with one of these, which is kept with its logprob.
      seed: with one, the token at absolute position p is a function of (weights, prefix, seed, p), so that a resumed
        attempt draws what an unbroken one would have drawn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@frozen(kw_only=True)
class Attempt:
    """One backend generate call.

    Attributes:
      rid: unique name in the run.
      token_ids: `array('i')`, the prefix, P ≥ 1 ids.
      sampling: limits and distribution.
      session_key: public key of the Session, equal for all its attempts: KV reuse and routing. No credential.
      response_start: index in `token_ids` where this turn's own tokens begin (P for a first attempt): stop strings
        are looked for from there.
      images: what stands for the placeholders among `token_ids`, in order.
    """

    rid: Rid
    token_ids: array[int]
    sampling: SamplingParams
    session_key: str
    response_start: int
    images: tuple[EncodedImage, ...] = ()


@frozen(kw_only=True)
class AttemptResult:
    """What an attempt produced.

    Attributes:
      token_ids: `array('i')`, C ≤ max_new_tokens new ids, stop token included.
      logprobs: `array('d')`, C natural-log probabilities of the sampling distribution.
      finish: "stop" (stop token or string), "length" (limit reached) or "abort" (C may be 0).
      versions: spans over the C tokens.
      stop_string: the stop string that ended it, if one did.
      cached_len: prefix tokens that were not computed anew.
    """

    token_ids: array[int]
    logprobs: array[float]
    finish: Literal["stop", "length", "abort"]
    versions: tuple[VersionSpan, ...]
    stop_string: str | None = None
    cached_len: int = 0

    def __attrs_post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), "one logprob per generated token"
        assert sum(span.n_tokens for span in self.versions) == len(self.token_ids), "every token has a version"


@frozen(kw_only=True)
class AdapterWeights:
    """A low-rank adapter by itself, in PEFT's terms.

    Attributes:
      config: content of PEFT's adapter_config.json.
      tensors: name → matrix by the names in PEFT's files, `base_model.model.MODULE.lora_A.weight` and `…lora_B.weight`.
    """

    config: JsonObject
    tensors: Mapping[str, torch.Tensor]


@frozen(kw_only=True)
class WeightSource:
    """Where new weights come from; a backend takes whichever form it can use.

    Attributes:
      tensors: name → tensor by the checkpoint's parameter names (any device, any float dtype); not mutated while
        `update_weights` runs.
      path: a Hugging Face checkpoint directory with the same weights.
      adapter: where only an adapter is trained: it alone, for the weights that training began with.
    """

    tensors: Mapping[str, torch.Tensor] | None = None
    path: Path | None = None
    adapter: AdapterWeights | None = None


@frozen(kw_only=True)
class BackendLoad:
    """A snapshot for views and admission: attempts running and waiting, cached and total KV tokens."""

    n_running: int
    n_waiting: int
    n_cached_tokens: int = 0
    n_total_tokens: int = 0
    extra: dict[str, float] = field(factory=dict)


class Pausing(Protocol):
    """How a backend holds every attempt where it is. Weights may change meanwhile."""

    async def pause(self) -> None:
        """From when this returns until `resume`, no attempt makes a token and each stays in its `generate`.

        An attempt that ended just before may still come back. An abort may have to wait for `resume`; a caller that is
        cancelled leaves at once, as ever. Paused already: nothing happens.

        Cancellation: some attempts may be paused; `resume` lets them go on.
        """
        ...

    async def resume(self) -> None:
        """Let attempts go on from where they are. Nothing is paused: nothing happens.

        Cancellation: some attempts may still be paused; it may be called again.
        """
        ...


class Backend(Protocol):
    """An engine. All methods may be called by many tasks at once."""

    @property
    def max_context_len(self) -> int:
        """Most tokens of prefix and completion together."""
        ...

    @property
    def weight_version(self) -> WeightVersion:
        """Version that a token generated now would carry."""
        ...

    @property
    def pausing(self) -> Pausing | None:
        """How attempts are paused; None where they can't be. Known once `run` has started."""
        ...

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started()` once attempts can be taken. Runs as a service of the engine.

        Raises:
          EngineFault: the engine's own loop failed.

        Cancellation: ends every attempt, joins worker threads, frees memory.
        """
        ...

    async def generate(self, attempt: Attempt) -> AttemptResult:
        """Run one attempt to its finish or abort.

        Raises:
          BackendUnavailable: not serving; safe to retry with the same prefix.
          BackendRejected: prefix + max_new_tokens exceeds `max_context_len`, an id is outside the vocabulary, or a
            running attempt has the same rid.

        Cancellation: the attempt is aborted in the engine, nothing is kept; returns within one decode step.
        """
        ...

    async def abort(self, rid: Rid) -> None:
        """Ask for what the attempt has; its `generate` returns with finish "abort". Unknown rid: nothing happens."""
        ...

    async def update_weights(self, version: WeightVersion, source: WeightSource) -> None:
        """Serve `source` as `version` from here on. Tokens generated after this returns carry it.

        Attempts in flight go on under the new version; their spans say so. No prefix cache computed under the old
        weights is used afterwards.

        Raises:
          WeightSyncError: a tensor is missing, unknown or misshapen; the old weights stay.
        """
        ...

    async def close_session(self, session_key: str) -> None:
        """The Session ended: its cached prefixes may go. Unknown key: nothing happens."""
        ...

    def load(self) -> BackendLoad:
        """A snapshot of the queue and the cache. Never checkpoints."""
        ...
