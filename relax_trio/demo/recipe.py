"""The numbers of the demo: what it trains, on what, and how. Owns no behaviour; changing a number here changes the cache key.

The demo must show learning within three minutes on two CPU cores, so every size is the smallest that still shows
it: a model that can copy numbers, a task that needs a tool, and a warm start that leaves good behaviour possible but not preferred.
"""

from __future__ import annotations

import hashlib
import json

from attrs import asdict, field, frozen


@frozen(kw_only=True)
class WarmStartRecipe:
    """The short supervised phase that makes the demo checkpoint.

    The demonstrations mix careful and careless behaviour in fixed shares, so that the warm-started policy is a
    mixture too: sampling sometimes does the right thing, and reinforcement has something to prefer.
    """

    hidden_len: int = 128
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    head_len: int = 32
    intermediate_len: int = 320
    vocab_len: int = 1024
    max_position: int = 2048
    rope_theta: float = 10_000.0
    n_steps: int = 260
    batch_len: int = 64
    lr: float = 3e-3
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    n_threads: int = 2
    guess_share: float = 0.35
    stop_share: float = 0.6
    forget_share: float = 0.1
    seed: int = 7


@frozen(kw_only=True)
class DemoRecipe:
    """Everything the demo chooses for the user. `fingerprint()` names the cached checkpoint."""

    version: int = 1
    warm_start: WarmStartRecipe = field(factory=WarmStartRecipe)

    def fingerprint(self) -> str:
        text = json.dumps({"version": self.version, "warm_start": asdict(self.warm_start)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
