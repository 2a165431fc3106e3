"""Builders of tests with SGLang: a checkpoint that it serves, backends over given servers, a real server's process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from builders_backend import CONTEXT_LEN, save_checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_trio.backend.sglang.backend import SGLangBackend, SGLangOptions
from relax_trio.backend.sglang.external import ExternalServer, ExternalServers
from relax_trio.backend.sglang.router import RouterServers
from relax_trio.backend.sglang.wire import has_spans
from relax_trio.demo.tokenizer import train_tokenizer

PYTHON = os.environ.get("RELAX_TRIO_SGLANG")
"""Python of an environment that tools/sglang_cpu_env made."""

CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-total-tokens", "16384", "--mem-fraction-static", "0.3", "--dtype", "float32", "--grammar-backend", "none"),
)


def run_flags():
    """`CPU_FLAGS` as flags of a run that starts its servers itself."""
    return [word.replace("--", "--sglang-", 1) if word.startswith("--") else word for word in CPU_FLAGS]


CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

SERVED_VOCAB_LEN = 512
END_ID = 2
"""The end of a turn for `served_model`."""


def require_sglang():
    """Skip, saying how not to, where no environment with SGLang is named."""
    if PYTHON is None:  # SGLang wants an environment of its own, which only CI and who asks for it has
        pytest.skip(
            "no SGLang: tools/sglang_cpu_env DIR makes an environment, RELAX_TRIO_SGLANG=DIR/bin/python names it"
        )


def require_router():
    """Skip, saying how not to, where the environment with SGLang has no router."""
    require_sglang()
    found = subprocess.run([PYTHON, "-c", "import sglang_router"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"no router: {PYTHON} -m pip install sglang-router")


def served_model(seed=0):
    """A tiny random Qwen3 that rarely ends a turn by itself."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=SERVED_VOCAB_LEN,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LEN + 6,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=END_ID,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.lm_head.weight.data[END_ID] = 0.0  # likeliest tokens have logits of several units
    return model


def served_checkpoint(path, seed=0):
    """A checkpoint directory of `served_model` with a tokenizer, as SGLang wants one."""
    save_checkpoint(served_model(seed), path)
    train_tokenizer(SERVED_VOCAB_LEN).to_transformers().save_pretrained(path)
    return path


def backend_on(
    checkpoint,
    snapshot_dir,
    *urls,
    decode=None,
    version="v1",
    adapter=None,
    start_timeout_s=30.0,
    health_timeout_s=10.0,
    **options,
):
    """A backend over servers that run already."""
    common = ExternalServers(start_timeout_s=start_timeout_s, health_timeout_s=health_timeout_s)
    return SGLangBackend(
        checkpoint,
        version,
        snapshot_dir=snapshot_dir,
        keepers=[ExternalServer(common, url) for url in urls],
        options=SGLangOptions(**options),
        decode=decode,
        adapter=adapter,
    )


def router_backend(
    checkpoint, snapshot_dir, url, *, start_timeout_s=30.0, health_timeout_s=10.0, interval_s=0.02, **options
):
    """A backend over the workers of a router, which is looked at every `interval_s`."""
    common = ExternalServers(start_timeout_s=start_timeout_s, health_timeout_s=health_timeout_s)
    keeper = RouterServers(common, url, interval_s)
    options = SGLangOptions(**options)
    return SGLangBackend(checkpoint, "v1", snapshot_dir=snapshot_dir, keepers=[keeper], options=options)


class _Process:
    """A process on a port of its own; ended with all it started."""

    def __init__(self, log_path, *words):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = Path(log_path)
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [PYTHON, *words, "--host", "127.0.0.1", "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **CPU_ENVIRONMENT},
            )

    def wait_ready(self, within_s=300.0):
        """Wait until `/health` is answered with 200; fails with the log's end, and at once if the process ends."""
        end = time.monotonic() + within_s
        while not _is_healthy(self.port):
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no {' '.join(self.process.args)}:\n{self.log_path.read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self):
        """Kill its group; a server with a stuck request ignores SIGTERM."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class RealServer(_Process):
    """A real server; other `flags` than `CPU_FLAGS` come behind them."""

    def __init__(self, checkpoint, log_path, *flags):
        super().__init__(
            log_path,
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(checkpoint),
            *CPU_FLAGS,
            "--enable-metrics",
            *flags,
        )


class RealRouter(_Process):
    """A real router, which takes up a worker within a second."""

    def __init__(self, log_path, *flags):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            metrics_port = probe.getsockname()[1]
        words = ["-m", "sglang_router.launch_router", "--prometheus-port", str(metrics_port)]
        words += ["--worker-startup-check-interval", "1"]
        super().__init__(log_path, *words, *flags)


def tells_spans(url):
    """Whether the real server at `url` tells the version of each token."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse().read()
    connection.close()
    return has_spans(answer)


def require_spans(url):
    """Skip where the real server at `url` is too old for weights that change under an attempt."""
    if not tells_spans(url):
        pytest.skip("this server names one version for a whole answer, so weights never change under an attempt on it")


def _is_healthy(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
