"""Fixtures of tests that train a tiny model."""

from __future__ import annotations

import pytest
import torch
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
