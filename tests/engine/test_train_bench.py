"""The benchmark of the trainer on small inputs: that its contenders do the same work. Times are nobody's test."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_torch_thread")]

PATH = Path(__file__).parents[2] / "tools" / "bench_train.py"
SMALL = {
    "rows": 12, "median": 20.0, "spread": 1.0, "longest": 128, "hidden": 64, "layers": 1, "vocab": 64,
    "micro": 4, "max_tokens": 64, "rounds": 1, "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_train", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_have_a_long_tail_and_both_kinds_of_tokens(bench):
    rows = bench.make_rows(argparse.Namespace(**{**SMALL, "rows": 400, "median": 200.0, "longest": 4096}))
    lens = [len(row["ids"]) for row in rows]
    assert 150 < statistics.median(lens) < 270
    assert max(lens) > 8 * statistics.median(lens)
    assert all(len(row["mask"]) == len(row["ids"]) and row["mask"][0] == 0 and row["mask"][-1] == 1 for row in rows)


def test_the_padded_loop_and_the_trainer_have_the_same_loss_step_after_step(bench):
    args = argparse.Namespace(**SMALL)
    ours, padded = bench.ours(args), bench.padded(args)
    for turn in range(3):
        assert ours(turn) == pytest.approx(padded(turn), rel=1e-4)
