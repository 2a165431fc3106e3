"""The attempts that run, one slot row each: their tokens and sampling parameters in arrays, and when each one ends.

Rows are dense: 0 to n - 1 run. Not covered: keys and values of the rows (kv.py) and the order of work (engine.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from relax_trio.backend.base import AttemptResult
from relax_trio.backend.embedded.commands import Job
from relax_trio.backend.embedded.prefix import Tokens
from relax_trio.backend.embedded.sampling import Draw
from relax_trio.data.sample import VersionSpan
from relax_trio.ids import WeightVersion

Decode = Callable[[Sequence[int]], str]

_STOP_MARGIN = 8


@define(eq=False, kw_only=True)
class Running:
    """One attempt that has a row.

    Attributes:
      job: what is run.
      row: its slot row; changes when rows close up.
      cached_len: prefix tokens whose keys and values were found.
      stop_window: tokens that can hold a stop string and what precedes it; 0 without stop strings.
      versions: closed spans; the open one belongs to the engine's present version.
    """

    job: Job
    row: int
    cached_len: int
    stop_window: int = 0
    stop_ids: frozenset[int] = field(init=False)
    versions: list[VersionSpan] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        sampling = self.job.attempt.sampling
        self.stop_ids = frozenset(sampling.stop_token_ids)
        if sampling.stop:
            # A token is at least a byte; the margin absorbs what a decoder does to the first piece of a text.
            self.stop_window = max(len(text.encode()) for text in sampling.stop) + _STOP_MARGIN

    def close_span(self, version: WeightVersion, n_generated: int) -> None:
        """Note that the tokens since the last span came from `version`."""
        n_open = n_generated - sum(span.n_tokens for span in self.versions)
        if n_open:
            self.versions.append(VersionSpan(version=version, n_tokens=n_open))


class RowTable:
    """Arrays over rows, so that a step touches no Python object per token.

    Attributes:
      running: the attempts of rows 0 to n - 1.
      tokens: (max_rows, capacity) int32; row r holds `length[r]` of them.
      length, kv_len: int64, tokens known and tokens whose keys and values are computed.
      prompt_len: int64, tokens the attempt came with.
      limit: int64, `length` at which the attempt is complete.
      log_probs: (max_rows, capacity) float64, at the place of the generated token.
    """

    def __init__(self, max_rows: int, decode: Decode | None) -> None:
        self.max_rows = max_rows
        self.running: list[Running] = []
        self.tokens = np.zeros((max_rows, 0), np.int32)
        self.log_probs = np.zeros((max_rows, 0), np.float64)
        self.length = np.zeros(max_rows, np.int64)
        self.kv_len = np.zeros(max_rows, np.int64)
        self.prompt_len = np.zeros(max_rows, np.int64)
        self.limit = np.zeros(max_rows, np.int64)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_p = np.ones(max_rows, np.float32)
        self._top_k = np.full(max_rows, -1, np.int64)
        self._seed = np.zeros(max_rows, np.uint64)
        self._by_row: tuple[NDArray[Any], ...] = (
            *(self.length, self.kv_len, self.prompt_len, self.limit),
            *(self._temperature, self._top_p, self._top_k, self._seed),
        )
        self._decode = decode

    @property
    def n(self) -> int:
        """Rows in use."""
        return len(self.running)

    def add(self, job: Job, prompt: Tokens, *, cached_len: int) -> Running:
        """Give the attempt the next row; `cached_len` of its tokens have keys and values there already."""
        row = self.n
        sampling = job.attempt.sampling
        limit = len(prompt) + sampling.max_new_tokens
        self._grow(limit)
        self.tokens[row, : len(prompt)] = prompt
        self.length[row] = len(prompt)
        self.kv_len[row] = cached_len
        self.prompt_len[row] = len(prompt)
        self.limit[row] = limit
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k
        self._seed[row] = job.seed
        running = Running(job=job, row=row, cached_len=cached_len)
        self.running.append(running)
        return running

    def remove(self, running: Running) -> int | None:
        """Free the attempt's row. Returns the row that moved into it, None when it was the last."""
        last = self.n - 1
        target = running.row
        moved = self.running.pop()
        if moved is running:
            return None
        n = self.length[last]
        self.tokens[target, :n] = self.tokens[last, :n]
        self.log_probs[target, :n] = self.log_probs[last, :n]
        for values in self._by_row:
            values[target] = values[last]
        self.running[target] = moved
        moved.row = target
        return last

    def draw(self, rows: slice | NDArray[np.int64]) -> Draw:
        """Sampling parameters of some rows, each about to draw the token after its last."""
        return Draw(
            temperature=self._temperature[rows],
            top_p=self._top_p[rows],
            top_k=self._top_k[rows],
            seed=self._seed[rows],
            position=self.length[rows],
        )

    def append(self, rows: NDArray[np.int64], ids: NDArray[np.float64], log_probs: NDArray[np.float64]) -> None:
        """Add one token to each of `rows`, whose keys and values are now computed up to it."""
        at = self.length[rows]
        self.tokens[rows, at] = ids
        self.log_probs[rows, at] = log_probs
        self.kv_len[rows] = at
        self.length[rows] = at + 1

    def ending(self, running: Running) -> tuple[Literal["stop", "length"], str | None] | None:
        """Whether the last token ended the attempt: how, and by which stop string."""
        row = running.row
        n = int(self.length[row])
        if running.stop_ids and int(self.tokens[row, n - 1]) in running.stop_ids:
            return "stop", None
        if running.stop_window:
            text = self._stop_string(running, n)
            if text is not None:
                return "stop", text
        return ("length", None) if n >= self.limit[row] else None

    def result(
        self,
        running: Running,
        finish: Literal["stop", "length", "abort"],
        version: WeightVersion,
        stop_string: str | None = None,
    ) -> AttemptResult:
        """What the attempt has so far."""
        part = slice(int(self.prompt_len[running.row]), int(self.length[running.row]))
        ids = self.tokens[running.row, part].tolist()
        running.close_span(version, len(ids))
        return AttemptResult(
            token_ids=array("i", ids),
            logprobs=array("d", self.log_probs[running.row, part].tolist()),
            finish=finish,
            versions=tuple(running.versions),
            stop_string=stop_string,
            cached_len=running.cached_len,
        )

    def _stop_string(self, running: Running, n: int) -> str | None:
        """The stop string that the newest token completed: the first in the text if there are several."""
        assert self._decode is not None, "attempts with stop strings are refused without a decoder"
        attempt = running.job.attempt
        start = max(attempt.response_start, n - running.stop_window)
        text = self._decode(self.tokens[running.row, start:n].tolist())
        found = [(at, stop) for stop in attempt.sampling.stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _grow(self, length: int) -> None:
        old = self.tokens.shape[1]
        if length <= old:
            return
        width = max(length, old + old // 2, 256)
        for name in ("tokens", "log_probs"):
            values = getattr(self, name)
            wider = np.zeros((self.max_rows, width), values.dtype)
            wider[:, :old] = values
            setattr(self, name, wider)
