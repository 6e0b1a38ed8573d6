"""A live pipeline on rank 0, and its answers, for commands, the evaluation and users' programs.

It knows nothing about how the other ranks were started, which is the task of `ranks.py` and `run.py`.
"""
from __future__ import annotations

import math
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Callable, Generator, Iterator, Mapping, Sequence, TypeVar, Union

from config.cli import shown_path
from config.console import say
from config.failure import PeerLost
from config.forms import ACCEPTED_PER_LEVEL
from config.keys import keys_with, parsed, written
from config.keys import options as keys_of
from config.run_config import RunConfig
from config.trees import RoundCosts, TreeConfig
from launch.build import LMHead, build_decoder, build_lm_head, build_passes, build_ring, build_stage, sampler_of
from launch.drafts import build_draft
from launch.prepare import check_ids, open_text
from launch.probe import (
    TIMED_CONTEXT,
    batch_seconds,
    latencies,
    learn_slowest_wire,
    level_seconds,
    level_share,
    round_trip,
    segment_rows,
    segment_seconds,
    sized,
)
from launch.ranks import rank_0
from launch.spec import RankSpec
from launch.wiring import Rank
from launch.words import resolve
from model.drafts.draft import Draft, Passes
from model.grammar import Grammar, Grammars, Guide
from model.text import NO_VARIABLES, AnswerReader, MessageDict, Stops, Text, as_messages, check_messages, is_in_loop
from model.tree import TokenTree
from pipeline.answers import Answer, Request
from pipeline.decode import Decoder, TokenStream
from pipeline.requests import Ring
from pipeline.trace import NoTrace
from tp.links import Loop

KEYS_BY_NAME = {option.name: option for option in keys_of(RunConfig)}
Result = TypeVar("Result")
# A question; a conversation, as alternate texts of user and assistant or as messages with roles; or token ids.
Prompt = Union[str, Sequence[str], Sequence[MessageDict], Sequence[int]]


class Generation:
    """One answer while it is generated: iterate over its pieces of text, or close it to cancel it.

    Without a tokenizer the pieces are token ids. `answer` has the token ids and the figures so far.
    """

    def __init__(self, answer: Answer, token_stream: TokenStream, reader: AnswerReader | None, trace: NoTrace) -> None:
        self.answer = answer
        self._token_stream, self.reader = token_stream, reader
        self._pieces = pieces(answer, token_stream, reader, trace)

    @property
    def ready(self) -> bool:
        """Whether the next piece, or the end, can be read without advancing any request."""
        return self._token_stream.ready

    @property
    def tree(self) -> TokenTree:
        """The text and its live guesses at this moment."""
        return self._token_stream.tree

    @property
    def segments_under_way(self) -> list[tuple[frozenset[int], float]]:
        """The nodes of each segment in flight, with the share of its way through the stages that it has gone."""
        return self._token_stream.segments_under_way

    @property
    def accepted(self) -> int:
        """The number of tokens of the answer so far that were guesses in flight."""
        return sum(self.accepted_runs)

    @property
    def accepted_runs(self) -> list[int]:
        """The lengths of the runs of tokens that were guesses in flight, empty ones included.

        A token that no guess in flight covered begins the next run, unless it is the last one so far.
        """
        first_position, accepted_positions = self.answer.prompt_tokens, frozenset(self.tree.accepted_positions)
        run_lengths: list[int] = []
        for position in range(first_position, first_position + self.answer.new_tokens):
            if position not in accepted_positions:
                run_lengths.append(0)
            elif run_lengths:
                run_lengths[-1] += 1
            else:
                run_lengths.append(1)

        return run_lengths[:-1] if run_lengths and not run_lengths[-1] else run_lengths

    @property
    def text(self) -> str:
        """The text so far; empty without a tokenizer."""
        return self.reader.text if self.reader else ""

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel the answer, even if it has not begun: no stage computes for it any more."""
        self._pieces.close()
        self._token_stream.close()


def pieces(answer: Answer, token_stream: Iterator[list[int]], reader: AnswerReader | None, trace: NoTrace
           ) -> Generator[str, None, None]:
    """Yield the pieces of an answer as its tokens settle. Closing it closes the stream of settled tokens, too."""
    with trace.span("request", answer=answer.token_ids), closing(token_stream):  # type: ignore[type-var]
        for tokens in token_stream:
            yield reader.read(tokens) if reader else "".join(f"{token} " for token in tokens)
    if reader:
        yield reader.finish()


def _answer_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options of one answer; raises ValueError for a key of the whole pipeline."""
    pipeline_keys = sorted(options.keys() & KEYS_BY_NAME.keys() - keys_with(RunConfig, "per_answer"))
    if pipeline_keys:
        raise ValueError(f"{pipeline_keys[0]} is the same for all answers of a pipeline: give it to Pipeline.open")
    return parsed([f"{key}={written(value)}" for key, value in options.items()], KEYS_BY_NAME)


@dataclass(frozen=True)
class Pipeline:
    """A split model on several ranks, ready to answer.

        with Pipeline.open("smollm2", temperature=0.7) as pipeline:
            for piece in pipeline.stream("What does a baker do?"):
                print(piece, end="", flush=True)

    One answer is generated at a time, or with `submit` up to `max_requests`. `text` is None if prompts are token ids.
    """

    rank: Rank  # rank 0
    ring: Ring
    text: Text | None
    lm_head: LMHead  # the target's, which drafts may share
    drafts: dict[Any, Draft] = field(default_factory=dict)  # all that were built, by kind and folder
    open_ranks: ExitStack = field(default_factory=ExitStack)  # what `open` has started and `close` ends

    # --- from the start to the end ------------------------------------------------------------------------------------

    @staticmethod
    def open(preset: str = "", **options: Any) -> Pipeline:
        """Start the ranks of a preset, with this program as rank 0; `bash run_pipe.sh --help` lists the options.

        The default model is SmolLM2, or the bundled model if SmolLM2 cannot be fetched.

        The other ranks are processes, or threads with `link="threads"`, as a single stage is by default. With
        `hosts=FILE` they are other boards, where a user starts run_jetson.sh; this returns once all have come. Raises
        ValueError, in a sentence that names the fix, for invalid options. If a rank is lost for good later, `stream`
        and `generate` raise PeerLost.
        """
        key_words = [f"{key}={written(value)}" for key, value in options.items()]
        resolved = resolve([preset, *key_words] if preset else key_words)
        rank = rank_0(resolved)
        resolved.report()

        with ExitStack() as open_ranks:
            pipeline = Pipeline.of_rank_0(open_ranks.enter_context(rank))
            return replace(pipeline, open_ranks=open_ranks.pop_all())

    @staticmethod
    def of_rank_0(rank: Rank) -> Pipeline:
        """Return the pipeline of a connected rank 0, once every stage is ready."""
        spec, trace = rank.spec, rank.trace
        links = rank.connections.links
        if len(spec.part.stages) == 1 and not spec.config.virtual:
            # rank 0 holds the whole model, or shares its layers: there is no ring
            links = [Loop(build_stage(spec, trace, rank.connections.group), rank.connections.fan)]

        lm_head = build_lm_head(spec)
        ring = build_ring(spec, lm_head, links, trace, rank.clock)
        ring.meter, ring.reconnect = rank.connections.meter, rank.rejoin

        try:
            pipeline = Pipeline(rank, ring, open_text(spec.config, spec.part), lm_head)
            pipeline.draft_of(spec)
            ring.start()
            return pipeline
        except (ValueError, KeyboardInterrupt):
            ring.stop()  # the other ranks work, and must end in an orderly way
            raise

    def __repr__(self) -> str:
        config = self.config
        shown_facts = [f"model={shown_path(config.model_dir or config.base_dir)!r}", f"split={self.spec.part.form!r}",
                       f"pipeline_type={config.pipeline_type!r}", f"draft={config.draft!r}"]
        if config.kind != "real":
            shown_facts.append(config.kind)
        if self.ring.stopped:
            shown_facts.append("closed")
        return f"Pipeline({', '.join(shown_facts)})"

    def stop(self) -> None:
        """End the work of all other ranks; returns once they have ended it."""
        self.ring.stop()

    def close(self) -> None:
        """End all ranks in an orderly way; has no effect if that was done."""
        if self.ring.stopped:
            return
        with self.open_ranks, suppress(PeerLost):  # a loss was reported when it happened
            self.ring.poll()  # raises after a loss, so that no rank takes it for an orderly end
            self.stop()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, error_class: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Return the complete answer; options are the keys of sampling and of an answer's end, and `template`."""
        generation = self.stream(prompt, **options)
        for _ in generation:
            pass
        return generation

    def chat(self, messages: Sequence[MessageDict], **options: Any) -> Generation:
        """Return the assistant's answer to messages with a `role` (system, user or assistant) and a `content`."""
        check_messages(messages)
        return self.generate(messages, **options)

    def stream(self, prompt: Prompt, **options: Any) -> Generation:
        """Return an answer that is generated while its pieces are read; options as for `generate`.

        With `logprobs=N` the answer has the target's log-probabilities of each token and of the N likeliest ones, with
        `prompt_logprobs=True` also those of the prompt. `guide` is a grammar that the answer follows
        (`model.grammar.Guide`, as `Guide.json_schema({"type": "object"})`), or one that `grammar` has compiled. With
        `shows_marks` the text of GPT-OSS has its channels as the model writes them.
        """
        return self._generation(prompt, options, self.decoder.stream)

    def submit(self, prompt: Prompt, waits: bool = True, decoder: Decoder | None = None, **options: Any) -> Generation:
        """Like `stream`, for an answer that begins at once, or as soon as fewer than `max_requests` run.

        Up to `max_requests` answers are generated at once. Reading one of them advances all of them. Unless it
        `waits`, its pieces are empty until tokens settle, and `turn` advances all. The option `priority`, above 0 and 1
        by default, weights its guesses and decides which request begins first. `decoder` replaces the pipeline's own,
        as one of `decoder_for`.
        """
        submit = (decoder or self.decoder).submit
        return self._generation(prompt, options, partial(submit, waits=waits))

    def turn(self) -> None:
        """Advance all submitted requests, or wait until one of them can advance. Raises PeerLost."""
        self.decoder.turn()

    def check(self) -> None:
        """Raise PeerLost if a rank is lost and does not come back; takes no time otherwise."""
        self._recovering(self.ring.poll)

    def reset_measurements(self, same: bool = False) -> None:
        """Forget what was learned, so that the next answer is generated like the first; none may be in progress.

        In virtual time the target computes only once for all answers to the `same` question.
        """
        self.ring.reset_measurements()
        for draft in self.drafts.values():
            draft.reset_learning()
        self.rank.restart(same)

    def _generation(self, prompt: Prompt, options: dict[str, Any],
                    start_request: Callable[[Request], tuple[Answer, TokenStream]]) -> Generation:
        stops: Stops = options.pop("stop", self.config.stop)
        priority: float = options.pop("priority", 1.0)
        num_logprobs: int | None = options.pop("logprobs", None)
        with_prompt_logprobs: bool = options.pop("prompt_logprobs", False)
        guide: Guide | Grammar | None = options.pop("guide", None)
        shows_marks: bool = options.pop("shows_marks", False)

        if self.ring.stopped:
            raise RuntimeError("the pipeline is closed: send requests inside its with")
        if not isinstance(stops, (str, list, tuple)):
            raise ValueError(f"stop is of type {type(stops).__name__}: give a text, or a list of texts")
        if not priority > 0:
            raise ValueError(f"priority={priority} is not above 0")
        if num_logprobs is not None and not 0 <= num_logprobs <= self.spec.sizes.vocab:
            raise ValueError(f"logprobs={num_logprobs} is not possible: give a number from 0 to "
                             f"{self.spec.sizes.vocab}")

        config = self.answer_config(options)
        request = self.request(self.prompt_ids(prompt, config.template), config, stops)
        grammar = self.grammar(guide) if isinstance(guide, Guide) else guide
        request = replace(
            request, priority=priority, likeliest=num_logprobs, echo=with_prompt_logprobs, grammar=grammar)

        answer, token_stream = start_request(request)
        answer_reader = AnswerReader(self.text, stops, shows_marks) if self.text else None
        return Generation(answer, token_stream, answer_reader, self.rank.trace)

    def is_stopped_loop(self, generation: Generation) -> bool:
        """Return whether an answer ended, as `stop_loops` asks, because it repeats itself."""
        return self.config.stop_loops and is_in_loop(generation.text)

    def answer_config(self, options: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of an answer with these options; raises ValueError for impossible ones."""
        return replace(self.config, **_answer_values(options))

    def prompt_ids(self, prompt: Prompt, template: str, variables: Mapping[str, Any] = NO_VARIABLES,
                   max_tokens: float = math.inf) -> list[int]:
        """Return a prompt as token ids, formatted by `template`, which may read `variables` in addition to messages.

        Raises ValueError for ids that the model does not have, and LongText for a text of more than `max_tokens`.
        """
        if not isinstance(prompt, Sequence):
            raise ValueError(f"the prompt is of type {type(prompt).__name__}: give a text, messages or token ids")

        prompt_turns: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
        token_ids = [turn for turn in prompt_turns if isinstance(turn, int)]
        if len(token_ids) < len(prompt_turns):
            if self.text is None:
                raise ValueError("this pipeline was started for token ids: give a list of them, or start it without "
                                 "prompt_ids")
            if not any(isinstance(turn, Mapping) for turn in prompt_turns):
                prompt_turns = as_messages([str(turn) for turn in prompt_turns])
            token_ids = self.text.chat_ids(prompt_turns, template, variables, max_tokens)

        check_ids("the prompt", token_ids, self.spec.sizes.vocab)
        return token_ids

    def grammar(self, guide: Guide) -> Grammar:
        """Return a guide's grammar for one request, on any thread; ValueError for one that cannot be met.

        It takes a millisecond, and ten seconds at most.
        """
        if self.grammars is None:
            raise ValueError("this pipeline was started for token ids, and a grammar is of text: leave it out, "
                             "or start it without prompt_ids")
        return self.grammars.of(guide)

    def prepare_grammars(self) -> None:
        """Do at once what would delay other requests by a second at the first grammar; ValueError if it fails."""
        if self.grammars is not None:
            self.grammars.prepare()

    def request(self, token_ids: list[int], config: RunConfig, stops: Stops) -> Request:
        """Return the request for an answer to these token ids, with this configuration's sampling and end."""
        check_ids("logit_bias", [token for token, _ in config.biases], self.spec.sizes.vocab)
        text = self.text
        request = Request(token_ids, sampler_of(config), config.max_new_tokens)
        if text and not config.ignore_eos:
            request = replace(request, end=frozenset(text.end_ids))
        if text and (stops or config.stop_loops):
            request = replace(request, stop=AnswerReader(text, stops, stops_loops=config.stop_loops).stops)
        return request

    # --- for measurements ---------------------------------------------------------------------------------------------

    @property
    def spec(self) -> RankSpec:
        """The specification that rank 0 is built from."""
        return self.rank.spec

    @property
    def config(self) -> RunConfig:
        """The configuration with which the pipeline was started."""
        return self.spec.config

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder of the configuration with which the pipeline was started."""
        return self.decoder_for(self.config)

    def decoder_for(self, config: RunConfig, head: str = "") -> Decoder:
        """Return a decoder of another method, with other trees, or another draft, over the same ring.

        `head` is the folder of a draft head that replaces the split's. Raises ValueError for a draft that does not fit.
        """
        spec = replace(self.spec, config=config, head=head)
        draft = self.draft_of(spec)
        tree = self._recovering(partial(self._tree, config, draft))
        return build_decoder(spec, self.ring, draft, tree, self.passes)

    def draft_of(self, spec: RankSpec) -> Draft:
        """Return the draft of a specification, which is built once."""
        draft_key = spec.sources, spec.head, spec.config.draft_dir, spec.config.ssm
        if draft_key not in self.drafts:
            self.drafts[draft_key] = build_draft(spec, self.lm_head)
        return self.drafts[draft_key]

    def _recovering(self, function: Callable[[], Result]) -> Result:
        """Return the result of a function that uses the ring; call it again after each loss that allows recovery."""
        while True:
            try:
                return function()
            except PeerLost as loss:
                self.ring.recover(loss)

    def _tree(self, config: RunConfig, draft: Draft) -> TreeConfig:
        """Return the trees that the strategy grows with this draft. Sizes that were not given are measured, once."""
        tree = sized(config, lambda: self._costs(config, draft), lambda: segment_rows(self.segment_seconds))
        self.ring.keep_times()

        if config.growth_policy == "opt" and not config.gain and draft.networks:
            network, = draft.networks
            measured_share = level_share(self.ring, network, self.passes, tree.init, self.spec.context)
            gain = max(measured_share, ACCEPTED_PER_LEVEL.min_value)
            init, expand = (replace(growth, gain=gain) for growth in (tree.init, tree.expand))
            tree = replace(tree, init=init, expand=expand)
        if config.replicated:
            tree = replace(tree, lookahead=self._lookahead(config, draft))
        return tree

    def _costs(self, config: RunConfig, draft: Draft) -> RoundCosts:
        """Return the costs of rounds; those of levels and of larger segments only if all ranks share one machine."""
        seconds_by_rows = {1: self.round_trip, **self.batch_seconds}
        if not self._is_one_machine or self.spec.context < TIMED_CONTEXT:
            return RoundCosts(tuple(sorted(seconds_by_rows.items())))

        seconds_by_rows = {**self.segment_seconds, **seconds_by_rows}
        seconds = level_seconds(self.ring, draft.networks, self.passes, config.tree.stream)
        return RoundCosts(tuple(sorted(seconds_by_rows.items())), seconds)

    @property
    def _is_one_machine(self) -> bool:
        """Whether all ranks share the cores of one machine, and no wires are emulated."""
        config = self.spec.config
        return config.kind == "real" and not (config.hosts or config.master)

    def _lookahead(self, config: RunConfig, draft: Draft) -> int:
        """Return the number of guesses in a verification of DSI, given or measured; warn if replicas are too few."""
        typed_lookahead, num_servers = config.guesses, self.ring.depth
        measured = latencies(self.ring, draft.networks, self.passes, self.spec.context)
        min_lookahead, num_needed = measured.least(num_servers), measured.needs(typed_lookahead or 1)

        if typed_lookahead and draft.networks and num_needed > num_servers:
            is_enough = measured.needs(min_lookahead) <= num_servers
            longer_lookahead = f"lookahead={min_lookahead}, or " if is_enough else ""
            say(f"with lookahead={typed_lookahead} up to {num_needed} verifications of "
                f"{measured.verification * 1e3:.3g} ms are under way at once, since a guess takes "
                f"{measured.guess * 1e3:.3g} ms; the replicas here compute {num_servers} at once, so some will wait: "
                f"give {longer_lookahead}replicas for {num_needed}")
        return typed_lookahead or min_lookahead

    @cached_property
    def grammars(self) -> Grammars | None:
        """The grammars over the model's tokens; None without a tokenizer."""
        text = self.text
        return Grammars(text.tokenizer, self.spec.sizes.vocab, text.end_ids) if text else None

    @cached_property
    def passes(self) -> Passes:
        """The function that runs the networks of drafts."""
        return build_passes(self.spec, self.rank.trace, self.ring.clock)

    @cached_property
    def segment_seconds(self) -> dict[int, float]:
        """The seconds of segments once round the pipeline, by their rows."""
        seconds_by_rows = segment_seconds(self.ring, self.spec.context)
        if not self._is_one_machine:
            learn_slowest_wire(self.ring, max(seconds_by_rows), self.spec.context)
        return seconds_by_rows

    @cached_property
    def batch_seconds(self) -> dict[int, float]:
        """The seconds of plain decoding per token of each request, by the number of requests at once, above 1."""
        return batch_seconds(self.ring, self.config.max_requests, self.spec.context)

    @cached_property
    def round_trip(self) -> float:
        """The approximate seconds of a token by plain decoding: one row once round the ring, by a few passes."""
        return round_trip(self.ring)
