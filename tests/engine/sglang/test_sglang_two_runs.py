"""Two runs on one server, by mistake: neither goes on with weights that the other has put there."""

from __future__ import annotations

import pytest
from builders_backend import CONTEXT_LEN, VOCAB_LEN, make_model, save_checkpoint, serving
from builders_sglang import backend_on
from sglang_wire import VERSIONS, wire_server

from relax_trio.backend.base import WeightSource
from relax_trio.errors import WeightSyncError

pytestmark = pytest.mark.engine


@pytest.fixture(params=VERSIONS)
async def server(request):
    async with wire_server(request.param, context_len=CONTEXT_LEN + 6) as server:
        yield server


@pytest.mark.parametrize("transfer", ["disk", "tensor"])
async def test_a_run_ends_at_its_next_update_when_another_has_changed_the_weights(server, tmp_path, transfer):
    model = make_model("llama")
    source = WeightSource(tensors=model.state_dict())
    first = save_checkpoint(model, tmp_path / "first" / "llama")
    second = save_checkpoint(model, tmp_path / "second" / "llama")

    def make(checkpoint):
        return backend_on(checkpoint, checkpoint.parent, server.url, vocab_len=VOCAB_LEN, transfer=transfer)

    async with serving(make(first)) as one:
        await one.update_weights("v2", source)
        await one.update_weights("v3", source)  # nobody else: it goes on
        async with serving(make(second)) as other:
            with pytest.raises(WeightSyncError, match=r"somebody else changes its weights"):
                await one.update_weights("v4", source)
            await other.update_weights("v2", source)  # it was the last to load
