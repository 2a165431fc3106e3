"""A server that answers in the recorded words of a real SGLang server, and dies of what the real one dies of.

Shapes, status codes and texts are those of tests/data/sglang/VERSION; the tokens are a function of their position, so
that an attempt that goes on where another ended says what the unbroken one would have said. What kills the real server
closes every connection here and is noted in `died_of`.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import h11
import trio

DATA = Path(__file__).parent / "data" / "sglang"
VERSIONS = ("0.5.15.post1", "0.5.23")
TICK_S = 0.002


def recorded(version, name):
    """One recording: (request, response)."""
    found = json.loads((DATA / version / f"{name}.json").read_text())
    return found["request"], found["response"]


def answer_of(version, name):
    """Status and body bytes of a recorded response."""
    response = recorded(version, name)[1]
    return response["status"], response["body"].encode()


def token_at(position, vocab_len):
    """The token that the server says at an absolute position."""
    return (position * 31 + 7) % vocab_len


class Died(Exception):
    """The real server would have exited."""


class Request:
    def __init__(self, body, n_prompt):
        self.body = body
        self.n_prompt = n_prompt
        self.tokens = []
        self.versions = []
        self.aborted = False
        self.changed = trio.Event()


class WireServer:
    """State of one server.

    Args:
      version: which recordings it speaks by.
      context_len: of the model; the server takes six tokens less, as the real one does.
      tokens_per_s: of each request.
      tells: requests are printed.
    """

    def __init__(
        self, version, *, vocab_len=97, context_len=646, tokens_per_s=2000.0, weight_version="default", tells=False
    ):
        self.version = version
        self.is_old = version.startswith("0.5.15")
        self.vocab_len = vocab_len
        self.context_len = context_len
        self.tokens_per_s = tokens_per_s
        self.weight_version = weight_version
        self.tells = tells
        self.running = {}
        self.paused = None
        self.resumed = trio.Event()
        self.in_update = False
        self.hangs = False
        self.died_of = None
        self.log = []
        self.bodies = []
        self.routing_keys = []  # of requests that have one, in their header
        self.url = None
        self.cached_under = set()  # versions that the prefix cache was computed under
        self.stale_hits = 0
        self.refuse_flush = False
        self.refuse_pause = self.refuse_continue = False
        self.n_ended_held = 0  # requests that have ended in a batch that is held in place
        self.n_lost_aborts = 0  # that came while it was paused
        self.watchdog_s = 300.0
        self.pad_id = None  # of a model that reads images, with as many placeholders for each image
        self.image_len = 1
        self.minds_bias = True
        self.eos_id = None  # ends a turn
        self.model_path = None  # a directory; else the recorded name
        self.loaded_from = None  # what was loaded last

    async def run(self, port=0, *, task_status=trio.TASK_STATUS_IGNORED):
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            listeners = await nursery.start(partial(trio.serve_tcp, self._connection, port, host="127.0.0.1"))
            port = listeners[0].socket.getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            task_status.started(self)

    # --- HTTP -------------------------------------------------------------------------------------------------

    async def _connection(self, stream):
        http = h11.Connection(h11.SERVER)
        try:
            while True:
                request, body = await _read(http, stream)
                if request is None:
                    return
                self.routing_keys += [value.decode() for name, value in request.headers if name == b"x-smg-routing-key"]
                status, answer = await self._answer(request.method.decode(), request.target.decode(), body)
                headers = [("content-length", str(len(answer))), ("content-type", "application/json")]
                await stream.send_all(http.send(h11.Response(status_code=status, headers=headers)))
                await stream.send_all(http.send(h11.Data(data=answer)) + http.send(h11.EndOfMessage()))
                if http.our_state is h11.MUST_CLOSE:
                    return
                http.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            return
        except Died as death:
            self.died_of = str(death)
            self._scope.cancel(reason="died")

    async def _answer(self, method, target, body):
        while self.hangs:  # noqa: ASYNC110 - as a stopped process does
            await trio.sleep(TICK_S)
        url = urlsplit(target)
        self.log.append(f"{method} {target}")
        name = url.path.strip("/").replace("/", "_")
        if self.tells and name.endswith("_generation"):
            print(name, body.decode(), flush=True)
        handler = getattr(self, f"_{name}", None)
        if handler is None or (self.is_old and name in ("begin_weight_update", "end_weight_update")):
            return answer_of(self.version, "00_not_found")
        if method == "GET" and name not in ("server_info", "model_info", "health", "metrics", "v1_loads"):
            return 405, b'{"detail":"Method Not Allowed"}'
        fields = json.loads(body) if body else {}
        return await handler({**fields, **{k: v[0] for k, v in parse_qs(url.query).items()}})

    # --- what it does -----------------------------------------------------------------------------------------

    async def _server_info(self, _):
        info = json.loads(answer_of(self.version, "00_server_info")[1])
        info |= {"max_req_input_len": self.context_len - 6, "watchdog_timeout": self.watchdog_s}
        return 200, _json(info if self.model_path is None else {**info, "model_path": str(self.model_path)})

    async def _model_info(self, _):
        info = json.loads(answer_of(self.version, "00_model_info")[1])
        return 200, _json(
            {**info, "weight_version": self.weight_version, "model_path": self.loaded_from or info["model_path"]}
        )

    async def _health(self, _):
        if self.paused:
            await trio.sleep(20)
            return 503, b""
        return 200, b""

    async def _metrics(self, _):
        return answer_of(self.version, "14_metrics")

    async def _generate(self, body):
        self.bodies.append(body)
        if self.tells:
            print("generate", body.get("rid"), flush=True)
        rid, ids, params = (
            body.get("rid") or f"anonymous-{len(self.bodies)}",
            body["input_ids"],
            body["sampling_params"],
        )
        known = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"}
        known |= {"repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens"}
        known |= {"spaces_between_special_tokens", "n", "sampling_seed", "logit_bias"}
        if set(params) - known:
            return answer_of(self.version, "03_err_unknown_sampling_param")
        if rid in self.running:
            status, answer = answer_of(self.version, "04_dup_rid_second")
            return status, answer.replace(b"dup", rid.encode())
        if not ids:
            return answer_of(self.version, "03_err_empty_ids")
        if len(ids) + params["max_new_tokens"] > self.context_len:
            return answer_of(self.version, "03_err_prompt_plus_max_new_too_long")
        images = body.get("image_data", ())
        if "json_schema" in params or "session_params" in body or (images and self.pad_id is None):
            raise Died(f"a request with {sorted(params)} and {sorted(body)}")
        if max(ids) >= self.vocab_len or min(ids) < 0:
            raise Died(f"token id {max(ids)}")
        if self.cached_under - {self.weight_version}:
            self.stale_hits += 1
        if images and ids.count(self.pad_id) != len(images):
            await trio.sleep_forever()  # as the real one: no answer, and its health stays good
        ids = [token for token in ids for _ in range(self.image_len if images and token == self.pad_id else 1)]
        request = self.running[rid] = Request(body, len(ids))
        try:
            await self._make_tokens(request, ids, params)
        finally:
            del self.running[rid]
        return 200, self._told(rid, request, params)

    async def _make_tokens(self, request, ids, params):
        limit = min(params["max_new_tokens"], self.context_len - 2 - len(ids))
        n_due = 0.0
        while len(request.tokens) < limit and not request.aborted:
            if self.paused == "in_place":
                with trio.move_on_after(self.watchdog_s) as watched:
                    await self.resumed.wait()
                if watched.cancelled_caught:
                    raise Died("its watchdog, of a batch that is held in place")
                continue
            if self.paused:
                await self.resumed.wait()
                continue
            with trio.move_on_after(TICK_S):
                await request.changed.wait()
            n_due += TICK_S * self.tokens_per_s
            while n_due >= 1 and len(request.tokens) < limit and not self.paused and not request.aborted:
                n_due -= 1
                token = token_at(len(ids) + len(request.tokens), self.vocab_len)
                while self.minds_bias and str(token) in params.get("logit_bias", ()):
                    token = (token + 1) % self.vocab_len
                request.tokens.append(token)
                request.versions.append(self.weight_version)
                self.cached_under.add(self.weight_version)
                if token in _stops(params) or (token == self.eos_id and not params.get("ignore_eos")):
                    return

    def _told(self, rid, request, params):
        tokens = request.tokens
        if tokens and tokens[-1] in _stops(params):
            template, reason = "01_generate_stop_token_id_noignore", {"matched": tokens[-1]}
        elif request.aborted:
            template, reason = "04_abort_victim_generate", {}
        else:
            template, reason = "01_generate_ids_rid", {"length": len(tokens)}
        told = json.loads(answer_of(self.version, template)[1])
        meta = told["meta_info"]
        told["output_ids"] = tokens
        meta["id"] = rid
        meta["finish_reason"].update(reason)
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in tokens]
        meta["output_token_logprobs_length"] = meta["completion_tokens"] = len(tokens)
        meta["prompt_tokens"] = request.n_prompt
        meta["weight_version"] = self.weight_version
        if "weight_versions" in meta:
            meta["weight_versions"] = _spans(request.versions) or [
                {"version": self.weight_version, "start": 0, "end": 0}
            ]
        if request.aborted and not tokens:
            del meta["prompt_tokens"], meta["cached_tokens"]
        return _json(told)

    async def _abort_request(self, body):
        rid = body.get("rid", "")
        if not rid:
            raise AssertionError("an abort without a rid")
        if self.paused:
            self.n_lost_aborts += 1
        elif rid in self.running:  # then everything that begins with it goes, too
            for name, request in self.running.items():
                if name.startswith(rid):
                    request.aborted = True
                    request.changed.set()
        return answer_of(self.version, "04_abort_request_rid")

    async def _pause_generation(self, body):
        if self.refuse_pause:
            return 500, b"Internal Server Error"
        if body["mode"] not in ("retract", "in_place"):
            return answer_of(self.version, "05_pause_bad_mode")
        self.resumed.set()  # another pause than before
        self.paused, self.resumed = body["mode"], trio.Event()  # caches are given up by the flush
        return answer_of(self.version, "05_pause_retract")

    async def _continue_generation(self, _):
        if self.refuse_continue:
            return 500, b"Internal Server Error"
        self.paused = None
        self.resumed.set()
        return answer_of(self.version, "05_continue_default")

    async def _flush_cache(self, body):
        wait_s = float(body.get("timeout", 0))
        if self.refuse_flush or ((self.running or self.n_ended_held) and self.paused == "in_place"):
            return answer_of(self.version, "06_flush_busy")
        if self.running and (wait_s or self.paused != "retract"):
            with trio.move_on_after(wait_s):
                while self.running:  # noqa: ASYNC110 - as the real one does
                    await trio.sleep(TICK_S)
        if self.running and self.paused != "retract":
            return answer_of(self.version, "06_flush_busy")
        if self.running and wait_s:
            return 400, b"Timed out waiting for idle state.\n"
        self.cached_under = set()
        return answer_of(self.version, "06_flush_idle")

    async def _update_weights_from_disk(self, body):
        if not os.path.isdir(body["model_path"]):  # noqa: ASYNC240 - a test may block
            return answer_of(self.version, "07_update_from_disk_bad_path")
        if self.is_old and self.paused == "retract" and self.running:
            raise Died("a weight update while something is retracted")
        while self.running and not self.paused:  # noqa: ASYNC110 - as the real one does
            await trio.sleep(TICK_S)
        if body.get("flush_cache", True):
            self.cached_under = set()
        self.loaded_from = body["model_path"]
        return self._updated(body, "07_update_from_disk_b")

    async def _begin_weight_update(self, _):
        if self.in_update:
            return answer_of(self.version, "11_begin_twice_2")
        self.in_update = True
        return answer_of(self.version, "11_begin_weight_update_pickle")

    async def _end_weight_update(self, _):
        if not self.in_update:
            return answer_of(self.version, "11_end_weight_update_not_open")
        self.in_update = False
        return answer_of(self.version, "11_end_weight_update_pickle")

    async def _update_weights_from_tensor(self, body):
        if not self.is_old and not self.in_update:
            return answer_of(self.version, "11_update_from_tensor_file_descriptor")
        return self._updated(body, "11_update_unknown_name")

    def _updated(self, body, template):
        self.weight_version = body.get("weight_version", self.weight_version)
        return answer_of(self.version, template)

    async def _close_session(self, _):
        return answer_of(self.version, "08_close_session")


@asynccontextmanager
async def wire_server(version, **how):
    """A running `WireServer` for the length of the block; one that died fails the test."""
    server = WireServer(version, **how)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        yield server
        nursery.cancel_scope.cancel(reason="the test is done with its server")
    assert server.died_of is None, server.died_of


async def _read(http, stream):
    """The next request and its body; None at the end."""
    request, body = None, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive_some())
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return request, body
        else:
            return None, b""


def _stops(params):
    """Token ids that end a turn besides the model's own; `ignore_eos` switches them off, too."""
    return () if params.get("ignore_eos") else params.get("stop_token_ids", ())


def _spans(versions):
    spans = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    return copy.deepcopy(spans)


def _json(value):
    return json.dumps(value).encode()


def main(words, kind=WireServer):
    """Serve as `python -m sglang.launch_server` would, by its flags; `--crash` is one that it refuses.

    `--tokens-per-s` is one of its own. Its log tells every request by its name.
    """
    flags = dict(zip(words, [*words[1:], ""], strict=True))
    print("flags:", *words, flush=True)
    if "--crash" in flags:
        sys.exit("launch_server.py: error: unrecognized arguments: --crash")
    model = json.loads((Path(flags["--model-path"]) / "config.json").read_text())
    server = kind(
        VERSIONS[1],
        vocab_len=model["vocab_size"],
        context_len=646,
        weight_version=flags["--weight-version"],
        tokens_per_s=float(flags.get("--tokens-per-s", 500)),
        tells=True,
    )
    trio.run(server.run, int(flags["--port"]))


if __name__ == "__main__":
    main(sys.argv[1:])
