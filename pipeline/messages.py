"""The messages of the pipeline, and how they are written on the wire.

They know nothing about how they travel. Segments, alone or several together, Start, Reset and Stop go round the ring in
order; only a Prune may overtake, since node ids never change their meaning. What belongs to a request has its number,
which rises from request to request. Ask and Drafted go between rank 0 and small models on ranks of their own.

On the wire a message is a header and a body: whole numbers, then up to two tensors; a batch is followed by its
segments. There is nothing of Python's pickle: a peer can send wrong numbers, but no code, and numbers that cannot be
are refused before memory is set aside for them.

Shapes: T rows, D columns of hidden states, N nodes with proposals below them, V vocabulary.
"""
from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, fields
from itertools import chain, islice
from typing import Callable, NamedTuple, Sequence, Union

import torch
from torch import Tensor

from config.run_config import CHOICES
from config.trees import Shape
from model.cache import Survivors
from model.sample import Sampler

NOBODY = -1  # no node
DTYPES = (torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16)
LARGEST = 1 << 31  # bytes of a body
ABSENT = -1  # columns of a tensor that is not there
NANO = 1e9  # nanoseconds of a second
RULE_NAMES = CHOICES["verify"]
WORD = 1 << 64  # how many numbers 8 bytes can be
NO_LAWS = torch.empty(0, 0, dtype=torch.float64)


class Visit(NamedTuple):
    """What a stage did with a message: it computed so many rows in so many seconds."""

    rows: int
    seconds: float


@dataclass
class Segment:
    """Rows on their way through the stages; `x`: tokens `[T]` before the first stage, hidden states `[T, D]` after it.

    The first `text` rows are settled text, the others guesses; a parent comes before its children. `inner`, where a
    draft wants it, collects what each stage keeps of its layers' inputs, `[T, 0]` at first; else it is absent. `visits`
    collects what each stage took that has computed it, with all rows of the message that it came in.
    """

    request: int
    nodes: list[int]
    parents: list[int]
    pos: list[int]
    text: int
    x: Tensor
    inner: Tensor | None = None
    visits: tuple[Visit, ...] = ()

    def take(self, rows: Sequence[int]) -> Segment:
        """The segment with only these of its rows, in this order; the segment itself if they are all."""
        if len(rows) == len(self.nodes):
            return self
        nodes = [self.nodes[i] for i in rows]
        parents = [self.parents[i] for i in rows]
        pos = [self.pos[i] for i in rows]
        text = sum(i < self.text for i in rows)
        x = self.x[list(rows)]
        inner = None if self.inner is None else self.inner[list(rows)]
        return Segment(self.request, nodes, parents, pos, text, x, inner, self.visits)


@dataclass
class Batch:
    """Segments of different requests that travel and are computed together."""

    segments: list[Segment]

    @property
    def nodes(self) -> list[int]:
        """Those of all its segments."""
        return [node for segment in self.segments for node in segment.nodes]


@dataclass
class Prune:
    """The text ends in `tip` below `parent`; of the nodes older than `horizon` only those and `keep` live."""

    request: int
    tip: int
    parent: int
    horizon: int
    keep: list[int]

    @property
    def survivors(self) -> Survivors:
        """The nodes that this prune does not declare dead."""
        return Survivors.after(self.tip, self.keep, self.horizon)


@dataclass
class Reset:
    """The request is over. Comes back to rank 0 when every stage has forgotten it.

    If `last` is a node, the text up to it stays, for a request that begins alike: a `Start` names it then, or a second
    Reset ends it.
    """

    request: int
    last: int = NOBODY


@dataclass
class Start:
    """A request begins with `length` tokens that the stages hold already, as the beginning of another one's text.

    There they end in the node `last`, in the new request in `tip`.
    """

    request: int
    tip: int
    source: int
    last: int
    length: int


@dataclass
class Stop:
    """The pipeline is over. Passed on, then obeyed."""


@dataclass
class Ask:
    """Rank 0 wants a tree of this shape below its text, which goes on with `tokens` behind the first `sent` ones.

    Where none was sent before, the text is that of a new request: of at most `limit` tokens, which `sampler` chooses;
    its penalties stay on rank 0.
    `number` is that of the question, from which an answer has it.
    """

    number: int
    sent: int
    tokens: list[int]
    limit: int
    sampler: Sampler
    shape: Shape


@dataclass
class Drafted:
    """The tree of one small model: what it proposed, in this order, in levels of so many proposals.

    A parent is the place of the proposal that it stands on, counted from 1; 0 is the tip. A score is that of the path
    from the tip, its log-probability. `law_NV` has, for each parent in the order of their first proposals, the law that
    those were drawn from; no rows, if they were chosen without chance.
    """

    number: int
    levels: list[int]
    parents: list[int]
    tokens: list[int]
    scores: list[float]
    law_NV: Tensor


Message = Union[Segment, Batch, Prune, Reset, Start, Stop, Ask, Drafted]


def joined(segments: Sequence[Segment]) -> Segment | Batch:
    """Segments of different requests as one message."""
    return segments[0] if len(segments) == 1 else Batch(list(segments))


def segments_of(msg: Message) -> list[Segment]:
    """The segments that a message holds."""
    if isinstance(msg, Batch):
        return msg.segments
    return [msg] if isinstance(msg, Segment) else []


# --- on the wire ------------------------------------------------------------------------------------------------------

KINDS = (Segment, Prune, Reset, Stop, Batch, Start, Ask, Drafted)  # by their numbers on the wire


class Header(NamedTuple):
    """What a body holds: so many whole numbers, then the tensors `x` and `inner`, of so many rows each."""

    kind: int
    numbers: int = 0
    rows: int = 0
    width: int = 0  # columns of `x`; 0: it has none, as tokens
    inner: int = ABSENT  # columns of `inner`
    dtype: int = 0  # of both, an index into DTYPES

    @staticmethod
    def read(given: Tensor) -> Header:
        """The header that `int64[6]` from the wire are; raises ValueError if no message begins so."""
        header = Header(*given.tolist())
        if not 0 <= header.kind < len(KINDS):
            raise ValueError(f"a message of unknown kind {header.kind}")
        sizes = header.numbers, header.rows, header.width, header.inner - ABSENT
        possible = all(0 <= size <= LARGEST for size in sizes)
        if not possible or not 0 <= header.dtype < len(DTYPES) or header.bytes > LARGEST:
            raise ValueError(f"a message of impossible size or type ({', '.join(map(str, header))})")
        return header

    @property
    def bytes(self) -> int:
        """Those of the body."""
        columns = max(self.width, 1) + max(self.inner, 0)
        element = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return 8 * self.numbers + self.rows * columns * element


def packets(msg: Message) -> list[tuple[Tensor, Tensor]]:
    """What goes over the wire for a message, one behind the other: headers `int64[6]` and bodies `uint8`."""
    parts: list[Message] = [msg, *msg.segments] if isinstance(msg, Batch) else [msg]
    return [_encoded(part) for part in parts]


def receive(packet: Callable[[], tuple[Header, Tensor]]) -> Message:
    """The next message, out of packets; raises ValueError for what no message is made of."""
    header, body = packet()
    if KINDS[header.kind] is not Batch:
        return _decoded(header, body)
    count, = _whole(header, body)
    return Batch([_part(*packet()) for _ in range(count)])


def _part(header: Header, body: Tensor) -> Segment:
    part = _decoded(header, body)
    if not isinstance(part, Segment):
        raise ValueError(f"a {type(part).__name__} where a segment belongs")
    return part


def _encoded(msg: Message) -> tuple[Tensor, Tensor]:
    numbers = _numbers(msg)
    x, inner = (msg.x, msg.inner) if isinstance(msg, Segment) else (NO_LAWS, None)
    if isinstance(msg, Drafted):
        x = msg.law_NV
    width = x.shape[1] if x.dim() == 2 else 0
    columns = ABSENT if inner is None else inner.shape[1]
    kind, dtype = KINDS.index(type(msg)), DTYPES.index(x.dtype)
    header = Header(kind, len(numbers), len(x), width, columns, dtype)
    if header.bytes > LARGEST:
        smaller = "expansion" if isinstance(msg, Drafted) else "prefill_chunk"
        raise ValueError(f"a {type(msg).__name__} of {header.bytes} bytes is too large to be sent: give a smaller "
                         f"{smaller}")
    parts = [torch.tensor(numbers, dtype=torch.int64), x]
    if inner is not None and columns:
        assert inner.dtype == x.dtype, f"a segment has one type, but holds {x.dtype} and {inner.dtype}"
        parts.append(inner)
    return torch.tensor(header), _gathered(parts, header.bytes)


def _gathered(parts: Sequence[Tensor], size: int) -> Tensor:
    """One body on the host. What lies on CUDA comes through pinned memory, which is quicker, and is waited for once."""
    cuda = next((part.device for part in parts if part.is_cuda), None)
    body = torch.empty(size, dtype=torch.uint8, pin_memory=cuda is not None)
    at = 0
    for part in parts:
        if part.numel():  # a tensor of no bytes cannot be seen as another type
            flat = part.contiguous().view(-1).view(torch.uint8)
            body[at:at + len(flat)].copy_(flat, non_blocking=True)
            at += len(flat)
    if cuda:
        torch.cuda.current_stream(cuda).synchronize()
    return body


def _numbers(msg: Message) -> list[int]:
    """The whole numbers of a message."""
    if isinstance(msg, Segment):
        visits: list[int] = []
        for rows, seconds in msg.visits:
            visits += rows, round(seconds * NANO)
        return [msg.request, msg.text, *visits, *msg.nodes, *msg.parents, *msg.pos]
    if isinstance(msg, Prune):
        return [msg.request, msg.tip, msg.parent, msg.horizon, *msg.keep]
    if isinstance(msg, Batch):
        return [len(msg.segments)]
    if isinstance(msg, Ask):
        sampler = msg.sampler
        seed = sampler.seed - WORD if sampler.seed >= WORD // 2 else sampler.seed
        rule = RULE_NAMES.index(sampler.rule)
        whole = [msg.number, msg.sent, msg.limit, seed, sampler.top_k, rule]
        real = _bits([sampler.temperature, sampler.top_p, sampler.min_p])
        levels = list(map(len, msg.shape))
        return _joined(whole, real, msg.tokens, levels, list(chain(*msg.shape)))
    if isinstance(msg, Drafted):
        scores = _bits(msg.scores)
        return _joined([msg.number], msg.levels, msg.parents, msg.tokens, scores)
    return list(astuple(msg))


def _whole(header: Header, body: Tensor) -> list[int]:
    """The whole numbers at the beginning of a body."""
    if len(body) != header.bytes:
        raise ValueError(f"a body of {len(body)} bytes where {header.bytes} belong")
    if not header.numbers:
        return []
    return body[:8 * header.numbers].view(torch.int64).tolist()  # type: ignore[no-any-return]


def _decoded(header: Header, body: Tensor) -> Message:
    """The message, but for a batch, that a header and a body carry; its tensors are views of the body."""
    numbers, kind = _whole(header, body), KINDS[header.kind]
    rows, dtype = header.rows, DTYPES[header.dtype]
    payload = torch.empty(0, dtype=dtype)
    if rows:
        payload = body[8 * header.numbers:].view(dtype)
    end = rows * max(header.width, 1)
    x, rest = payload[:end], payload[end:]
    if header.width:
        x = x.view(rows, header.width)
    if kind is Segment:
        inner = None if header.inner == ABSENT else rest.view(rows, header.inner)
        return _segment(numbers, x, inner)
    if kind is Ask:
        return _ask(numbers)
    if kind is Drafted:
        return _drafted(numbers, x)
    if kind is Prune and len(numbers) > 3:
        request, tip, parent, horizon = numbers[:4]
        return Prune(request, tip, parent, horizon, numbers[4:])
    for plain in (Reset, Start, Stop):
        if kind is plain and len(numbers) == len(fields(plain)):
            return plain(*numbers)
    raise ValueError(f"a {kind.__name__} of {len(numbers)} numbers")


def _segment(numbers: list[int], x: Tensor, inner: Tensor | None) -> Segment:
    rows = len(x)
    begin = len(numbers) - 3 * rows  # of the nodes, behind request, text and visits
    if begin < 2 or begin % 2 or not 0 <= numbers[1] <= rows:
        raise ValueError(f"a segment of {rows} rows whose {len(numbers)} numbers contradict each other")
    request, text, *visited = numbers[:begin]
    counted = zip(visited[::2], visited[1::2])
    visits = tuple(Visit(count, took / NANO) for count, took in counted)
    if any(visit.rows < 1 or visit.seconds < 0 for visit in visits):
        raise ValueError(f"a segment of {rows} rows whose stages computed none, or in less than no time")
    nodes, others = numbers[begin:begin + rows], numbers[begin + rows:]
    return Segment(request, nodes, others[:rows], others[rows:], text, x, inner, visits)


def _ask(numbers: list[int]) -> Ask:
    whole, real, tokens, levels, flat = _columns(numbers, 5)
    sizes = len(whole), len(real), sum(levels)
    fits = sizes == (6, 3, len(flat)) and all(count >= 0 for count in levels)
    if not fits or not 0 <= whole[5] < len(RULE_NAMES):
        raise ValueError("a question for a tree whose numbers contradict each other")
    number, sent, limit, seed, top_k, rule = whole
    temperature, top_p, min_p = _floats(real)
    sampler = Sampler(temperature, top_p, top_k, seed % WORD, RULE_NAMES[rule], min_p)
    counts = iter(flat)
    shape = tuple(tuple(islice(counts, size)) for size in levels)
    return Ask(number, sent, tokens, limit, sampler, shape)


def _drafted(numbers: list[int], law_NV: Tensor) -> Drafted:
    number, levels, parents, tokens, scores = _columns(numbers, 5)
    known = len(set(parents))
    if len(law_NV) == 0:
        law_NV = NO_LAWS
    lawful = law_NV.dim() == 2 and law_NV.dtype == torch.float64
    fits = len(tokens) == len(scores) == len(parents) == sum(levels)
    possible = fits and len(number) == 1 and known > 0
    if not possible or not lawful or len(law_NV) not in (0, known) or min(levels) < 0:
        raise ValueError("a tree of proposals whose numbers contradict each other")
    if not all(0 <= parent <= place for place, parent in enumerate(parents)):
        raise ValueError("a proposal that stands on a later one")
    return Drafted(number[0], levels, parents, tokens, _floats(scores), law_NV)


def _joined(*columns: Sequence[int]) -> list[int]:
    """Columns of numbers, each behind its length."""
    return [number for column in columns for number in (len(column), *column)]


def _columns(numbers: list[int], count: int) -> list[list[int]]:
    """So many columns; ValueError if their lengths are not those of the numbers that are there."""
    found = []
    for _ in range(count):
        size = numbers[0] if numbers else -1
        if not 0 <= size < len(numbers):
            raise ValueError(f"{count} columns of numbers that are cut off")
        found.append(numbers[1:size + 1])
        numbers = numbers[size + 1:]
    return found


def _bits(real: Sequence[float]) -> list[int]:
    """Floating-point numbers as the whole numbers of the same bits."""
    packed = struct.pack(f"{len(real)}d", *real)
    return list(struct.unpack(f"{len(real)}q", packed))


def _floats(bits: Sequence[int]) -> list[float]:
    packed = struct.pack(f"{len(bits)}q", *bits)
    return list(struct.unpack(f"{len(bits)}d", packed))
