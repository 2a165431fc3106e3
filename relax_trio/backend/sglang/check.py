"""The contract of a backend tried out on a running server, one finding after another: `relax-trio engine-check URL`.

Only what leaves the server as it was: its weights are not changed, and however a check ends, the server goes on and
runs nothing of it. Nothing is sent that is known to kill a server, as long as nobody else uses it.
"""

from __future__ import annotations

import functools
import json
import secrets
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count

import trio
from attrs import define, field, frozen

from relax_trio.backend.base import SamplingParams
from relax_trio.backend.sglang import wire
from relax_trio.backend.sglang.attempts import ABORT_AFTER_S
from relax_trio.backend.sglang.client import CONTROL_S, PauseMode, SGLangClient
from relax_trio.backend.sglang.connect import connect
from relax_trio.errors import BackendError, BackendRejected
from relax_trio.sync.cleanup import cleanup_scope

Check = Callable[[], Awaitable[str]]

_PROBE_S = 60.0
_FINISH_S = 120.0
_LONG = 4096
"""New tokens of an attempt that is to run until it is aborted."""


@frozen
class Finding:
    """One row of the table.

    Attributes:
      what: the claim.
      verdict: "yes", "no", or "FAILED" where the contract is broken.
      detail: numbers, or what went wrong.
    """

    what: str
    verdict: str
    detail: str = ""


@define(eq=False)
class EngineCheck:
    """The checks of one server, in order.

    Args:
      client: to the server.
    """

    client: SGLangClient
    info: wire.ServerInfo | None = None
    _tag: str = field(factory=functools.partial(secrets.token_hex, 4))
    _rids: count[int] = field(factory=functools.partial(count, 1))

    async def run(self) -> list[Finding]:
        """Try everything; one failure does not end it, a server that does not answer does.

        Raises:
          BackendError: the server does not answer, or is no SGLang server.
        """
        info = self.info = await self.client.info()
        probe = await self.client.probe(_PROBE_S)
        bracketed = await self.client.has_post("/begin_weight_update")
        findings = [
            Finding("SGLang", info.version, f"weights {probe.version!r}, {info.max_total_tokens} KV tokens"),
            Finding("longest context", str(info.max_context_len), "prefix and completion"),
            Finding("version of each token", _yes(probe.has_spans), "else only drain and abort are safe"),
            Finding("weights from memory", "yes", "between begin and end" if bracketed else "at once"),
            await self._broadcasts(info),
            _adapters(info),
            Finding("memory lent to the trainer", _yes(info.saves_memory), "--enable-memory-saver, for --colocate"),
        ]
        findings += [await self._try(what, check) for what, check in self._checks(probe.has_spans)]
        try:
            await self.client.metrics()
        except BackendError:
            findings.append(Finding("metrics", "no", "--enable-metrics; without, no program-aware admission"))
        else:
            findings.append(Finding("metrics", "yes"))
        return findings

    async def _broadcasts(self, info: wire.ServerInfo) -> Finding:
        what = "weights by broadcast"
        if info.n_replicas > 1 or info.n_stages > 1:
            return Finding(what, "no", f"--dp-size {info.n_replicas}, --pp-size {info.n_stages}: both have to be 1")
        if not await self.client.has_post("/init_weights_update_group"):
            return Finding(what, "no", "it has no /init_weights_update_group")
        return Finding(what, "yes", f"{'Gloo' if info.device == 'cpu' else 'NCCL'}, {info.n_ranks} ranks")

    def _checks(self, has_spans: bool) -> list[tuple[str, Check]]:
        checks: list[tuple[str, Check]] = [
            ("ids and logprobs agree", self._agrees),
            ("greedy answers repeat", self._repeats),
            ("a stop token ends a turn and is kept", self._stops),
            ("a prefix is cached, and flushed", self._flushes),
            ("an abort brings back what there is", self._aborts),
            ("an aborted turn goes on where it ended", self._resumes),
            ("a name that is running is refused", self._refuses_twin),
            ("a context that is too long is refused", self._refuses_long),
            ("a Session is closed", self._closes),
            ("a paused attempt goes on (in_place)", functools.partial(self._pauses, "in_place")),
        ]
        if has_spans:
            checks.append(("a paused attempt goes on (retract)", functools.partial(self._pauses, "retract")))
        return checks

    async def _try(self, what: str, check: Check) -> Finding:
        try:
            with trio.fail_after(_FINISH_S):
                return Finding(what, "yes", await check())
        except (BackendError, _Broken) as exc:
            return Finding(what, "FAILED", str(exc))
        except ExceptionGroup as group:  # of a check with an attempt beside it
            if group.split((BackendError, _Broken))[1] is not None:
                raise
            return Finding(what, "FAILED", _first_text(group))
        except trio.TooSlowError:
            return Finding(what, "FAILED", f"not finished after {_FINISH_S:g} s")

    # --- checks; each returns a detail ------------------------------------------------------------------------

    async def _agrees(self) -> str:
        leg = await self._generate([5, 6, 7], 8)
        _expect(leg.finish != "abort" and len(leg.token_ids) > 0, f"{leg.finish} after {len(leg.token_ids)} tokens")
        return f"{len(leg.token_ids)} tokens"

    async def _repeats(self) -> str:
        first, second = [await self._generate([5, 6, 7], 8) for _ in range(2)]
        _expect(first.token_ids == second.token_ids, "two greedy answers differ")
        worst = max(abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True))
        return f"largest difference {worst:.1e}"

    async def _stops(self) -> str:
        free = await self._generate([5, 6, 7], 8)
        stop = free.token_ids[0]
        leg = await self._generate([5, 6, 7], 8, stop_token_ids=(stop,))
        _expect(
            leg.finish == "stop" and leg.token_ids.tolist() == [stop], f"{leg.finish} with {leg.token_ids.tolist()}"
        )
        return f"token {stop}"

    async def _flushes(self) -> str:
        prefix = [5 + i % 60 for i in range(64)]
        await self._generate(prefix, 1)
        hit = (await self._generate(prefix, 1)).cached_len
        await self.client.flush_cache()
        after = (await self._generate(prefix, 1)).cached_len
        _expect(after == 0, f"{after} cached tokens after the flush")
        return f"{hit} of {len(prefix)} cached before" if hit else "nothing is cached (--disable-radix-cache)"

    async def _aborts(self) -> str:
        leg = await self._aborted()
        return f"{len(leg.token_ids)} tokens and logprobs"

    async def _resumes(self) -> str:
        first = await self._aborted()
        rest = await self._generate([5, 6, 7, *first.token_ids], 4, ends=False)
        whole = await self._generate([5, 6, 7], len(first.token_ids) + 4, ends=False)
        both = [*first.token_ids, *rest.token_ids]
        _expect(whole.token_ids.tolist()[: len(both)] == both, "the continuation differs from the unbroken answer")
        return f"{len(first.token_ids)} + {len(rest.token_ids)} tokens"

    async def _refuses_twin(self) -> str:
        refused = False
        async with self._running(ABORT_AFTER_S) as (rid, _):
            try:
                await self._generate([5], 1, rid=rid)
            except BackendRejected:
                refused = True
        _expect(refused, "it was taken twice")
        return "HTTP 400"

    async def _refuses_long(self) -> str:
        assert self.info is not None, "asked first"
        try:
            await self._generate([5] * (self.info.max_context_len + 100), 8)
        except BackendRejected:
            return "HTTP 400"
        raise _Broken("it was taken")

    async def _closes(self) -> str:
        await self._generate([5, 6], 1, session="engine-check")
        await self.client.close_session("engine-check")
        return ""

    async def _pauses(self, mode: PauseMode) -> str:
        async with self._running(0.2) as (_, legs):
            try:
                await self.client.pause(mode)
                await trio.sleep(0.2)
            finally:
                with cleanup_scope(CONTROL_S, "continuing the server"):
                    await self.client.resume()
            await trio.sleep(0.2)
        return f"{len(legs[0].token_ids)} tokens"

    # --- inside -----------------------------------------------------------------------------------------------

    def _rid(self) -> str:
        return f"engine-check-{self._tag}-{next(self._rids)};"

    async def _generate(
        self,
        prefix: list[int],
        n: int,
        *,
        rid: str | None = None,
        stop_token_ids: tuple[int, ...] = (),
        session: str | None = None,
        ends: bool = True,
    ) -> wire.Leg:
        """Run an attempt; without `ends` it goes on behind the end of a turn, whatever the model."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=n, stop_token_ids=stop_token_ids)
        body = wire.generate_body(rid or self._rid(), array("i", prefix), sampling, n, session)
        if not ends:
            fields = json.loads(body)
            fields["sampling_params"]["ignore_eos"] = True
            body = json.dumps(fields).encode()
        return await self.client.generate(body, "engine check")

    @asynccontextmanager
    async def _running(self, seconds: float) -> AsyncIterator[tuple[str, list[wire.Leg]]]:
        """An attempt that has run for some seconds, by name; aborted at the end of the block, and then in the list."""
        assert self.info is not None, "asked first"
        rid, n = self._rid(), min(_LONG, self.info.max_context_len - 4)
        legs: list[wire.Leg] = []

        async def attempt() -> None:
            legs.append(await self._generate([5, 6, 7], n, rid=rid, ends=False))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, name=f"attempt {rid}")
            try:
                await trio.sleep(seconds)
                yield rid, legs
            finally:
                with cleanup_scope(CONTROL_S, f"abort {rid}"):
                    await self.client.abort(rid)

    async def _aborted(self) -> wire.Leg:
        """An attempt that was aborted while it ran, or was faster than that."""
        async with self._running(2 * ABORT_AFTER_S) as (_, legs):
            pass
        return legs[0]


class _Broken(Exception):
    """A claim of the contract does not hold."""


def _first_text(exc: BaseException) -> str:
    """The text of an error, or of the first in a group."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return str(exc)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Broken(otherwise)


def _adapters(info: wire.ServerInfo) -> Finding:
    what = "adapters (--sglang-lora-transfer)"
    if info.max_adapter_rank is None:
        return Finding(what, "no", "--enable-lora --max-lora-rank R --lora-target-modules all")
    if info.n_replicas > 1:
        return Finding(what, "no", f"--dp-size {info.n_replicas}: has to be 1")
    return Finding(what, "yes", f"up to rank {info.max_adapter_rank}")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def check_engine(url: str, wait_s: float) -> list[Finding]:
    """Check the server at `url`, in a Trio run of its own.

    Raises:
      BackendError: it does not generate within `wait_s`, or is no SGLang server.
    """

    async def main() -> list[Finding]:
        client = SGLangClient(url, "the server", 8)
        try:
            await connect(client, wait_s)
            return await EngineCheck(client).run()
        finally:
            await client.aclose()

    return trio.run(main)


def table(findings: list[Finding]) -> str:
    """Findings as lines with aligned columns."""
    widths = [max(len(getattr(f, name)) for f in findings) for name in ("what", "verdict")]
    rows = [f"{f.what:<{widths[0]}}  {f.verdict:<{widths[1]}}  {f.detail}".rstrip() for f in findings]
    return "\n".join(rows) + "\n"
