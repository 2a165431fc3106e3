"""Exported contexts → training rows."""

from __future__ import annotations

from relax_trio.data.sample import Context, Sample
from relax_trio.ids import place_id
from relax_trio.runtime.group import Complete, Group
from relax_trio.tokens.codec import ChatCodec


def build_samples(group: Group, outcome: Complete, codec: ChatCodec) -> list[Sample]:
    """Make the rows of a complete Group, in order of place and export. All contexts of a Session share one index."""
    return [
        _build(group, index, context, codec)
        for index, session in enumerate(outcome.sessions)
        for context in session.contexts
    ]


def _build(group: Group, index: int, context: Context, codec: ChatCodec) -> Sample:
    task = group.task
    response = context.tokens[context.prompt_len :]
    return Sample(
        prompt=task.prompt,
        response=codec.decode(response),
        label=task.label,
        tokens=context.tokens,
        response_length=len(response),
        loss_mask=context.loss_mask,
        rollout_log_probs=context.logprobs,
        reward=context.reward,
        metadata={**task.metadata, **context.metadata},
        output_metadata=context.metadata,
        index=group.number * group.n_places + index,
        group_index=group.number,
        status=context.status.value,
        weight_versions=context.versions,
        place=place_id(group.id, index),
        group=group.id,
        name=context.name,
        row=task.row,
        messages=context.messages,
        images=context.images,
        turn_lens=context.turn_lens,
        turn_starts=context.turn_starts,
    )
