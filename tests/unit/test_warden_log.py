"""The bounded log: never beyond its limit, its start and its newest part kept, and every byte accounted for."""

from __future__ import annotations

import errno
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_trio.warden.log import BoundedLog

LINE = re.compile(rb"\n\[\xe2\x80\xa6 +(\d+) bytes left out \xe2\x80\xa6\]\n")
LIMIT = 2048


def write(log, data, path):
    """Write through the pipe, checking the bound after every move."""
    while data:
        data = data[os.write(log.writing, data[:4096]) :]
        while log.pump():
            assert path.stat().st_size <= LIMIT
    assert log.reading >= 0


@given(sizes=st.lists(st.integers(1, 5000), max_size=12), before=st.integers(0, 3000))
def test_what_is_kept_is_the_start_and_the_newest_part(tmp_path_factory, sizes, before):
    path = tmp_path_factory.mktemp("log") / "run.log"
    stream = b"".join(b"%d." % n for n in range(sum(sizes) + before))
    path.write_bytes(stream[:before])
    written = stream[: before + sum(sizes)]
    log = BoundedLog(str(path), LIMIT)
    at = before
    for size in sizes:
        write(log, stream[at : at + size], path)
        at += size
    log.hand_over()
    log.close()

    kept = path.read_bytes()
    if not sizes or len(written) <= LIMIT:
        assert kept == written
    else:
        assert len(kept) <= LIMIT
        start, left_out, end = LINE.split(kept)
        assert written.startswith(start)
        assert written.endswith(end)
        assert len(start) == LIMIT // 4
        assert len(end) >= LIMIT // 4
        assert len(start) + int(left_out) + len(end) == len(written)


def test_the_end_of_all_writers_is_noticed_once(tmp_path):
    log = BoundedLog(str(tmp_path / "log"), LIMIT)
    copy = os.dup(log.writing)
    os.write(copy, b"last")
    log.hand_over()
    os.close(copy)
    assert log.pump()
    assert not log.pump()
    assert log.reading == -1
    assert not log.pump()
    log.drain()
    log.close()
    assert (tmp_path / "log").read_bytes() == b"last"


def test_drain_takes_what_is_there_and_returns_while_others_write(tmp_path, monkeypatch):
    log = BoundedLog(str(tmp_path / "log"), 1 << 20)
    pump = log.pump

    def pump_and_refill():
        moved = pump()
        os.write(log.writing, b"y" * 60000)
        return moved

    monkeypatch.setattr(log, "pump", pump_and_refill)
    os.write(log.writing, b"x" * 60000)
    log.drain()
    assert (tmp_path / "log").read_bytes().startswith(b"x" * 60000)


def test_a_full_disk_loses_output_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "log"
    log = BoundedLog(str(path), LIMIT)
    write(log, b"a" * 100, path)
    with monkeypatch.context() as broken:

        def refuse(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        broken.setattr("relax_trio.warden.log.os.pwrite", refuse)
        write(log, b"b" * 100, path)
    write(log, b"c" * 100, path)
    log.close()
    assert path.read_bytes() == b"a" * 100 + b"c" * 100


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        BoundedLog(str(tmp_path / "missing" / "log"), LIMIT)
    assert caught.value.filename == str(tmp_path / "missing" / "log")
