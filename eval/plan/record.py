"""The record that a plan is made of: what the target writes to some questions, and what each draft foresees of it.

`read_record` reads one for other programs, and `accept_lengths` says what a chain would bring (docs/planner.md).

Each network reads the texts of the target from every token on with features of its own, as deep as it is worth noting;
its likeliest guesses at each place are kept, with what they claim, by how many of its own guesses it stands on there.
In a trial they take the place of the network, and no model is computed.

Shapes: T rows, W guesses of a row.
"""
from __future__ import annotations

import math
from itertools import takewhile
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from config.questions import by_turns
from config.run_config import PENALTIES
from config.schema.heads import BlockForm
from eval.plan.keys import PlanConfig
from eval.recorded import check_room, keep, kept, sampler_of, settings_of
from eval.self_feeding import blocks, read_text, unrolled
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.virtual import as_virtual
from model.cache import Admitted, TreeCache
from model.drafts.dflash import Block
from model.drafts.draft import Guesses
from model.drafts.eagle import Eagle
from model.drafts.network import ModelDraft, TreeDraft
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.decode import Decoder, Request

# Tokens, the likeliest first, and their log-probabilities; above temperature 0 behind them the same of those that win
# most likely with the noise of their position.
Listed = Sequence[Sequence[Any]]
Table = Sequence[Sequence[Listed]]  # by place in the text, then by depth
DEEPEST = 10  # guesses of its own on which a network's guesses are noted; beyond, they count as those
WIDE = 16  # guesses at each place
SETTINGS = ("base_dir", "model_dir", "eagle_dir", "draft_dir", "ssm", "sets", "data", "questions",
            "template", "max_new_tokens", "dtype", "temperature", *PENALTIES)  # the keys that decide a record …
DRAWING = ("top_p", "top_k", "min_p", "seed")  # … and those that do above temperature 0
OTHER = "name another traces="
APART = {"time": "virtual", "profile": "server"}  # no matter which: nobody asks for the time


class Network(NamedTuple):
    """What a network is to the code that drafts with it; names as those of `TreeDraft`."""

    source: str
    lag: int
    drifts: bool
    block: int = 0  # tokens of a block that it guesses at once; 0: it guesses token by token


class Written(NamedTuple):
    """One answer: token ids, and what each network guesses along them, by its name."""

    prompt: list[int]
    text: list[int]
    guesses: Mapping[str, Table]


class Book(NamedTuple):
    """The answers to all questions, the networks by their names, tokens that there are, end tokens, and layers."""

    answers: list[Written]
    networks: dict[str, Network]
    vocab: int
    ends: list[int]
    layers: int


# --- kept in a file ---------------------------------------------------------------------------------------------------

def book_of(config: PlanConfig) -> Book:
    """The record that the file of traces holds, or a new one, which is kept there.

    Raises ValueError if the file holds anything else, a record of other keys or of fewer drafts, or if something is not
    there.
    """
    settings = settings_of(config, SETTINGS + DRAWING if config.run.temperature else SETTINGS)
    found = kept(config.traces, settings, "holds no record of drafts", OTHER)
    if found:
        lacking = set(config.kinds).difference(map(kind_of, found["networks"]))
        if lacking:
            raise ValueError(f"{config.traces} has no guesses of {', '.join(sorted(lacking))}: {OTHER}")
        return _book(found)
    book = made(config)
    if config.traces:
        written = [one._asdict() for one in book.answers]
        keep(config.traces, settings, {**book._asdict(), "answers": written})
    return book


def _book(found: Mapping[str, Any]) -> Book:
    answers = [Written(**one) for one in found["answers"]]
    networks = {name: Network(*values) for name, values in found["networks"].items()}
    return Book(answers, networks, found["vocab"], found["ends"], found["layers"])


def read_record(path: str) -> Book:
    """The record in a file that `traces=` has written, whatever its keys. Its format is in docs/planner.md.

    Raises ValueError if there is no such file, or if it was changed since.
    """
    found = kept(path, {}, "holds no record of drafts, or was changed", "let scripts.plan write it with traces=FILE")
    if found is None:
        raise ValueError(f"there is no file {path}: let scripts.plan write it with traces={path}")
    return _book(found)


def accept_lengths(one: Written, network: str, guesses: int) -> list[int]:
    """Tokens of each verification of a chain of so many likeliest guesses of a network, the target's own included.

    The first token of the text is the prefill's, and counts in none.
    """
    table, text, lengths, place = one.guesses[network], one.text, [], 1
    while place < len(text):
        ahead = enumerate(text[place:place + guesses])
        hits = (listed_at(table, place + depth, depth)[0][0] == said
                for depth, said in ahead)
        right = sum(takewhile(bool, hits))
        lengths.append(min(right + 1, len(text) - place))
        place += right + 1
    return lengths


def listed_at(table: Table, place: int, depth: int) -> Listed:
    """The guesses at a place, behind so many own ones; those at the ends of the record for what lies beyond them."""
    depths = table[min(max(0, place), len(table) - 1)]
    return depths[min(depth, len(depths) - 1)]


def kind_of(network: str) -> str:
    """The kind of a network by its name, which has a number behind it where there are several."""
    return network.rstrip("0123456789")


# --- made with the models ---------------------------------------------------------------------------------------------

def made(config: PlanConfig) -> Book:
    """A record by the models themselves, all in this process.

    Questions are asked one of each set and then the next of each, so that the first few are of all kinds.
    """
    run, usual = config.run, config.single(pipeline_type="ar", **APART)
    with as_virtual(prepare(usual)) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
        assert pipeline.text is not None, "questions are text"
        ends, sizes = frozenset(pipeline.text.end_ids), pipeline.spec.sizes
        readers = list(_readers(pipeline, config))
        asked = by_turns(config.folder, config.chosen_sets, *run.span)
        prompts = [pipeline.prompt_ids(question, run.template) for question in asked]
        check_room(prompts, run.max_new_tokens, pipeline.spec.context)
        answers, sampler = [], sampler_of(run)
        for prompt in tqdm(prompts, desc="record", unit="answer", leave=False):
            text = pipeline.decoder.whole(Request(prompt, sampler, run.max_new_tokens, ends)).token_ids
            guesses = {network.source: _table(decoder, network, prompt, text, sampler)
                       for decoder, network in readers}
            answers.append(Written(prompt, text, guesses))
        networks = {one.source: Network(one.source, one.lag, one.drifts, _block(one))
                    for _, one in readers}
        return Book(answers, networks, sizes.vocab, sorted(ends), sizes.layers)


def _readers(pipeline: Pipeline, config: PlanConfig) -> Iterator[tuple[Decoder, TreeDraft]]:
    """The networks that are there, each with its decoder."""
    for kind in config.kinds:
        decoder = pipeline.decoder_for(config.single(pipeline_type="serial", draft=kind, **APART))
        for network in decoder.draft.networks:
            if not isinstance(network, TreeDraft) or not (network.by_level or _block(network)):
                raise ValueError(f"a plan records what a draft says behind its own guesses, and draft={kind} is "
                                 "asked otherwise: take drafts=suffix, or try it with profile=NAME time=virtual")
            if kind_of(network.source) != kind:
                raise ValueError("the head of this model guesses blocks: plan with drafts=suffix,dflash,dflash+suffix")
            yield decoder, network


def _block(network: Any) -> int:
    return network.form.size if isinstance(network, Block) else 0


def _table(decoder: Decoder, network: TreeDraft, prompt: Sequence[int],
           text: Sequence[int], sampler: Sampler) -> Table:
    """What a network guesses at each place of a text, by how many of its own guesses it stands on."""
    tree = read_text(decoder, [*prompt, *text])
    read = unrolled(network, tree, len(prompt), DEEPEST if network.lag else 0)
    if isinstance(network, Block):
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
    """What a network guesses after each row, whose last tokens are at these places of the text."""
    logits_TV = network.logits(out_TD)
    logprob_TW, token_TW = network.guess(logits_TV, WIDE)
    columns = [token_TW.tolist(), logprob_TW.tolist()]
    if sampler.temperature:
        network.begin(sampler)
        foreseen = network.predict(logits_TV, [place + 1 for place in places], WIDE)
        columns.append([[token for token, _ in guesses] for guesses in foreseen])
        columns.append([[math.log(chance) for _, chance in guesses] for guesses in foreseen])
    yield from map(list, zip(*columns))


# --- in the place of the networks -------------------------------------------------------------------------------------

class Replayed(TreeDraft):
    """A network that guesses what it guessed along a recorded text; `open` names that of the next request.

    A path that stands on the text gets the guesses of its place and depth, so what is right and what is not is as it
    was. So does a path beside the text: nothing there is ever right, and only the worth of its guesses counts, by which
    they compete with others. What it makes of a row are two numbers: on how many of its own guesses the row stands, and
    its position.
    """

    def __init__(self, network: Network, slots: int) -> None:
        self.source, self.lag, self.drifts, _ = network
        TreeDraft.__init__(self, TreeCache((0, 1, slots, 1), torch.float64, "cpu"))
        self._prompt = 0
        self._table: Table = []

    def open(self, prompt: int, table: Table) -> None:
        """The next request has so many tokens of prompt, and these guesses along its text."""
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

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: Admitted) -> Tensor:
        depth_T = feature_TD[:, 0] + 1 if self.lag else torch.zeros(len(pos_T))  # a small model looks at tokens alone
        position_T = pos_T + self.lag
        return torch.stack([depth_T.double(), position_T.double()], -1)

    def logits(self, out_TD: Tensor) -> Tensor:
        return out_TD  # the record is looked up where logits are read

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
        """The recorded guesses behind each row."""
        rows = out_TD.int().tolist()
        return [listed_at(self._table, position + 1 - self._prompt, depth) for depth, position in rows]


class ReplayedBlock(Replayed, Block):
    """The same of a network that guesses blocks; a mask's place in its block is the number of guesses before it."""

    inner = False

    def __init__(self, network: Network, slots: int) -> None:
        self.form = BlockForm((), network.block, 0)
        super().__init__(network, slots)

    def blank(self, rows: int) -> Tensor:
        place_T = torch.arange(rows, dtype=torch.float64) - 1
        return torch.stack((place_T, place_T), -1)

    def known(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        return Block.known(self, tree, fresh)

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: Admitted) -> Tensor:
        return torch.stack((feature_TD[:, 0], pos_T - 1.0), -1)  # a mask says the token at its own place
