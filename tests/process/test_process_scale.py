"""Many real agents at once and one after another: nothing of them is left. `tools/nightly` runs the full sizes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

TOOLS = Path(__file__).parents[2] / "tools"


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_stubborn_agents_at_once_and_brief_ones_in_a_row_leave_nothing(monkeypatch, capsys):
    tool = load("check_processes")
    monkeypatch.setattr(tool, "GRACE_S", 0.3)
    assert tool.main(["--dropped", "12", "--ended", "48"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["afresh", "forked"] * 3
    assert all(line.endswith(": met") for line in lines)
    assert "12 Sessions of 4 stubborn processes dropped" in lines[0]


def test_the_bench_of_warm_parents_tells_its_ratio(capsys):
    assert load("bench_preload").main(["--sessions", "2", "--modules", "json", "--at-least", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 Sessions that import json: forked")
