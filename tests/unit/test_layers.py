"""The architecture as a test: imports point down only, and a few rules that a reader can grep."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "relax_trio"

LAYERS = [
    {"errors", "ids", "warden"},
    {"config", "events"},
    {"data"},
    {"sync", "forest"},
    {"tokens"},
    {"backend", "agent", "api", "reward"},
    {"runtime"},
    {"train"},
    {"observe", "preflight", "testing"},
    {"loop"},
    {"demo"},
    {"cli"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [node.module]
            if node.module == "relax_trio":
                names = [f"relax_trio.{alias.name}" for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("relax_trio.")}
    return rooms - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    room = room_of(path)
    if room in {"__init__", "__main__"}:
        return
    for other in imported_rooms(path) - {room}:
        assert other in RANK, f"{path} imports {other}, which has no layer"
        assert RANK[other] < RANK[room], f"{path}: {room} must not import {other}"


def test_every_room_has_a_layer():
    rooms = {room_of(path) for path in FILES} - {"__init__", "__main__"}

    assert rooms <= set(RANK)


def test_train_never_imports_runtime():
    for path in (PACKAGE / "train").rglob("*.py"):
        assert "runtime" not in imported_rooms(path), path


def test_files_stay_readable():
    long = {str(p.relative_to(PACKAGE)): n for p in FILES if (n := len(p.read_text().splitlines())) > 450}

    assert not long


@pytest.mark.parametrize(
    ("pattern", "allowed", "why"),
    [
        (r"shield\s*=\s*True", {"sync/cleanup.py", "sync/services.py"}, "a shield outside the bounded helper"),
        (r":\s*trio\.Nursery\s*[,)]|->\s*trio\.Nursery", set(), "a nursery in a signature"),
        (r"\bimport asyncio|from asyncio", set(), "asyncio in the package"),
        (r"\bimport httpx|from httpx", {"backend"}, "httpx outside backend/"),
        (r"\btime\.sleep\(", set(), "a blocking sleep"),
    ],
)
def test_rules_that_can_be_grepped(pattern, allowed, why):
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if name in allowed or name.split("/")[0] in allowed:
            continue
        match = re.search(pattern, path.read_text())
        assert match is None, f"{name}: {why}: {match.group()!r}"
