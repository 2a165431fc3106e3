"""What a run wrote down, compared token by token with a server's raw answers and with plain forward passes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from relax_trio.observe.dump import read_rollout_dump


@dataclass(frozen=True, kw_only=True)
class Raw:
    """One request as the server answered it: token, logprob and version of each generated token, over all its legs."""

    tokens: list
    n_legs: int


def raw_turns(record):
    """Request → `Raw`; a request is named by its attempts' rids without their numbers."""
    turns = defaultdict(lambda: ([], []))
    for leg in record.legs():
        rid = re.fullmatch(r"[0-9a-f]{8}-\d+-(.*)\.\d+;", leg.request["rid"])[1]
        tokens, legs = turns[rid]
        legs.append(leg)
        if leg.status == 200 and leg.answer["output_ids"]:
            meta = leg.answer["meta_info"]
            whole = {"version": meta["weight_version"], "start": 0, "end": len(leg.answer["output_ids"])}
            spans = meta.get("weight_versions", [whole])  # an older server names one version for all
            versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            tokens.extend(zip(leg.answer["output_ids"], logprobs, versions, strict=True))
    return {rid: Raw(tokens=tokens, n_legs=len(legs)) for rid, (tokens, legs) in turns.items()}


def dumps(run_dir):
    """Every step's dump, in order."""
    paths = sorted(Path(run_dir).glob("samples-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
    return [read_rollout_dump(path) for path in paths]


def written_turns(dump):
    """Request → its generated tokens as `Raw` has them, of every Session of a step whose turns are one row."""
    found = {}
    for session in dump.sessions:
        (sample,) = [sample for sample in dump.samples if sample.place == session.place]
        tokens = sample.tokens.tolist()
        prompt_len = len(tokens) - sample.response_length
        versions = list(chain.from_iterable([span.version] * span.n_tokens for span in sample.weight_versions))
        at = 0
        requests = [session_request["attempts"][0]["rid"].rpartition(".")[0] for session_request in session.requests]
        for rid, start, n_tokens in zip(requests, sample.turn_starts, sample.turn_lens, strict=True):
            where = slice(start, start + n_tokens)
            found[rid] = list(
                zip(
                    tokens[prompt_len:][where],
                    sample.rollout_log_probs.tolist()[where],
                    versions[at : at + n_tokens],
                    strict=True,
                )
            )
            at += n_tokens
    return found


def gaps(dump, models):
    """Differences of every generated token's logprob to the plain model of the token's own version.

    Args:
      models: version → model.
    """
    found = []
    for sample in dump.samples:
        tokens = torch.tensor([sample.tokens.tolist()])
        prompt_len = tokens.shape[1] - sample.response_length
        versions = list(chain.from_iterable([span.version] * span.n_tokens for span in sample.weight_versions))
        places = [
            start + i
            for start, n_tokens in zip(sample.turn_starts, sample.turn_lens, strict=True)
            for i in range(n_tokens)
        ]
        for version in set(versions):
            with torch.inference_mode():
                logits = models(version)(input_ids=tokens, use_cache=False).logits[0].float()
            logprobs = torch.log_softmax(logits, dim=-1)
            for place, own in zip(places, versions, strict=True):
                if own == version:
                    at = prompt_len + place
                    plain = logprobs[at - 1, tokens[0, at]].item()
                    found.append(abs(plain - sample.rollout_log_probs[place]))
    return found


def version_models(checkpoint, save_dir, dtype=torch.float32):
    """A function: version → its plain model, read from the run's checkpoints; "0" is where the run began."""
    loaded = {}

    def load(version):
        if version not in loaded:
            path = checkpoint if version == "0" else Path(save_dir) / f"step_{int(version):06d}"
            loaded[version] = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="eager"
            ).eval()
        return loaded[version]

    return load


def metrics_of(run_dir):
    """The objects of metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
