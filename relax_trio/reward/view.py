"""What a hook sees of a training row: the names it knows, as plain lists and objects of its own.

Owns the border between our row and foreign code: nothing the hook does to its view reaches tokens, masks or logprobs.
`metadata` and `train_metadata` alone are taken over when the hook changed them.
"""

from __future__ import annotations

from functools import cached_property

from relax_trio.data.json import JsonObject, JsonValue, canonical_json
from relax_trio.data.record import Reward
from relax_trio.data.sample import Sample
from relax_trio.errors import RewardError


class HookSample:
    """A row as hooks of slime and Relax know it.

    Attributes:
      prompt: the dataset row's prompt, a string or a message list.
      response: text of everything after the prompt tokens.
      label: the row's label, None without `--label-key`.
      tokens: list of N ids, prompt and response.
      response_length: tokens after the prompt (R).
      loss_mask: list of R ints of 0 or 1.
      rollout_log_probs: list of R natural-log probabilities, 0.0 where the mask is 0.
      reward: the exported reward, None while there is none.
      metadata: exported metadata over the row's; what the hook changes here is kept.
      train_metadata: for the trainer; what the hook changes here is kept.
      index: number of the logical Session in the run.
      group_index: number of the Group in the run.
      status: "completed" or "truncated".
      weight_versions: version strings in order of generation.
    """

    # Long lists are made when they are asked for: most hooks read the response and the label only.

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self.response = sample.response
        self.response_length = sample.response_length
        self.index = sample.index
        self.group_index = sample.group_index
        self.status = sample.status
        self.reward: Reward = sample.reward
        self.metadata = _copy_object(sample.metadata)
        self.train_metadata = _copy_object(sample.train_metadata)

    @cached_property
    def prompt(self) -> JsonValue:
        """See the class."""
        return _copy(self._sample.prompt)

    @cached_property
    def label(self) -> JsonValue:
        """See the class."""
        return _copy(self._sample.label)

    @cached_property
    def tokens(self) -> list[int]:
        """See the class."""
        return self._sample.tokens.tolist()

    @cached_property
    def loss_mask(self) -> list[int]:
        """See the class."""
        return list(self._sample.loss_mask)

    @cached_property
    def rollout_log_probs(self) -> list[float]:
        """See the class."""
        return self._sample.rollout_log_probs.tolist()

    @cached_property
    def weight_versions(self) -> list[str]:
        """See the class."""
        return [str(span.version) for span in self._sample.weight_versions]


def take_over(view: HookSample, sample: Sample, hook_path: str) -> None:
    """Copy `metadata` and `train_metadata` from the view to its row when the hook changed them.

    Raises:
      RewardError: one of them is no JSON object any more. The row is then unchanged.
    """
    taken = {}
    for name in ("metadata", "train_metadata"):
        value = getattr(view, name)
        if value != getattr(sample, name):
            taken[name] = _checked(value, f"session {sample.place}: {hook_path} left sample.{name}")
    for name, value in taken.items():
        setattr(sample, name, value)


def _checked(value: object, what: str) -> JsonObject:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise RewardError(f"{what} as {type(value).__name__}; it must stay an object with string keys")
    try:
        canonical_json(value)
    except (TypeError, ValueError, RecursionError) as exc:
        raise RewardError(f"{what} with a value that is not JSON: {exc}") from None
    return _copy_object(value)


def _copy_object(value: JsonObject) -> JsonObject:
    return {key: _copy(item) for key, item in value.items()}


def _copy(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return _copy_object(value)
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value
