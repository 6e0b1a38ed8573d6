"""A live pipeline, as whoever sits at rank 0 holds it: commands, the evaluation, a person's own program.

It knows nothing about how its ranks were started: that is the affair of who gives it its wires.
"""
from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Iterator, Sequence, Union

from config.cli import parse
from config.methods import METHODS
from config.run_config import RunConfig, TreeConfig
from launch.build import build_decoder, build_draft, build_lm_head, build_ring, build_stage
from launch.prepare import open_text, prepare
from launch.probe import segment_rows
from launch.ranks import as_processes, as_threads
from launch.spec import RankSpec
from launch.wiring import Wires
from model.sample import Sampler
from model.text import Reader, Text
from pipeline.decode import Answer, Decoder, Request
from pipeline.interfaces import Draft
from pipeline.loss import PeerLost
from pipeline.target import Ring
from pipeline.trace import NoTrace
from tp.links import Loop

# A question; the turns of a conversation, the user's and the assistant's by turns; or token ids.
Prompt = Union[str, Sequence[str], Sequence[int]]


@dataclass(frozen=True)
class Pipeline:
    """The ring, the draft and the tokenizer. `text` is absent where prompts are token ids."""

    spec: RankSpec  # of rank 0
    ring: Ring
    draft: Draft
    text: Text | None
    trace: NoTrace
    started: ExitStack = field(default_factory=ExitStack)  # what ends with it

    @staticmethod
    def open(preset: str = "toy", **options: Any) -> Pipeline:
        """Start all ranks, this program being rank 0: of a preset, with the keys of `bash run_pipe.sh --help`.

        Every other rank is a process, or with `processes=False` a thread. Raises ValueError for what cannot work, in a
        sentence with the fix; a rank that is lost later ends a `stream` or `generate` with PeerLost.
        """
        words = [preset, *(f"{key}={_written(value)}" for key, value in options.items())]
        config = parse(words)
        folder, placement = prepare(config)
        if config.processes:
            ranks = as_processes(config, folder, placement, words)
        else:
            ranks = as_threads(config, folder, placement)
        with ExitStack() as started:
            pipeline = Pipeline.lead(*started.enter_context(ranks))
            return replace(pipeline, started=started.pop_all())

    @staticmethod
    def lead(spec: RankSpec, wires: Wires, trace: NoTrace) -> Pipeline:
        """Be rank 0 over these wires; returns once every stage is there."""
        alone = len(spec.part.stages) == 1  # or with members, but without a ring
        link = Loop(build_stage(spec, trace, wires.group), wires.fan) if alone else wires.link
        lm_head = build_lm_head(spec)
        ring = build_ring(spec, lm_head, link, trace)
        try:
            text = open_text(spec.config, spec.part.folder)
            draft = build_draft(spec, lm_head, trace)
            ring.start()
        except (ValueError, KeyboardInterrupt):
            ring.stop()  # the other ranks are well, and shall end in good order
            raise
        return Pipeline(spec, ring, draft, text, trace)

    def close(self) -> None:
        """End all ranks in good order."""
        with self.started, suppress(PeerLost):  # whose loss was told when it came
            self.ring.stop()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self.close()

    @property
    def config(self) -> RunConfig:
        return self.spec.config

    @property
    def scale(self) -> float:
        """Seconds that pass here for each second that is modelled."""
        return self.config.slowdown

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """A whole answer. The options are keys of `RunConfig` that say how it is chosen and when it ends."""
        generation = self.stream(prompt, **options)
        for _ in generation:
            pass
        return generation

    def stream(self, prompt: Prompt, **options: Any) -> Generation:
        """An answer that is made while its pieces are read."""
        config = replace(self.config, **options)
        ids = self._ids(prompt, config)
        request = self._request(ids, config)
        answer, stream = self.decoder.decode(request)
        reader = Reader(self.text, config.stop) if self.text else None
        return Generation(answer, _pieces(stream, reader, answer, self.trace), reader)

    def _ids(self, prompt: Prompt, config: RunConfig) -> list[int]:
        turns = [prompt] if isinstance(prompt, str) else list(prompt)
        ids = [turn for turn in turns if isinstance(turn, int)]
        if len(ids) == len(turns):
            return ids
        if self.text is None:
            raise ValueError("this pipeline was started for token ids: give a list of them, or start it without "
                             "prompt_ids")
        return self.text.prompt_ids([str(turn) for turn in turns], config.template)

    def _request(self, ids: list[int], config: RunConfig) -> Request:
        """A request as the configuration wants it."""
        sampler = Sampler(config.temperature, config.top_p, config.top_k, config.seed)
        request = Request(ids, sampler, config.max_new_tokens)
        if self.text and not config.ignore_eos:
            request = replace(request, end=frozenset(self.text.end_ids))
        if self.text and config.stop:
            request = replace(request, stop=self.text.stop_rule(config.stop))
        return request

    @cached_property
    def decoder(self) -> Decoder:
        """That of the configuration itself."""
        return self.decoder_for(self.config)

    def decoder_for(self, config: RunConfig) -> Decoder:
        """A decoder of another method, or with other trees, over the same ring and draft."""
        return build_decoder(replace(self.spec, config=config), self.ring, self.draft, self.tree_for(config))

    def tree_for(self, config: RunConfig) -> TreeConfig:
        """What the strategy receives. Sizes of segments that were left open are measured, once."""
        tree = config.tree
        if not METHODS[config.pipeline_type].measured:
            return tree
        if config.init_subseq_token == 0:
            tree = replace(tree, init=replace(tree.init, segment=self.segment_rows))
        if config.expand_subseq_token == 0:
            tree = replace(tree, expand=replace(tree.expand, segment=self.segment_rows))
        return tree

    @cached_property
    def segment_rows(self) -> int:
        """How many rows a segment should hold, as a few passes of the pipeline tell."""
        return segment_rows(self.ring, self.spec.context)


class Generation:
    """One answer: iterate over its pieces of text (or its token ids, if there is no tokenizer), close it to give up.

    `answer` has its token ids and figures so far.
    """

    def __init__(self, answer: Answer, pieces: Iterator[str], reader: Reader | None) -> None:
        self.answer, self._pieces, self._reader = answer, pieces, reader

    @property
    def text(self) -> str:
        """What has come so far."""
        return self._reader.text if self._reader else ""

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        """Give up: no stage computes for this answer any more."""
        self._pieces.close()  # type: ignore[attr-defined]


def _pieces(stream: Iterator[list[int]], reader: Reader | None, answer: Answer, trace: NoTrace) -> Iterator[str]:
    with trace.span("request", answer=answer.token_ids), closing(stream):  # type: ignore[type-var]
        for tokens in stream:
            yield reader.read(tokens) if reader else "".join(f"{token} " for token in tokens)
    if reader:
        yield reader.finish()


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
