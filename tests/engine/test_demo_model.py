"""The demo's model: how it is built, cached and what it can do. The full-quality checks are marked slow."""

import random
import re
from pathlib import Path

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from relax_trio.demo.checkpoint import ensure_demo_checkpoint, fingerprint
from relax_trio.demo.recipe import DemoRecipe, WarmStartRecipe
from relax_trio.demo.task import Question, calculate, draw_question
from relax_trio.demo.tokenizer import END_OF_TURN, first_prompt_text, tool_result_text, train_tokenizer
from relax_trio.demo.warm_start import orthogonalized, warm_start
from relax_trio.errors import ConfigError

pytestmark = pytest.mark.engine

SHORT = DemoRecipe(
    warm_start=WarmStartRecipe(hidden_len=32, n_layers=1, head_len=8, intermediate_len=32, n_steps=3, batch_len=4)
)
CALL = re.compile(
    r'<tool_call>\n\{"name": "calculate", "arguments": \{"a": (\d+), "op": "([-+*])", "b": (\d+)\}\}\n</tool_call>'
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def short_checkpoint(cache: Path) -> Path:
    return ensure_demo_checkpoint(cache_dir=cache, recipe=SHORT)


def test_the_auto_classes_load_the_checkpoint(short_checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(short_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(short_checkpoint)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    assert GenerationConfig.from_pretrained(short_checkpoint).eos_token_id == end
    assert tokenizer.eos_token_id == end
    assert "tool_call" in tokenizer.chat_template


def test_the_loaded_tokenizer_encodes_as_the_trained_one(short_checkpoint: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(short_checkpoint)
    text = first_prompt_text("What is 12 + 13?") + "<tool_call>\nïß 漢 \r\n 1"
    assert [loaded.encode(text)] == train_tokenizer(SHORT.warm_start.vocab_len).encode_many([text])
    assert loaded.decode(loaded.encode(text)) == text


def test_a_cached_checkpoint_is_returned_without_training(cache: Path, short_checkpoint: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in short_checkpoint.iterdir()}
    calls: list[int] = []
    again = ensure_demo_checkpoint(cache_dir=cache, recipe=SHORT, progress=lambda done, total, loss: calls.append(done))
    assert again == short_checkpoint
    assert calls == []
    assert {path.name: path.stat().st_mtime_ns for path in short_checkpoint.iterdir()} == before
    assert [path.name for path in cache.iterdir()] == [f"demo-{fingerprint(SHORT)}"]


def test_building_twice_gives_the_same_bytes_and_leaves_torch_as_it_was(tmp_path: Path, short_checkpoint: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    calls: list[tuple[int, int]] = []
    again = ensure_demo_checkpoint(
        cache_dir=tmp_path, recipe=SHORT, progress=lambda done, total, loss: calls.append((done, total))
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert calls == [(1, 3), (2, 3), (3, 3)]
    for path in short_checkpoint.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_cache_follows_xdg_cache_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_checkpoint: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "relax_trio").mkdir()
    target = tmp_path / "relax_trio" / short_checkpoint.name
    target.symlink_to(short_checkpoint)
    assert ensure_demo_checkpoint(recipe=SHORT) == target


def test_a_build_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        ensure_demo_checkpoint(cache_dir=tmp_path / "cache", recipe=SHORT, progress=stop)
    assert list((tmp_path / "cache").iterdir()) == []
    assert torch.get_num_threads() == threads


def test_a_builder_that_comes_second_takes_the_first_one_s_checkpoint(tmp_path: Path, short_checkpoint: Path) -> None:
    final = tmp_path / short_checkpoint.name

    def other_builder_finishes(done: int, total: int, loss: float) -> None:
        if done == total:
            final.mkdir()
            for path in short_checkpoint.iterdir():
                (final / path.name).write_bytes(path.read_bytes())
            (final / "theirs").touch()

    assert ensure_demo_checkpoint(cache_dir=tmp_path, recipe=SHORT, progress=other_builder_finishes) == final
    assert (final / "theirs").exists()
    assert list(tmp_path.iterdir()) == [final]


def test_a_damaged_cache_is_named_and_not_used(tmp_path: Path) -> None:
    final = tmp_path / f"demo-{fingerprint(SHORT)}"
    final.mkdir()
    (final / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks .*model\.safetensors.*remove the directory"):
        ensure_demo_checkpoint(cache_dir=tmp_path, recipe=SHORT)


def test_a_cache_that_cannot_be_made_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    calls: list[int] = []
    with pytest.raises(ConfigError, match="Cannot keep the demo checkpoint"):
        ensure_demo_checkpoint(
            cache_dir=tmp_path / "file" / "cache",
            recipe=SHORT,
            progress=lambda done, total, loss: calls.append(done),
        )
    assert calls == []


def test_the_fingerprint_follows_what_the_weights_depend_on_and_nothing_else() -> None:
    base = DemoRecipe()
    assert fingerprint(base) == fingerprint(DemoRecipe())
    assert fingerprint(base) == fingerprint(evolve(base, lr=1.0, n_steps=1))
    changed = [
        evolve(base, version=base.version + 1),
        evolve(base, warm_start=evolve(base.warm_start, seed=base.warm_start.seed + 1)),
        evolve(base, one_operation_share=0.5),
    ]
    assert len({fingerprint(recipe) for recipe in (base, *changed)}) == 4


def test_warm_start_lowers_the_loss() -> None:
    losses: list[float] = []
    recipe = DemoRecipe(warm_start=evolve(SHORT.warm_start, n_steps=20, batch_len=8))
    warm_start(train_tokenizer(1024), recipe, lambda done, total, loss: losses.append(loss))
    assert losses[-1] < losses[0] - 1.0


def test_orthogonalizing_brings_singular_values_near_one_in_both_shapes() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 8, 24), (2, 24, 8)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape, generator=generator)))
        assert values.min() > 0.5
        assert values.max() < 1.5


@pytest.mark.slow
def test_the_demo_policy_is_a_mixture_that_reinforcement_can_improve() -> None:
    checkpoint = ensure_demo_checkpoint()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rng = random.Random(1)
    n_single = round(400 * DemoRecipe().one_operation_share)
    questions = [draw_question(rng, n_operations=1 if index < n_single else 2, held_out=True) for index in range(400)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sampled = success_rate(model, tokenizer, questions, do_sample=True)
    greedy = success_rate(model, tokenizer, questions[::2], do_sample=False)
    assert 0.2 <= sampled <= 0.42
    assert 0.25 <= greedy <= 0.5


def success_rate(model, tokenizer, questions: list[Question], *, do_sample: bool) -> float:
    """Share of questions that end in the right answer by the tool, up to three turns each."""
    tokenizer.padding_side = "left"
    texts = [first_prompt_text(question.text) for question in questions]
    results: list[int | None] = [None] * len(questions)
    n_right, active = 0, list(range(len(questions)))
    for _ in range(3):
        batch = tokenizer([texts[i] for i in active], return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        produced = model.generate(**batch, max_new_tokens=24, do_sample=do_sample, top_k=0)
        still = []
        for i, row in zip(active, produced[:, batch["input_ids"].shape[1] :], strict=True):
            text, ended, _ = tokenizer.decode(row).partition(END_OF_TURN)
            if call := CALL.fullmatch(text):
                results[i] = calculate(int(call[1]), call[2], int(call[3]))
                texts[i] += text + END_OF_TURN + tool_result_text(str(results[i]))
                still.append(i)
            elif ended and text == f"Answer: {questions[i].answer}" and results[i] == questions[i].answer:
                n_right += 1
        active = still
        if not active:
            break
    return n_right / len(questions)
