"""A training run on two real servers with small pools and admission: one is killed, then the other hangs."""

from __future__ import annotations

import http.client
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders_commands import Told, command, running, write_rows
from builders_sglang import CPU_ENVIRONMENT, PYTHON, require_sglang, run_flags, served_checkpoint
from sglang_agreement import dumps, metrics_of

from relax_trio.backend.sglang.readings import read_gauges

pytestmark = [pytest.mark.engine, pytest.mark.sglang_server]

N_STEPS, N_GROUPS, N_SAMPLES = 5, 1, 4
N_ATTEMPTS = N_GROUPS * N_SAMPLES
KILL_IN, HANG_IN = 2, 3
N_NEW, POOL = 160, 352
"""Three attempts of 173 tokens fit under 90 % of two pools, and the fourth waits: a lease has all begin at once."""

IN_FLIGHT_S = 0.5
"""From an agent's word before its model call: by then a server has it, for a second and more."""

ATOL = 1e-4
"""Float32 on both sides; kernels and batch widths differ."""

_KV = "agentic_kv/"


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """The run's directory, its metrics, and what its servers said of their pools before they were disturbed."""
    require_sglang()
    home = tmp_path_factory.mktemp("disturbed")
    checkpoint = served_checkpoint(home / "model")
    out, log = home / "run", home / "console.log"
    told = Told(home / "tell")
    words = command("train", checkpoint, write_rows(home / "rows.jsonl", 2 * N_STEPS * N_GROUPS), out)
    words += ["--rollout-batch-size", str(N_GROUPS), "--n-samples-per-prompt", str(N_SAMPLES)]
    words += ["--num-rollout", str(N_STEPS), "--rollout-max-context-len", "300"]
    words += ["--rollout-max-response-len", str(N_NEW), "--agent-env", f"MAX_TOKENS={N_NEW}", f"TELL={told.path}"]
    words += ["--rollout-backend", "sglang", "--sglang-num-servers", "2", "--sglang-python", PYTHON]
    words += [*run_flags(), "--sglang-max-total-tokens", str(POOL), "--engine-health-timeout", "20"]
    words += ["--agentic-program-admission", "--agentic-session-lifecycle"]
    words += ["--save-debug-rollout-data", str(out / "samples-{rollout_id}.jsonl")]
    with running(words, temp=home / "tmp", log=log, env=CPU_ENVIRONMENT) as process:
        told.wait_for(KILL_IN * N_ATTEMPTS, process, log)
        pools = [_pool(server.port) for server in _servers(out)]
        told.wait_for(N_ATTEMPTS, process, log)
        first, second = _servers(out)
        time.sleep(IN_FLIGHT_S)
        os.kill(first.pid, signal.SIGKILL)
        in_step = range(HANG_IN * N_GROUPS, (HANG_IN + 1) * N_GROUPS)
        told.wait_for(N_ATTEMPTS, process, log, rows=in_step)
        time.sleep(IN_FLIGHT_S)
        for pid in _family(second.pid):
            os.kill(pid, signal.SIGSTOP)
        code = process.wait(300)
    told.close()
    assert code == 0, log.read_text()[-3000:]
    return SimpleNamespace(out=out, metrics=metrics_of(out), pools=pools, log=(out / "run.log").read_text())


def test_every_step_is_complete_with_no_group_dropped_and_nothing_doubled(disturbed):
    assert [step["rollout/n_dropped_groups"] for step in disturbed.metrics] == [0] * N_STEPS
    samples = [sample for dump in dumps(disturbed.out) for sample in dump.samples]
    assert len(samples) == len({sample.place for sample in samples}) == N_STEPS * N_ATTEMPTS
    assert Counter(sample.row for sample in samples) == dict.fromkeys(range(N_STEPS * N_GROUPS), N_SAMPLES)


def test_what_ran_on_a_lost_server_was_tried_again_at_its_place(disturbed):
    failed = [step["rollout/n_failed_sessions"] for step in disturbed.metrics]
    assert failed[:KILL_IN] == [0] * KILL_IN
    assert failed[KILL_IN] > 0
    assert failed[HANG_IN] > 0


def test_death_is_noticed_as_such_and_a_hang_by_the_health_check(disturbed):
    reasons = dict(re.findall(r"server\.died server='SGLang server (\d)' reason=(.*?) restarts=0", disturbed.log))
    assert "SIGKILL" in reasons["0"]
    assert "not well within --engine-health-timeout 20 s" in reasons["1"]


def test_a_server_that_was_started_again_had_the_weights_of_then(disturbed):
    assert len(re.findall(r"server\.admitted server='SGLang server 0'", disturbed.log)) == 2
    gaps = [step["train/rollout_logprob_abs_diff"] for step in disturbed.metrics]
    assert max(gaps) < ATOL
    for number, dump in enumerate(dumps(disturbed.out)):
        assert {span.version for sample in dump.samples for span in sample.weight_versions} == {str(number)}


def test_the_ceiling_is_that_of_the_pools_that_the_servers_tell(disturbed):
    assert disturbed.pools == [POOL, POOL]
    ceilings = [step[f"{_KV}budget/ceiling"] for step in disturbed.metrics]
    assert ceilings[KILL_IN - 1] == int(0.9 * sum(disturbed.pools))
    assert ceilings[KILL_IN] == int(0.9 * disturbed.pools[1])


def test_the_ledger_kept_below_the_ceiling_and_who_did_not_fit_waited(disturbed):
    before = disturbed.metrics[1:KILL_IN]  # pools are read from when the first attempts are there already
    for step in before:
        assert 0 < step[f"{_KV}budget/reserved"] <= step[f"{_KV}budget/ceiling"]
        assert step[f"{_KV}budget/reserved_utilization"] <= 1
        assert step[f"{_KV}admission/admit"] == N_ATTEMPTS
        assert step[f"{_KV}admission/bypass"] == 0
        assert step[f"{_KV}admission/wait"] > 0
        assert step[f"{_KV}admission/wait_seconds_mean"] > 0
        assert step[f"{_KV}budget/degraded"] == 0
    assert 0 < max(step[f"{_KV}budget/kv_token_usage_max"] or 0 for step in disturbed.metrics) <= 1
    began = ["admit", "bypass_protected", "bypass_degraded", "bypass_aged"]
    for step in disturbed.metrics:
        assert sum(step[f"{_KV}admission/{name}"] for name in began) >= N_ATTEMPTS


def test_metrics_have_their_names_in_every_step(disturbed):
    names = [f"admission/{name}" for name in ("admit", "bypass", "wait", "waiting", "cancelled", "wait_seconds_mean")]
    names += [f"admission/bypass_{name}" for name in ("protected", "degraded", "aged")]
    names += [f"budget/{name}" for name in ("ceiling", "reserved", "reserved_utilization", "degraded")]
    names += [f"budget/kv_token_usage_{name}" for name in ("mean", "max")]
    names += ["session/close", "session/close_failure"]
    for step in disturbed.metrics:
        assert {f"{_KV}{name}" for name in names} <= step.keys()


@dataclass(frozen=True, kw_only=True)
class _Started:
    """A server of the run."""

    pid: int
    port: int


def _servers(out):
    """Those that the run started first, in order of their numbers."""
    text = (out / "run.log").read_text()
    found = re.findall(r"server\.started server='SGLang server (\d)' pid=(\d+) port=(\d+)", text)[:2]
    return [_Started(pid=int(pid), port=int(port)) for _, pid, port in sorted(found)]


def _pool(port):
    """Tokens of a server's pool, by its own metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return read_gauges(text, str(port)).n_total_tokens


def _family(pid):
    """A process and all its descendants."""
    children = [
        child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(member for child in children for member in _family(int(child)))]
