"""What a run uses: tokens a second, memory of this process and of GPUs."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

from relax_trio.data.sample import Sample

_GIB = 2**30


def train_rate(samples: Sequence[Sample], seconds: float | None) -> dict[str, float]:
    """`perf/train_tokens_per_s`: tokens of the rows, prompts and observations included, by seconds of training.

    Args:
      seconds: None without training.
    """
    if not seconds:
        return {}
    return {"perf/train_tokens_per_s": sum(len(sample.tokens) for sample in samples) / seconds}


def memory_use() -> dict[str, float]:
    """`perf/peak_memory_gib` of this process so far; with torch on GPUs `perf/gpu_peak_memory_gib`, of the fullest.

    GiB. Trainer processes and SGLang servers have memory of their own, which isn't among it.
    """
    out = {"perf/peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB}
    torch: Any = sys.modules.get("torch")  # who hasn't loaded it uses no GPU through it
    if torch is not None and torch.cuda.is_available():
        peaks = [torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())]
        out["perf/gpu_peak_memory_gib"] = max(peaks) / _GIB
    return out
