"""What the files of the warden's room may use: they run without site-packages, and in the agent's own Python."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[2] / "relax_trio" / "warden"
FILES = sorted(ROOM.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_the_warden_needs_python_39_and_its_standard_library_alone(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
    ours = {name for name in imported if name.startswith("relax_trio")}
    assert all(name.startswith("relax_trio.warden.") for name in ours)
    assert {name.partition(".")[0] for name in imported - ours} <= sys.stdlib_module_names
