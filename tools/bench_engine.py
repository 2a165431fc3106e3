"""The client's own CPU time of one attempt on an SGLang server, with 1,024 of them at once.

A process of its own answers in the shapes of an SGLang server of 2026 (0.5.23): it holds every `/generate` until all of
a round have come, and then answers them all, so that they are really under way together. This process runs
`SGLangBackend` and counts its own CPU time over a round: building requests, sending, reading, checking. The first round
opens the connections and is told apart. Exits with 1 if the median of the others misses the bound.

    python tools/bench_engine.py [--attempts 1024] [--prefix 4096] [--new 256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from functools import partial
from pathlib import Path

import h11
import trio

MOST_MS = 2.0
VOCABULARY = 151_936
CONTEXT_LEN = 1 << 20


# --- the server process ----------------------------------------------------------------------------------------


class Server:
    """Answers `/generate` once `n_together` are held; everything else at once."""

    def __init__(self, n_together: int, n_new: int) -> None:
        self.n_together = n_together
        self.n_held = 0
        self.go = trio.Event()
        ids = [(i * 7919) % VOCABULARY for i in range(n_new)]
        self.answer = self.completion(ids)
        self.probe = self.completion(ids[:1])

    @staticmethod
    def completion(ids: list[int]) -> bytes:
        """The body of an answer to `/generate`, with the fields that a server of that version sends."""
        meta = {
            "id": "attempt",
            "finish_reason": {"type": "length", "length": len(ids)},
            "prompt_tokens": 4096,
            "weight_version": "v1",
            "num_retractions": 0,
            "output_token_logprobs": [[-1.0 / (i + 3), token, None] for i, token in enumerate(ids)],
            "output_token_logprobs_length": len(ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": [{"version": "v1", "start": 0, "end": len(ids)}],
            "e2e_latency": 1.0,
        }
        return json.dumps({"text": "word " * len(ids), "output_ids": ids, "meta_info": meta}).encode()

    async def respond(self, path: str, body: bytes) -> bytes:
        """The answer to one request."""
        if path == "/generate":
            if json.loads(body[:200].partition(b'"input_ids"')[0] + b'"_":0}').get("rid") is None:
                return self.probe
            self.n_held += 1
            if self.n_held == self.n_together:
                self.n_held = 0
                self.go.set()
                self.go = trio.Event()
            else:
                await self.go.wait()
            return self.answer
        if path == "/server_info":
            return json.dumps(
                {"version": "0.5.23", "max_req_input_len": CONTEXT_LEN, "max_total_num_tokens": 1 << 24, "tp_size": 1}
            ).encode()
        return json.dumps({"weight_version": "v1", "success": True, "message": ""}).encode()

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection."""
        http = h11.Connection(h11.SERVER)
        body, path = b"", ""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await stream.receive_some())
            elif isinstance(event, h11.Request):
                path, body = event.target.decode(), b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                answer = await self.respond(path, body)
                headers = [("content-length", str(len(answer))), ("content-type", "application/json")]
                head = http.send(h11.Response(status_code=200, headers=headers))
                await stream.send_all(head + http.send(h11.Data(data=answer)) + http.send(h11.EndOfMessage()))
                http.start_next_cycle()
            else:
                return


async def serve(n_together: int, n_new: int) -> None:
    """Serve until ended; the first line of the output is the URL."""
    server = Server(n_together, n_new)

    async def connection(stream: trio.SocketStream) -> None:
        try:
            await server.serve(stream)
        except (trio.BrokenResourceError, h11.RemoteProtocolError):
            return

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, connection, 0, host="127.0.0.1", backlog=n_together))
        print(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", flush=True)


# --- this process ----------------------------------------------------------------------------------------------


async def measure(url: str, n_attempts: int, n_prefix: int, n_new: int, n_rounds: int) -> list[float]:
    """Milliseconds of this process's CPU for an attempt, of each round."""
    from relax_trio.backend.base import Attempt, SamplingParams
    from relax_trio.backend.sglang.backend import SGLangBackend, SGLangOptions
    from relax_trio.backend.sglang.external import ExternalServer, ExternalServers
    from relax_trio.ids import Rid, WeightVersion

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch)
        (checkpoint / "config.json").write_text("{}")
        backend = SGLangBackend(
            checkpoint,
            WeightVersion("v1"),
            snapshot_dir=checkpoint / "weights",
            keepers=[ExternalServer(ExternalServers(max_inflight=n_attempts), url)],
            options=SGLangOptions(vocab_len=VOCABULARY),
        )
        prefix = array("i", [(i * 31) % VOCABULARY for i in range(n_prefix)])
        took = []
        async with trio.open_nursery() as nursery:
            await nursery.start(backend.run)
            for number in range(n_rounds):
                attempts = [
                    Attempt(
                        rid=Rid(f"{number}.{i}"),
                        token_ids=prefix,
                        sampling=SamplingParams(max_new_tokens=n_new, stop_token_ids=(VOCABULARY - 1,)),
                        session_key=f"G{i}/0",
                        response_start=n_prefix,
                    )
                    for i in range(n_attempts)
                ]
                started = time.process_time()
                async with trio.open_nursery() as round_nursery:
                    for attempt in attempts:
                        round_nursery.start_soon(backend.generate, attempt)
                took.append(1000 * (time.process_time() - started) / n_attempts)
            nursery.cancel_scope.cancel(reason="measured")
    return took


def main() -> int:
    """Run the measurement; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--attempts", type=int, default=1024, help="attempts at once")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of each prefix")
    parser.add_argument("--new", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        trio.run(serve, given.attempts, given.new)
        return 0
    words = [sys.executable, __file__, "--serve", "--attempts", str(given.attempts), "--new", str(given.new)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None, "asked for"
        url = server.stdout.readline().strip()
        took = trio.run(measure, url, given.attempts, given.prefix, given.new, given.rounds)
    finally:
        server.kill()
        server.wait()
    first, *later = took
    median = statistics.median(later)
    print(
        f"{given.attempts} attempts at once, {given.prefix} tokens each and {given.new} new; {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}"
    )
    print(f"client CPU of an attempt: {median:.2f} ms median of {len(later)} rounds ({min(later):.2f} to ", end="")
    print(f"{max(later):.2f}); first round, which connects: {first:.2f} ms; bound {MOST_MS:g} ms")
    return int(median > MOST_MS)


if __name__ == "__main__":
    sys.exit(main())
