"""What all Sessions of a run share: engine, codec, launcher, limits. Values and seams only, no behaviour."""

from __future__ import annotations

from typing import Literal

import trio
from attrs import frozen

from relax_trio.agent.base import AgentLauncher
from relax_trio.backend.admission import Admission
from relax_trio.backend.base import Backend
from relax_trio.runtime.directory import SessionTable
from relax_trio.sync.cpu import CpuPool
from relax_trio.tokens.codec import ChatCodec

Mode = Literal["train", "eval"]


@frozen(kw_only=True)
class TurnLimits:
    """How turns of one mode are sampled and bounded.

    Attributes:
      temperature, top_p, top_k: the training configuration's; requests can't change them.
      max_response_len: limit of one turn in tokens.
      max_context_len: limit of a conversation in tokens, training view.
      stop: stop strings of every turn.
      stop_token_ids: stop ids besides the codec's end-of-turn ids.
      seed: base of derived sampling seeds under `--deterministic`; None: seeds only where a request names one.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    max_response_len: int
    max_context_len: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@frozen(kw_only=True)
class Shared:
    """Everything a Session needs besides its own task.

    Attributes:
      attempt_permits: one per attempt on the backend; held across a shut gate by paused attempts only.
      admission: makes attempts wait for room in the servers' KV pools, before their permit; None: off.
      abort_grace_s: how long an aborted attempt may take to come back.
      base_url: RELAX_BASE_URL of the agents.
      retry_grace_s: how long a request goes on after its client left.
      agent_timeout_s: active-time budget of a Session.
    """

    backend: Backend
    codec: ChatCodec
    launcher: AgentLauncher
    cpu: CpuPool
    sessions: SessionTable
    base_url: str
    attempt_permits: trio.CapacityLimiter
    admission: Admission | None = None
    abort_grace_s: float = 10.0
    retry_grace_s: float = 5.0
    agent_timeout_s: float = 1800.0
    unechoed_reasoning: Literal["restore", "fork"] = "restore"
    dedup_shared_turns: bool = False
