"""`relax-trio serve`: what it prints, what it serves, what it leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from builders_checkpoint import save_tiny_checkpoint
from builders_commands import running, wait_until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def serve(checkpoint, *more):
    return [sys.executable, "-m", "relax_trio", "serve", "--hf-checkpoint", str(checkpoint), *more]


def ask(base, credential, path, body=None):
    request = urllib.request.Request(
        base + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {credential}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_script_is_served_to_each_session_and_the_forest_written_on_exit(checkpoint, tmp_path):
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"text": "One.", "finish": "stop"}\n{"text": "Two", "finish": "length", "delay": 0.1}\n')
    out, err, forest = tmp_path / "out", tmp_path / "err", tmp_path / "forest.json"
    words = serve(checkpoint, "--answers", str(answers), "--sessions", "2", "--forest-out", str(forest))
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(words, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL)
        try:
            wait_until(lambda: out.read_text().count("\n") == 3, within_s=60, log=err)
            (_, base), *sessions = [line.split("=", 1) for line in out.read_text().splitlines()]
            assert [name for name, _ in sessions] == ["RELAX_SESSION_ID"] * 2
            (_, first), (_, second) = sessions

            messages = [{"role": "user", "content": "Hi"}]
            status, reply = ask(base, first, "/v1/chat/completions", {"messages": messages})
            assert (status, reply["choices"][0]["message"]["content"]) == (200, "One.")
            assert reply["choices"][0]["finish_reason"] == "stop"
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
            status, reply = ask(base, first, "/chat/completions", {"messages": messages})
            assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == (
                "Two",
                "length",
            )
            status, reply = ask(base, first, "/v1/chat/completions", {"messages": messages})
            assert status == 500
            assert "exhausted" in reply["error"]["message"]
            status, reply = ask(base, second, "/v1/chat/completions", {"messages": messages[:1]})
            assert reply["choices"][0]["message"]["content"] == "One."

            status, state = ask(base, first, "/debug_state?forest=1")
            assert status == 200
            assert [node["kind"] for node in state["nodes"]] == ["observation", "response"] * 2
            assert ask(base, "nobody", "/debug_state")[0] == 404
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0

    written = json.loads(forest.read_text())
    assert len(written["sessions"]) == 2
    nodes = written["sessions"][0]["nodes"]
    for node in nodes:
        assert len(node["token_ids"]) == len(node["loss_mask"]) == len(node["logprobs"])
        assert set(node["loss_mask"]) == {int(node["kind"] == "response")}
    assert [node["parent"] for node in nodes] == [None, nodes[0]["id"], nodes[1]["id"], nodes[2]["id"]]
    assert written["sessions"][0]["leaves"] == [nodes[-1]["id"]]
    assert len(written["sessions"][0]["requests"]) == 3
    # The cut answer has no end of turn; the complete one has.
    assert nodes[1]["token_ids"][-1] != nodes[3]["token_ids"][-1]


def test_a_model_is_served(checkpoint, tmp_path):
    out = tmp_path / "out"
    with running(serve(checkpoint), temp=tmp_path / "tmp", log=out):
        wait_until(lambda: "RELAX_SESSION_ID" in out.read_text(), within_s=60, log=out)
        lines = dict(line.split("=", 1) for line in out.read_text().splitlines() if line.startswith("RELAX_"))
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "logprobs": True}
        status, reply = ask(lines["RELAX_BASE_URL"], lines["RELAX_SESSION_ID"], "/v1/chat/completions", body)

    assert status == 200
    assert 1 <= reply["usage"]["completion_tokens"] <= 4
    assert len(reply["choices"][0]["logprobs"]["content"]) == reply["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": 3}', ":1"),
        ('{"text": "a", "finish": "never"}', "finish"),
        ("nonsense", ":1"),
    ],
)
def test_a_bad_script_is_refused(checkpoint, tmp_path, line, says):
    answers = tmp_path / "answers.jsonl"
    answers.write_text(line + "\n")
    done = subprocess.run(serve(checkpoint, "--answers", str(answers)), capture_output=True, text=True, timeout=60)

    assert done.returncode == 64
    assert says in done.stderr
    assert done.stdout == ""
