"""Records what a real SGLang router says of its workers: `python tests/sglang_router_record.py`.

RELAX_TRIO_SGLANG names a Python that has SGLang and sglang-router. Two real servers are started behind it. Written to
tests/data/sglang/router-VERSION, one file for each call, in the form of the recordings of servers.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from builders_sglang import PYTHON, RealRouter, RealServer, served_checkpoint

DATA = Path(__file__).parent / "data" / "sglang"
_NOT_KEPT = {"date", "x-request-id", "content-length"}


class Recorder:
    """Calls a router and keeps what it says."""

    def __init__(self, directory, checkpoint):
        self.directory = directory
        self.checkpoint = checkpoint

    def call(self, name, url, method, path, body=None, headers=None):
        text = "" if body is None else json.dumps(body)
        sent = {"Content-Type": "application/json", **(headers or {})}
        target = urlsplit(url)
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
        connection.request(method, path, text or None, sent)
        response = connection.getresponse()
        answer = response.read().decode()
        connection.close()
        kept = [[key, value] for key, value in response.getheaders() if key not in _NOT_KEPT]
        exchange = {
            "name": name,
            "request": {"method": method, "path": path, "headers": sent, "body": text},
            "response": {"status": response.status, "headers": kept, "body": answer},
        }
        text = json.dumps(exchange, indent=1).replace(str(self.checkpoint), "models/tiny-qwen3")
        (self.directory / f"{name}.json").write_text(text + "\n")
        return response.status, answer


def workers_of(url):
    """The workers as the router tells them, unrecorded."""
    target = urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
    connection.request("GET", "/workers")
    workers = json.loads(connection.getresponse().read())["workers"]
    connection.close()
    return workers


def wait_for(url, holds):
    """Wait until the list of workers is as it should be: a router tells nobody that it has changed."""
    end = time.monotonic() + 120
    while not holds(workers_of(url)):
        if time.monotonic() > end:
            raise AssertionError(f"the router never came to it: {workers_of(url)}")
        time.sleep(0.2)


def main():
    version = subprocess.run(
        [PYTHON, "-c", "from importlib.metadata import version; print(version('sglang-router'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    scratch = Path(tempfile.mkdtemp(prefix="sglang-router-"))
    checkpoint = served_checkpoint(scratch / "model")
    directory = DATA / f"router-{version}"
    directory.mkdir(exist_ok=True)
    recorder = Recorder(directory, checkpoint)
    servers = [RealServer(checkpoint, scratch / f"server-{i}.log") for i in range(2)]
    routers, checked = [], ["--health-check-interval-secs", "1"]

    def router(*args):
        routers.append(RealRouter(scratch / f"router-{len(routers)}.log", *checked, *args))
        routers[-1].wait_ready()
        return routers[-1].url

    try:
        for server in servers:
            server.wait_ready()
        first, second = (server.url for server in servers)

        url = router()
        recorder.call("20_workers_none", url, "GET", "/workers")
        recorder.call("20_readiness_none", url, "GET", "/readiness")
        recorder.call("21_worker_add", url, "POST", "/workers", {"url": first})
        wait_for(url, lambda workers: len(workers) == 1)
        recorder.call("21_workers_one", url, "GET", "/workers")
        recorder.call("21_worker_add_again", url, "POST", "/workers", {"url": first})
        recorder.call("21_worker_add_second", url, "POST", "/workers", {"url": second})
        wait_for(url, lambda workers: len(workers) == 2)
        recorder.call("21_workers_two", url, "GET", "/workers")
        for path in ("server_info", "get_server_info", "model_info", "health", "list_workers", "begin_weight_update"):
            recorder.call(f"22_{path}", url, "GET", f"/{path}")
        for path in ("abort_request", "pause_generation", "close_session", "update_weights_from_disk"):
            recorder.call(f"22_{path}", url, "POST", f"/{path}", {})
        asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
        keyed = {**asked, "rid": "a;", "session_id": "G1/0-0", "routing_key": "G1/0-0"}
        recorder.call("23_generate", url, "POST", "/generate", keyed, {"X-SMG-Routing-Key": "G1/0-0"})
        gone = workers_of(url)[0]
        recorder.call("24_worker_delete", url, "DELETE", f"/workers/{gone['id']}")
        wait_for(url, lambda workers: len(workers) == 1)
        recorder.call("24_workers_after_delete", url, "GET", "/workers")
        recorder.call("24_worker_deleted", url, "GET", f"/workers/{gone['id']}")
        (left,) = workers_of(url)
        dead = next(server for server in servers if server.url == left["url"])
        dead.stop()
        wait_for(url, lambda workers: not workers[0]["is_healthy"])
        recorder.call("25_workers_unhealthy", url, "GET", "/workers")

        alive = next(server.url for server in servers if server is not dead)
        url = router(
            "--pd-disaggregation", "--prefill", alive, "9001", "--decode", alive.replace("127.0.0.1", "localhost")
        )
        wait_for(url, lambda workers: len(workers) == 2)
        recorder.call("26_workers_prefill_decode", url, "GET", "/workers")
        url = router("--worker-urls", alive, "--dp-aware")
        wait_for(url, lambda workers: len(workers) == 1)
        recorder.call("26_workers_dp_aware", url, "GET", "/workers")
        url = router("--worker-urls", alive, "--api-key", "sesame")
        recorder.call("26_workers_without_key", url, "GET", "/workers")
    finally:
        for process in [*routers, *servers]:
            process.stop()


if __name__ == "__main__":
    main()
