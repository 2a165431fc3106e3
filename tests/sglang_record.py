"""Stands before a real SGLang server and writes down every call, so that a run can be compared with the raw answers."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One call: number in order of arrival, how many had been answered by then, and what was said."""

    sent: int
    answered: int
    path: str
    request: dict
    status: int
    answer: dict


class Record:
    """All calls that were answered, in the order of their answers."""

    def __init__(self):
        self.exchanges = []
        self.n_sent = 0
        self.lock = threading.Lock()

    def of(self, path):
        return [exchange for exchange in self.exchanges if exchange.path.startswith(path)]

    def legs(self):
        """Calls of `/generate` with a name, in the order in which they were sent."""
        named = [exchange for exchange in self.of("/generate") if "rid" in exchange.request]
        return sorted(named, key=lambda exchange: exchange.sent)

    def stale_hits(self):
        """Legs whose cached prefix nobody had asked for since the cache was last flushed."""
        found = []
        known, flushed_after = [], 0
        for exchange in self.exchanges:
            if exchange.path.startswith("/flush_cache") and exchange.status == 200:
                known, flushed_after = [], exchange.sent
            elif exchange.path == "/generate" and exchange.status == 200 and exchange.sent > flushed_after:
                ids, meta = exchange.request["input_ids"], exchange.answer["meta_info"]
                known.append((exchange.sent, ids + exchange.answer["output_ids"]))
                others = [tokens for sent, tokens in known if sent != exchange.sent] + self._under_way(exchange)
                if meta.get("cached_tokens", 0) > max((_common(ids, tokens) for tokens in others), default=0):
                    found.append(exchange)
        return found

    def foreign_hits(self):
        """Legs whose cached prefix nobody else asked for under the adapter that they name, or under none."""
        found, answered = [], [leg for leg in self.legs() if leg.status == 200]
        for leg in answered:
            ids, adapter = leg.request["input_ids"], leg.request.get("lora_path")
            others = [
                other.request["input_ids"] + other.answer["output_ids"]
                for other in answered
                if other is not leg and other.request.get("lora_path") == adapter
            ]
            if leg.answer["meta_info"].get("cached_tokens", 0) > max((_common(ids, o) for o in others), default=0):
                found.append(leg)
        return found

    def _under_way(self, one):
        """Prefixes of calls that were sent before `one` was answered and were answered after it."""
        at = self.exchanges.index(one)
        return [
            later.request["input_ids"]
            for later in self.exchanges[at + 1 :]
            if later.path == "/generate" and later.answered <= at
        ]


def _common(a, b):
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


@contextmanager
def recorded_server(url):
    """The URL that stands before `url`, and the record."""
    record, target = Record(), urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            with record.lock:
                record.n_sent += 1
                sent, answered = record.n_sent, len(record.exchanges)
            upstream = http.client.HTTPConnection(target.hostname, target.port)
            try:
                upstream.request(self.command, self.path, body or None, {"content-type": "application/json"})
                response = upstream.getresponse()
                data = response.read()
            finally:
                upstream.close()
            exchange = Exchange(
                sent=sent,
                answered=answered,
                path=self.path,
                request=_object(body),
                status=response.status,
                answer=_object(data),
            )
            with record.lock:
                record.exchanges.append(exchange)
            self.send_response(response.status)
            self.send_header("content-type", response.headers.get("content-type", "application/json"))
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            try:
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # whoever asked went away

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # a connection that the run closed

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", record
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _object(data):
    try:
        value = json.loads(data or b"{}")
    except ValueError:  # text of metrics, of a health check
        return {}
    return value if isinstance(value, dict) else {}
