"""The quickstart's agents as real processes against a scripted model API."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from relax_trio.demo.task import TOOLS, write_dataset

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
AGENTS = ["agent.py", "agent_openai.py"]
ROW = {
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "What is (3 + 4) * 5?"}],
    "metadata": {"answer": "35"},
}

pytestmark = pytest.mark.process


def call(a: object, op: object, b: object, name: str = "calculate") -> dict:
    return raw_call(json.dumps({"a": a, "op": op, "b": b}), name)


def raw_call(arguments: str, name: str = "calculate") -> dict:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": f"call_{arguments}", "type": "function", "function": function}],
    }


def say(text: str | None) -> dict:
    return {"role": "assistant", "content": text}


@contextmanager
def model_api(replies: list[dict], status: int = 200) -> Iterator[tuple[str, list[dict]]]:
    """Serve `replies` in order; yields the base URL and the list of (path, authorization, body) received."""
    seen: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "authorization": self.headers["Authorization"], "body": body})
            choice = {"index": 0, "message": replies[len(seen) - 1], "finish_reason": "stop"}
            answer = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/agentic_api", seen
        finally:
            server.shutdown()
            thread.join()


def run_agent(
    agent: str, tmp_path: Path, base_url: str, row: dict = ROW
) -> tuple[subprocess.CompletedProcess[str], dict | None]:
    """Start the agent as the engine does; returns the finished process and its output, None if it wrote none."""
    source, output = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(row), encoding="utf-8")
    relax = {
        "RELAX_INPUT_JSON": str(source),
        "RELAX_OUTPUT_JSON": str(output),
        "RELAX_BASE_URL": base_url,
        "RELAX_SESSION_ID": "rs-secret",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, str(QUICKSTART / agent)]
    done = subprocess.run(command, env=os.environ | relax, capture_output=True, text=True, timeout=120, check=False)
    return done, json.loads(output.read_text(encoding="utf-8")) if output.exists() else None


@pytest.mark.parametrize("agent", AGENTS)
def test_a_right_answer_by_two_calls_earns_the_reward_and_keeps_the_whole_history(agent: str, tmp_path: Path) -> None:
    if agent == "agent_openai.py":
        pytest.importorskip("openai")
    replies = [call(3, "+", 4), call(7, "*", 5), say("Answer: 35")]
    with model_api(replies) as (url, seen):
        done, output = run_agent(agent, tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert output == {"reward": 1.0, "metadata": {"answer": 35, "n_turns": 3, "ending": "answered"}}
    assert {request["path"] for request in seen} == {"/agentic_api/chat/completions"}
    assert {request["authorization"] for request in seen} == {"Bearer rs-secret"}
    assert all(request["body"]["tools"] == TOOLS for request in seen)
    history = seen[2]["body"]["messages"]
    assert [message["role"] for message in history] == ["system", "user", *["assistant", "tool"] * 2]
    assert history[:2] == ROW["messages"]
    # The SDK's model_dump adds nulls; nothing the model said may be lost or changed.
    assert replies[0].items() <= history[2].items()
    assert history[3] == {"role": "tool", "tool_call_id": replies[0]["tool_calls"][0]["id"], "content": "7"}
    assert history[5]["content"] == "35"
    assert "rs-secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("replies", "ending"),
    [
        pytest.param([say("Answer: 35")], "answered", id="guess without the tool"),
        pytest.param([call(3, "+", 4), say("Answer: 7")], "answered", id="stops after the first operation"),
        pytest.param([call(7, "*", 5), say("Answer: 36")], "answered", id="answer differs from the tool's"),
        pytest.param([say("35")], "no answer", id="answer in the wrong form"),
        pytest.param([say(None)], "no answer", id="empty answer"),
        pytest.param([raw_call('{"a": 3, "op"')], "bad call", id="arguments are no JSON"),
        pytest.param([raw_call("[3]")], "bad call", id="arguments are no object"),
        pytest.param([call("3", "+", 4)], "bad call", id="argument of the wrong type"),
        pytest.param([call(3, "/", 4)], "bad call", id="unknown operation"),
        pytest.param([call(3, "+", 4, name="guess")], "bad call", id="unknown tool"),
        pytest.param([call(3, "+", 4)] * 4, "too many turns", id="never answers"),
    ],
)
def test_a_session_that_goes_wrong_ends_cleanly_with_reward_zero(
    tmp_path: Path, replies: list[dict], ending: str
) -> None:
    with model_api(replies) as (url, seen):
        done, output = run_agent("agent.py", tmp_path, url)
    assert done.returncode == 0, done.stderr
    assert output is not None
    assert output["reward"] == 0.0
    assert output["metadata"]["ending"].startswith(ending)
    assert len(seen) == output["metadata"]["n_turns"] == len(replies)


def test_a_refused_request_fails_the_agent_and_shows_the_answer(tmp_path: Path) -> None:
    with model_api([say("no")], status=400) as (url, _):
        done, output = run_agent("agent.py", tmp_path, url)
    assert (done.returncode, output) == (1, None)
    assert done.stderr.startswith("The model API refused a request: 400 {")


def test_the_rows_of_the_demo_are_tasks_the_agent_accepts(tmp_path: Path) -> None:
    write_dataset(tmp_path / "rows.jsonl", n_rows=1, seed=0, held_out=True)
    row = json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8"))
    with model_api([say("Answer: 1")]) as (url, seen):
        done, output = run_agent("agent.py", tmp_path, url, row)
    assert done.returncode == 0, done.stderr
    assert output is not None
    assert seen[0]["body"]["messages"] == row["messages"]
