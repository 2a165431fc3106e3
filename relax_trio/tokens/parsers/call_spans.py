"""Where in a text the calls stand that a parser of others found in it.

Such a parser returns calls and some text, and drops the rest: text behind a call, calls that are malformed. What it
dropped is found by asking again. Marks of the format cut the text into tokens; a token belongs to a call if that call
is no longer found without it; from a call's first such token to its last all is its markup. Marks that stand beside a
call (closing tags, wrappers) go with it. Everything else is content, whatever the parser made of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from attrs import define

from relax_trio.tokens.parsers.base import ParsedCall, Piece

See: TypeAlias = Callable[[str], tuple[ParsedCall, ...]]
"""The calls that a parser finds in a text."""

_MAX_TOKENS: Final = 200
"""Each token costs one more parse. A text with more keeps the markup of its calls as content too: nothing is lost."""
_MAX_PARSES: Final = 2000
"""Parses spent on telling equal neighbours apart, with the same consequence."""
_LOOKS_CLOSING: Final = re.compile(r"</|<[|｜]?/|end|END|close|suffix")
_SENTENCE: Final = re.compile(r"\S\s|\s\S")
_BRACKETS: Final = {"]": "[", "}": "{", ")": "("}


@define
class _Token:
    """A mark, or the text between two.

    Attributes:
      of: the groups of equal neighbouring calls that it is needed for.
      n_left: calls that are found without it.
    """

    text: str
    is_mark: bool
    of: frozenset[int] = frozenset()
    n_left: int = 0


@define
class _Core:
    """The tokens from the first to the last that a call, and no other, needs; `end` is exclusive."""

    begin: int
    end: int
    call: ParsedCall


def place_calls(text: str, see: See, marks: Sequence[str]) -> list[Piece]:
    """Cut `text` into pieces, its calls being those that `see` finds in it.

    Args:
      text: the content; `see` finds a call in it.
      see: asked once for the text and once for every token of it; must not raise.
      marks: fixed texts of the format's markup.
    """
    calls = see(text)
    tokens = _tokens(text, marks)
    groups = _groups(calls)
    if len(tokens) > _MAX_TOKENS:
        return _unplaced(text, calls)
    for index, token in enumerate(tokens):
        left = see(_join(tokens, range(index, index + 1)))
        token.of, token.n_left = _needed_for(calls, groups, left), len(left)
    closing = _closing(tokens, groups)
    cores = _cores(tokens, see, calls, groups, closing)
    if cores is None:
        return _unplaced(text, calls)
    tokens = _trim(tokens, cores, see, calls)
    if _is_cut_off(tokens, cores[-1]):
        cores.pop()
        calls = tuple(core.call for core in cores)
    pieces = list(_pieces(tokens, cores, closing))
    markup = "".join(piece.text for piece in pieces if piece.kind in ("markup", "call"))
    return pieces if see(markup) == calls else _unplaced(text, calls)


def _is_cut_off(tokens: Sequence[_Token], core: _Core) -> bool:
    """Whether a call was read from JSON that is not closed, as some parsers do: the turn ended in the middle of it."""
    if any(token.is_mark for token in tokens[core.end - 1 :]):
        return False
    text = "".join(token.text for token in tokens[core.begin : core.end])
    return any(text.count(opening) > text.count(closing) for closing, opening in _BRACKETS.items())


def _unplaced(text: str, calls: tuple[ParsedCall, ...]) -> list[Piece]:
    return [Piece("text", text), Piece("call", "", calls)]


def _tokens(text: str, marks: Sequence[str]) -> list[_Token]:
    if not marks:
        return [_Token(text, is_mark=False)]
    pattern = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    parts = re.split(f"({pattern})", text)
    return [_Token(part, is_mark=index % 2 == 1) for index, part in enumerate(parts) if part]


def _join(tokens: Sequence[_Token], without: range, instead: str = "") -> str:
    """The text with `instead` in the place of some tokens."""
    before, behind = tokens[: without.start], tokens[without.stop :]
    return "".join([*(token.text for token in before), instead, *(token.text for token in behind)])


def _groups(calls: Sequence[ParsedCall]) -> list[int]:
    """The group of each call: equal neighbours cannot be told apart by taking a token away."""
    groups = [0]
    for before, call in itertools.pairwise(calls):
        groups.append(groups[-1] + (call != before))
    return groups


def _needed_for(calls: Sequence[ParsedCall], groups: Sequence[int], left: Sequence[ParsedCall]) -> frozenset[int]:
    """Groups of the calls that are no longer among those `left`."""
    if tuple(left) == tuple(calls):
        return frozenset()
    n_same = min(len(calls), len(left))
    before = next((index for index in range(n_same) if calls[index] != left[index]), n_same)
    behind = next((index for index in range(n_same - before) if calls[-1 - index] != left[-1 - index]), n_same - before)
    return frozenset(groups[before : max(len(calls) - behind, before + 1)]) or frozenset(groups[-1:])


def _closing(tokens: Sequence[_Token], groups: Sequence[int]) -> frozenset[str]:
    """Marks that close: by their look, or because the last call ends with them."""
    looks = {token.text for token in tokens if token.is_mark and _LOOKS_CLOSING.search(token.text)}
    first = [token.text for token in tokens if token.is_mark and token.of == {0}][:1]
    last = [token.text for token in tokens if token.is_mark and token.of == {groups[-1]}][-1:]
    return frozenset((looks | set(last)) - set(first))


def _cores(
    tokens: Sequence[_Token],
    see: See,
    calls: tuple[ParsedCall, ...],
    groups: Sequence[int],
    closing: frozenset[str],
) -> list[_Core] | None:
    """The core of each call, in order; None where they can't be told apart."""
    cores: list[_Core] = []
    for group in range(groups[-1] + 1):
        own = [index for index, token in enumerate(tokens) if token.of == {group}]
        while cores and own and tokens[own[0]].text in closing:  # without it the call before swallowed this one
            cores[-1].end = own.pop(0) + 1
        if not own or (cores and own[0] < cores[-1].end):
            return None
        first = groups.index(group)
        begins = _begins(tokens, own, see, calls, first, groups.count(group))
        if begins is None:
            return None
        for begin, behind in itertools.pairwise([own[0], *begins[1:], own[-1] + 1]):
            member = [index for index in own if begin <= index < behind]
            cores.append(_Core(member[0], member[-1] + 1, calls[first]))
    return cores


def _begins(
    tokens: Sequence[_Token], own: Sequence[int], see: See, calls: tuple[ParsedCall, ...], first: int, n_members: int
) -> list[int] | None:
    """The tokens at which equal neighbours begin; None where they can't be told apart.

    The next one begins as far on as tokens can be taken away from the beginning of one at the cost of that one alone.
    """
    if n_members == 1:
        return [own[0]]
    if n_members * (own[-1] - own[0]) > _MAX_PARSES:
        return None
    one_less = calls[:first] + calls[first + 1 :]
    begins = [index for index in own if tokens[index].n_left == len(one_less)][:1]
    while begins and len(begins) < n_members:
        fits = [
            index for index in own if index > begins[-1] and see(_join(tokens, range(begins[-1], index))) == one_less
        ]
        if not fits:
            return None
        begins.append(fits[-1])
    return begins or None


def _trim(tokens: list[_Token], cores: Sequence[_Core], see: See, calls: tuple[ParsedCall, ...]) -> list[_Token]:
    """Cut off what the calls are found without from the outer tokens of cores and from tokens that several calls need.

    Moves the cores along.
    """
    cut: list[_Token] = []
    at = 0
    ends = [(core, core.begin, core.end) for core in cores]
    for core, begin, end in [*ends, (None, len(tokens), len(tokens))]:
        for index in range(at, begin):
            token = tokens[index]
            if token.is_mark or not token.of:
                cut.append(token)
            else:
                cut += _trimmed(tokens, range(index, index + 1), see, calls)[0]
        if core is not None:
            parts, core.begin, core.end = _trimmed(tokens, range(begin, end), see, calls)
            core.begin += len(cut)
            core.end += len(cut)
            cut += parts
        at = end
    return cut


def _trimmed(
    tokens: Sequence[_Token], part: range, see: See, calls: tuple[ParsedCall, ...]
) -> tuple[list[_Token], int, int]:
    """The tokens of `part` with their removable ends apart; where what remains of them begins and ends."""
    inner = [_Token(tokens[index].text, tokens[index].is_mark, tokens[index].of) for index in part]
    before = behind = ""
    if not inner[0].is_mark:
        n = _removable(tokens, part[0], see, calls, at_end=False)
        before, inner[0].text = inner[0].text[:n], inner[0].text[n:]
    if not inner[-1].is_mark:
        text = inner[-1].text
        kept = text[: max(0, len(text) - _removable(tokens, part[-1], see, calls, at_end=True))]
        kept += _closers("".join(token.text for token in inner[:-1]) + kept, text[len(kept) :])
        behind, inner[-1].text = text[len(kept) :], kept
    head = [_Token(before, is_mark=False)] if before else []
    tail = [_Token(behind, is_mark=False)] if behind else []
    return [*head, *inner, *tail], len(head), len(head) + len(inner)


def _removable(tokens: Sequence[_Token], at: int, see: See, calls: tuple[ParsedCall, ...], *, at_end: bool) -> int:
    """How many characters at one end of a token can go without changing the calls; found by bisection."""
    text = tokens[at].text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        rest = text[: len(text) - middle] if at_end else text[middle:]
        if see(_join(tokens, range(at, at + 1), rest)) == calls:
            low = middle
        else:
            high = middle - 1
    return low


def _closers(text: str, rest: str) -> str:
    """What closes the quotes and brackets of `text` at the beginning of `rest`; some parsers do without."""
    n = 0
    for sign in rest:
        done = text + rest[:n]
        if not (sign == '"' and done.count('"') % 2) and not done.count(_BRACKETS.get(sign, sign)) > done.count(sign):
            break
        n += 1
    return rest[:n]


def _pieces(tokens: Sequence[_Token], cores: Sequence[_Core], closing: frozenset[str]) -> Iterator[Piece]:
    if not cores:
        yield Piece("unparsed", "".join(token.text for token in tokens))
        return
    at = 0
    for index, core in enumerate(cores):
        yield from _gap(tokens[at : core.begin], closing, behind_call=index > 0, before_call=True)
        yield from _call(tokens[core.begin : core.end], closing, core.call)
        at = core.end
    yield from _gap(tokens[at:], closing, behind_call=True, before_call=False)


def _call(tokens: Sequence[_Token], closing: frozenset[str], call: ParsedCall) -> Iterator[Piece]:
    """Pieces of a core: the call, and content that stands in the middle of it."""
    calls: tuple[ParsedCall, ...] = (call,)
    markup = ""
    for is_needed, group in itertools.groupby(tokens, lambda token: bool(token.of)):
        run = list(group)
        if is_needed or not _is_content(run):
            markup += "".join(token.text for token in run)
            continue
        yield Piece("call" if calls else "markup", markup, calls)
        yield from _gap(run, closing, behind_call=True, before_call=True)
        calls, markup = (), ""
    yield Piece("call" if calls else "markup", markup, calls)


def _is_content(run: Sequence[_Token]) -> bool:
    """Whether text that no call needs is more than notation, such as one word between two marks, or marks alone."""
    words = [token.text for token in run if not token.is_mark and not token.text.isspace()]
    return bool(words) and (any(token.is_mark for token in run) or any(_SENTENCE.search(word) for word in words))


def _gap(tokens: Sequence[_Token], closing: frozenset[str], *, behind_call: bool, before_call: bool) -> Iterator[Piece]:
    """Pieces between calls: marks that close go with the call before, others with that behind; the rest is content."""
    markup = [bool(token.of) for token in tokens]
    runs: list[tuple[range, bool]] = []
    runs += [(range(len(tokens)), True)] if behind_call else []
    runs += [(range(len(tokens) - 1, -1, -1), False)] if before_call else []
    for indices, closes in runs:
        for index in indices:
            token = tokens[index]
            if token.is_mark and (token.text in closing) == closes:
                markup[index] = True
            elif not markup[index] and not token.text.isspace():
                break
    for token, is_markup in zip(tokens, markup, strict=True):
        if is_markup:
            yield Piece("markup", token.text)
        else:
            yield Piece("unparsed" if token.is_mark and token.text not in closing else "text", token.text)
