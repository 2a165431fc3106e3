"""Flags of admission: what they default to, what they become, what is refused, what servers are started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders_backend import make_model, save_checkpoint
from builders_sglang import backend_on

from relax_trio.backend.admission import AdmissionOptions
from relax_trio.backend.fake import FakeBackend
from relax_trio.config.backend_tree import BackendConfig
from relax_trio.config.check_backend import backend_problems
from relax_trio.config.parse import parse_config
from relax_trio.config.tree import Config
from relax_trio.loop.servers import _keepers, make_admission
from relax_trio.sync.process import Warden

SGLANG = ("--rollout-backend", "sglang", "--agentic-program-admission")


def parsed(*words):
    return parse_config(list(words)).config


@pytest.fixture
def backend(tmp_path):
    return backend_on(save_checkpoint(make_model("llama"), tmp_path / "llama"), tmp_path, "http://127.0.0.1:1")


def options_of(config, backend):
    admission = make_admission(config, backend)
    return None if admission is None else admission._options


def test_admission_is_off_unless_asked_for(backend):
    assert make_admission(Config(), backend) is None


def test_the_defaults_of_the_flags_are_those_of_the_rules(backend):
    assert options_of(parsed(*SGLANG), backend) == AdmissionOptions()
    assert AdmissionOptions() == AdmissionOptions(
        headroom=0.90, pressure_threshold=0.92, expected_decode_cap=None, max_wait_s=30.0, scope="train"
    )


def test_every_flag_reaches_the_rules(backend):
    config = parsed(
        *SGLANG,
        *("--agentic-admission-headroom", "0.5", "--agentic-admission-pressure-threshold", "0.7"),
        *("--agentic-admission-expected-decode-cap", "512", "--agentic-admission-max-wait-s", "3.5"),
        *("--agentic-admission-scope", "all"),
    )

    assert options_of(config, backend) == AdmissionOptions(
        headroom=0.5, pressure_threshold=0.7, expected_decode_cap=512, max_wait_s=3.5, scope="all"
    )


def test_a_backend_without_servers_has_no_admission():
    """`relax-trio serve --answers` with the flags of a run."""
    assert make_admission(parsed(*SGLANG), FakeBackend([])) is None


def test_it_is_refused_where_nothing_has_a_pool_to_read():
    problems = backend_problems(Config(backend=BackendConfig(agentic_program_admission=True)))

    assert problems == ["--agentic-program-admission is given without --rollout-backend sglang"]


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ((), ()),
        (("--agentic-program-admission",), ("--enable-metrics",)),
        (("--agentic-program-admission", "--sglang-enable-metrics"), ("--enable-metrics",)),
    ],
)
def test_servers_of_the_run_are_started_with_their_metrics_on(words, flags):
    config = parsed("--rollout-backend", "sglang", *words)
    (keeper,) = _keepers(config, Warden(), Path())

    assert keeper._common.args == flags
