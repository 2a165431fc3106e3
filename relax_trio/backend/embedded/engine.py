"""The loop of the engine thread: take commands, give attempts rows, compute, draw, hand back what ended.

Owns the order of work between two commands. Knows neither Trio nor tasks: commands come through a thread-safe queue,
outcomes leave through one callback.

With `deterministic` an attempt's numbers depend on nothing but its own tokens: prefill runs one attempt at a time in
chunks that start at fixed positions, decoding always computes all rows and reads a padded length that the row's own
length decides, and only keys and values that prefill computed are used again.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from outcome import Error, Value

from relax_trio.backend.embedded.commands import Abort, CloseSession, Command, Finished, Job, Stop, Submit, Update
from relax_trio.backend.embedded.kv import KvStore, StepPlan
from relax_trio.backend.embedded.model import CausalModel
from relax_trio.backend.embedded.prefix import Kept, PrefixCache, Tokens
from relax_trio.backend.embedded.rows import Decode, RowTable, Running
from relax_trio.backend.embedded.sampling import sample
from relax_trio.errors import BackendProtocolError, WeightSyncError
from relax_trio.ids import WeightVersion

PREFILL_CHUNK = 512
"""Most tokens of one attempt in one pass: what an abort or a short attempt may have to wait for."""

PREFILL_TOKENS = 4096
"""Most padded prefill tokens between two decode steps."""

FIXED_CHUNK = 64
"""Prefill chunk under `deterministic`: chunks start at multiples of it."""

FIXED_LENGTH = 256
"""Least padded length under `deterministic`; doubled as often as a row needs."""

WORTH_WAITING = 32
"""Shared tokens for which an attempt waits until another one has computed them."""

Rows = NDArray[np.int64]


@frozen(kw_only=True)
class EngineLimits:
    """Sizes of an engine, in attempts and tokens."""

    max_batch: int
    max_context_len: int
    max_cached_tokens: int
    deterministic: bool


class Engine:
    """One model, its rows and its queue; `run` belongs to one thread, `put` to everybody."""

    def __init__(
        self,
        model: CausalModel,
        limits: EngineLimits,
        *,
        version: WeightVersion,
        decode: Decode | None,
        deliver: Callable[[list[Finished]], None],
    ) -> None:
        self._model = model
        self._limits = limits
        self._version = version
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._waiting: dict[Job, None] = {}
        self._rows = RowTable(limits.max_batch, decode)
        self._store = KvStore(
            model.spec,
            max_rows=limits.max_batch,
            max_len=limits.max_context_len,
            fixed_rows=limits.deterministic,
        )
        self._prefixes = PrefixCache(limits.max_cached_tokens)
        self._finished: list[Finished] = []

    def put(self, command: Command) -> None:
        """Hand over a command, from any thread. Commands are taken in order, between two steps."""
        self._commands.put(command)

    @property
    def n_running(self) -> int:
        """Attempts that have a row."""
        return self._rows.n

    @property
    def n_cached_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return self._prefixes.n_tokens + int(self._rows.kv_len[: self._rows.n].sum())

    def run(self) -> None:
        """Work until `Stop`; blocks while there is nothing to do."""
        with torch.inference_mode():
            while self._take():
                self._step()
                if self._finished:
                    finished, self._finished = self._finished, []
                    self._deliver(finished)

    # --- commands ---------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Handle the commands that are there, or wait for one when idle. False after `Stop`."""
        block = not self._rows.n and not self._waiting
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if isinstance(command, Stop):
                return False
            self._handle(command)

    def _handle(self, command: Submit | Abort | Update | CloseSession) -> None:
        if isinstance(command, Submit):
            self._waiting[command.job] = None
        elif isinstance(command, Abort):
            self._abort(command.job)
        elif isinstance(command, Update):
            if command.claim():
                self._update(command)
        else:
            self._prefixes.close_session(command.session_key)

    def _abort(self, job: Job) -> None:
        if job in self._waiting:
            del self._waiting[job]
            self._finished.append((job, Value(job.empty_result())))
            return
        for running in self._rows.running:
            if running.job is job:
                self._finished.append((job, Value(self._rows.result(running, "abort", self._version))))
                self._leave(running)
                return

    def _update(self, update: Update) -> None:
        try:
            self._model.replace(update.source)
        except WeightSyncError as exc:
            self._finished.append((update, Error(exc)))
            return
        rows = self._rows
        for running in rows.running:
            running.close_span(self._version, int(rows.length[running.row] - rows.prompt_len[running.row]))
        # Running attempts compute their keys and values anew: the next step finds them with nothing computed.
        rows.kv_len[:] = 0
        self._prefixes.clear()
        self._store.wipe()
        self._version = update.version
        self._finished.append((update, Value(None)))

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give rows to waiting attempts in order; one that shares much with a row still in prefill waits for it."""
        for job in [*self._waiting]:
            if self._rows.n == self._limits.max_batch:
                return
            prompt = np.frombuffer(job.attempt.token_ids, np.int32)
            if self._start(job, prompt):
                del self._waiting[job]

    def _start(self, job: Job, prompt: Tokens) -> bool:
        """Copy what is computed of `prompt` into a new row. False: better wait for a row that computes more of it."""
        most = self._whole_chunks(len(prompt) - 1)
        kept_len, kept = self._prefixes.find(job.attempt.session_key, prompt)
        kept_len = self._whole_chunks(min(kept_len, most))
        now, soon = self._shared_with_rows(prompt, most)
        row_len = int(now.max(initial=0))
        if int(soon.max(initial=0)) - max(row_len, kept_len) >= WORTH_WAITING:
            return False
        row = self._rows.n
        self._store.grow(row + 1, len(prompt))
        if kept is not None and kept_len >= row_len:
            self._store.put(row, kept.block, kept_len)
        elif row_len:
            self._store.copy_row(int(now.argmax()), row, row_len)
        self._rows.add(job, prompt, cached_len=max(row_len, kept_len))
        return True

    def _shared_with_rows(self, prompt: Tokens, most: int) -> tuple[Rows, Rows]:
        """Opening tokens shared with each running row: those computed now, and those that its prefill will compute."""
        rows, n = self._rows, self._rows.n
        width = min(len(prompt), rows.tokens.shape[1])
        differs = rows.tokens[:n, :width] != prompt[:width]
        shared = np.where(differs.any(axis=1), differs.argmax(axis=1), width) if width else np.zeros(n, np.int64)
        shared = np.minimum(np.minimum(shared, rows.length[:n]), most)
        if self._limits.deterministic:
            shared = np.minimum(shared, rows.prompt_len[:n]) // FIXED_CHUNK * FIXED_CHUNK
        return np.minimum(shared, rows.kv_len[:n]), np.minimum(shared, rows.prompt_len[:n])

    def _whole_chunks(self, n: int) -> int:
        """`n`, under `deterministic` cut to whole chunks: what a part of a chunk holds is not computed alone."""
        return n // FIXED_CHUNK * FIXED_CHUNK if self._limits.deterministic else n

    # --- steps ------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One round: admit, some prefill, one decode step for every row that is ready."""
        self._admit()
        budget = PREFILL_TOKENS
        while budget > 0 and (group := self._next_prefill()):
            budget -= self._prefill(*group)
        ready = np.flatnonzero(~self._in_prefill())
        if not len(ready):
            return
        if not self._limits.deterministic:
            self._decode(ready, int(ready[0]), int(ready[-1]) + 1, int(self._rows.length[ready].max()))
            return
        padded = self._padded(self._rows.length[ready])
        # Rows by their own padded length, found before any row ends: ended rows make others move.
        groups = [([self._rows.running[row] for row in ready[padded == n]], int(n)) for n in np.unique(padded)]
        for members, length in groups:
            rows = np.array([running.row for running in members], np.int64)
            self._decode(rows, 0, self._limits.max_batch, length)

    def _in_prefill(self) -> NDArray[np.bool_]:
        """Rows with more than the newest token to compute."""
        rows, n = self._rows, self._rows.n
        in_prefill = rows.length[:n] - rows.kv_len[:n] > 1
        if self._limits.deterministic:
            # A first token always comes from a prefill pass, whether or not all before it was cached.
            in_prefill |= rows.length[:n] == rows.prompt_len[:n]
        return np.asarray(in_prefill)

    def _padded(self, length: Rows) -> Rows:
        doubled = FIXED_LENGTH * 2 ** np.ceil(np.log2(np.maximum(length, FIXED_LENGTH) / FIXED_LENGTH)).astype(np.int64)
        return np.minimum(doubled, self._limits.max_context_len)

    def _next_prefill(self) -> tuple[int, int, int] | None:
        """First row, end row and width of the next prefill pass; None when no row needs one."""
        pending = np.flatnonzero(self._in_prefill())
        if not len(pending):
            return None
        first = end = int(pending[0])
        if self._limits.deterministic:
            return first, first + 1, FIXED_CHUNK
        need = self._rows.length - self._rows.kv_len
        width = n_real = 0
        for row in pending.tolist():
            chunk = min(int(need[row]), PREFILL_CHUNK)
            wider = max(width, chunk)
            n_padded = wider * (row + 1 - first)
            # Padding costs more than a pass of its own once it outweighs the tokens and these are not few.
            if row != end or (width and n_padded > min(PREFILL_TOKENS, max(512, 2 * (n_real + chunk)))):
                break
            width, n_real, end = wider, n_real + chunk, row + 1
        return first, end, width

    def _prefill(self, first: int, end: int, width: int) -> int:
        """Compute the next chunk of each row in a range, draw where that was the last. Returns the padded tokens."""
        rows = self._rows
        start = rows.kv_len[first:end].copy()
        stop = np.minimum(rows.length[first:end], start + width)
        length = int(stop.max())
        if self._limits.deterministic:
            length = min(int(start[0]) + width, self._limits.max_context_len)
        self._store.grow(rows.n, length)
        # Right-aligned: the last column holds every row's last token, so one column of logits is enough.
        position = stop[:, None] - width + np.arange(width)
        real = position >= start[:, None]
        row = np.arange(first, end)[:, None]
        position[~real] = 0
        ids = np.where(real, rows.tokens[row, position], 0)
        index = np.where(real, row * self._store.capacity + position, self._store.trash)
        logits = self._forward(first, end, length, ids, position, index)
        rows.kv_len[first:end] = stop
        done = np.flatnonzero(stop == rows.length[first:end])
        if len(done):
            self._draw(logits[torch.from_numpy(done).to(logits.device)], first + done, slice(None), first + done)
        return ids.size

    def _decode(self, ready: Rows, first: int, end: int, length: int) -> None:
        """One token for each row in `ready`, computed together with the idle rows between `first` and `end`."""
        rows = self._rows
        self._store.grow(rows.n, length)
        row = np.arange(first, end)
        idle = np.ones(end - first, np.bool_)
        idle[ready - first] = False
        position = np.where(idle, 0, rows.length[first:end] - 1)
        ids = np.where(idle, 0, rows.tokens[row, position])
        index = np.where(idle, self._store.trash, row * self._store.capacity + position)
        logits = self._forward(first, end, length, ids[:, None], position[:, None], index)
        self._draw(logits, slice(first, end), ready - first, ready)

    def _forward(self, first: int, end: int, length: int, ids: Rows, position: Rows, index: Rows) -> torch.Tensor:
        device = self._model.device
        self._store.plan = StepPlan(
            first=first,
            n_rows=end - first,
            length=length,
            index=torch.from_numpy(index.reshape(-1)).to(device),
        )
        ids_on, position_on = (torch.from_numpy(a.astype(np.int64, copy=False)).to(device) for a in (ids, position))
        return self._model.logits(ids_on, position_on, self._store)

    # --- results ----------------------------------------------------------------------------------------------

    def _draw(self, logits: torch.Tensor, drawn: slice | Rows, used: slice | Rows, rows: Rows) -> None:
        """Draw for the rows `drawn` that `logits` covers, keep the places `used` of it as the tokens of `rows`."""
        ids, log_probs = sample(logits, self._rows.draw(drawn))
        new = torch.stack((ids.to(torch.float64), log_probs.to(torch.float64))).cpu().numpy()[:, used]
        self._rows.append(rows, new[0], new[1])
        sound = np.isfinite(new[1]).tolist()
        for running, is_sound in zip([self._rows.running[row] for row in rows], sound, strict=True):
            if not is_sound:
                self._fail(running)
                continue
            ending = self._rows.ending(running)
            if ending is not None:
                result = self._rows.result(running, ending[0], self._version, ending[1])
                self._finished.append((running.job, Value(result)))
                self._leave(running)

    def _fail(self, running: Running) -> None:
        rid = running.job.attempt.rid
        message = f"attempt {rid}: the weights of version {self._version!r} gave logits that are not finite"
        self._finished.append((running.job, Error(BackendProtocolError(message))))
        self._store.wipe_row(running.row)
        self._close_up(running)

    def _leave(self, running: Running) -> None:
        """Keep what the attempt computed for the next turn, and free its row."""
        row = running.row
        n = int(self._rows.kv_len[row])
        if self._limits.deterministic:
            n = self._whole_chunks(min(n, int(self._rows.prompt_len[row])))
        if 0 < n <= self._limits.max_cached_tokens:
            tokens = self._rows.tokens[row, :n].copy()
            self._prefixes.add(
                Kept(session_key=running.job.attempt.session_key, tokens=tokens, block=self._store.take(row, n))
            )
        self._close_up(running)

    def _close_up(self, running: Running) -> None:
        target = running.row
        moved = self._rows.remove(running)
        if moved is not None:
            self._store.copy_row(moved, target, int(self._rows.kv_len[target]))
