"""The check that observations are exact, used by tests and by the table in docs/templates.md.

The oracle is the template's own rendering of the whole conversation: an observation has to be its end, token by token,
and to begin exactly where the turn before it ends there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

from template_families import Family

from relax_trio.data.json import JsonObject
from relax_trio.data.messages import Message
from relax_trio.errors import InvalidRequest
from relax_trio.tokens.dialogues import Round

Stopped = Literal["by a stop token", "by its limit", "by a stop string", "by another stop token"]
Played = Literal["append-only", "rewriting", "rewriting later", "refused"]
STOP_STRING = "\nObservation:"


def play_exactly(
    family: Family,
    opening: Sequence[Message],
    rounds: Sequence[Round],
    tools: Sequence[JsonObject],
    kwargs: JsonObject,
    stopped: Stopped = "by a stop token",
) -> Played:
    """Play a conversation turn by turn, and check every observation against the rendering of the whole.

    Returns:
      "append-only" where all recorded pieces joined are the template's own rendering after every round; "rewriting"
      where it changed something that was recorded, "rewriting later" where the first round's messages had not done it
      yet; "refused" where it refuses the conversation.
    """
    codec, history = family.codec, tuple(opening)
    n_appended = 0
    try:
        recorded = codec.encode_opening(history, tools, kwargs)
        for turn, following in rounds:
            turn_ids = recorded_turn(family, turn, following, kwargs, stopped)
            observation = codec.encode_observation(
                following, tools, kwargs, turn=turn, turn_ids=turn_ids, earlier=history
            )
            history = (*history, turn, *following)
            whole = codec.encode_opening(history, tools, kwargs)
            check_observation(family, turn, turn_ids, observation, whole)
            recorded += turn_ids + observation
            n_appended += recorded == whole
    except InvalidRequest:
        return "refused"
    if n_appended == len(rounds):
        return "append-only"
    return "rewriting later" if n_appended else "rewriting"


def recorded_turn(
    family: Family, turn: Message, following: tuple[Message, ...], kwargs: JsonObject, stopped: Stopped
) -> array[int]:
    """What an engine would have returned for `turn`."""
    text = family.generates(turn, kwargs)
    usual = family.stop(turn, following)
    if stopped == "by a stop string":
        text += STOP_STRING
    if stopped == "by a stop token":
        text += usual
    if stopped == "by another stop token":
        text += next(stop for stop in family.stops if stop != usual)
    return array("i", family.codec.encode_text(text))


def check_observation(
    family: Family, turn: Message, turn_ids: array[int], observation: array[int], whole: array[int]
) -> None:
    """Check that `observation` is the end of `whole` and begins where `turn` ends."""
    decode = family.codec.decode
    assert observation == whole[-len(observation) :], (
        f"not the end of the template's rendering: {decode(observation)!r}"
    )
    before = decode(whole[: -len(observation)])
    said = decode(family.codec.encode_text(family.printed(turn)))  # as the tokenizer normalizes text
    last = decode(turn_ids[-1:])
    if last in family.ends:  # the token that ends the turn is recorded, perhaps another than the history prints
        assert before.endswith(tuple(said + end for end in family.ends)), f"begins elsewhere, behind {before[-80:]!r}"
    elif not family.ends and before.endswith(said + last):  # the tag of the next message is recorded
        assert last in family.stops
    else:
        assert before.endswith(said), f"begins elsewhere, behind {before[-80:]!r}"
        assert decode(observation[:1]) in (family.ends or family.special)
