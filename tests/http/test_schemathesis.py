"""The served OpenAPI document against the served API: schemathesis derives requests from it and checks the answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from builders_served import open_served

EXCLUDED_CHECKS = {
    # The document says what a client may rely on. A server that takes more than it promises is what unmodified clients
    # need: unknown fields are ignored, null is absent, 64.0 is 64, a text part may be a bare string.
    "negative_data_rejection",
    # A credential that opens no live Session is a 404 that says not to retry, whatever it is: an ended Session's must
    # look the same as one that never was (test_api_errors.py has both, and the 401 of a missing one).
    "ignored_auth",
}
"""Checks of schemathesis that don't apply here."""

N_EXAMPLES = 20
N_ANSWERS = 20_000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "POST"])  # views of a forest that thousands of posts have grown take long
async def test_the_api_is_what_its_document_says(tmp_path, method):
    async with open_served(["</think>ok"] * N_ANSWERS, tokens_per_s=float("inf")) as served:
        url = f"http://127.0.0.1:{served.port}/agentic_api"
        words = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
        words += ["--header", f"Authorization: Bearer {served.session.credential}", "--include-method", method]
        words += ["--exclude-checks", ",".join(sorted(EXCLUDED_CHECKS)), "--max-examples", str(N_EXAMPLES)]
        words += ["--generation-database", "none", "--no-color", "--request-timeout", "30", "--continue-on-failure"]
        env = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parents[1])}
        done = await trio.run_process(
            words, check=False, capture_stdout=True, stderr=subprocess.STDOUT, cwd=tmp_path, env=env
        )
        print(done.stdout.decode())

    assert done.returncode == 0
