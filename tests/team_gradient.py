"""One process of a team that computes gradients: python tests/team_gradient.py RANK N STORE OUT.

Writes for each of `CASES` the whole gradient and the metrics into OUT; also what a test compares them with.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from builders_train import off_policy, rollout, settings, tiny_model
from torch.distributed.device_mesh import init_device_mesh

from relax_trio.train.phase import run_phase
from relax_trio.train.policy import Policy
from relax_trio.train.reference import Reference
from relax_trio.train.team import ALONE, Team
from relax_trio.train.update import Updater

PACKED = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
CASES = {
    "packed": ("qwen3", 8, PACKED),
    "one_micro_batch": ("llama", 2, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1000}),
    "padded": ("gemma2", 5, {"micro_batch_size": 2}),
    "recomputed_layers": ("llama", 7, {**PACKED, "gradient_checkpointing": True}),
    "whitened_with_kl": (
        "qwen3",
        8,
        {**PACKED, "normalize_advantages": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    ),
    "sessions_in_several_micro_batches": (
        "llama",
        8,
        {"micro_batch_size": 1, "estimator": "gspo", "use_opsm": True, "opsm_delta": 0.0},
    ),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def gradient(case: str, dtype: torch.dtype, team: Team = ALONE):
    """Flat gradient of the one optimizer step of a case, and its metrics."""
    kind, n_rows, train = CASES[case]
    model = tiny_model(kind).to(dtype)
    chosen = settings(lr=0.0, clip_grad=0.0, **train)
    samples = off_policy(rollout(model, n_rows))
    policy = Policy(model, recompute_layers=chosen.train.gradient_checkpointing)
    team.shard(policy)
    reference = None
    if chosen.train.needs_reference:
        other = Policy(tiny_model(kind, seed=7).to(dtype).requires_grad_(False))
        team.shard(other)
        reference = Reference(other, chosen.distribution, team)
    updater = Updater(policy, chosen, reference, team)
    seen = []

    def keep(*_):
        seen.append(torch.cat([team.whole(p.grad).flatten() for p in model.parameters()]))

    updater._optimizer.register_step_pre_hook(keep)
    metrics = run_phase(updater, samples, lambda: None).metrics
    return seen[0], metrics


def main(rank: int, n: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = Path(store).as_uri()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    team = Team(rank, n, init_device_mesh("cpu", (n,)))
    found = {f"{case}/{name}": gradient(case, dtype, team) for case in CASES for name, dtype in DTYPES.items()}
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
