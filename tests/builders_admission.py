"""Builders of tests of admission: capacity by a timetable, servers with recorded metrics, a pool that evicts."""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from contextlib import asynccontextmanager
from functools import cache

import trio
from sglang_wire import answer_of

from relax_trio.backend.admission import Admission, AdmissionOptions, Reservation
from relax_trio.backend.base import AttemptResult, BackendLoad
from relax_trio.backend.capacity import READING_INTERVAL_S, Reading
from relax_trio.data.sample import VersionSpan

NEW = "0.5.23"
GAUGES = ("max_total_num_tokens", "num_used_tokens", "token_usage")


def reading(total, usage=0.0):
    return Reading(n_total_tokens=total, n_used_tokens=int(total * usage), token_usage=usage)


def steady(*totals, usage=0.0, until_s=float("inf")):
    """A source: servers of these sizes, read every 2 s from 0 to `until_s`."""

    async def source(capacity):
        for index in range(len(totals)):
            capacity.follow(index)
        while trio.current_time() <= until_s:
            for index, total in enumerate(totals):
                capacity.read(index, reading(total, usage))
            await trio.sleep(READING_INTERVAL_S)
        await trio.sleep_forever()

    return source


async def silent(capacity):
    """A source that reads nothing."""
    await trio.sleep_forever()


def planned(*changes):
    """A source: one server of 100 tokens whose usage is that of the last (second, usage) begun."""

    async def source(capacity):
        capacity.follow("server")
        while True:
            now = trio.current_time()
            capacity.read("server", reading(100, [usage for at, usage in changes if at <= now][-1]))
            await trio.sleep(READING_INTERVAL_S)

    return source


@asynccontextmanager
async def open_admission(source, **options):
    """Admission that has its first reading."""
    admission = Admission(AdmissionOptions(**options), source)
    async with trio.open_nursery() as nursery:
        await nursery.start(admission.run)
        await trio.testing.wait_all_tasks_blocked()
        yield admission
        nursery.cancel_scope.cancel()


def wanted(tokens, name="s", **fields):
    return Reservation(session=name, n_prefix=tokens - 1, n_new=1, **fields)


class Line:
    """Attempts that come and go; `begun` has when, by their names."""

    def __init__(self, admission, nursery):
        self.admission = admission
        self.nursery = nursery
        self.begun = {}
        self.recalled = {}
        self.scopes = {}

    def come(self, name, tokens, seconds=10.0, **fields):
        """An attempt arrives now, and lasts so long once it has begun."""
        self.scopes[name] = trio.CancelScope()
        self.nursery.start_soon(self._live, name, wanted(tokens, name, **fields), seconds)

    async def _live(self, name, reservation, seconds):
        with self.scopes[name]:
            async with self.admission.admit(reservation) as may_begin:
                if may_begin:
                    self.begun[name] = trio.current_time()
                    await trio.sleep(seconds)
                else:
                    self.recalled[name] = trio.current_time()


class MeteredServer:
    """What is used of a server when its pool is read."""

    def __init__(self, name, metrics):
        self.name = name
        self.gone = trio.Event()
        self.client = self
        self.metrics = metrics


@cache
def _metrics_template(version):
    text = answer_of(version, "14_metrics")[1].decode()
    for name in GAUGES:
        text, n_found = re.subn(rf"(?m)^(sglang:{name}\{{.*\}}) \S+$", rf"\g<1> <{name}>", text)
        assert n_found == 1, name
    return text


def metrics_text(total, used, usage, version=NEW):
    """The metrics of a real server, with other numbers in its pool's gauges."""
    text = _metrics_template(version)
    for name, value in zip(GAUGES, (total, used, usage), strict=True):
        text = text.replace(f"<{name}>", str(float(value)))
    return text


class _Job:
    def __init__(self, attempt, ids):
        self.attempt = attempt
        self.ids = ids
        self.n_made = 0
        self.cached_len = 0
        self.is_aborted = False
        self.done = trio.Event()

    @property
    def n_held(self):
        return len(self.attempt.token_ids) + self.n_made


class PooledBackend:
    """A backend with a KV pool like a server's, at one token for each attempt and tick.

    The pool holds what running attempts have and, as long as there is room, the conversations of finished ones, of
    which the longest unused goes first. An attempt starts when its prefix has room; when running ones outgrow the pool,
    the one that came last is put back into the queue and all it has must be computed anew.

    Attributes:
      n_computed: tokens that went through the model. n_recomputed: those that had before.
      n_retracted: attempts that were put back.
      most_used: highest number of tokens that running attempts held.
    """

    max_context_len = 4096
    weight_version = "0"

    def __init__(self, n_total, say, *, tick_s=0.04):
        self.n_total = n_total
        self.n_computed = self.n_recomputed = self.n_retracted = self.most_used = 0
        self._say = say
        self._tick_s = tick_s
        self._queue = []
        self._running = []
        self._cached = OrderedDict()  # Session → tokens, the longest unused first
        self._known = {}  # Session → tokens that were computed at some time
        self._arrived = trio.Event()

    @property
    def n_used(self):
        return sum(job.n_held for job in self._running)

    async def metrics(self):
        """Prometheus text, as the server's."""
        await trio.lowlevel.checkpoint()
        return metrics_text(self.n_total, self.n_used, round(self.n_used / self.n_total, 2))

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED):
        task_status.started()
        while True:
            if not self._queue and not self._running:
                self._arrived = trio.Event()
                await self._arrived.wait()
            await trio.sleep(self._tick_s)
            self._start()
            self._decode()

    async def generate(self, attempt):
        ids = self._say(attempt)[len(attempt.token_ids) - attempt.response_start :]
        job = _Job(attempt, ids)
        self._queue.append(job)
        self._arrived.set()
        try:
            await job.done.wait()
        finally:
            self._leave(job)
        return AttemptResult(
            token_ids=array("i", ids[: job.n_made]),
            logprobs=array("d", [-1.0] * job.n_made),
            finish="abort" if job.is_aborted else "stop",
            versions=(VersionSpan(version="0", n_tokens=job.n_made),) if job.n_made else (),
            cached_len=job.cached_len,
        )

    async def abort(self, rid):
        for job in (*self._running, *self._queue):
            if job.attempt.rid == rid and not job.done.is_set():
                job.is_aborted = True
                job.done.set()
        await trio.lowlevel.checkpoint()

    async def close_session(self, session_key):
        await trio.lowlevel.checkpoint()
        self._cached.pop(session_key, None)

    def load(self):
        return BackendLoad(n_running=len(self._running), n_waiting=len(self._queue))

    def _start(self):
        while self._queue:
            job = self._queue[0]
            key, n_needed = job.attempt.session_key, job.n_held
            n_cached = min(self._cached.pop(key, 0), n_needed)
            if self.n_used + n_needed > self.n_total:
                if n_cached:
                    self._cached[key] = n_cached
                return
            self._running.append(self._queue.pop(0))
            self._compute(key, n_cached, n_needed)
            job.cached_len = n_cached
            self._evict()

    def _decode(self):
        while self.n_used + len(self._running) > self.n_total:
            self.n_retracted += 1
            self._queue.insert(0, self._running.pop())
        for job in self._running:
            if job.n_made < len(job.ids):
                job.n_made += 1
                self._compute(job.attempt.session_key, job.n_held - 1, job.n_held)
            if job.n_made == len(job.ids):
                job.done.set()
        self._evict()
        self.most_used = max(self.most_used, self.n_used)

    def _compute(self, key, start, end):
        known = self._known.get(key, 0)
        self.n_computed += end - start
        self.n_recomputed += max(0, min(end, known) - start)
        self._known[key] = max(known, end)

    def _evict(self):
        n_free = self.n_total - self.n_used - sum(self._cached.values())
        while n_free < 0:
            key, n_tokens = self._cached.popitem(last=False)
            n_free += n_tokens
            if n_free > 0:
                self._cached[key] = n_free
                self._cached.move_to_end(key, last=False)
                return

    def _leave(self, job):
        if job in self._queue:
            self._queue.remove(job)
        if job in self._running:
            self._running.remove(job)
            self._cached[job.attempt.session_key] = job.n_held
