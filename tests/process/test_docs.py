"""Every command that README and docs show is run: blocks marked `sh`, in order, in a directory like the checkout."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builders_commands import wait_until

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
EXAMPLES = [ROOT / "examples" / name / "README.md" for name in ("quickstart", "suite")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *EXAMPLES]
INSTALL = {
    "pip install -c constraints.txt -e . && relax-trio demo",
    "pip install -c constraints.txt -e '.[dev]' && pytest",
}
"""Run by `.ci/run` in a fresh environment."""


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


SHOWN = {page: commands(page) for page in PAGES}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory that has what a checkout has, so that runs are written elsewhere."""
    home = tmp_path_factory.mktemp("checkout")
    (home / "examples").symlink_to(ROOT / "examples")
    return home


@pytest.fixture(scope="module")
def environment():
    """`relax-trio` and `python` of this environment come first in PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("page", [page for page in PAGES if SHOWN[page]], ids=lambda page: page.name)
def test_the_commands_of_a_page_work(page, home, environment):
    for command in SHOWN[page]:
        if command in INSTALL:
            continue
        if command.startswith("relax-trio serve"):
            check_serve(command, home, environment)
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def check_serve(command, home, environment):
    out = home / "serve.out"
    with out.open("w") as file:
        process = subprocess.Popen(
            shlex.split(command), cwd=home, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            wait_until(lambda: "RELAX_SESSION_ID" in out.read_text(), within_s=120, log=out)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0, out.read_text()


def test_ci_runs_the_readmes_install_commands():
    script = (ROOT / ".ci" / "run").read_text()

    assert set(SHOWN[ROOT / "README.md"]) >= INSTALL
    for command in INSTALL:
        assert command in script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_flag_that_docs_name_exists():
    known = set(re.findall(r"^\| `(--[a-z0-9-]+)", (ROOT / "docs/flags.md").read_text(), flags=re.MULTILINE))
    assert len(known) > 50
    own = {"--answers", "--sessions", "--forest-out", "--steps", "--config", "--help", "--reference"}
    own |= {"--sample", "--jobs", "--at"}  # of the explorer
    own |= {"--tokenizer", "--write", "--rows"}
    own |= {"--tool-call-parser", "--reasoning-parser", "--tools", "--json"}  # of relax-trio parse
    own |= {"--rollout"}  # of relax-trio replay
    own |= {"--tp-size", "--enable-metrics", "--watchdog-timeout"}  # of SGLang, as are --sglang-… not in the list
    own |= {"--enable-lora", "--max-lora-rank", "--max-loras-per-batch", "--enable-memory-saver"}
    own |= {"--dp-size", "--pp-size", "--schedule-policy"}
    own |= {"--policy", "--dp-aware"}  # of SGLang's router
    own |= {"--no-deps"}  # of pip
    for page in PAGES:
        if page.name == "flags.md":  # made from the flags themselves
            continue
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text()))
        named = {flag for flag in named if not flag.startswith("--sglang-")}
        unknown = {flag for flag in named if flag not in known | own and flag.replace("--no-", "--") not in known}
        assert not unknown, f"{page.name}: {unknown}"


def test_the_quickstart_runs_with_the_official_openai_sdk(home, environment):
    """The agent's command is all that changes; sizes are small because every process imports the SDK."""
    command = """relax-trio demo --agent-command "python agent_openai.py" --output-dir runs/sdk --steps 1 \
      --rollout-batch-size 2 --n-samples-per-prompt 4 --eval-interval 1 \
      --eval-prompt-data few 'examples/quickstart/questions.jsonl@[0:4]'"""
    done = subprocess.run(
        ["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True, timeout=180
    )

    assert done.returncode == 0, done.stderr[-2000:]
    (step,) = [json.loads(line) for line in (home / "runs/sdk/metrics.jsonl").read_text().splitlines()]
    assert (step["rollout/n_sessions"], step["rollout/n_failed_sessions"]) == (8, 0)
    assert step["rollout/turns/mean"] == step["n_turns/mean"]
    assert step["rollout/turns/max"] >= 2
