"""The Python of docs/testing.md is a test file of a user: it is imported, and its tests are run."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from relax_trio.testing import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.fixture
def user_tests(tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "test_of_a_user.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("test_of_a_user")
    del sys.modules["test_of_a_user"]


def test_the_tests_that_the_page_shows_pass(user_tests):
    tests = [value for name, value in vars(user_tests).items() if name.startswith("test_")]

    assert len(tests) == 2
    for test in tests:
        test()


def test_the_page_tells_of_every_action():
    for kind in KINDS:
        assert re.search(rf"`{kind}( \w+)?`", PAGE.read_text()), kind
