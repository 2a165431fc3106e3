"""The script of answers: its file format, and how Sessions read it."""

from __future__ import annotations

import pytest
import trio
from builders_backend import make_attempt, serving

from relax_trio.backend.scripted import ScriptedBackend, read_answers
from relax_trio.errors import BackendRejected, ConfigError

EOT = 99


def encode(text):
    return [ord(c) - ord("a") for c in text]


def write(tmp_path, text):
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    return path


def make_backend(tmp_path, *lines):
    path = write(tmp_path, "\n".join(lines))
    return ScriptedBackend(read_answers(path, encode, EOT), name=path.name, max_context_len=100)


async def say(backend, *, session="s", **kwargs):
    return await backend.generate(make_attempt([1, 2, 3], session=session, **kwargs))


async def test_stop_appends_the_end_of_turn_and_length_does_not(tmp_path, autojump_clock):
    backend = make_backend(tmp_path, '{"text": "abc", "finish": "stop"}', "", '{"text": "de", "finish": "length"}')
    async with serving(backend):
        first, second = await say(backend), await say(backend)
    assert (first.token_ids.tolist(), first.finish) == ([0, 1, 2, EOT], "stop")
    assert (second.token_ids.tolist(), second.finish) == ([3, 4], "length")
    assert first.logprobs.tolist() == [0.0] * 4


async def test_each_session_reads_its_own_copy(tmp_path, autojump_clock):
    backend = make_backend(tmp_path, '{"text": "a"}', '{"text": "b"}')
    async with serving(backend):
        said = [(await say(backend, session=s)).token_ids[0] for s in ("x", "y", "x", "y")]
    assert said == [0, 0, 1, 1]


async def test_an_exhausted_script_says_so(tmp_path, autojump_clock):
    backend = make_backend(tmp_path, '{"text": "a"}')
    async with serving(backend):
        await say(backend)
        with pytest.raises(BackendRejected, match=r"script answers\.jsonl is exhausted"):
            await say(backend)
        await say(backend, session="other")


async def test_the_limit_cuts_an_answer(tmp_path, autojump_clock):
    backend = make_backend(tmp_path, '{"text": "abcdef"}', '{"text": "b"}')
    async with serving(backend):
        cut = await say(backend, max_new_tokens=2)
        after = await say(backend)
    assert (cut.token_ids.tolist(), cut.finish) == ([0, 1], "length")
    assert after.token_ids.tolist() == [1, EOT]


async def test_delay_is_waited_for_and_an_abort_ends_it_without_losing_the_answer(tmp_path, autojump_clock):
    backend = make_backend(tmp_path, '{"text": "a", "delay": 4.5}', '{"text": "b"}')
    results = []

    async def call():
        results.append((await say(backend, rid="r"), trio.current_time()))

    async with serving(backend):
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.sleep(2)
            await backend.abort("r")
        again = await say(backend)
        assert trio.current_time() == start + 2 + 4.5
    assert (results[0][0].finish, results[0][1]) == ("abort", start + 2)
    assert len(results[0][0].token_ids) == 0
    assert again.token_ids.tolist() == [0, EOT]


async def test_an_answer_whose_caller_left_is_said_to_the_next(tmp_path, autojump_clock):
    backend = make_backend(tmp_path, '{"text": "a", "delay": 5}', '{"text": "b"}')
    async with serving(backend):
        with trio.move_on_after(1):
            await say(backend)
        assert (await say(backend)).token_ids[0] == 0
        assert (await say(backend)).token_ids[0] == 1


async def test_a_closed_session_starts_over(tmp_path, autojump_clock):
    backend = make_backend(tmp_path, '{"text": "a"}')
    async with serving(backend):
        await say(backend)
        await backend.close_session("s")
        assert (await say(backend)).token_ids[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"text": }', r"answers\.jsonl:2: not JSON"),
        ('{"text": "a"}\n\n[1]', r"answers\.jsonl:3: an answer is a JSON object"),
        ('{"txt": "a"}', r"answers\.jsonl:1: unknown key 'txt'"),
        ('{"finish": "stop"}', r"answers\.jsonl:1: 'text' must be a string"),
        ('{"text": "a", "finish": "end"}', r"answers\.jsonl:1: 'finish' must be one of stop, length"),
        ('{"text": "a", "finish": ["stop"]}', r"answers\.jsonl:1: 'finish' must be one of"),
        ('{"text": "a", "delay": -1}', r"answers\.jsonl:1: 'delay' must be a number"),
        ('{"text": "a", "delay": true}', r"answers\.jsonl:1: 'delay' must be a number"),
        ('{"text": "", "finish": "length"}', r"answers\.jsonl:1: an answer that ends by its length needs a text"),
        ("\n", r"answers\.jsonl: no answers in it"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_answers(write(tmp_path, text), encode, EOT)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing-here"):
        read_answers(tmp_path / "nothing-here", encode, EOT)
    (tmp_path / "latin").write_bytes(b'{"text": "\xe9"}')
    with pytest.raises(ConfigError, match="latin"):
        read_answers(tmp_path / "latin", encode, EOT)
