"""Reasoning in Responses items: written as summary, as content and sealed, read from whichever of these came back.

The seal comes first: it is exact where a client has touched the readable texts. An item with an id alone carries no
text; it counts as no reasoning, and the forest's restore of unechoed reasoning finds the turn again.
"""

from __future__ import annotations

from relax_trio.api.fields import kind_of
from relax_trio.api.sealed import seal, unseal
from relax_trio.data.json import JsonObject, JsonValue
from relax_trio.data.normalize import clean_text, text_or_none
from relax_trio.errors import InvalidRequest


def reasoning_item(text: str, *, item_id: str, status: str) -> JsonObject:
    """The output item of a turn's reasoning."""
    return {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "summary": [{"type": "summary_text", "text": text}],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": seal(text),
    }


def item_reasoning(item: JsonObject, path: str) -> str | None:
    """The text of a reasoning item: from its seal, else its content, else its summary; None where it has none.

    Raises:
      InvalidRequest: one of the three has the wrong type.
    """
    sealed = text_or_none(item.get("encrypted_content"), f"{path}.encrypted_content")
    content = _texts(item.get("content"), f"{path}.content")
    summary = _texts(item.get("summary"), f"{path}.summary")
    restored = None if sealed is None else unseal(sealed)
    return restored or "".join(content) or "\n\n".join(summary) or None


def _texts(raw: JsonValue, path: str) -> list[str]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise InvalidRequest(f"{path} must be a list of texts, not {kind_of(raw)}", param=path)
    texts = []
    for index, part in enumerate(raw):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}[{index}] must be an object with a string in `text`", param=f"{path}[{index}]")
        texts.append(clean_text(text))
    return texts
