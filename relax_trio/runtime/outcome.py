"""How a Session ended, as a value: the one boundary where its expected failures stop being exceptions."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from relax_trio.data.json import JsonObject
from relax_trio.data.sample import Context
from relax_trio.errors import AgentError, AgentLaunchError, BackendError, ExportError
from relax_trio.ids import PlaceId, WeightVersion

SessionFailure: TypeAlias = AgentError | ExportError | BackendError


@frozen(kw_only=True)
class SessionReport:
    """What is remembered of an ended Session for metrics and dumps; plain values only.

    Attributes:
      n_aborted: how often attempts were interrupted: aborted and sent round again, or paused.
      oldest_version: weights that the backend served when the first attempt was dispatched.
      n_restored: responses that came back without their reasoning and were recognized.
      n_shared_tokens: generated tokens that stand in more than one of its contexts.
      flags: turns by what was unusual about them, see `ParsedTurn.flags`.
    """

    place: PlaceId
    seconds: float
    n_requests: int
    n_attempts: int
    n_aborted: int
    oldest_version: WeightVersion
    n_restored: int
    n_shared_tokens: int
    flags: dict[str, int]
    requests: tuple[JsonObject, ...]
    state_hashes: tuple[str, ...]


@frozen(kw_only=True)
class Completed:
    """The agent finished and its contexts were exported."""

    contexts: tuple[Context, ...]
    report: SessionReport


@frozen(kw_only=True)
class Failed:
    """The Session failed; `error` says why and whose fault it was."""

    place: PlaceId
    error: SessionFailure
    report: SessionReport

    @property
    def is_agents_fault(self) -> bool:
        """Whether another try with the same agent and row is likely to end the same way."""
        return not isinstance(self.error, AgentLaunchError | BackendError)


SessionOutcome: TypeAlias = Completed | Failed
