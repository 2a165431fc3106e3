"""The error taxonomy: one flat type for each boundary a failure can cross.

Expected failures become values at one boundary (`SessionOutcome`, `Call.result`); the classes here are what those
values hold. `EngineFault` alone means a bug: an invariant of ours is broken, and it travels to the root unmodified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class RelaxTrioError(Exception):
    """Base of every expected failure."""


class ConfigError(RelaxTrioError):
    """The user's flags, files or data cannot be run. Raised before anything is started."""


# --- model API -------------------------------------------------------------------------------------------------


class ProtocolError(RelaxTrioError):
    """A model request that is answered with an error envelope in its own dialect.

    Attributes:
      status: HTTP status code.
      kind: the envelope's `type` in OpenAI's words, e.g. "invalid_request_error".
      code: machine-readable code, or None.
      param: path of the offending field, e.g. "messages[3].content", or None.
      retryable: False makes the answer carry `x-should-retry: false`.
    """

    status = 500
    kind = "server_error"
    code: str | None = None
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(ProtocolError):
    """400: a field is missing, has the wrong type or a value that cannot be served."""

    status = 400
    kind = "invalid_request_error"


class UnsupportedFeature(InvalidRequest):
    """400: well-formed, but this API does not offer it; the message says what to do instead."""

    code = "unsupported_feature"


class ContextLengthExceeded(InvalidRequest):
    """400 `context_length_exceeded`: prompt plus completion do not fit the context.

    Attributes:
      n_prompt: tokens of the request, training view.
      max_context_len: the limit in tokens.
    """

    code = "context_length_exceeded"

    def __init__(self, *, n_prompt: int, max_context_len: int) -> None:
        self.n_prompt = n_prompt
        self.max_context_len = max_context_len
        super().__init__(
            f"This model's maximum context length is {max_context_len} tokens. However, your messages resulted in "
            f"{n_prompt} tokens. Please reduce the length of the messages.",
            param="messages",
        )


class AuthenticationError(ProtocolError):
    """401: no credential, or one that is malformed."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotFound(ProtocolError):
    """404: no such path or model."""

    status = 404
    kind = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(ProtocolError):
    """405: the path exists, but not for this method."""

    status = 405
    kind = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: Iterable[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class SessionDiscarded(ProtocolError):
    """404: the credential names no live Session; retrying cannot help."""

    status = 404
    kind = "invalid_request_error"
    code = "session_discarded"


class PayloadTooLarge(ProtocolError):
    """413: body over `--max-request-bytes`."""

    status = 413
    kind = "invalid_request_error"
    code = "request_too_large"


class InternalError(ProtocolError):
    """500: the engine failed this request; the message names it."""

    status = 500
    kind = "server_error"
    code = "internal_error"


class EngineUnavailable(ProtocolError):
    """503: the run is shutting down or has no backend."""

    status = 503
    kind = "server_error"
    code = "engine_unavailable"


# --- backend ---------------------------------------------------------------------------------------------------


class BackendError(RelaxTrioError):
    """A backend attempt failed. `retryable`: the same prefix may be sent again."""

    retryable = False


class BackendUnavailable(BackendError):
    """Connection refused, 5xx, engine gone: safe to try again with the same prefix."""

    retryable = True


class BackendRejected(BackendError):
    """The engine refused the attempt's content; trying again gives the same answer."""


class PromptRefused(BackendRejected):
    """The engine can't be sent what the conversation says; who wrote it can."""


class BackendProtocolError(BackendError):
    """The engine answered with something that breaks its own contract."""


# --- agent -----------------------------------------------------------------------------------------------------


class AgentError(RelaxTrioError):
    """A Session failed because of its agent process."""


class AgentLaunchError(AgentError):
    """The process could not be started. Not the agent's fault: tried again at its place."""


class AgentExecutionError(AgentError):
    """The agent exited with a failure, or its output cannot be read.

    Attributes:
      exit_code: exit status, negative for a signal (-9 = SIGKILL), None when it was the output that failed.
      tail: the last bytes of `run.log`, decoded, at most 8 KiB.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, tail: str = "") -> None:
        text = message if not tail else f"{message}; the end of run.log follows\n{tail}"
        super().__init__(text)
        self.exit_code = exit_code
        self.tail = tail


class AgentTimeout(AgentExecutionError):
    """The Session's active-time budget (`--agent-timeout`) was spent."""


class AgentOutputError(AgentExecutionError):
    """`session_output.json` breaks the output contract; says which record and why."""


class ExportError(RelaxTrioError):
    """What the agent asked to export cannot be exported from its forest."""


class NoCommittedResponse(ExportError):
    """Implicit export, but no lineage has a delivered response."""


class AmbiguousLeaf(ExportError):
    """Implicit export, but more than one exportable leaf."""


class UnknownState(ExportError):
    """An explicit record equals no committed state; shows the nearest one and the first difference."""


# --- reward, training ------------------------------------------------------------------------------------------


class RewardError(RelaxTrioError):
    """A reward hook raised, timed out or returned something that is no reward."""


class CreditError(RelaxTrioError):
    """Credit cannot be computed; stops the run before any training on the Group."""


class TrainError(RelaxTrioError):
    """The optimizer step failed; ends the run."""


class WeightSyncError(RelaxTrioError):
    """New weights could not be handed to the backend; ends the run."""


class RunFailed(RelaxTrioError):
    """The run cannot go on, e.g. every Group fails. The message carries the last agent's log tail."""


class EngineFault(Exception):
    """An invariant of relax_trio is broken: a bug. Caught only at the root."""


@contextmanager
def boundary(error: type[RelaxTrioError], what: str, *foreign: type[Exception]) -> Iterator[None]:
    """Translate the named foreign exceptions into `error` once; errors of ours pass through.

    Args:
      error: class to raise, taking one message.
      what: what was attempted, with its id; the message becomes "{what}: {Type}: {text}".
      foreign: exception types to translate (at least one).
    """
    try:
        yield
    except RelaxTrioError:
        raise
    except foreign as exc:
        raise error(f"{what}: {type(exc).__name__}: {exc}") from exc
