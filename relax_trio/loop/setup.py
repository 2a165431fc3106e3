"""From a checked configuration to the objects of a run. Everything that can be refused is refused here."""

from __future__ import annotations

import math
import os
import random
import tempfile
from pathlib import Path
from typing import Final

import numpy
import torch
from attrs import evolve, frozen

from relax_trio.backend.embedded.backend import EmbeddedBackend, EmbeddedOptions
from relax_trio.backend.embedded.model import ModelInfo
from relax_trio.config.eval_spec import eval_specs
from relax_trio.config.namespace import hook_args
from relax_trio.config.tree import Config
from relax_trio.data.dataset import Dataset, load_dataset
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.rows import RowStream
from relax_trio.errors import ConfigError, boundary
from relax_trio.events import emit
from relax_trio.ids import WeightVersion
from relax_trio.reward.reward import RewardScorer
from relax_trio.runtime.evaluate import EvalDataset
from relax_trio.runtime.ledger import Partition
from relax_trio.runtime.shared import TurnLimits
from relax_trio.runtime.work import Work
from relax_trio.sync.cpu import CpuPool
from relax_trio.tokens.codec import ChatCodec
from relax_trio.tokens.probe import probe_template
from relax_trio.tokens.vision import NoVision
from relax_trio.train.checkpoint import find_latest, load_state


@frozen(kw_only=True)
class Resume:
    """Where a resumed run goes on.

    Attributes:
      checkpoint: one of our checkpoints.
      rollout_id: first step to run.
      next_group: number of the next Group.
      weight_version: version of the checkpoint's weights.
      rows: position of the row stream.
      row_failures: Groups that failed, by row.
    """

    checkpoint: Path
    rollout_id: int
    next_group: int
    weight_version: WeightVersion
    rows: JsonObject
    row_failures: dict[int, int]


def resume_state(
    work: Work, rollout_id: int, weight_version: WeightVersion, run_dir: Path, *, trained: Partition | None = None
) -> JsonObject:
    """What a checkpoint remembers of the loop between two steps; read back by `find_resume`.

    Args:
      trained: a partition that is still open, but part of these weights.
    """
    return {
        "rollout_id": rollout_id,
        "next_group": work.residents.next_group,
        "weight_version": weight_version,
        "rows": work.rows.position(work.unfinished(trained)),
        "row_failures": [[row, count] for row, count in sorted(work.residents.row_failures.items())],
        "run_dir": str(run_dir),
    }


def find_resume(config: Config) -> Resume | None:
    """The checkpoint that `--load` names, None without `--load`.

    Raises:
      ConfigError: there is none, or it is damaged.
    """
    directory = config.train.load
    if directory is None:
        return None
    checkpoint = find_latest(directory)
    if checkpoint is None:
        raise ConfigError(f"--load {directory}: holds no checkpoint; leave the flag out to begin anew")
    state = load_state(checkpoint)
    rollout_id, next_group, rows = state.get("rollout_id"), state.get("next_group"), state.get("rows")
    if not (isinstance(rollout_id, int) and isinstance(next_group, int) and isinstance(rows, dict)):
        raise ConfigError(f"checkpoint {checkpoint}: its state.json is not that of a run; name another by --load")
    return Resume(
        checkpoint=checkpoint,
        rollout_id=rollout_id,
        next_group=next_group,
        weight_version=WeightVersion(str(state.get("weight_version"))),
        rows=rows,
        row_failures=_row_failures(state.get("row_failures")),
    )


def _row_failures(pairs: JsonValue) -> dict[int, int]:
    found = pairs if isinstance(pairs, list) else []
    return {int(str(pair[0])): int(str(pair[1])) for pair in found if isinstance(pair, list) and len(pair) == 2}


def make_save_dir(directory: Path) -> None:
    """Make the directory of checkpoints and write into it once: hours later would be too late to find out.

    Raises:
      ConfigError: it can't be made or written to.
    """
    with boundary(ConfigError, f"--save {directory} can't be written to", OSError):
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()


_EMBEDDED_READS_TEXT: Final = NoVision(
    "the embedded engine serves text only; serve a vision-language checkpoint with --rollout-backend sglang"
)


def load_codec(config: Config, checkpoint: Path, *, scripted: bool = False) -> ChatCodec:
    """Tokenizer, template, parsers and image processor of `checkpoint`.

    Args:
      scripted: answers come from a script, whatever engine the configuration names.

    Raises:
      ConfigError: as `ChatCodec.load`; or the dataset holds images, and none can be served.

    A template that rewrites earlier turns is told as event `template.warned`, with the kinds of turn it does it to.
    """
    rollout = config.rollout
    codec = ChatCodec.load(
        checkpoint, reasoning_parser=rollout.agentic_reasoning_parser, tool_call_parser=rollout.agentic_tool_call_parser
    )
    if config.backend.rollout_backend == "embedded" and not scripted and codec.vision.pads is not None:
        codec = evolve(codec, vision=_EMBEDDED_READS_TEXT)
    if config.data.image_key is not None and isinstance(codec.vision, NoVision):
        raise ConfigError(f"--multimodal-keys: the dataset holds images, but {codec.vision.why}")
    rewriting = probe_template(codec.observations).rewriting_text
    if rewriting:
        emit("template.warned", rewrites=rewriting, finding=f"relax-trio template {checkpoint}")
    return codec


def make_backend(config: Config, checkpoint: Path, codec: ChatCodec, version: WeightVersion) -> EmbeddedBackend:
    """The embedded engine, not started yet. Its context is as long as the longest conversation allowed."""
    lens = (config.rollout.rollout_max_context_len, config.eval.eval_max_context_len)
    known = [length for length in lens if length is not None]
    model_len = ModelInfo(checkpoint).max_position
    if known and max(known) > model_len:
        raise ConfigError(
            f"--rollout-max-context-len or --eval-max-context-len is {max(known)} tokens, but {checkpoint} was made "
            f"for {model_len}; lower it"
        )
    options = EmbeddedOptions(
        max_batch=config.backend.embedded_max_batch,
        max_context_len=max(known) if lens[0] is not None else None,
        dtype=config.backend.embedded_dtype,
        n_threads=config.backend.embedded_threads,
        deterministic=config.rollout.deterministic,
        version=version,
    )
    return EmbeddedBackend(checkpoint, options, decode=codec.decode)


@frozen(kw_only=True)
class RunData:
    """The datasets of a run: rows to roll out, and those to evaluate on."""

    rows: Dataset
    evaluation: tuple[EvalDataset, ...]


def load_data(config: Config) -> RunData:
    """Read every dataset. Comes before anything is made, so that a bad row leaves nothing behind.

    Raises:
      ConfigError: names file and line.
    """
    return RunData(rows=_train_dataset(config), evaluation=_eval_datasets(config))


def _train_dataset(config: Config) -> Dataset:
    data = config.data
    assert data.prompt_data is not None, "checked before"
    return load_dataset(
        data.prompt_data,
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        image_key=data.image_key,
    )


def make_rows(config: Config, dataset: Dataset, resume: Resume | None) -> RowStream:
    """The data source, where the resumed run left it."""
    rows = RowStream(rows=dataset.rows, seed=config.data.rollout_seed, shuffle=config.data.rollout_shuffle)
    if resume is not None:
        rows.restore(resume.rows)
    return rows


def n_rollout_steps(config: Config, dataset: Dataset) -> int:
    """`--num-rollout`, or the steps of one epoch."""
    return config.rollout.num_rollout or math.ceil(len(dataset) / config.rollout.rollout_batch_size)


def _eval_datasets(config: Config) -> tuple[EvalDataset, ...]:
    """The datasets of `--eval-prompt-data`, in their order."""
    return tuple(
        EvalDataset(
            name=spec.name,
            tasks=load_dataset(
                spec.path,
                input_key=spec.input_key,
                label_key=spec.label_key,
                metadata_key=config.data.metadata_key,
                image_key=config.data.image_key,
            ).rows,
            n_samples=spec.n_samples,
            concurrency=spec.concurrency,
        )
        for spec in eval_specs(config)
    )


def train_limits(config: Config, model_len: int) -> TurnLimits:
    """Limits of train Sessions; `model_len` bounds the context where the configuration doesn't."""
    rollout = config.rollout
    return TurnLimits(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_response_len=rollout.rollout_max_response_len,
        max_context_len=rollout.rollout_max_context_len or model_len,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        seed=config.data.rollout_seed if rollout.deterministic else None,
    )


def eval_limits(config: Config, model_len: int) -> TurnLimits:
    """Limits of eval Sessions: the rollout's where eval has none of its own."""
    rollout, evaluation = config.rollout, config.eval
    return TurnLimits(
        temperature=evaluation.eval_temperature,
        max_response_len=evaluation.eval_max_response_len or rollout.rollout_max_response_len,
        max_context_len=evaluation.eval_max_context_len or rollout.rollout_max_context_len or model_len,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        seed=config.data.rollout_seed if rollout.deterministic else None,
    )


def make_scorer(config: Config, cpu: CpuPool) -> RewardScorer:
    """Reward hooks and their limits."""
    return RewardScorer(config.reward, hook_args(config), cpu, max_calls=config.reward.rm_concurrency)


def seed_globals(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
