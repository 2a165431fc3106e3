"""The supervised phase that turns random weights into a policy that can form turns.

Owns the model's shape, the optimizer of this phase and its loop. It doesn't own the demonstrations
(`task.demonstration`), nor reinforcement: that is the ordinary pipeline's work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from relax_trio.demo.recipe import DemoRecipe, WarmStartRecipe
from relax_trio.demo.task import demonstration, draw_question
from relax_trio.demo.tokenizer import END_OF_TURN, DemoTokenizer, first_prompt_text, tool_result_text

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

Progress = Callable[[int, int, float], None]
"""Called after each optimizer step with (steps done, steps in all, loss in nats per trained token)."""


@frozen
class Row:
    """One tokenized demonstration; both tuples have the same length, `trained` is True on response tokens."""

    token_ids: Sequence[int]
    trained: Sequence[bool]


def warm_start(tokenizer: DemoTokenizer, recipe: DemoRecipe, progress: Progress | None = None) -> Qwen3ForCausalLM:
    """Make the demo model and train it on demonstrations: `fit` on the demo's own rows."""
    return fit(tokenizer, demonstration_rows(tokenizer, recipe), recipe.warm_start, progress)


def fit(
    tokenizer: DemoTokenizer, rows: list[Row], numbers: WarmStartRecipe, progress: Progress | None = None
) -> Qwen3ForCausalLM:
    """Make a model of the demo's shape and train it on `rows`, `numbers.batch_len` a step, in their order.

    Blocks for about `numbers.n_steps` × 0.1 s; call it in a worker thread. An exception that `progress` raises ends the
    training and passes through. The same rows and numbers give the same weights on the same machine. Global random
    state and thread settings are as before on return.
    """
    with _isolated_torch(numbers.seed):
        model = build_model(len(tokenizer), tokenizer, numbers)
        _train(model, rows, numbers, progress)
    model.eval()  # type: ignore[no-untyped-call]  # transformers has no types here
    return model


def build_model(vocab_len: int, tokenizer: DemoTokenizer, numbers: WarmStartRecipe) -> Qwen3ForCausalLM:
    """Make the untrained model, float32 on the CPU, from torch's current global random state."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    end, pad = tokenizer.token_id(END_OF_TURN), tokenizer.pad_id
    config = Qwen3Config(
        vocab_size=vocab_len,
        hidden_size=numbers.hidden_len,
        num_hidden_layers=numbers.n_layers,
        num_attention_heads=numbers.n_heads,
        num_key_value_heads=numbers.n_kv_heads,
        head_dim=numbers.head_len,
        intermediate_size=numbers.intermediate_len,
        max_position_embeddings=numbers.max_position_len,
        rope_parameters={"rope_type": "default", "rope_theta": numbers.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers has no types here
        eos_token_id=end, pad_token_id=pad, do_sample=True, temperature=1.0, top_p=1.0, top_k=0
    )
    return model


def demonstration_rows(tokenizer: DemoTokenizer, recipe: DemoRecipe) -> list[Row]:
    """Tokenize `n_steps` × `batch_len` demonstrations, drawn from the training part of the questions."""
    numbers = recipe.warm_start
    rng = random.Random(numbers.seed)
    careful = evolve(numbers, guess_share=0.0, stop_share=0.0)
    conversations: list[list[tuple[str, str]]] = []
    for row in range(numbers.n_steps * numbers.batch_len):
        habits = careful if row < numbers.n_careful_steps * numbers.batch_len else numbers
        n_operations = 1 if rng.random() < recipe.one_operation_share else 2
        question = draw_question(rng, n_operations=n_operations, held_out=False)
        turns = demonstration(question, rng, habits)
        conversations.append(
            [
                (first_prompt_text(question.text) if observation is None else tool_result_text(observation), response)
                for observation, response in turns
            ]
        )
    return conversation_rows(tokenizer, conversations)


def conversation_rows(tokenizer: DemoTokenizer, conversations: Sequence[Sequence[tuple[str, str]]]) -> list[Row]:
    """Tokenize conversations: each turn is the text before it, as the template writes it, and the model's response."""
    pieces: list[str] = []
    owners: list[tuple[int, bool]] = []
    for row, turns in enumerate(conversations):
        for prompt, response in turns:
            pieces += [prompt, response + END_OF_TURN]
            owners += [(row, False), (row, True)]
    ids: list[list[int]] = [[] for _ in conversations]
    trained: list[list[bool]] = [[] for _ in conversations]
    for (row, is_response), piece_ids in zip(owners, tokenizer.encode_many(pieces), strict=True):
        ids[row].extend(piece_ids)
        trained[row].extend([is_response] * len(piece_ids))
    return [Row(token_ids, mask) for token_ids, mask in zip(ids, trained, strict=True)]


def _train(model: Qwen3ForCausalLM, rows: list[Row], numbers: WarmStartRecipe, progress: Progress | None) -> None:
    model.train()
    parameters = list(model.parameters())
    optimizers = _optimizers(model, numbers)
    with ThreadPoolExecutor(numbers.n_workers, "demo-warm-start", _use_one_torch_thread) as pool:
        for step in range(numbers.n_steps):
            batch = rows[step * numbers.batch_len : (step + 1) * numbers.batch_len]
            n_trained = sum(sum(row.trained) for row in batch)
            share = partial(_loss_and_gradients, model, parameters, n_trained)
            parts = list(pool.map(share, [batch[i :: numbers.n_workers] for i in range(numbers.n_workers)]))
            for index, parameter in enumerate(parameters):
                parameter.grad = torch.stack([gradients[index] for _, gradients in parts]).sum(dim=0)
            nn.utils.clip_grad_norm_(parameters, numbers.clip_grad)
            scale = _lr_scale(step, numbers)
            for optimizer, base_lr in optimizers:
                optimizer.param_groups[0]["lr"] = base_lr * scale
                optimizer.step()
            if progress is not None:
                progress(step + 1, numbers.n_steps, sum(loss for loss, _ in parts))


def _loss_and_gradients(
    model: Qwen3ForCausalLM, parameters: list[nn.Parameter], n_trained: int, rows: list[Row]
) -> tuple[float, tuple[Tensor, ...]]:
    """This share's part of the mean loss over `n_trained` tokens, and its gradients. Touches no `.grad`."""
    token_ids, trained = _pad(rows)
    hidden = model.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
    targets = token_ids[:, 1:][trained[:, 1:]]
    logits = model.lm_head(hidden[trained[:, 1:]])
    loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / n_trained
    return loss.item(), torch.autograd.grad(loss, parameters)


def _use_one_torch_thread() -> None:
    torch.set_num_threads(1)


def _pad(batch: list[Row]) -> tuple[Tensor, Tensor]:
    """Right-pad rows: (token ids int64, trained bool), both (rows, longest row)."""
    width = max(len(row.token_ids) for row in batch)
    token_ids = torch.zeros(len(batch), width, dtype=torch.long)
    trained = torch.zeros(len(batch), width, dtype=torch.bool)
    for index, row in enumerate(batch):
        token_ids[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
        trained[index, : len(row.trained)] = torch.tensor(row.trained)
    return token_ids, trained


def _lr_scale(step: int, numbers: WarmStartRecipe) -> float:
    """Linear rise over `n_warmup_steps`, then flat, then linear fall over the last `decay_share` of the steps."""
    rise = (step + 1) / numbers.n_warmup_steps
    fall = (numbers.n_steps - step) / (numbers.decay_share * numbers.n_steps)
    return min(1.0, rise, fall)


def _optimizers(model: nn.Module, numbers: WarmStartRecipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the layers' matrices, AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(rest, lr=numbers.lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [(Muon(matrices, lr=numbers.matrix_lr), numbers.matrix_lr), (adam, numbers.lr)]


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest semi-orthogonal matrix.

    A small model learns to copy numbers in about a third of the steps that AdamW needs, and this phase is all
    copying. Written here because torch has it only since 2.9.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    assert p.grad is not None, "every matrix takes part in the loss"
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(torch.lerp(p.grad, buffer, group["momentum"]))
                # The factor gives the update the root mean square an Adam update has, so rates are comparable.
                step_len = group["lr"] * 0.2 * max(shape) ** 0.5
                for p, update in zip(params, orthogonalized(torch.stack(updates)), strict=True):
                    p.add_(update, alpha=-step_len)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Push every singular value of (n, rows, columns) matrices towards 1 by five Newton–Schulz iterations."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x: Tensor = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if wide else x.mT


@contextmanager
def _isolated_torch(seed: int) -> Iterator[None]:
    """Seed torch and give it one thread, for the block only.

    Threads of ours share the batch instead of torch's sharing each operation: those meet hundreds of times a step
    and spin while they wait, which on cores that are busy otherwise takes ten times as long.
    """
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
