"""Speeds that follow from a profile and a record alone: by the methods' own code in virtual time, and by formulas.

No model is computed. In virtual time the strategies, trees, drafts, rings and replicas are those of a real run; only
what the target says and what the drafter guesses is read out of the record (`eval/recorded.py`).
"""
from __future__ import annotations

from typing import NamedTuple, Sequence

from config.methods import METHODS
from config.run_config import RunConfig
from eval.dsi import formulas
from eval.dsi.acceptance_rates import rate
from eval.dsi.forwards import Forward
from eval.dsi.predict_keys import PredictConfig
from eval.dsi.records import Book, sampler_of
from eval.dsi.speculation import Plan, decode
from eval.metrics import NAN
from eval.recorded import Recorded
from launch.build import build_decoder, build_passes, build_ring
from launch.prepare import prepare
from launch.ranks import Rank
from launch.virtual import as_virtual
from model.drafts.mixture import Mixture
from pipeline.decode import Answer, Decoder, Request
from sim.cluster import NOTHING, Own

TICK = 1e-9  # seconds of the simulation by events
BY_EVENTS = {"ar": "non-SI", "serial": "SI", "dsi": "DSI"}  # names there


class Spent(NamedTuple):
    """What an answer took."""

    tokens: int
    seconds: float


def request_of(config: PredictConfig, book: Book, prompt: Sequence[int]) -> Request:
    """The request whose answer is in the record."""
    return Request(prompt, sampler_of(config), config.max_new_tokens, frozenset(book.ends))


def spent_on(answer: Answer, scale: float = 1.0) -> Spent:
    """What an answer took, where `scale` seconds passed for each modelled one."""
    return Spent(answer.new_tokens, (answer.prefill_seconds + answer.decode_seconds) / scale)


def speed(spent: Sequence[Spent]) -> float:
    """Tokens per second of all answers together, prefill included."""
    return sum(one.tokens for one in spent) / sum(one.seconds for one in spent)


# --- in virtual time --------------------------------------------------------------------------------------------------

def foretold(config: PredictConfig, book: Book, method: str, own: Own = NOTHING) -> list[Spent]:
    """What each answer takes in virtual time by a method; `own` is what Python takes beside what the profile charges.
    """
    run = config.run(method, virtual=True)
    spent = []
    for one in book.answers:
        asked = request_of(config, book, one.prompt)
        recorded = Recorded(one.record(coupled=method == "dsi"), book.vocab)
        answer = _answer(run, recorded, asked, own)
        assert answer.token_ids == one.text, "the text of a prediction is the recorded one"
        spent.append(spent_on(answer))
    return spent


def _answer(run: RunConfig, recorded: Recorded, asked: Request, own: Own) -> Answer:
    """One answer by a cluster of its own."""
    folder, placement = prepare(run)
    with as_virtual(run, folder, placement, own=own, answers=lambda _: recorded) as rank_0:
        decoder = _decoder(rank_0, recorded)
        decoder.ring.start()
        answer = decoder.whole(asked)
        decoder.ring.stop()
    return answer


def _decoder(rank_0: Rank, recorded: Recorded) -> Decoder:
    """What decodes on rank 0, over the record in place of the models."""
    spec, clock = rank_0.spec, rank_0.clock
    assert spec.cluster is not None, "a prediction has an emulated cluster"
    ring = build_ring(spec, recorded.lm_head, rank_0.wires.links, rank_0.trace, clock)
    draft = recorded.draft(spec.slots)
    passes = build_passes(spec, rank_0.trace, clock)
    return build_decoder(spec, ring, Mixture([draft]), spec.config.tree, passes)


# --- out of four numbers ----------------------------------------------------------------------------------------------

class Numbers(NamedTuple):
    """Milliseconds of a forward of the target, of a guess, and of a message; the acceptance rate; stages of a pipeline.
    """

    target: float
    drafter: float
    hop: float
    acceptance: float
    stages: int


def numbers_of(config: PredictConfig, book: Book, stages: int) -> Numbers:
    """What the closed forms know of the cluster and the record."""
    profile = config.run("ar", virtual=True).cluster
    assert profile is not None, "a prediction has an emulated cluster"
    acceptance = rate([one.likeliest for one in book.answers]).value
    return Numbers(profile.model, profile.level, profile.latency, acceptance, stages)


def closed_form(config: PredictConfig, method: str, numbers: Numbers) -> float:
    """Tokens per second in the long run by the closed form of a method.

    `serial` is SI over a pipeline, whose answers take the pipeline's latency. `pipeinfer` has no form of its own: that
    of `continuous` describes it, with the tip alone at first and then window after window.
    """
    target, drafter, hop, acceptance, stages = numbers
    if method == "dsi":
        cost = formulas.dsi_rate(target, drafter, acceptance, config.tree.lookahead)
    elif method == "serial":
        latency = formulas.latency(target, stages, hop)
        cost = formulas.si_rate(latency, drafter, acceptance, config.init_depth + 1)
    else:
        guesses = config.run_pipeinfer if method == "pipeinfer" else config.init_depth + 1
        form = formulas.PIPELINES["continuous" if method == "pipeinfer" else method]
        cost = form(target, drafter, acceptance, guesses, stages, hop)
    return 1e3 / float(cost)


def by_events(config: PredictConfig, method: str, book: Book, numbers: Numbers) -> float:
    """Tokens per second of the recorded matches by events; NaN for a method that has none of its own there."""
    if method not in BY_EVENTS:
        return NAN
    servers = config.run(method, virtual=True).copies(1 + config.replica_stages)
    target, drafter = _forward(numbers.target), _forward(numbers.drafter)
    hop = _ticks(numbers.hop)
    seconds, tokens = 0.0, 0
    for one in book.answers:
        matches = one.coupled if METHODS[method].target == "replicas" else one.likeliest
        plan = Plan(len(one.text), config.tree.lookahead, servers, target, drafter, hop=hop)
        seconds += decode(BY_EVENTS[method], plan, list(map(bool, matches))).ticks * TICK
        tokens += len(one.text)
    return tokens / seconds


def _forward(milliseconds: float) -> Forward:
    """A forward that always takes as long."""
    ticks = _ticks(milliseconds)
    return Forward(ticks, (ticks,))


def _ticks(milliseconds: float) -> int:
    return round(milliseconds / 1e3 / TICK)
