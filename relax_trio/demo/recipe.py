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
        can copy, three learn it in fewer steps; 0.43 M parameters with the embedding.
      vocab_len: tokens; enough for each recurring line to be one token, small enough for cheap logits.
      max_position_len: tokens; far above the task, so that the model can be tried by hand.
      n_steps, batch_len: optimizer steps, and demonstrations in each. With 200 steps some seeds still copied
        three-digit numbers badly, with 240 none did.
      n_careful_steps: the first steps, which show careful behaviour only and teach the skill; the rest show the
        mixture and set the preference.
      matrix_lr: rate of Muon (layer matrices); lr: rate of AdamW (embedding, norms).
      n_warmup_steps, decay_share: linear rise, then a linear fall over this share of the steps.
      n_workers: threads that share a batch; fixed because float32 sums depend on it.
      guess_share: demonstrations that answer at once with the last number of the question.
      stop_share: of two-operation demonstrations that called, those that take the first result for the answer.
      seed: of questions, behaviours and initial weights.
    """

    hidden_len: int = 128
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    head_len: int = 32
    intermediate_len: int = 128
    vocab_len: int = 1024
    max_position_len: int = 2048
    rope_theta: float = 10_000.0
    n_careful_steps: int = 180
    n_steps: int = 240
    batch_len: int = 32
    lr: float = 3e-3
    matrix_lr: float = 6e-3
    n_warmup_steps: int = 10
    decay_share: float = 0.4
    clip_grad: float = 1.0
    n_workers: int = 2
    guess_share: float = 0.4
    stop_share: float = 0.72
    seed: int = 7


@frozen(kw_only=True)
class DemoRecipe:
    """Everything the demo chooses for its user: the checkpoint, the data, and the flags of the run that trains on it.

    Attributes:
      version: raise it when code changes what the same numbers give, so that old cached checkpoints are not used.
      one_operation_share: rows that need one call; the others need two, the second with the first one's result.
      warm_start: how the checkpoint is made.
      n_samples_per_prompt, rollout_batch_size: 8 × 8 = 64 Sessions a step. Eight of a kind make a Group without any
        success rare at the start (0.7 ** 8 = 6 %); eight Groups keep the mean reward of a step within 0.06.
      n_steps: steps of the run (`--num-rollout`). With 20, one seed of three ended a hair below a mean reward of 0.8.
      lr: large, because the model is tiny and the change small: a preference, no new skill. 1e-3 destroys the copying
        within five steps, 5e-4 damages it for one seed in six, 1e-4 needs three times the steps.
      lr_decay_style: linear. With a constant rate late steps, whose few failures get large advantages, still move the
        model as much as early ones, and the reward dips.
      clip_grad: largest gradient norm.
      eps_clip: of the policy ratio; without effect while a step is one optimizer update on its own samples.
      temperature: 1.0, so that the recorded logprobs are those of the policy itself.
      max_response_len: tokens of a turn; a call takes about twelve.
      max_context_len: tokens of a conversation; four turns take about a hundred.
      n_eval_rows: held-out questions, answered greedily before and after.
      train_seed, eval_seed: of the two files of questions. They can't overlap, whatever the seeds.
    """

    version: int = 1
    one_operation_share: float = 0.35
    warm_start: WarmStartRecipe = field(factory=WarmStartRecipe)
    n_samples_per_prompt: int = 8
    rollout_batch_size: int = 8
    n_steps: int = 30
    lr: float = 3e-4
    lr_decay_style: str = "linear"
    clip_grad: float = 1.0
    eps_clip: float = 0.2
    temperature: float = 1.0
    max_response_len: int = 32
    max_context_len: int = 256
    n_eval_rows: int = 64
    train_seed: int = 1
    eval_seed: int = 2

    @property
    def n_train_rows(self) -> int:
        """Rows that the run uses once each; spare ones replace Groups that are dropped."""
        return 2 * self.n_steps * self.rollout_batch_size
