"""The agents of `examples/harnesses`, each on its harness as the registry ships it today, against scripted answers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from attrs import frozen
from builders_checkpoint import save_tiny_checkpoint

pytestmark = [pytest.mark.harness, pytest.mark.process]

EXAMPLES = Path(__file__).parents[2] / "examples" / "harnesses"
UNREACHABLE = (
    *("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ProxyError", "Network is unreachable"),
    *("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH"),
)
"""What pip and npm say when there is no way to their registry."""


@frozen(kw_only=True)
class Harness:
    """A script of `examples/harnesses` and what it needs."""

    name: str
    answers: str
    pip: str | None = None
    npm: str | None = None


HARNESSES = [
    Harness(name="openai_sdk", answers="read_file", pip="openai"),
    Harness(name="anthropic_sdk", answers="read_file", pip="anthropic"),
    Harness(name="openai_agents_sdk", answers="read_file", pip="openai-agents"),
    Harness(name="pydantic_ai_agent", answers="read_file", pip="pydantic-ai-slim[openai]"),
    Harness(name="mini_swe_agent", answers="mini_swe_agent", pip="mini-swe-agent"),
    Harness(name="codex_cli", answers="codex_cli", npm="@openai/codex"),
    Harness(name="claude_code", answers="claude_code", npm="@anthropic-ai/claude-code"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=HARNESSES, ids=lambda harness: harness.name)
def installed(request, tmp_path_factory):
    """A harness, and the directory of the programs that it was installed as; removed again, they are large."""
    harness = request.param
    place = tmp_path_factory.mktemp(harness.name)
    yield harness, install_pip(harness.pip, place) if harness.pip else install_npm(harness.npm, place)
    shutil.rmtree(place)


def install_pip(package: str, place: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    programs = place / "venv" / "bin"
    run_installer([str(programs / "pip"), "install", "-q", package])
    return programs


def install_npm(package: str, place: Path) -> Path:
    if shutil.which("npm") is None:
        pytest.skip(f"{package} is installed by npm, and there is no npm here")
    run_installer(["npm", "install", "-g", "--prefix", str(place), f"--allow-scripts={package}", package])
    return place / "bin"


def run_installer(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, stdin=subprocess.DEVNULL)
    said = done.stdout + done.stderr
    if done.returncode != 0 and any(word in said for word in UNREACHABLE):
        pytest.skip(f"the registry can't be reached: {' '.join(words)}: {said.strip().splitlines()[-1]}")
    assert done.returncode == 0, f"{' '.join(words)}\n{said[-3000:]}"


@contextmanager
def outside_world():
    """A proxy that lets nobody out. Yields its URL and the first bytes of everybody who tried."""
    tried: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the listener was shut down
                    return
                with connection:
                    connection.settimeout(5)
                    tried.append(connection.recv(200))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", tried
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def try_one(harness: Harness, programs: Path, answers: Path, checkpoint: Path, directory: Path, proxy: str):
    """Run the agent by `try_one.py` in an empty home. Returns its status, its output or None, and the forest."""
    home = directory / "home-of-the-user"
    home.mkdir()
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), proxy)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    out = directory / "out"
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / "try_one.py"), "--hf-checkpoint", str(checkpoint), "--out", str(out)),
            *("--answers", str(answers), "python", f"{harness.name}.py"),
        ],
        env={**os.environ, **proxies, "PATH": path, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    print(done.stdout, done.stderr)  # shown where an assertion fails
    output = out / "output.json"
    forest = json.loads((out / "forest.json").read_text())
    return done.returncode, json.loads(output.read_text()) if output.exists() else None, forest


def messages_of(forest, role):
    return [message for node in forest["nodes"] for message in node["messages"] if message["role"] == role]


def test_an_agent_leaves_one_line_of_turns(installed, checkpoint, tmp_path):
    harness, programs = installed
    answers = EXAMPLES / "answers" / f"{harness.answers}.jsonl"
    with outside_world() as (proxy, tried):
        status, output, forest = try_one(harness, programs, answers, checkpoint, tmp_path, proxy)

    assert (status, output) == (0, {"reward": 1.0, "metadata": {"answer": "82"}})
    nodes = forest["nodes"]
    texts = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    assert [node["kind"] for node in nodes] == ["observation", "response"] * len(texts)
    assert [node["parent"] for node in nodes] == [None, *(node["id"] for node in nodes[:-1])]
    assert forest["leaves"] == forest["exportable_leaves"] == [nodes[-1]["id"]]
    assert all(node["delivered"] for node in nodes)
    assert [len(request["attempts"]) for request in forest["requests"]] == [1] * len(texts)
    left, right = [message["content"] for message in messages_of(forest, "tool")]
    assert ("37" in left, "45" in right) == (True, True)
    assert [message["reasoning_content"] for message in messages_of(forest, "assistant")] == [
        text.split("\n")[1] for text in texts
    ]
    assert tried == []


def test_a_refused_request_ends_the_agent_and_is_not_sent_again(installed, checkpoint, tmp_path):
    harness, programs = installed
    whole = EXAMPLES / "answers" / f"{harness.answers}.jsonl"
    answers = tmp_path / "answers.jsonl"
    answers.write_text(whole.read_text().splitlines(keepends=True)[0])
    with outside_world() as (proxy, tried):
        status, output, forest = try_one(harness, programs, answers, checkpoint, tmp_path, proxy)

    assert status != 0
    assert output is None
    assert len(forest["requests"]) == 2
    assert [node["kind"] for node in forest["nodes"]] == ["observation", "response"]
    assert tried == []
