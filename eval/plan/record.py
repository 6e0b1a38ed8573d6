"""The record for a plan: the target's answers to some questions, and the guesses of each draft along these texts.

`read_record` reads one for other programs, and `accept_lengths` gives the accepted lengths of a chain
(docs/planner.md). From every token of a text on, each network also reads its own outputs, up to MAX_DEPTH of them. The
record holds its most likely guesses at each position with their probabilities, by the number of own guesses before it,
their depth. In a trial the record replaces the network, and no model is computed.

Shapes: T rows, W guesses of a row.
"""
from __future__ import annotations

import math
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
from pipeline.answers import Request
from pipeline.decode import Decoder

# Tokens, the most likely first, and their log-probabilities; above temperature 0 then the same for the tokens that
# most likely win with the noise of their position.
Listed = Sequence[Sequence[Any]]
GuessTable = Sequence[Sequence[Listed]]  # by position in the text, then by depth
MAX_DEPTH = 10  # largest recorded number of own guesses before a guess; it represents larger ones, too
MAX_WIDTH = 16  # guesses at each position
SETTINGS = ("base_dir", "model_dir", "eagle_dir", "draft_dir", "ssm", "sets", "data", "questions",
            "template", "max_new_tokens", "dtype", "temperature", *PENALTIES)  # the keys that determine a record …
SAMPLING_SETTINGS = ("top_p", "top_k", "min_p", "seed")  # … and those that also do above temperature 0
REMEDY = "name another traces="
ANY_CLUSTER = {"time": "virtual", "profile": "server"}  # the time is not used


class NetworkTraits(NamedTuple):
    """The properties of a network that drafting uses, with the names of `TreeDraft`."""

    source: str
    lag: int
    drifts: bool
    block: int = 0  # tokens of a block that it guesses at once; 0: it guesses token by token


class RecordedAnswer(NamedTuple):
    """One answer as token ids, and the guesses of each network along it, by its name."""

    prompt: list[int]
    text: list[int]
    guesses: Mapping[str, GuessTable]


class PlanRecord(NamedTuple):
    """A record: the answers to all questions, the networks, and properties of the target."""

    answers: list[RecordedAnswer]
    networks: dict[str, NetworkTraits]  # by name
    vocab: int  # number of tokens
    ends: list[int]  # end tokens
    layers: int


# --- in a file --------------------------------------------------------------------------------------------------------

def record_of(config: PlanConfig) -> PlanRecord:
    """Return the record in the file of `traces`, or make a new one and write it there.

    Raises ValueError if the file holds anything else, or a record with other keys or fewer drafts, or if an input is
    missing.
    """
    keys = SETTINGS + SAMPLING_SETTINGS if config.run.temperature else SETTINGS
    settings = settings_of(config, keys)
    content = load(config.traces, settings, "holds no record of drafts", REMEDY)

    if content:
        recorded_kinds = map(kind_of, content["networks"])
        missing = set(config.kinds).difference(recorded_kinds)
        if missing:
            raise ValueError(f"{config.traces} has no guesses of {', '.join(sorted(missing))}: {REMEDY}")
        return _record_from(content)

    record = make_record(config)
    if config.traces:
        answers = [answer._asdict() for answer in record.answers]
        save(config.traces, settings, {**record._asdict(), "answers": answers})
    return record


def _record_from(content: Mapping[str, Any]) -> PlanRecord:
    answers = [RecordedAnswer(**answer) for answer in content["answers"]]
    networks = {name: NetworkTraits(*traits) for name, traits in content["networks"].items()}
    return PlanRecord(answers, networks, content["vocab"], content["ends"], content["layers"])


def read_record(path: str) -> PlanRecord:
    """Return the record in a file that `traces=` has written, with any keys. Its format is in docs/planner.md.

    Raises ValueError if the file is missing, or was changed since.
    """
    content = load(path, {}, "holds no record of drafts, or was changed", "let scripts.plan write it with traces=FILE")

    if content is None:
        raise ValueError(f"there is no file {path}: let scripts.plan write it with traces={path}")
    return _record_from(content)


def accept_lengths(answer: RecordedAnswer, network: str, num_guesses: int) -> list[int]:
    """Return the tokens of each verification of a chain of a network's `num_guesses` most likely guesses.

    They include the target's own token. The first token of the text comes from the prefill and is not counted.
    """
    table, text = answer.guesses[network], answer.text
    lengths: list[int] = []
    position = 1  # of the next token to settle

    while position < len(text):
        num_accepted = 0
        for depth, token in enumerate(text[position:position + num_guesses]):
            first_guess = listed_at(table, position + depth, depth)[0][0]
            if first_guess != token:
                break
            num_accepted += 1

        lengths.append(min(num_accepted + 1, len(text) - position))
        position += num_accepted + 1
    return lengths


def listed_at(table: GuessTable, position: int, depth: int) -> Listed:
    """Return the guesses at a position after `depth` own ones; beyond the bounds of the record, the nearest entry."""
    by_depth = table[min(max(0, position), len(table) - 1)]
    return by_depth[min(depth, len(by_depth) - 1)]


def kind_of(network: str) -> str:
    """Return the kind of a network from its name, which ends with a number if there are several."""
    return network.rstrip("0123456789")


# --- from the models --------------------------------------------------------------------------------------------------

def make_record(config: PlanConfig) -> PlanRecord:
    """Make a record with the models, all in this process.

    Questions are taken from the sets in turn, so that the first few are of all kinds.
    """
    run = config.run
    autoregressive_run = config.single(pipeline_type="ar", **ANY_CLUSTER)
    with as_virtual(prepare(autoregressive_run)) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
        assert pipeline.text is not None, "questions need a tokenizer"
        end_ids, sizes = frozenset(pipeline.text.end_ids), pipeline.spec.sizes
        readers = list(_readers(pipeline, config))

        questions = by_turns(config.folder, config.chosen_sets, *run.question_range)
        prompts = [pipeline.prompt_ids(question, run.template) for question in questions]
        check_room(prompts, run.max_new_tokens, pipeline.spec.context)

        answers, sampler = [], sampler_of(run)
        for prompt in ProgressBar(prompts, desc="record", unit="answer", leave=False):
            request = Request(prompt, sampler, run.max_new_tokens, end_ids)
            text = pipeline.decoder.complete(request).token_ids
            guesses = {network.source: _table(decoder, network, prompt, text, sampler)
                       for decoder, network in readers}
            answers.append(RecordedAnswer(prompt, text, guesses))

        networks = {}
        for _, network in readers:
            block_size = _block_size(network)
            networks[network.source] = NetworkTraits(network.source, network.lag, network.drifts, block_size)
        return PlanRecord(answers, networks, sizes.vocab, sorted(end_ids), sizes.layers)


def _readers(pipeline: Pipeline, config: PlanConfig) -> Iterator[tuple[Decoder, TreeDraft]]:
    """Yield the available networks, each with its decoder."""
    for kind in config.kinds:
        serial_run = config.single(pipeline_type="serial", draft=kind, **ANY_CLUSTER)
        decoder = pipeline.decoder_for(serial_run)

        for network in decoder.draft.networks:
            if not isinstance(network, TreeDraft) or not (network.by_level or _block_size(network)):
                raise ValueError(f"a plan cannot record guesses of draft={kind}, which does not draft level by level: "
                                 "use drafts=suffix, or try it with profile=NAME time=virtual")
            if kind_of(network.source) != kind:
                raise ValueError("the head of this model guesses blocks: plan with drafts=suffix,dflash,dflash+suffix")
            yield decoder, network


def _block_size(network: Any) -> int:
    return network.form.size if isinstance(network, BlockDraft) and network.marginal else 0


def _table(decoder: Decoder, network: TreeDraft, prompt: Sequence[int],
           text: Sequence[int], sampler: Sampler) -> GuessTable:
    """Return the guesses of a network at each position of a text, by the number of own guesses before it."""
    tree = read_text(decoder, [*prompt, *text])
    if isinstance(network, BlockDraft):
        outputs = blocks(network, tree, len(prompt))
    else:
        outputs = unrolled(network, tree, len(prompt), MAX_DEPTH if network.lag else 0)

    table: list[list[Listed]] = [[] for _ in text]
    for depth, last_positions, out_TD in outputs:  # positions of the tokens that were read last, prompt included
        for last_position, listed in zip(last_positions, _listed(network, out_TD, last_positions, sampler)):
            text_position = last_position + 1 - len(prompt)
            if text_position < len(text):
                assert len(table[text_position]) == depth, (last_position, depth)
                table[text_position].append(listed)
    return table


def _listed(network: TreeDraft, out_TD: Tensor,
            last_positions: Sequence[int], sampler: Sampler) -> Iterator[Listed]:
    """Yield the guesses of a network after each row; `last_positions` are the positions of the rows' last tokens."""
    logits_TV = network.logits(out_TD)
    logprob_TW, token_TW = network.guess(logits_TV, MAX_WIDTH)
    columns = [token_TW.tolist(), logprob_TW.tolist()]

    if sampler.temperature:
        network.begin(sampler)
        next_positions = [position + 1 for position in last_positions]
        predicted = network.predict(logits_TV, next_positions, MAX_WIDTH)
        columns.append([[token for token, _ in guesses] for guesses in predicted])
        columns.append([[math.log(probability) for _, probability in guesses] for guesses in predicted])

    yield from map(list, zip(*columns))


# --- in place of the networks -----------------------------------------------------------------------------------------

class Replayed(TreeDraft):
    """A network that repeats its guesses along a recorded text; `open` sets the text of the next request.

    A path along the text gets the guesses of its position and depth, so the same guesses are correct as in the record.
    A path off the text gets them, too: no guess there is ever correct, but their probabilities compete with those of
    others. Its features of a row are two numbers: the number of own guesses before the row, and its position.
    """

    def __init__(self, network: NetworkTraits, num_slots: int) -> None:
        self.source, self.lag, self.drifts, _ = network
        TreeDraft.__init__(self, TreeCache((0, 1, num_slots, 1), torch.float64, "cpu"))
        self._prompt_length = 0
        self._table: GuessTable = []

    def open(self, prompt_length: int, table: GuessTable) -> None:
        """Set the number of prompt tokens of the next request, and the guesses along its text."""
        self._prompt_length, self._table = prompt_length, table

    def readable(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        kind: Any = Eagle if self.lag else ModelDraft
        nodes: list[int] = kind.readable(self, tree, fresh)
        return nodes

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
        token_rows, logprob_rows, *_ = zip(*self._listed(logits_TV))
        token_TW = torch.tensor(token_rows)
        logprob_TW = torch.tensor(logprob_rows, dtype=torch.float64)
        return logprob_TW[:, :width], token_TW[:, :width]

    def predict(self, logits_TV: Tensor, positions: list[int], width: int) -> list[Guesses]:
        guesses_by_row: list[Guesses] = []
        for *_, tokens, logprobs in self._listed(logits_TV):
            probabilities = torch.tensor(logprobs).exp().tolist()
            guesses_by_row.append(list(zip(tokens[:width], probabilities)))
        return guesses_by_row

    def _listed(self, out_TD: Tensor) -> list[Listed]:
        """Return the recorded guesses after each row."""
        rows = out_TD.int().tolist()
        return [listed_at(self._table, position + 1 - self._prompt_length, depth) for depth, position in rows]


class ReplayedBlock(Replayed, BlockDraft):
    """A replayed network that guesses blocks; the index of a mask in its block is the number of guesses before it."""

    inner = False

    def __init__(self, network: NetworkTraits, num_slots: int) -> None:
        self.form = BlockForm((), network.block, 0)
        super().__init__(network, num_slots)

    def blank(self, rows: int) -> Tensor:
        mask_T = torch.arange(rows, dtype=torch.float64) - 1
        return torch.stack((mask_T, mask_T), -1)

    def readable(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        return BlockDraft.readable(self, tree, fresh)

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: SegmentCache) -> Tensor:
        return torch.stack((feature_TD[:, 0], pos_T - 1.0), -1)  # a mask predicts the token at its own position
