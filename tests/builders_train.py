"""What tests of the trainer are made of: tiny random models, rows sampled from them, settings, cancellation."""

from __future__ import annotations

from array import array

import torch
import trio
from attrs import evolve
from tokenizers import Tokenizer, models
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from relax_trio.config.tree import TrainConfig
from relax_trio.data.sample import Sample
from relax_trio.ids import GroupId, PlaceId
from relax_trio.train.phase import run_phase
from relax_trio.train.policy import Distribution, Policy
from relax_trio.train.settings import TrainerSettings
from relax_trio.train.update import Updater

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CPU = torch.device("cpu")


def tiny_model(kind="qwen3", seed=0):
    torch.manual_seed(seed)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.5, attn_implementation="eager"))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)  # far from uniform, so that mistakes show
    return model.eval()


def write_checkpoint(path):
    """A Qwen3 checkpoint with a tokenizer."""
    tiny_model().save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages }}").save_pretrained(path)
    return path


def make_sample(tokens, mask, *, index=0, advantage=1.0, logprobs=None, group_index=0):
    return Sample(
        prompt="",
        response="",
        label=None,
        tokens=array("i", tokens),
        response_length=len(mask),
        loss_mask=bytearray(mask),
        rollout_log_probs=array("d", logprobs or [0.0] * len(mask)),
        reward=None,
        metadata={},
        index=index,
        group_index=group_index,
        status="completed",
        weight_versions=(),
        place=PlaceId(f"G{group_index}/{index}"),
        group=GroupId(f"G{group_index}"),
        name=None,
        row=0,
        messages=(),
        turn_lens=(),
        turn_starts=(),
        advantage=advantage,
    )


def rollout(model, n, *, temperature=1.0, seed=0, max_len=12):
    """On-policy rows of varied length, with untrained stretches, logprobs taken from unpadded full logits."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(n):
        prompt_len, response_len = (int(torch.randint(1, max_len, (1,), generator=generator)) for _ in range(2))
        tokens = torch.randint(0, VOCAB, (prompt_len,), generator=generator).tolist()
        mask, logprobs = [], []
        for t in range(response_len):
            with torch.no_grad():
                log_probs = (model(torch.tensor([tokens])).logits[0, -1] / (temperature or 1.0)).log_softmax(-1)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            mask.append(int(t % 3 != 1))
            logprobs.append(float(log_probs[token]) if mask[-1] else 0.0)
            tokens.append(token)
        advantage = float(torch.randn(1, generator=generator))
        rows.append(make_sample(tokens, mask, index=index // 2, advantage=advantage, logprobs=logprobs))
    return rows


def off_policy(samples, seed=1):
    """The same rows as if another policy had sampled them."""
    noise = torch.Generator().manual_seed(seed)
    return [
        evolve(
            s,
            rollout_log_probs=array(
                "d",
                [
                    p + 0.3 * float(torch.randn(1, generator=noise)) if m else 0.0
                    for p, m in zip(s.rollout_log_probs, s.loss_mask, strict=True)
                ],
            ),
        )
        for s in samples
    ]


def settings(*, distribution=None, deterministic=False, n_total=None, estimator="grpo", token_budget=1024, **train):
    return TrainerSettings(
        train=TrainConfig(**{"lr": 1e-3, **train}),
        distribution=distribution or Distribution(),
        deterministic=deterministic,
        n_total=n_total,
        device=CPU,
        estimator=estimator,
        token_budget=token_budget,
    )


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def same_tensors(a, b):
    return a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(t, b.tensors[name]) for name, t in a.tensors.items()
    )


def cancel_at_score(n, monkeypatch, scope):
    """Cancel `scope` while the nth micro-batch is at work; returns the list that counts them."""
    score, seen = Policy.score, []

    def scoring(self, batch, distribution):
        seen.append(batch)
        if len(seen) == n:
            trio.from_thread.run_sync(scope.cancel)
        return score(self, batch, distribution)

    monkeypatch.setattr(Policy, "score", scoring)
    return seen


def flat_gradient(policy, samples, **train):
    """Flat gradient of one optimizer step, as AdamW gets it, and the metrics; the model stays as it is."""
    updater = Updater(policy, settings(**{"lr": 0.0, "clip_grad": 0.0, **train}))
    seen = []
    updater._optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad]))
    )
    metrics = run_phase(updater, samples, lambda: None).metrics
    (gradient,) = seen
    return gradient, metrics
