"""A backend that answers from a file: what `relax-trio serve --answers FILE` stands on.

Each Session reads its own copy of the script in order. A scripted answer is certain, so each of its tokens has logprob
0.0. The script decides what is said: of the sampling parameters only `max_new_tokens` acts. Not covered: tokenization
itself, which comes as a callable.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import trio
from attrs import define, field, frozen

from relax_trio.backend.base import Attempt, AttemptResult, BackendLoad, WeightSource
from relax_trio.backend.refuse import refuse_unfit
from relax_trio.backend.turns import InterruptedTurns
from relax_trio.data.json import parse_json
from relax_trio.data.sample import VersionSpan
from relax_trio.errors import BackendRejected, BackendUnavailable, ConfigError, WeightSyncError
from relax_trio.ids import Rid, WeightVersion
from relax_trio.sync.gate import Gate

Encode = Callable[[str], Sequence[int]]
ScriptFinish = Literal["stop", "length"]

_KEYS = ("text", "finish", "delay")


@frozen(kw_only=True)
class Answer:
    """One line of the script.

    Attributes:
      ids: tokens of the text, with the end-of-turn token where `finish` is "stop"; at least one.
      finish: how the turn ends.
      delay_s: time before each attempt at this turn answers.
    """

    ids: tuple[int, ...]
    finish: ScriptFinish
    delay_s: float = 0.0


def read_answers(path: Path, encode: Encode, end_of_turn_id: int) -> tuple[Answer, ...]:
    """Read a script: JSON Lines of `{"text": …, "finish": "stop" or "length", "delay": seconds}`.

    `finish` defaults to "stop", `delay` to 0; blank lines are skipped.

    Raises:
      ConfigError: the file can't be read, has no answer, or a line is wrong; names FILE:LINE.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot read the answers: {exc}") from exc
    answers = tuple(
        _parse(line, f"{path}:{number}", encode, end_of_turn_id)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not answers:
        raise ConfigError(f"{path}: no answers in it; each line is an object with a text")
    return answers


def _parse(line: str, where: str, encode: Encode, end_of_turn_id: int) -> Answer:
    try:
        value = parse_json(line)
    except ValueError as exc:
        raise ConfigError(f"{where}: not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: an answer is a JSON object")
    unknown = sorted(value.keys() - set(_KEYS))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    text, finish, delay = value.get("text"), value.get("finish", "stop"), value.get("delay", 0)
    if not isinstance(text, str):
        raise ConfigError(f"{where}: 'text' must be a string")
    if isinstance(delay, bool) or not isinstance(delay, int | float) or delay < 0:
        raise ConfigError(f"{where}: 'delay' must be a number of seconds, at least 0")
    if finish == "stop":
        return Answer(ids=(*encode(text), end_of_turn_id), finish="stop", delay_s=float(delay))
    if finish != "length":
        raise ConfigError(f"{where}: 'finish' must be one of {', '.join(get_args(ScriptFinish))}")
    ids = tuple(encode(text))
    if not ids:
        raise ConfigError(f"{where}: an answer that ends by its length needs a text")
    return Answer(ids=ids, finish="length", delay_s=float(delay))


@define(eq=False, kw_only=True)
class _Turn:
    interrupt: trio.Event = field(factory=trio.Event)
    end: Literal["abort", "gone"] | None = None


class ScriptedBackend:
    """`Backend` over a script.

    Args:
      answers: the script, from `read_answers`.
      name: what messages call it, e.g. its path.
      max_context_len: most tokens of prefix and completion.
      vocab_len: number of token ids, None: not checked.
    """

    def __init__(
        self, answers: Sequence[Answer], *, name: str, max_context_len: int, vocab_len: int | None = None
    ) -> None:
        self._answers = tuple(answers)
        self._name = name
        self._max_context_len = max_context_len
        self._vocab_len = vocab_len
        self._version = WeightVersion("scripted")
        self._serving = False
        self._answering = Gate()
        self._running: dict[Rid, _Turn] = {}
        self._n_begun: dict[str, int] = {}
        self._interrupted: InterruptedTurns[Answer] = InterruptedTurns()

    @property
    def max_context_len(self) -> int:
        """See `Backend`."""
        return self._max_context_len

    @property
    def weight_version(self) -> WeightVersion:
        """See `Backend`."""
        return self._version

    @property
    def pausing(self) -> ScriptedBackend:
        """See `Backend`."""
        return self

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Backend`."""
        self._serving = True
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self._serving = False
            self._answering.open()
            for turn in self._running.values():
                turn.end = "gone"
                turn.interrupt.set()

    async def generate(self, attempt: Attempt) -> AttemptResult:
        """See `Backend`: the whole answer after its delay; an abort before that returns no tokens.

        Raises:
          BackendRejected: besides the common reasons: the Session has had all answers of the script.

        Cancellation: acts at once; the answer is kept for an attempt at the same turn.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._serving:
            raise BackendUnavailable(f"attempt {attempt.rid}: the scripted backend is not serving")
        refuse_unfit(attempt, running=self._running, max_context_len=self._max_context_len, vocab_len=self._vocab_len)
        answer = self._interrupted.take(attempt, lambda: self._begin(attempt))
        turn = self._running[attempt.rid] = _Turn()
        finished = False
        try:
            with trio.move_on_after(answer.delay_s):
                await turn.interrupt.wait()
            if turn.end != "gone":
                await self._answering.wait_open()
            if turn.end == "gone":
                raise BackendUnavailable(f"attempt {attempt.rid}: the scripted backend ended")
            finished = turn.end is None
            return self._result(attempt, answer) if finished else _aborted()
        finally:
            del self._running[attempt.rid]
            if not finished:
                self._interrupted.put_back(attempt, answer)

    async def abort(self, rid: Rid) -> None:
        """See `Backend`."""
        turn = self._running.get(rid)
        if turn is not None and turn.end is None:
            turn.end = "abort"
            turn.interrupt.set()
        await trio.lowlevel.checkpoint()

    async def pause(self) -> None:
        """See `Pausing`: answers and aborts that are due come at `resume`."""
        self._answering.shut("paused")
        await trio.lowlevel.checkpoint()

    async def resume(self) -> None:
        """See `Pausing`."""
        self._answering.open()
        await trio.lowlevel.checkpoint()

    async def update_weights(self, version: WeightVersion, source: WeightSource) -> None:
        """Answer on under `version`: a script has no weights to change."""
        await trio.lowlevel.checkpoint()
        if source.tensors is None and source.path is None:
            raise WeightSyncError("a weight source needs tensors or a path; this one has neither")
        self._version = version

    async def close_session(self, session_key: str) -> None:
        """See `Backend`."""
        self._n_begun.pop(session_key, None)
        self._interrupted.close_session(session_key)
        await trio.lowlevel.checkpoint()

    def load(self) -> BackendLoad:
        """See `Backend`."""
        return BackendLoad(n_running=len(self._running), n_waiting=0)

    def _begin(self, attempt: Attempt) -> Answer:
        number = self._n_begun.get(attempt.session_key, 0)
        if number >= len(self._answers):
            raise BackendRejected(
                f"attempt {attempt.rid}: the script {self._name} is exhausted: it has {len(self._answers)} answers and "
                "this Session has had them all"
            )
        self._n_begun[attempt.session_key] = number + 1
        return self._answers[number]

    def _result(self, attempt: Attempt, answer: Answer) -> AttemptResult:
        rest = answer.ids[len(attempt.token_ids) - attempt.response_start :]
        ids = rest[: attempt.sampling.max_new_tokens]
        return AttemptResult(
            token_ids=array("i", ids),
            logprobs=array("d", bytes(8 * len(ids))),
            finish=answer.finish if len(ids) == len(rest) else "length",
            versions=(VersionSpan(version=self._version, n_tokens=len(ids)),) if ids else (),
        )


def _aborted() -> AttemptResult:
    return AttemptResult(token_ids=array("i"), logprobs=array("d"), finish="abort", versions=())
