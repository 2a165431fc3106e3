"""Fixtures of tests that train a tiny model."""

from __future__ import annotations

import pytest
import torch
from builders_adapter import LORA_FLAGS
from builders_sglang import RealServer, require_sglang, require_spans, served_checkpoint, tells_spans
from builders_train import write_checkpoint


@pytest.fixture
def one_torch_thread():
    """Kernels of this size gain nothing from threads, and lose much where other processes want the cores too."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A directory with a tiny Qwen3 model and a tokenizer; not to be written into."""
    return write_checkpoint(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory):
    """A checkpoint, and the URL of a real SGLang server that began with it; started once for all tests."""
    require_sglang()
    directory = tmp_path_factory.mktemp("sglang")
    checkpoint = served_checkpoint(directory / "model")
    server = RealServer(checkpoint, directory / "server.log")
    try:
        server.wait_ready()
        yield checkpoint, server.url
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server_tells_spans(sglang_server):
    """Whether the server tells the version of each token; an older one names one for a whole answer."""
    return tells_spans(sglang_server[1])


@pytest.fixture(scope="session")
def span_server(sglang_server):
    """`sglang_server`, and a skip where weights never change under an attempt on it."""
    require_spans(sglang_server[1])
    return sglang_server


@pytest.fixture(scope="session")
def lora_server(tmp_path_factory):
    """A checkpoint, and the URL of a real server that began with it and takes adapters; one for all tests."""
    require_sglang()
    directory = tmp_path_factory.mktemp("lora")
    checkpoint = served_checkpoint(directory / "model")
    server = RealServer(checkpoint, directory / "server.log", *LORA_FLAGS)
    try:
        server.wait_ready()
        yield checkpoint, server.url
    finally:
        server.stop()
