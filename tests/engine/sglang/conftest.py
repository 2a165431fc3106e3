"""Fixtures of tests with servers in recorded words: a tiny model that is served, and new weights for it."""

from __future__ import annotations

import pytest
from builders_backend import make_model, save_checkpoint

from relax_trio.backend.base import WeightSource


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    """Its directory; not to be written into."""
    return save_checkpoint(model, tmp_path_factory.mktemp("wire") / "llama")


@pytest.fixture
def source(model):
    return WeightSource(tensors=model.state_dict())
