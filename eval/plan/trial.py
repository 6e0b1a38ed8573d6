"""Trials: questions answered in virtual time over a split, by the methods' own code.

The models are in this process. The target computes each token of a text once for all trials, the drafts guess in each.
"""
from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Iterator, NamedTuple, Sequence

from config.cli import parts
from config.methods import METHODS
from config.profiles import Profile
from config.questions import by_turns
from eval.bench import speed
from eval.keys import Contender, first
from eval.plan.keys import PlanConfig
from launch.build import build_decoder
from launch.memory import GB, cached
from launch.pipeline import Pipeline
from launch.prepare import Prepared, prepare
from launch.spec import dropping_windows
from launch.splits import Split
from launch.virtual import as_virtual
from model.drafts.draft import Read, Reading
from model.drafts.network import read_all
from pipeline.answers import Answer, Request
from pipeline.trace import OFF
from sim.clock import Pace, VirtualClock
from sim.cluster import Cluster
from sim.devices import SlowHead
from sim.ring import VirtualRing
from sim.stages import StageShare, Work, work_of

ANY_PROFILE = "server"  # of a pipeline in which only rank 0 is measured


class Trial(NamedTuple):
    """A method with a draft over a split, and its answers."""

    contender: Contender
    split: Split
    answers: Sequence[Answer]

    @property
    def speed(self) -> float:
        """Tokens per second of all answers together, prefill included."""
        return speed(self.answers)

    @property
    def first_seconds(self) -> float:
        """Mean seconds to the first token."""
        return sum(answer.prefill_seconds for answer in self.answers) / len(self.answers)

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a run of this trial."""
        method, draft = self.contender
        draft_keys = {"draft": draft} if METHODS[method].draft == "eagle" else {}
        return {"pipeline_type": method, **draft_keys, "stages": "+".join(map(str, (0, *self.split.layers)))}


class Bench:
    """The setting of trials: the cluster, and a pipeline in virtual time whose models and questions they use."""

    def __init__(self, profile: Profile, config: PlanConfig, prepared: Prepared, pipeline: Pipeline) -> None:
        self.profile, self.prepared = profile, prepared
        self._config, self._pipeline = config, pipeline
        self.num_layers = pipeline.spec.sizes.layers
        self._requests = list(_requests(config, pipeline))

    @property
    def layer_gigabytes(self) -> float:
        """GB of a layer, and of its keys, values and states: of the model, or, if the profile is of another one, of two
        rows for each token."""
        profile, spec, run = self.profile, self._pipeline.spec, self._config.run
        sizes, like = spec.sizes, spec.like
        request_bytes = 2 * profile.row_bytes * profile.layers * run.max_length
        if (profile.layers, profile.row_bytes) == (sizes.layers, sizes.hidden * like.element_size()):
            windows = dropping_windows(run, sizes, range(sizes.layers))
            request_bytes = sum(cached(sizes, enumerate(windows), spec.context, like, spec.code_type))
        return (profile.weights + request_bytes / GB) / self.num_layers

    def rank_0_times(self) -> tuple[float, float]:
        """Return the milliseconds of a level of the first draft and of a verdict, as this machine computes them."""
        pipeline, level_seconds = self._pipeline, []

        def timed_passes(readings: Sequence[Reading]) -> list[Read]:
            begun_at = time.perf_counter()
            outputs = read_all(readings)
            level_seconds.append(time.perf_counter() - begun_at)
            return outputs

        spec = replace(pipeline.spec, config=replace(pipeline.config, pipeline_type="serial"))
        decoder = build_decoder(spec, pipeline.ring, pipeline.draft_of(spec), spec.config.tree, timed_passes)
        decoder.complete(self._requests[0])

        x_TD = spec.like.new_zeros(1, spec.sizes.hidden)
        begun_at = time.perf_counter()
        pipeline.lm_head(x_TD)
        verdict_seconds = time.perf_counter() - begun_at
        return 1e3 * median(level_seconds or [0.0]), 1e3 * verdict_seconds

    def trial(self, contender: Contender, split: Split) -> Trial:
        """Let a method answer all questions over this split; every answer begins like the first."""
        pipeline = replace(self._pipeline, ring=self._ring_over(split))
        run = self._config.with_draft(contender.draft, pipeline_type=contender.method)
        decoder = pipeline.decoder_for(run, parts(contender.draft).head)

        answers = []
        for request in self._requests:
            pipeline.reset_measurements(same=True)
            answers.append(decoder.complete(request))

        return Trial(contender, split, answers)

    def _ring_over(self, split: Split) -> VirtualRing:
        """Return a ring over the boards of a split, with the target of the pipeline and its clock."""
        rank, clock = self._pipeline.rank, self._pipeline.rank.clock
        assert isinstance(clock, VirtualClock), "trials take place in virtual time"
        target = rank.connections.links[0].cluster.paths
        num_ranks = 1 + len(split.boards)

        cluster = Cluster(self.profile, clock, [self._works(split)], target, [OFF] * num_ranks)
        head = SlowHead(self._pipeline.lm_head, Pace(self.profile, clock))
        return VirtualRing(cluster.links[0], head, num_ranks, rank.spec.device, clock=clock)

    def _works(self, split: Split) -> list[Work]:
        """Return the work of each stage."""
        works, end_layer = [], 0
        for board, num_layers in zip(split.boards, split.layers):
            first_layer, end_layer = end_layer, end_layer + num_layers
            last_input = end_layer if end_layer == self.num_layers else end_layer - 1  # the model's output, too
            num_inner = sum(first_layer <= layer <= last_input for layer in self._pipeline.spec.part.inner)

            works.append(work_of(self.profile, StageShare([board], num_layers / self.num_layers, num_inner)))

        return works


@contextmanager
def open_bench(profile: Profile, config: PlanConfig) -> Iterator[Bench]:
    """Load the models of a plan into this process. Raises ValueError if an input is missing."""
    profile_name = config.run.profile if config.run.cluster else ANY_PROFILE
    prepared = prepare(config.with_draft(config.first_draft, pipeline_type=first(config.chosen_methods), hosts="",
                                         profile=profile_name, time="virtual"))

    with as_virtual(prepared) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
        yield Bench(profile, config, prepared, pipeline)


def _requests(config: PlanConfig, pipeline: Pipeline) -> Iterator[Request]:
    """Yield the requests for the questions of the data sets."""
    run = config.run
    for question in by_turns(config.folder, config.chosen_sets, *run.question_range):
        yield pipeline.request(pipeline.prompt_ids(question, run.template), run, "")
