"""A naive forest, and random conversations to hold the real one against it.

The reference keeps what was committed as plain tuples of letters, one letter for each message of a small alphabet. To
find where a request stands it lays every committed conversation beside it, message by message. It costs the square of
the history, shares no code with the package, and records itself what the engine was sent and returned.
"""

from __future__ import annotations

from attrs import define, evolve, field, frozen
from builders_tokens import LOOK, assistant, look_call, result, system, user

from relax_trio.data.messages import ImagePart, Message, TextPart

TREES = [((), {}), ((LOOK,), {}), ((), {"enable_thinking": False})]
ONE_CALL, TWO_CALLS = (look_call("c1"),), (look_call("c1"), look_call("c2"))
SAID = [
    user("a"),
    user("b"),
    system("s"),
    result("1", "c1"),
    result("", "c1"),
    result("2", "c2"),
    result("1", "c2"),
    Message(role="user", content=(TextPart("see"), ImagePart("data:image/png;base64,AA=="))),
]
REPLIES = [
    assistant("x"),
    assistant("x", reasoning="one"),
    assistant("x", reasoning="two"),
    assistant(None, reasoning="one"),
    assistant(""),
    assistant(None, calls=ONE_CALL),
    assistant(None, reasoning="one", calls=ONE_CALL),
    assistant("x", reasoning="two", calls=TWO_CALLS),
    assistant("x", calls=TWO_CALLS),
    assistant("y"),
    assistant(None, calls=(look_call("c1", '{"at":2}'),)),
    assistant(None, calls=(look_call("c2"),)),
]
LETTERS = [*SAID, *REPLIES]
"""The alphabet; a conversation is a tuple of indices into it."""
N_SAID = len(SAID)
SILENT = {
    N_SAID + 1: N_SAID,
    N_SAID + 2: N_SAID,
    N_SAID + 3: N_SAID + 4,
    N_SAID + 6: N_SAID + 5,
    N_SAID + 7: N_SAID + 8,
}
"""What a client sends that leaves the reasoning of a reply out."""
SPOKEN = (0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11)
"""How often each reply comes: those that look alike without their reasoning more often."""
NEW = [(0,), (0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,), (0, 1), (3, 5), (4, 5), (3, 6), (2, 0), (3, 5, 1)]
BYTES_PER_TURN = 5
MAX_TURNS = 14
SCRIPT_BYTES = 1 + BYTES_PER_TURN * MAX_TURNS

Path = tuple[int, ...]


def spell(path: Path) -> tuple[Message, ...]:
    """The messages of a conversation."""
    return tuple(LETTERS[letter] for letter in path)


# --- the reference ---------------------------------------------------------------------------------------------


@define(eq=False)
class Entry:
    """A committed conversation: what the engine had seen and written at its end, and which node stands for it."""

    tree: int
    path: Path
    above: Entry | None  # the response it goes on from
    node: object
    order: int
    tokens: tuple[int, ...]
    prompt_len: int
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    turn_lens: tuple[int, ...]
    turn_starts: tuple[int, ...]
    delivered: bool = False

    def lineage(self) -> list[Entry]:
        """Responses above, the first one first, and this."""
        return [*(self.above.lineage() if self.above else []), self]


@frozen
class Found:
    """Where a request stands."""

    response: Entry | None
    observation: Entry | None
    path: Path  # the request as it is read
    n_answered: int
    n_restored: int
    n_choices: int  # readings that lead equally far


@define(eq=False)
class Reference:
    """What was committed."""

    restores: bool
    observations: dict[tuple[int, Path], Entry] = field(factory=dict)
    responses: dict[tuple[int, Path], Entry] = field(factory=dict)

    @property
    def entries(self) -> list[Entry]:
        return sorted([*self.observations.values(), *self.responses.values()], key=lambda entry: entry.order)

    def find(self, tree: int, request: Path) -> tuple[Found, Entry | None]:
        """Where `request` stands; and the committed conversation that it is as a whole, if it is one."""
        beside = []
        for entry in [*self.observations.values(), *self.responses.values()]:
            if entry.tree == tree and len(entry.path) <= len(request):
                steps = self._steps(entry, request)
                if steps is not None:
                    beside.append((-len(entry.path), steps, entry.order, entry))
        if not beside:
            return Found(None, None, request, 0, 0, 0), None
        beside.sort(key=lambda candidate: candidate[:3])
        length, steps, _, entry = beside[0]
        n_choices = sum(candidate[0] == length for candidate in beside)
        path = entry.path + request[len(entry.path) :]
        n_restored = sum(step != (0,) for step in steps)
        n_answered = max((k for k in range(len(entry.path) + 1) if (tree, path[:k]) in self.responses), default=0)
        response = self.responses.get((tree, path[:n_answered]))
        whole = entry if len(entry.path) == len(request) else None
        observation = whole if whole and (tree, path) in self.observations else None
        return Found(response, observation, path, n_answered, n_restored, n_choices), whole

    def _steps(self, entry: Entry, request: Path) -> tuple[tuple[int, ...], ...] | None:
        """How each message of `request` is read as one of the entry's, the preferred ways first in order; None where
        it can't be."""
        if entry.path == request[: len(entry.path)]:
            return ((0,),) * len(entry.path)
        if not self.restores:
            return None
        steps = []
        for index, committed in enumerate(entry.path):
            if request[index] == committed:
                steps.append((0,))
                continue
            response = self.responses.get((entry.tree, entry.path[: index + 1]))
            if not (response and SILENT.get(committed) == request[index]):
                return None
            steps.append((1, not response.delivered, -response.order))
        return tuple(steps)


def deliver(entry: Entry | None) -> None:
    """The client has this response, and so those before it."""
    while entry is not None:
        entry.delivered = True
        entry = entry.above


# --- random conversations --------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Turn:
    """One request and what comes of it."""

    tree: int
    path: Path
    reply: int  # letter
    n_tokens: int
    delay: int  # how many requests later it commits
    delivered: bool
    salt: int  # the template prints something else
    edit: str


@frozen
class Temper:
    """How an agent behaves, in bytes: below `onward` it goes on from its last turn, below `calm` it leaves its history
    as it is; its requests overlap by one of `delays`."""

    onward: int
    calm: int
    delays: tuple[int, ...]


CALM = Temper(254, 252, (0,))
LIVELY = Temper(225, 240, (0, 0, 0, 0, 0, 0, 2))
WILD = Temper(120, 190, (0, 0, 0, 0, 1, 2, 3))


@define
class Script:
    """Bytes read as the turns of one agent; the first gives its temper, and whether it echoes reasoning."""

    data: bytes

    @property
    def n_turns(self) -> int:
        """More often many than few."""
        return MAX_TURNS - (self.data[0] % 10 if self.data[0] & 1 else 0)

    @property
    def temper(self) -> Temper:
        return (CALM, LIVELY, WILD, WILD)[self.data[0] >> 6]

    @property
    def echo(self) -> str:
        return ("all", "none", "some", "all")[self.data[0] >> 4 & 3]

    def turn(self, index: int, reference: Reference) -> Turn:
        """The `index`-th turn, made of some conversation committed by then."""
        where, how, what, reply, rest = self.data[1 + BYTES_PER_TURN * index :][:BYTES_PER_TURN]
        temper = self.temper
        base = self._base(where, reference)
        tree, path = (base.tree, base.path) if base else (0, ())
        tree, path, edit = _edited(tree, path, how, what, temper.calm)
        if self.echo == "none":
            path = tuple(SILENT.get(letter, letter) for letter in path)
        elif self.echo == "some":
            path = tuple(SILENT.get(letter, letter) if what >> at % 8 & 1 else letter for at, letter in enumerate(path))
        if not (edit == "none" and how & 1 and path and path[-1] < N_SAID):  # else a repeat of what was asked
            path += NEW[what % len(NEW)]
        return Turn(
            tree=tree,
            path=path,
            reply=N_SAID + SPOKEN[reply % len(SPOKEN)],
            n_tokens=rest >> 3 & 3,
            delay=temper.delays[rest % len(temper.delays)],
            delivered=rest >> 5 != 0,
            salt=reply >> 5 if reply >= 224 else 0,
            edit=edit,
        )

    def _base(self, where: int, reference: Reference) -> Entry | None:
        entries = reference.entries
        responses = [entry for entry in entries if (entry.tree, entry.path) in reference.responses]
        if where < self.temper.onward:
            return responses[-1] if responses else None
        return entries[where % len(entries)] if entries else None


def _edited(tree: int, path: Path, how: int, what: int, calm: int) -> tuple[int, Path, str]:
    """What the agent did to its history: nothing where `how` is below `calm`."""
    if how < calm or not path:
        return tree, path, "none"
    kind = how % 9
    if kind < 2:
        return tree, path[: -(1 + what % 4)], "cut"
    if kind < 4:
        at = what % len(path)
        other = what % N_SAID if path[at] < N_SAID else N_SAID + what % len(REPLIES)
        return tree, (*path[:at], other, *path[at + 1 :]), "changed"
    if kind < 6:
        return tree, (*path, N_SAID + what % len(REPLIES)), "own answer"
    if kind < 8:
        return (tree + 1 + what % 2) % len(TREES), path, "other tree"
    return tree, (), "reset"


def encode(path: Path, salt: int) -> tuple[int, ...]:
    """Two ids for each message; stands for a template and tokenizer."""
    return tuple(part for letter in path for part in (1 + salt, 100 + letter))


def record(reference: Reference, turn: Turn, found: Found, sent: tuple[int, ...], serial: int, node: object) -> Entry:
    """Note a new response that the engine wrote behind the tokens `sent`."""
    above = found.observation.above if found.observation else found.response
    n_new = len(sent) - (len(above.tokens) if above else 0)
    prompt_len = above.prompt_len if above else n_new
    fill = n_new if above else 0  # observation tokens behind the prompt
    generated = generate(serial, turn.n_tokens)
    entry = Entry(
        tree=turn.tree,
        path=(*found.path, turn.reply),
        above=above,
        node=node,
        order=serial,
        tokens=sent + generated,
        prompt_len=prompt_len,
        mask=(above.mask if above else ()) + (0,) * fill + (1,) * turn.n_tokens,
        logprobs=(above.logprobs if above else ()) + (0.0,) * fill + logprobs(serial, turn.n_tokens),
        turn_lens=(above.turn_lens if above else ()) + (turn.n_tokens,),
        turn_starts=(above.turn_starts if above else ()) + (len(sent) - prompt_len,),
    )
    if (turn.tree, found.path) not in reference.observations:
        reference.observations[turn.tree, found.path] = evolve(
            entry,
            path=found.path,
            node=None,
            order=serial - 1,
            tokens=sent,
            mask=entry.mask[: len(entry.mask) - turn.n_tokens],
            logprobs=entry.logprobs[: len(entry.logprobs) - turn.n_tokens],
            turn_lens=entry.turn_lens[:-1],
            turn_starts=entry.turn_starts[:-1],
        )
    reference.responses[turn.tree, entry.path] = entry
    return entry


def generate(serial: int, n_tokens: int) -> tuple[int, ...]:
    """Ids that no other turn has."""
    return tuple(5000 + 10 * serial + index for index in range(n_tokens))


def logprobs(serial: int, n_tokens: int) -> tuple[float, ...]:
    """Negative numbers that no other turn has."""
    return tuple(-(serial + (index + 1) / 8) for index in range(n_tokens))
