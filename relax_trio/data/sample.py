"""A training row and the token context it is made from."""

from __future__ import annotations

from array import array
from enum import Enum

from attrs import define, field, frozen

from relax_trio.data.image import EncodedImage
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import Message
from relax_trio.data.record import Reward
from relax_trio.ids import GroupId, NodeId, PlaceId, WeightVersion


class SampleStatus(Enum):
    """How a context ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"


@frozen(kw_only=True)
class VersionSpan:
    """`n_tokens` generated tokens in a row that one weight version produced."""

    version: WeightVersion
    n_tokens: int


@frozen(kw_only=True)
class Context:
    """One lineage of a forest selected for training: tokens = concatenation of its deltas.

    Attributes:
      name: export name, None for the implicit export.
      node_id: the exported state.
      messages: its canonical messages.
      tokens: `array('i')`, N ids: prompt, then responses and later observations.
      prompt_len: length of the initial observation.
      loss_mask: N - prompt_len bytes of 0 or 1; 1 exactly on generated tokens (less where deduplicated).
      logprobs: `array('d')`, N - prompt_len natural-log probabilities; 0.0 on observation tokens.
      turn_lens: generated tokens of each assistant turn, in order.
      turn_starts: where each turn's tokens begin, counted from the end of the prompt.
      turn_nodes: response node of each assistant turn, in order; two contexts that name one share its tokens.
      versions: spans over the generated tokens, in order; their lengths sum to the generated tokens.
      images: what stands for the placeholders among `tokens`, in order.
      status: truncated when the lineage ends in an observation or in a turn cut by its limit.
    """

    name: str | None
    node_id: NodeId
    messages: tuple[Message, ...]
    tokens: array[int]
    prompt_len: int
    loss_mask: bytearray
    logprobs: array[float]
    turn_lens: tuple[int, ...]
    turn_starts: tuple[int, ...]
    versions: tuple[VersionSpan, ...]
    status: SampleStatus
    metadata: JsonObject
    reward: Reward = None
    turn_nodes: tuple[NodeId, ...] = ()
    images: tuple[EncodedImage, ...] = ()

    def __attrs_post_init__(self) -> None:
        response_len = len(self.tokens) - self.prompt_len
        assert len(self.loss_mask) == response_len, "loss mask covers the response exactly"
        assert len(self.logprobs) == response_len, "one logprob per response token"
        assert sum(span.n_tokens for span in self.versions) == sum(self.turn_lens), (
            "every generated token has a version"
        )


@define(eq=False, kw_only=True)
class Sample:
    """One physical training row, with the names users of slime and Relax know from their hooks.

    Attributes:
      prompt: the dataset row's prompt.
      response: text of everything after the prompt tokens.
      label: the row's label.
      tokens: `array('i')`, prompt and response.
      response_length: tokens after the prompt (R).
      loss_mask: R ints of 0 or 1.
      rollout_log_probs: R natural-log probabilities, 0.0 on observation tokens.
      reward: primary reward as exported or as the RM gave it, None while there is none.
      metadata: exported metadata of the context over the row's metadata.
      output_metadata: what the agent exported, without the row's.
      train_metadata: what the trainer gets besides; empty by default.
      index: number of the logical Session in the run; all contexts of a Session share it.
      group_index: number of the Group in the run.
      status: "completed" or "truncated".
      weight_versions: the version of every generated span, in order.
      place: public name of the Session's place.
      group: public name of the Group.
      name: export name, None for the implicit export.
      row: dataset row.
      messages: canonical messages of the context.
      turn_lens, turn_starts: generated tokens of each assistant turn, and where they begin behind the prompt.
      images: what stands for the placeholders among `tokens`, in order.
      advantage: base credit of the row, or one number for each assistant turn, set by credit.
    """

    prompt: JsonValue
    response: str
    label: JsonValue
    tokens: array[int]
    response_length: int
    loss_mask: bytearray
    rollout_log_probs: array[float]
    reward: Reward
    metadata: JsonObject
    train_metadata: JsonObject = field(factory=dict)
    index: int
    group_index: int
    status: str
    weight_versions: tuple[VersionSpan, ...]
    place: PlaceId
    group: GroupId
    name: str | None
    row: int
    messages: tuple[Message, ...]
    turn_lens: tuple[int, ...]
    turn_starts: tuple[int, ...]
    advantage: float | tuple[float, ...] | None = None
    output_metadata: JsonObject = field(factory=dict)
    images: tuple[EncodedImage, ...] = ()
