"""The evaluation's loop: every method answers every question by turns, and each answer becomes one line of the results.

All seconds are modelled ones: those that passed, divided by how many times slower than the modelled cluster this
machine runs it (1 where nothing is emulated).
"""
from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Generator, Iterable, Iterator, Mapping, Sequence, TypeVar

from torch import Tensor
from tqdm import tqdm

from config.questions import Question
from eval.keys import Contender, EvalConfig
from eval.metrics import divergence
from eval.results import Key, Results
from model.sample import Sampler, gumbel, warp
from model.text import Reader, Text
from pipeline.decode import Answer, Decoder, Request, concurrent
from pipeline.decode import Job as Work
from pipeline.trace import OFF, NoTrace

WARM_UP = 16  # tokens, at most
Sets = Mapping[str, Sequence[Question]]  # the questions of each data set
Decoders = Mapping[Contender, Decoder]
Texts = Sequence[Sequence[int]]  # the token ids of each turn
Line = dict  # an answer as it is written
T = TypeVar("T")
Steps = Generator[None, None, T]  # to a result; it yields where it waits for the pipeline


@dataclass(frozen=True)
class Job:
    """One question that a method has to answer with a draft, at a temperature and for the repeat-th time."""

    contender: Contender
    set: str
    temperature: float
    repeat: int
    question: Question

    @property
    def key(self) -> Key:
        assert self.question.id is not None, f"a question of {self.set} has no id"
        return Key(*self.contender, self.set,
                   self.temperature, self.repeat, self.question.id)


@dataclass(frozen=True)
class Recorder(Sampler):
    """A sampler that keeps the logits `[V]` of every position that it was asked for."""

    rows: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def __call__(self, logits_TV: Tensor, positions: Sequence[int]) -> list[int]:
        self.rows.update(zip(positions, logits_TV))
        return super().__call__(logits_TV, positions)

    def margin(self, position: int, token: int, other: int) -> float:
        """By how much `token` beats `other` in what the sampler compares: logits, above temperature 0 warped ones with
        their noise."""
        row_V = self.rows[position]
        if self.temperature:
            [warped_V] = warp(row_V.double()[None],
                              self.temperature, self.top_k, self.top_p)
            row_V = warped_V + gumbel(self.seed, position, len(row_V)).to(row_V.device)
        return float(row_V[token] - row_V[other])


@dataclass
class Turn:
    """One turn of a conversation: what was asked, what came, and when; seconds as they passed, not modelled ones."""

    prompt: Sequence[int]
    answer: Answer
    request: int  # how many requests came before it since the start of the pipeline
    text: str = ""
    settled: list[list[float]] = field(default_factory=list)  # seconds since the request began, tokens settled then
    accepted: list[int] = field(default_factory=list)  # tokens of each target pass, its own token included

    @property
    def seconds(self) -> float:
        """The seconds from the request to its last token, prefill included."""
        return self.answer.prefill_seconds + self.answer.decode_seconds


def all_jobs(config: EvalConfig, sets: Sets, methods: Sequence[str]) -> list[Job]:
    """All jobs in their order: each question goes to all methods with all drafts by turns, so that what changes in a
    machine's speed meets them all. Where several questions are answered at once, a method answers those of a set."""
    jobs, contenders = [], config.contenders(methods)
    for repeat in range(config.repeats):
        for name, temperature in itertools.product(config.chosen_sets, config.chosen_temperatures):
            pairs = list(itertools.product(sets[name], contenders))
            if config.concurrency > 1:
                pairs.sort(key=lambda pair: contenders.index(pair[1]))
            jobs += [Job(contender, name, temperature, repeat, question) for question, contender in pairs]
    return jobs


def _batches(jobs: Sequence[Job], concurrency: int) -> Iterator[list[Job]]:
    """The jobs that may be done at once: those of a method with one draft, for one set, temperature and repeat."""
    if concurrency == 1:
        yield from ([job] for job in jobs)
        return
    for _, batch in itertools.groupby(jobs, lambda job: job.key._replace(question=0)):
        yield list(batch)


class Evaluation:
    """Methods that answer questions over one pipeline; `scale` is how many seconds pass for a modelled one.

    `unlearn` lets the pipeline forget what earlier answers taught, so that figures do not depend on their order.
    """

    def __init__(self, config: EvalConfig, text: Text, decoders: Decoders, scale: float = 1.0,
                 trace: NoTrace = OFF, unlearn: Callable[[], object] = int) -> None:
        self.config = config
        self.text = text
        self.decoders = decoders
        self.scale = scale
        self.trace, self.unlearn = trace, unlearn
        self.end = frozenset() if config.run.ignore_eos else frozenset(text.end_ids)

    @property
    def requests(self) -> int:
        """How many requests the pipeline has had so far, as the tally counts them."""
        return next(iter(self.decoders.values())).ring.requests

    def run(self, jobs: Sequence[Job], results: Results,
            ready: Callable[[], None] = lambda: None) -> None:
        """Answer what `results` does not have yet, and write each answer as it is made.

        `ready` is called once, when every method is warm and nothing is written yet. Raises ValueError before the
        first answer if a question and its answers do not fit into the context.
        """
        left = [job for job in jobs if job.key not in results.texts]
        if not left:
            return
        self._check(left)
        speeds = self._warm_up(left)
        ready()
        limit = self.config.run.max_new_tokens
        seconds = [len(job.question.turns) * limit / speeds[job.contender] for job in left]
        print(f"flowspec: {len(left)} answers, in {sum(seconds) / 60:.1f} minutes or less", file=sys.stderr)
        done = len(jobs) - len(left)
        with tqdm(total=len(jobs), initial=done,
                  unit="answer", file=sys.stderr) as bar:
            for batch in _batches(left, self.config.concurrency):
                job = batch[0]
                bar.set_description(f"{job.set} t={job.temperature:g} {' '.join(job.contender)}")
                for line in self._answers(batch, results):
                    results.add(line)
                    bar.update()

    def _answers(self, batch: Sequence[Job], results: Results) -> Iterator[Line]:
        """The lines of these jobs as they are done, as many at once as the configuration says."""
        decoder = self.decoders[batch[0].contender]
        self.unlearn()
        references = (results.texts.get(job.key._replace(method="ar", draft="none"))
                      for job in batch)
        works = (self._answer(job, reference) for job, reference in zip(batch, references))
        yield from concurrent(works, decoder, self.config.concurrency)

    def _check(self, jobs: Iterable[Job]) -> None:
        """Raise ValueError if a question and its answers may not fit into the context: better now than in an hour."""
        room = min(decoder.max_length for decoder in self.decoders.values())
        for name, question in dict.fromkeys((job.set, job.question) for job in jobs):
            messages = [message for turn in question.turns for message in (turn, "")]
            least = len(self.text.prompt_ids(messages[:-1], self.config.run.template))
            need = least + (len(question.turns) - 1) * self.config.run.max_new_tokens
            if need >= room:
                raise ValueError(f"question {question.id} of {name} needs up to {need} tokens before its last answer, "
                                 f"but the context has {room}: leave it out with question_begin and question_end, "
                                 "leave the set out with sets=, or give less max_new_tokens or more max_length")

    def _warm_up(self, jobs: Sequence[Job]) -> dict[Contender, float]:
        """Let each contender give a short answer, which is not recorded; their speeds in tokens/s, as they passed."""
        first, limit = jobs[0], min(WARM_UP, self.config.run.max_new_tokens)
        request = self._request(first.question.turns[:1], self._sampler(first), limit)
        contenders = dict.fromkeys(job.contender for job in jobs)
        return {contender: self.decoders[contender].whole(request).tokens_per_second for contender in contenders}

    def _request(self, messages: Sequence[str], sampler: Sampler, limit: int) -> Request:
        """The request of an answer to the last of these messages with at most `limit` tokens."""
        config = self.config.run
        prompt = self.text.prompt_ids(messages, config.template)
        return Request(prompt, sampler, limit, self.end, self.text.stop_rule(config.stop))

    def _sampler(self, job: Job) -> Sampler:
        config = self.config.run
        return Sampler(job.temperature, config.top_p, config.top_k,
                       config.seed + job.repeat, config.verify)

    def _answer(self, job: Job, reference: Texts | None) -> Work[Line]:
        """Answer a question; the line to be written. `reference` are the token ids of `ar` for each turn, if known."""
        clock = self.decoders[job.contender].ring.clock
        begun = clock.now()
        turns = yield from self._conversation(job)
        line = self._line(job, turns)
        if self.config.concurrency > 1:
            span = [begun / self.scale, clock.now() / self.scale]
            line.update(concurrency=self.config.concurrency, span=span)
        one_text = self.config.run.verify == "match" or not job.temperature
        if reference is not None and one_text and job.contender.method != "ar":
            difference = self._first_difference(job, turns, reference)
            line.update(same_as_ar=difference is None, first_difference=difference)
        yield line

    def _conversation(self, job: Job) -> Steps[list[Turn]]:
        """All turns of a question, each with the method's own answers before it; yields where it waits."""
        messages: list[str] = []
        turns = []
        for words in job.question.turns:
            messages.append(words)
            request = self._request(messages, self._sampler(job), self.config.run.max_new_tokens)
            turn = yield from self._turn(job.contender, request)
            messages.append(turn.text)
            turns.append(turn)
        return turns

    def _turn(self, contender: Contender, request: Request) -> Steps[Turn]:
        reader = Reader(self.text, self.config.run.stop)
        answer, stream = self.decoders[contender].submit(request, waits=False)
        turn = Turn(request.prompt, answer, self.requests)
        accepted: Counter[int] = Counter()
        with self.trace.span("request", answer=answer.token_ids), closing(stream):  # type: ignore[type-var]
            for new in stream:
                if not new:
                    yield None
                    continue
                turn.settled.append([turn.seconds, len(new)])
                accepted[answer.target_passes] += len(new)
                reader.read(new)
        assert answer.finish_reason, f"the stream of {contender} ended before its answer, at {answer.new_tokens} tokens"
        reader.finish()
        turn.text = reader.text
        turn.accepted = [accepted[number] for number in range(1, answer.target_passes + 1)]
        return turn

    def _line(self, job: Job, turns: Sequence[Turn]) -> Line:
        """An answer as it is written: EAGLE's and Spec-Bench's names, then ours. See docs/evaluation.md."""
        config = self.config.run
        model = Path(config.model_dir or config.base_dir).name
        method, draft = job.contender
        trial = f"{job.set}-t{job.temperature:g}-r{job.repeat}-{job.question.id}"
        answers = [turn.answer for turn in turns]
        choice = {  # the fields that Spec-Bench measures speed with
            "index": 0,
            "turns": [turn.text for turn in turns],
            "idxs": [max(answer.target_passes, 1) - 1 for answer in answers],
            "new_tokens": [answer.new_tokens for answer in answers],
            "wall_time": [turn.seconds / self.scale for turn in turns],
            "accept_lengths": [count for turn in turns for count in turn.accepted]}
        line: Line = {
            "question_id": job.question.id, "category": job.question.category,
            "answer_id": f"{method}-{draft}-{trial}", "model_id": f"{model}-{method}-{draft}",
            "choices": [choice], "tstamp": time.time()}
        line.update(method=method, draft=draft, set=job.set, temperature=job.temperature,
                    repeat=job.repeat, seed=config.seed + job.repeat)
        line.update(profile=config.profile, emulated=config.cluster is not None, simulated=config.virtual,
                    scale=self.scale, launch=self.config.launch)
        line.update(sources=[answer.sources for answer in answers], **self._by_turn(turns))
        line.update(same_as_ar=None, first_difference=None)
        return line

    def _by_turn(self, turns: Sequence[Turn]) -> Line:
        """The fields that hold a list with one element for each turn."""
        answers = [turn.answer for turn in turns]
        settled = [[[seconds / self.scale, count] for seconds, count in turn.settled] for turn in turns]
        return {
            "requests": [turn.request for turn in turns],
            "prompt_tokens": [answer.prompt_tokens for answer in answers],
            "token_ids": [answer.token_ids for answer in answers],
            "finish_reason": [answer.finish_reason for answer in answers],
            "ttft": [answer.prefill_seconds / self.scale for answer in answers],
            "settled": settled,
            "target_passes": [answer.target_passes for answer in answers],
            "tau": [answer.mean_accepted_length for answer in answers],
            "segments": [answer.segments for answer in answers]}

    def _first_difference(self, job: Job, turns: Sequence[Turn],
                          reference: Texts) -> dict[str, Any] | None:
        """Where the answer leaves that of `ar`, and by how much the target itself prefers the token of `ar`."""
        for number, (turn, others) in enumerate(zip(turns, reference)):
            ids = turn.answer.token_ids
            position = divergence(ids, others)
            if position is None:
                continue
            token, other = ([*text, None][position] for text in (ids, others))  # None behind the end
            margin = None
            if token is not None and other is not None:
                before = [*turn.prompt, *others[:position]]
                margin = self._margin(job, before, other, token)
            return {"turn": number, "position": position, "token": token, "ar_token": other, "margin": margin}
        return None

    def _margin(self, job: Job, before: list[int],
                token: int, other: int) -> float:
        """Ask the target once more what follows the tokens `before`, which the prefill of a new request shows."""
        recorder = Recorder(**vars(self._sampler(job)))
        _, stream = self.decoders[job.contender].decode(Request(before, recorder, 1))
        with closing(stream):  # type: ignore[type-var]
            next(stream)
        return recorder.margin(len(before), token, other)
