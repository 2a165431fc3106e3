"""Admission over HTTP, against a server in recorded words: read through its lanes, gone with it."""

from __future__ import annotations

from functools import partial

import pytest
from builders_admission import wanted
from builders_backend import CONTEXT_LEN, make_model, save_checkpoint, serving
from builders_process import eventually
from builders_sglang import backend_on
from sglang_wire import VERSIONS, wire_server

from relax_trio.backend.admission import Admission, AdmissionOptions
from relax_trio.backend.sglang.readings import follow_servers

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_pools_of_servers_are_known_and_lost_with_them(version, tmp_path, nursery, events):
    checkpoint = save_checkpoint(make_model("llama"), tmp_path / "llama")
    async with (
        wire_server(version, context_len=CONTEXT_LEN + 6) as first,
        wire_server(version, context_len=CONTEXT_LEN + 6) as second,
        serving(backend_on(checkpoint, tmp_path, first.url, second.url)) as backend,
    ):
        admission = Admission(AdmissionOptions(), partial(follow_servers, lambda: backend.servers))
        await nursery.start(admission.run)
        await eventually(lambda: admission.ceiling == int(2 * 16384 * 0.9))
        async with admission.admit(wanted(1000)) as may_begin:
            assert (may_begin, admission.n_reserved) == (True, 1000)
            (lost, _) = backend.servers
            backend._fleet.lose(lost, "the test's")
            await eventually(lambda: admission.ceiling == int(16384 * 0.9))
        assert admission.n_reserved == 0
        assert "GET /metrics" in second.log
        nursery.cancel_scope.cancel()
