"""The numbers of the demo: what it trains, on what, and how. Owns no behaviour.

The demo must show learning within three minutes on two CPU cores, so every size is the smallest that still shows
it: a model that can copy numbers, a task that needs a tool, and a warm start that leaves good behaviour possible
but not preferred.
"""

from __future__ import annotations

from attrs import field, frozen


@frozen(kw_only=True)
class WarmStartRecipe:
    """The supervised phase that makes the demo checkpoint.

    Attributes:
      hidden_len, n_layers, n_heads, n_kv_heads, head_len, intermediate_len: shape of the Qwen3 model. Two layers
        can copy, three copy in half the steps; about 0.65 M parameters with the embedding.
      vocab_len: tokens; enough for each recurring line to be one token, small enough for cheap logits.
      max_position_len: tokens; far above the task, so that the model can be tried by hand.
      n_steps, batch_len: demonstrations seen = product. Copying appears at about step 90; the rest makes it reliable.
      matrix_lr: rate of Muon (layer matrices); lr: rate of AdamW (embedding, norms).
      n_warmup_steps, decay_share: linear rise, then a linear fall over this share of the steps.
      n_threads: torch threads, fixed because float32 sums depend on it.
      guess_share: demonstrations that answer at once with the last number of the question.
      stop_share: of two-operation demonstrations that called, those that take the first result for the answer.
      forget_share: likewise, those that forget the first result in the second call.
      seed: of questions, behaviours and initial weights.
    """

    hidden_len: int = 128
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    head_len: int = 32
    intermediate_len: int = 320
    vocab_len: int = 1024
    max_position_len: int = 2048
    rope_theta: float = 10_000.0
    n_careful_steps: int = 120
    n_steps: int = 180
    batch_len: int = 32
    lr: float = 3e-3
    matrix_lr: float = 6e-3
    n_warmup_steps: int = 10
    decay_share: float = 0.4
    clip_grad: float = 1.0
    n_threads: int = 2
    guess_share: float = 0.35
    stop_share: float = 0.6
    forget_share: float = 0.1
    seed: int = 7


@frozen(kw_only=True)
class DemoRecipe:
    version: int = 1
    one_operation_share: float = 0.35
    warm_start: WarmStartRecipe = field(factory=WarmStartRecipe)
