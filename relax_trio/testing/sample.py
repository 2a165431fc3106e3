"""A training row for tests of reward hooks, credit and metrics. Not covered: rows of real conversations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.messages import Message
from relax_trio.data.record import Reward
from relax_trio.data.sample import Sample, VersionSpan
from relax_trio.ids import WeightVersion, group_id, place_id


def make_sample(
    *,
    group: int = 0,
    place: int = 0,
    reward: Reward = None,
    prompt: JsonValue = "What is 1 + 1?",
    response: str = "2",
    label: JsonValue = "2",
    name: str | None = None,
    metadata: JsonObject | None = None,
    prompt_len: int = 3,
    turn_lens: Sequence[int] = (4,),
    status: str = "completed",
) -> Sample:
    """Make a consistent row: turns of `turn_lens` generated tokens with one observation token between two of them.

    Token ids count from 0, every generated token has logprob -0.5 and weight version "0".
    """
    mask, starts = bytearray(), []
    for turn, turn_len in enumerate(turn_lens):
        mask += bytes([0] * bool(turn))
        starts.append(len(mask))
        mask += bytes([1] * turn_len)
    return Sample(
        prompt=prompt,
        response=response,
        label=label,
        tokens=array("i", range(prompt_len + len(mask))),
        response_length=len(mask),
        loss_mask=mask,
        rollout_log_probs=array("d", [-0.5 if trained else 0.0 for trained in mask]),
        reward=reward,
        metadata=metadata or {},
        output_metadata=metadata or {},
        index=group * 1000 + place,
        group_index=group,
        status=status,
        weight_versions=(VersionSpan(version=WeightVersion("0"), n_tokens=sum(turn_lens)),),
        place=place_id(group_id(group), place),
        group=group_id(group),
        name=name,
        row=group,
        messages=(Message(role="user", content=str(prompt)), Message(role="assistant", content=response)),
        turn_lens=tuple(turn_lens),
        turn_starts=tuple(starts),
    )
