"""The loop of the engine thread: take commands, give attempts rows, compute, draw, hand back what ended.

Owns the order of work between two commands. Knows neither Trio nor tasks: commands come through a thread-safe queue,
outcomes leave through one callback. Not covered: the passes through the model (passes.py).
"""

from __future__ import annotations

import queue
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from outcome import Error, Value

from relax_trio.backend.embedded.commands import Abort, CloseSession, Command, Finished, Job, Stop, Submit, Update
from relax_trio.backend.embedded.kv import KvStore
from relax_trio.backend.embedded.model import CausalModel
from relax_trio.backend.embedded.passes import FIXED_CHUNK, PREFILL_TOKENS, Drawn, EngineLimits, Passes
from relax_trio.backend.embedded.prefix import Kept, PrefixCache, Tokens
from relax_trio.backend.embedded.rows import Decode, RowTable, Running
from relax_trio.errors import BackendProtocolError, WeightSyncError
from relax_trio.ids import WeightVersion

WORTH_WAITING = 32
"""Shared tokens for which an attempt waits until another one has computed them."""

Rows = NDArray[np.int64]


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
        self._passes = Passes(model, self._store, self._rows, limits)
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
                # What a command ended need not wait for the step.
                self._flush()
                self._step()
                self._flush()

    def _flush(self) -> None:
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
        while budget > 0 and (part := self._passes.next_prefill()) is not None:
            budget -= part.n_padded
            self._take_tokens(self._passes.prefill(part))
        # Rows move when others end: the parts of this round name attempts, not rows.
        for members, length in self._passes.decode_parts():
            rows = np.array([running.row for running in members], np.int64)
            self._take_tokens(self._passes.decode(rows, length))

    # --- results ----------------------------------------------------------------------------------------------

    def _take_tokens(self, drawn: Drawn | None) -> None:
        """Add new tokens to their rows; finish the attempts that end with them."""
        if drawn is None:
            return
        self._rows.append(drawn.rows, drawn.ids, drawn.log_probs)
        sound = np.isfinite(drawn.log_probs).tolist()
        for running, is_sound in zip([self._rows.running[row] for row in drawn.rows], sound, strict=True):
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
