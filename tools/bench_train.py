"""Measures the trainer: tokens per second and peak memory beside a plain padded Hugging Face loop and TRL's GRPO step.

    python tools/bench_train.py --rounds 5 --trl-python PYTHON

All train the same model (random weights) on the same rows by the same loss, one optimizer step a turn, with AdamW in
float32. Rows have the length spread of agent traces: log-normal, with a long tail, the prompt a part of each,
stretches of tool output untrained. Every contender is a process of its own; they take turns, and the ratios are medians
of the ratios within a turn. Time is that of the processor on CPU, so that other work on the machine counts for nobody,
and the clock's on GPU. Tokens are the rows' own: padding counts for nobody. TRL may live in another environment
(`tools/trl_env DIR`), whose Python is named by `--trl-python`; without it, it is left out. The contenders pad each
micro-batch to its own longest row, which is kinder than padding the whole step.

The last line is one JSON object. Exits with 1 where the padded loop is less than `--at-least` times slower, TRL is
faster, or either has the lower peak.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Row = dict[str, list[int]]
Step = Callable[[int], float]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
EPS = 0.2


def make_rows(args: argparse.Namespace) -> list[Row]:
    """Rows as agents leave them: `ids`, and `mask` with 1 on generated tokens."""
    draw = random.Random(args.seed)
    rows = []
    for _ in range(args.rows):
        n = min(args.longest, max(16, int(draw.lognormvariate(math.log(args.median), args.spread))))
        mask = [0] * max(4, n // 8)
        while len(mask) < n:
            mask += [1] * draw.randint(8, 64) + [0] * draw.randint(4, 48)
        mask = [*mask[: n - 1], 1]
        rows.append({"ids": [draw.randrange(args.vocab) for _ in range(n)], "mask": mask})
    return rows


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 128),
        head_dim=64,
        max_position_embeddings=args.longest,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).to(DEVICE)


def advantage_of(row: int) -> float:
    return 1.0 if row % 2 else -1.0


# --- contenders -----------------------------------------------------------------------------------------------------


def ours(args: argparse.Namespace) -> Step:
    """The project's own trainer."""
    from array import array

    from relax_trio.config.tree import TrainConfig
    from relax_trio.data.sample import Sample
    from relax_trio.ids import GroupId, PlaceId
    from relax_trio.train.phase import run_phase
    from relax_trio.train.policy import make_policy
    from relax_trio.train.settings import TrainerSettings
    from relax_trio.train.update import Updater

    samples = []
    for index, row in enumerate(make_rows(args)):
        start = row["mask"].index(1)
        mask = row["mask"][start:]
        samples.append(
            Sample(
                prompt="",
                response="",
                label=None,
                tokens=array("i", row["ids"]),
                response_length=len(mask),
                loss_mask=bytearray(mask),
                rollout_log_probs=array("d", [-math.log(args.vocab) if m else 0.0 for m in mask]),
                reward=None,
                metadata={},
                index=index,
                group_index=0,
                status="completed",
                weight_versions=(),
                place=PlaceId(f"G0/{index}"),
                group=GroupId("G0"),
                name=None,
                row=0,
                messages=(),
                turn_lens=(),
                turn_starts=(),
                advantage=advantage_of(index),
            )
        )
    train = TrainConfig(
        lr=1e-5, use_dynamic_batch_size=True, max_tokens_per_gpu=args.max_tokens, calculate_per_token_loss=True
    )
    updater = Updater(make_policy(make_model(args), train), TrainerSettings(train=train, device=DEVICE))

    def step(_: int) -> float:
        return run_phase(updater, samples, lambda: None).metrics["train/loss"]

    return step


def shuffled(rows: list[Row], turn: int, size: int) -> list[list[int]]:
    order = list(range(len(rows)))
    random.Random(turn).shuffle(order)
    return [order[start : start + size] for start in range(0, len(order), size)]


def padded_tensors(rows: list[Row], chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, T) ids, attention mask and loss mask, padded on the right."""
    longest = max(len(rows[i]["ids"]) for i in chosen)
    ids, attention, loss = (torch.zeros((len(chosen), longest), dtype=torch.int64) for _ in range(3))
    for b, i in enumerate(chosen):
        n = len(rows[i]["ids"])
        ids[b, :n] = torch.tensor(rows[i]["ids"])
        attention[b, :n] = 1
        loss[b, :n] = torch.tensor(rows[i]["mask"])
    return ids.to(DEVICE), attention.to(DEVICE), loss.to(DEVICE)


def padded(args: argparse.Namespace) -> Step:
    """The loop that one writes first: shuffled micro-batches, padding, full logits."""
    rows, model = make_rows(args), make_model(args).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    n_trained = sum(sum(row["mask"]) for row in rows)

    def step(turn: int) -> float:
        total = 0.0
        for chosen in shuffled(rows, turn, args.micro):
            ids, attention, mask = padded_tensors(rows, chosen)
            logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            advantage = torch.tensor([[advantage_of(i)] for i in chosen], device=DEVICE)
            ratio = (logprobs + math.log(args.vocab)).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS) * advantage)
            loss = -(surrogate * mask[:, 1:]).sum() / n_trained
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def trl(args: argparse.Namespace) -> Step:
    """TRL's own loss on its own model wrapper; the batches are handed to it in place of generation."""
    import tempfile

    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    rows = make_rows(args)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b")
    home = tempfile.mkdtemp()
    config = GRPOConfig(
        output_dir=home,
        use_cpu=not GPU,
        bf16=False,
        per_device_train_batch_size=args.micro,
        num_generations=2,
        beta=0.0,
        loss_type="dapo",
        report_to=[],
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=make_model(args),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=tokenizer,
    )
    model = trainer.model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batches_of = {turn: shuffled(rows, turn, args.micro) for turn in range(args.rounds + 1)}
    trainer.current_gradient_accumulation_steps = len(batches_of[0])
    n_trained = torch.tensor(sum(sum(row["mask"]) for row in rows))

    def step(turn: int) -> float:
        total = 0.0
        for chosen in batches_of[turn]:
            ids, attention, mask = padded_tensors(rows, chosen)
            # All after the first common prompt token is its completion: only there it makes logits.
            start = min(rows[i]["mask"].index(1) for i in chosen)
            loss = trainer._compute_loss(
                model,
                {
                    "prompt_ids": ids[:, :start],
                    "prompt_mask": attention[:, :start],
                    "completion_ids": ids[:, start:],
                    "completion_mask": attention[:, start:],
                    "tool_mask": mask[:, start:],
                    "advantages": torch.tensor([advantage_of(i) for i in chosen], device=DEVICE),
                    "old_per_token_logps": torch.full(ids[:, start:].shape, -math.log(args.vocab), device=DEVICE),
                    "num_items_in_batch": n_trained.to(DEVICE),
                },
            )
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


CONTENDERS = {"ours": ours, "padded": padded, "trl": trl}


# --- one contender's process ----------------------------------------------------------------------------------------


def contend(args: argparse.Namespace) -> None:
    """Make a step for every line read; tell its seconds, its loss and the peak memory so far."""
    torch.set_num_threads(args.threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    step = CONTENDERS[args.contender](args)
    base = memory()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        started = now()
        loss = step(int(line))
        if GPU:
            torch.cuda.synchronize()
        told = {"seconds": now() - started, "loss": loss, "peak": memory(), "base": base}
        print(json.dumps(told), file=answers, flush=True)


def now() -> float:
    return time.perf_counter() if GPU else time.process_time()


def memory() -> int:
    """Peak bytes of the process so far: the GPU's where there is one, else resident memory."""
    if GPU:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- the measurement ------------------------------------------------------------------------------------------------


class Contender:
    """A contender in its own process."""

    def __init__(self, name: str, python: str, options: list[str]) -> None:
        self.name = name
        self.told: list[dict[str, float]] = []
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), *options, "--contender", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def turn(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        self.told.append(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: exit status {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer


def main() -> int:
    args = arguments()
    if args.contender:
        contend(args)
        return 0
    lens = [len(row["ids"]) for row in make_rows(args)]
    print(f"{len(lens)} rows, {sum(lens)} tokens, median {statistics.median(lens):.0f}, longest {max(lens)}")
    pythons = {"ours": sys.executable, "padded": sys.executable}
    if args.trl_python:
        pythons["trl"] = args.trl_python
    contenders = [Contender(name, python, sys.argv[1:]) for name, python in pythons.items()]
    try:
        for turn in range(args.rounds + 1):
            for contender in contenders:
                contender.turn(turn)
    finally:
        for contender in contenders:
            contender.close()
    return report(contenders, sum(lens), args)


def report(contenders: list[Contender], n_tokens: int, args: argparse.Namespace) -> int:
    """Print the table and the summary; the first turn warms up and isn't counted."""
    first = contenders[0]
    summary: dict[str, float] = {}
    good = True
    print(f"{'':8}{'tokens/s':>10}{'ours is':>10}{'peak MiB':>10}{'over base':>11}{'loss':>12}")
    for contender in contenders:
        seconds = [told["seconds"] for told in contender.told[1:]]
        ratio = statistics.median(s / o["seconds"] for s, o in zip(seconds, first.told[1:], strict=True))
        last = contender.told[-1]
        over = last["peak"] - last["base"]
        print(
            f"{contender.name:8}{n_tokens / statistics.median(seconds):10.0f}{ratio:9.2f}x{last['peak'] / 2**20:10.0f}"
            f"{over / 2**20:11.0f}{contender.told[0]['loss']:12.6f}"
        )
        summary[f"{contender.name}_tokens_per_s"] = n_tokens / statistics.median(seconds)
        summary[f"{contender.name}_peak_mib"] = last["peak"] / 2**20
        if contender is not first:
            summary[f"faster_than_{contender.name}"] = ratio
            bound = args.at_least if contender.name == "padded" else 1.0
            good &= ratio >= bound and first.told[-1]["peak"] <= last["peak"]
    print(json.dumps({name: round(value, 3) for name, value in summary.items()}))
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--median", type=float, default=200.0, help="tokens of the middle row")
    parser.add_argument("--spread", type=float, default=1.0, help="sigma of the logarithm of lengths")
    parser.add_argument("--longest", type=int, default=2048, help="tokens at which a row is cut")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--micro", type=int, default=8, help="rows of a padded micro-batch")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens of a packed micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch on CPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-least", type=float, default=2.0, help="bound of the ratio to the padded loop")
    parser.add_argument("--trl-python", default="", help="Python of an environment with TRL")
    parser.add_argument("--contender", choices=("", *CONTENDERS), default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
