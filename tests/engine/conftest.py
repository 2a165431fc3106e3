"""Fixtures of tests that train a tiny model."""

from __future__ import annotations

import pytest
import torch
from builders_sglang import RealServer, require_sglang, served_checkpoint
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
    yield checkpoint, server.url
    server.stop()
