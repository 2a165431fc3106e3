"""Builders of tests with SGLang: a checkpoint that it serves, backends over given servers, a real server's process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from builders_backend import CONTEXT_LEN, save_checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_trio.backend.sglang.backend import SGLangBackend, SGLangOptions
from relax_trio.backend.sglang.external import ExternalServer, ExternalServers
from relax_trio.demo.tokenizer import train_tokenizer

PYTHON = os.environ.get("RELAX_TRIO_SGLANG")
"""Python of an environment that tools/sglang_cpu_env made."""

CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--max-total-tokens", "16384", "--mem-fraction-static", "0.3", "--dtype", "float32", "--grammar-backend", "none"),
)

CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

SERVED_VOCAB_LEN = 512
END_ID = 2
"""The end of a turn for `served_model`."""


def require_sglang():
    """Skip, saying how not to, where no environment with SGLang is named."""
    if PYTHON is None:
        pytest.skip(
            "no SGLang: tools/sglang_cpu_env DIR makes an environment, RELAX_TRIO_SGLANG=DIR/bin/python names it"
        )


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


def backend_on(checkpoint, snapshot_dir, *urls, decode=None, start_timeout_s=30.0, health_timeout_s=10.0, **options):
    """A backend over servers that run already."""
    common = ExternalServers(start_timeout_s=start_timeout_s, health_timeout_s=health_timeout_s)
    return SGLangBackend(
        checkpoint,
        "v1",
        snapshot_dir=snapshot_dir,
        keepers=[ExternalServer(common, url) for url in urls],
        options=SGLangOptions(**options),
        decode=decode,
    )


class RealServer:
    """A process of a real server; ended with all it started."""

    def __init__(self, checkpoint, log_path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log_path
        argv = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--port", str(port), *CPU_FLAGS]
        with Path(log_path).open("w") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **CPU_ENVIRONMENT},
            )

    def stop(self):
        """Kill its group; a server with a stuck request ignores SIGTERM."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
