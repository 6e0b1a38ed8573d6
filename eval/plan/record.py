"""The record for a plan: the target's answers to some questions, and the guesses of each draft along these texts.

`read_record` reads one for other programs, and `accept_lengths` gives the accepted lengths of a chain
(docs/planner.md). From every token of a text on, each network also reads its own outputs, up to DEEPEST of them. The
record holds its most likely guesses at each place with their probabilities, by the number of own guesses before it. In
a trial the record replaces the network, and no model is computed.

Shapes: T rows, W guesses of a row.
"""
from __future__ import annotations

import math
from itertools import takewhile
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from config.questions import by_turns
from config.run_config import PENALTIES
from config.schema.block_heads import BlockForm
from eval.plan.keys import PlanConfig
from eval.recorded import check_room, load, sampler_of, save, settings_of
from eval.self_feeding import blocks, read_text, unrolled
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.progress import ProgressBar
from launch.virtual import as_virtual
from model.cache import SegmentCache, TreeCache
from model.drafts.dflash import BlockDraft
from model.drafts.draft import Guesses
from model.drafts.eagle import Eagle
from model.drafts.network import ModelDraft, TreeDraft
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.decode import Decoder, Request

# Tokens, the most likely first, and their log-probabilities; above temperature 0 then the same for the tokens that
# most likely win with the noise of their position.
Listed = Sequence[Sequence[Any]]
Table = Sequence[Sequence[Listed]]  # by place in the text, then by depth
DEEPEST = 10  # largest recorded number of own guesses before a guess; it represents larger ones, too
WIDE = 16  # guesses at each place
SETTINGS = ("base_dir", "model_dir", "eagle_dir", "draft_dir", "ssm", "sets", "data", "questions",
            "template", "max_new_tokens", "dtype", "temperature", *PENALTIES)  # the keys that determine a record …
DRAWING = ("top_p", "top_k", "min_p", "seed")  # … and those that also do above temperature 0
OTHER = "name another traces="
APART = {"time": "virtual", "profile": "server"}  # any profile: the time is not used


class NetworkTraits(NamedTuple):
    """The properties of a network that drafting uses, with the names of `TreeDraft`."""

    source: str
    lag: int
    drifts: bool
    block: int = 0  # tokens of a block that it guesses at once; 0: it guesses token by token


class Written(NamedTuple):
    """One answer as token ids, and the guesses of each network along it, by its name."""

    prompt: list[int]
    text: list[int]
    guesses: Mapping[str, Table]


class Book(NamedTuple):
    """A record: the answers to all questions, the networks, and properties of the target."""

    answers: list[Written]
    networks: dict[str, NetworkTraits]  # by name
    vocab: int  # number of tokens
    ends: list[int]  # end tokens
    layers: int


# --- in a file --------------------------------------------------------------------------------------------------------

def book_of(config: PlanConfig) -> Book:
    """Return the record in the file of `traces`, or make a new one and write it there.

    Raises ValueError if the file holds anything else, or a record with other keys or fewer drafts, or if an input is
    missing.
    """
    settings = settings_of(config, SETTINGS + DRAWING if config.run.temperature else SETTINGS)
    found = load(config.traces, settings, "holds no record of drafts", OTHER)
    if found:
        missing = set(config.kinds).difference(map(kind_of, found["networks"]))
        if missing:
            raise ValueError(f"{config.traces} has no guesses of {', '.join(sorted(missing))}: {OTHER}")
        return _book(found)
    book = make_record(config)
    if config.traces:
        written = [one._asdict() for one in book.answers]
        save(config.traces, settings, {**book._asdict(), "answers": written})
    return book


def _book(found: Mapping[str, Any]) -> Book:
    answers = [Written(**one) for one in found["answers"]]
    networks = {name: NetworkTraits(*values) for name, values in found["networks"].items()}
    return Book(answers, networks, found["vocab"], found["ends"], found["layers"])


def read_record(path: str) -> Book:
    """Return the record in a file that `traces=` has written, with any keys. Its format is in docs/planner.md.

    Raises ValueError if the file is missing, or was changed since.
    """
    found = load(path, {}, "holds no record of drafts, or was changed", "let scripts.plan write it with traces=FILE")
    if found is None:
        raise ValueError(f"there is no file {path}: let scripts.plan write it with traces={path}")
    return _book(found)


def accept_lengths(one: Written, network: str, guesses: int) -> list[int]:
    """Return the tokens of each verification of a chain of a network's most likely guesses, the target's own included.

    The first token of the text comes from the prefill and is not counted.
    """
    table, text, lengths, place = one.guesses[network], one.text, [], 1
    while place < len(text):
        ahead = enumerate(text[place:place + guesses])
        hits = (listed_at(table, place + depth, depth)[0][0] == token
                for depth, token in ahead)
        right = sum(takewhile(bool, hits))
        lengths.append(min(right + 1, len(text) - place))
        place += right + 1
    return lengths


def listed_at(table: Table, place: int, depth: int) -> Listed:
    """Return the guesses at a place after `depth` own ones; beyond the bounds of the record, the nearest entry."""
    depths = table[min(max(0, place), len(table) - 1)]
    return depths[min(depth, len(depths) - 1)]


def kind_of(network: str) -> str:
    """Return the kind of a network from its name, which ends with a number if there are several."""
    return network.rstrip("0123456789")


# --- from the models --------------------------------------------------------------------------------------------------

def make_record(config: PlanConfig) -> Book:
    """Make a record with the models, all in this process.

    Questions are taken from the sets in turn, so that the first few are of all kinds.
    """
    run, usual = config.run, config.single(pipeline_type="ar", **APART)
    with as_virtual(prepare(usual)) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
        assert pipeline.text is not None, "questions need a tokenizer"
        ends, sizes = frozenset(pipeline.text.end_ids), pipeline.spec.sizes
        readers = list(_readers(pipeline, config))
        questions = by_turns(config.folder, config.chosen_sets, *run.question_range)
        prompts = [pipeline.prompt_ids(question, run.template) for question in questions]
        check_room(prompts, run.max_new_tokens, pipeline.spec.context)
        answers, sampler = [], sampler_of(run)
        for prompt in ProgressBar(prompts, desc="record", unit="answer", leave=False):
            text = pipeline.decoder.complete(Request(prompt, sampler, run.max_new_tokens, ends)).token_ids
            guesses = {network.source: _table(decoder, network, prompt, text, sampler)
                       for decoder, network in readers}
            answers.append(Written(prompt, text, guesses))
        networks = {one.source: NetworkTraits(one.source, one.lag, one.drifts, _block(one))
                    for _, one in readers}
        return Book(answers, networks, sizes.vocab, sorted(ends), sizes.layers)


def _readers(pipeline: Pipeline, config: PlanConfig) -> Iterator[tuple[Decoder, TreeDraft]]:
    """Yield the available networks, each with its decoder."""
    for kind in config.kinds:
        decoder = pipeline.decoder_for(config.single(pipeline_type="serial", draft=kind, **APART))
        for network in decoder.draft.networks:
            if not isinstance(network, TreeDraft) or not (network.by_level or _block(network)):
                raise ValueError(f"a plan cannot record guesses of draft={kind}, which does not draft level by level: "
                                 "use drafts=suffix, or try it with profile=NAME time=virtual")
            if kind_of(network.source) != kind:
                raise ValueError("the head of this model guesses blocks: plan with drafts=suffix,dflash,dflash+suffix")
            yield decoder, network


def _block(network: Any) -> int:
    return network.form.size if isinstance(network, BlockDraft) and network.marginal else 0


def _table(decoder: Decoder, network: TreeDraft, prompt: Sequence[int],
           text: Sequence[int], sampler: Sampler) -> Table:
    """Return the guesses of a network at each place of a text, by the number of own guesses before it."""
    tree = read_text(decoder, [*prompt, *text])
    read = unrolled(network, tree, len(prompt), DEEPEST if network.lag else 0)
    if isinstance(network, BlockDraft):
        read = blocks(network, tree, len(prompt))
    found: list[list[Listed]] = [[] for _ in text]
    for depth, places, out_TD in read:
        for place, listed in zip(places, _listed(network, out_TD, places, sampler)):
            at = place + 1 - len(prompt)
            if at < len(text):
                assert len(found[at]) == depth, (place, depth)
                found[at].append(listed)
    return found


def _listed(network: TreeDraft, out_TD: Tensor,
            places: Sequence[int], sampler: Sampler) -> Iterator[Listed]:
    """Yield the guesses of a network after each row; the last tokens of the rows are at these places of the text."""
    logits_TV = network.logits(out_TD)
    logprob_TW, token_TW = network.guess(logits_TV, WIDE)
    columns = [token_TW.tolist(), logprob_TW.tolist()]
    if sampler.temperature:
        network.begin(sampler)
        predicted = network.predict(logits_TV, [place + 1 for place in places], WIDE)
        columns.append([[token for token, _ in guesses] for guesses in predicted])
        columns.append([[math.log(chance) for _, chance in guesses] for guesses in predicted])
    yield from map(list, zip(*columns))


# --- in place of the networks -----------------------------------------------------------------------------------------

class Replayed(TreeDraft):
    """A network that repeats its guesses along a recorded text; `open` sets the text of the next request.

    A path along the text gets the guesses of its place and depth, so the same guesses are correct as in the record. A
    path off the text gets them, too: no guess there is ever correct, but their probabilities compete with those of
    others. Its features of a row are two numbers: the number of own guesses before the row, and its position.
    """

    def __init__(self, network: NetworkTraits, slots: int) -> None:
        self.source, self.lag, self.drifts, _ = network
        TreeDraft.__init__(self, TreeCache((0, 1, slots, 1), torch.float64, "cpu"))
        self._prompt = 0
        self._table: Table = []

    def open(self, prompt: int, table: Table) -> None:
        """Set the number of prompt tokens of the next request, and the guesses along its text."""
        self._prompt, self._table = prompt, table

    def known(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        kind: Any = Eagle if self.lag else ModelDraft
        known: list[int] = kind.known(self, tree, fresh)
        return known

    def features(self, tree: TokenTree | None, fresh: list[int]) -> Tensor:
        return torch.full((len(fresh), 2), -1.0, dtype=torch.float64)

    def carried(self, parents: list[int]) -> Tensor:
        return super().carried(parents) if self.lag else self.features(None, parents)

    @property
    def network(self) -> object:
        return self

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: SegmentCache) -> Tensor:
        depth_T = feature_TD[:, 0] + 1 if self.lag else torch.zeros(len(pos_T))  # a small model only reads tokens
        position_T = pos_T + self.lag
        return torch.stack([depth_T.double(), position_T.double()], -1)

    def logits(self, out_TD: Tensor) -> Tensor:
        return out_TD  # `guess` and `predict` look up the record

    def guess(self, logits_TV: Tensor, width: int) -> tuple[Tensor, Tensor]:
        tokens, gains, *_ = zip(*self._listed(logits_TV))
        token_TW, logprob_TW = torch.tensor(tokens), torch.tensor(gains, dtype=torch.float64)
        return logprob_TW[:, :width], token_TW[:, :width]

    def predict(self, logits_TV: Tensor, positions: list[int], width: int) -> list[Guesses]:
        found: list[Guesses] = []
        for *_, tokens, gains in self._listed(logits_TV):
            chances = torch.tensor(gains).exp().tolist()
            found.append(list(zip(tokens[:width], chances)))
        return found

    def _listed(self, out_TD: Tensor) -> list[Listed]:
        """Return the recorded guesses after each row."""
        rows = out_TD.int().tolist()
        return [listed_at(self._table, position + 1 - self._prompt, depth) for depth, position in rows]


class ReplayedBlock(Replayed, BlockDraft):
    """A replayed network that guesses blocks; the place of a mask in its block is the number of guesses before it."""

    inner = False

    def __init__(self, network: NetworkTraits, slots: int) -> None:
        self.form = BlockForm((), network.block, 0)
        super().__init__(network, slots)

    def blank(self, rows: int) -> Tensor:
        place_T = torch.arange(rows, dtype=torch.float64) - 1
        return torch.stack((place_T, place_T), -1)

    def known(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        return BlockDraft.known(self, tree, fresh)

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: SegmentCache) -> Tensor:
        return torch.stack((feature_TD[:, 0], pos_T - 1.0), -1)  # a mask predicts the token at its own place
