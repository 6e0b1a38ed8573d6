"""The bench: every method answers every question by turns, and each answer becomes one line of the results.

It knows nothing about processes, or where decoders come from. All seconds are modelled ones: those that passed, divided
by how many times slower than the modelled cluster this machine runs it (1 where nothing is emulated).
"""
from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from torch import Tensor
from tqdm import tqdm

from config.eval_config import EvalConfig
from config.questions import Question
from eval.results import Key, Results
from model.sample import Sampler, gumbel, warp
from model.text import Reader, Text
from pipeline.decode import Answer, Decoder, Request
from pipeline.trace import OFF, NoTrace

WARM_UP = 16  # tokens, at most


@dataclass(frozen=True)
class Job:
    """One answer to be given."""

    method: str
    set: str
    temperature: float
    repeat: int
    question: Question

    @property
    def key(self) -> Key:
        assert self.question.id is not None, "each question of a set has one"
        return Key(self.method, self.set, self.temperature, self.repeat, self.question.id)


@dataclass(frozen=True)
class Recorder(Sampler):
    """A sampler that keeps the logits of every position that it was asked for."""

    rows: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def __call__(self, logits_TV: Tensor, positions: Sequence[int]) -> list[int]:
        self.rows.update(zip(positions, logits_TV))
        return super().__call__(logits_TV, positions)

    def margin(self, position: int, token: int, other: int) -> float:
        """By how much `token` beats `other` in what the sampler compares: logits, above temperature 0 warped ones with
        their noise."""
        row_V = self.rows[position]
        if self.temperature:
            noise = gumbel(self.seed, position, len(row_V)).to(row_V.device)
            row_V = warp(row_V.double()[None], self.temperature, self.top_k, self.top_p)[0] + noise
        return float(row_V[token] - row_V[other])


@dataclass
class Turn:
    """One answer of a talk: what was asked, what came, and when; seconds as they passed."""

    prompt: list[int]
    answer: Answer
    request: int  # how many requests came before it since the start of the pipeline
    text: str
    settled: list[list[float]]  # seconds since the request began, and how many tokens settled then
    accepted: list[int]  # tokens of each target pass, its own token included

    @property
    def seconds(self) -> float:
        return self.answer.prefill_seconds + self.answer.decode_seconds


def plan(config: EvalConfig, sets: Mapping[str, Sequence[Question]], methods: Iterable[str]) -> list[Job]:
    """All answers in their order: to each question all methods by turns, so that what changes in a machine's speed
    meets them all."""
    return [Job(method, name, temperature, repeat, question) for repeat in range(config.repeats)
            for name in config.chosen_sets for temperature in config.chosen_temperatures
            for question in sets[name] for method in methods]


class Bench:
    """Methods that answer questions over one pipeline; `scale` is how many seconds pass for a modelled one."""

    def __init__(self, config: EvalConfig, text: Text, decoders: Mapping[str, Decoder], scale: float = 1.0,
                 trace: NoTrace = OFF) -> None:
        self.config, self.text, self.decoders = config, text, decoders
        self.scale, self.trace = scale, trace
        self.end = frozenset() if config.ignore_eos else frozenset(text.end_ids)

    @property
    def requests(self) -> int:
        """How many requests the pipeline has had so far, as the tally counts them."""
        return next(iter(self.decoders.values())).ring.requests

    def run(self, jobs: Sequence[Job], results: Results, ready: Callable[[], None] = lambda: None) -> None:
        """Answer what `results` does not have yet, and write each answer as it is made.

        `ready` is called once, when every method is warm and nothing is written yet. Raises ValueError before the
        first answer if a question and its answer do not fit into the context.
        """
        left = [job for job in jobs if job.key not in results.texts]
        if not left:
            return
        self._check(left)
        speeds = self._warm_up(left)
        ready()
        longest = sum(len(job.question.turns) * self.config.max_new_tokens / speeds[job.method] for job in left)
        print(f"flowspec: {len(left)} answers, in {longest / 60:.1f} minutes or less", file=sys.stderr)
        with tqdm(total=len(jobs), initial=len(jobs) - len(left), unit="answer", file=sys.stderr) as bar:
            for job in left:
                bar.set_description(f"{job.set} t={job.temperature:g} {job.method}")
                turns = self._talk(job)
                line = self._line(job, turns)
                base = results.texts.get(Key("ar", *job.key[1:]))
                if base is not None and job.method != "ar":
                    line["first_difference"] = self._first_difference(job, turns, base)
                    line["same_as_ar"] = line["first_difference"] is None
                results.add(line)
                bar.update()

    def _check(self, jobs: Iterable[Job]) -> None:
        """Better now than after an hour."""
        for name, question in dict.fromkeys((job.set, job.question) for job in jobs):
            said = [word for turn in question.turns for word in (turn, "")][:-1]
            room = min(decoder.max_length for decoder in self.decoders.values())
            least = len(self.text.prompt_ids(said, self.config.template))
            need = least + (len(question.turns) - 1) * self.config.max_new_tokens
            if need >= room:
                raise ValueError(f"question {question.id} of {name} needs up to {need} tokens before its last answer, "
                                 f"but the context has {room}: leave it out with question_begin and question_end, "
                                 "leave the set out with sets=, or give less max_new_tokens or more max_length")

    def _warm_up(self, jobs: Sequence[Job]) -> dict[str, float]:
        """A short answer of each method, which is not recorded; how many tokens pass in a second."""
        speeds = {}
        for method in dict.fromkeys(job.method for job in jobs):
            limit = min(WARM_UP, self.config.max_new_tokens)
            turn = self._turn(method, list(jobs[0].question.turns[:1]), self._sampler(jobs[0]), limit)
            speeds[method] = turn.answer.tokens_per_second
        return speeds

    def _sampler(self, job: Job) -> Sampler:
        config = self.config
        return Sampler(job.temperature, config.top_p, config.top_k, config.seed + job.repeat)

    def _talk(self, job: Job) -> list[Turn]:
        """All turns of a question, each with the method's own answers before it."""
        said: list[str] = []
        turns = []
        for words in job.question.turns:
            turns.append(self._turn(job.method, [*said, words], self._sampler(job), self.config.max_new_tokens))
            said += [words, turns[-1].text]
        return turns

    def _turn(self, method: str, said: list[str], sampler: Sampler, limit: int) -> Turn:
        prompt = self.text.prompt_ids(said, self.config.template)
        reader = Reader(self.text, self.config.stop)
        settled: list[list[float]] = []
        accepted: Counter[int] = Counter()
        request = Request(prompt, sampler, limit, self.end, self.text.stop_rule(self.config.stop))
        answer, stream = self.decoders[method].decode(request)
        turn = Turn(prompt, answer, self.requests, "", settled, [])
        with self.trace.span("request", answer=answer.token_ids), closing(stream):  # type: ignore[type-var]
            for new in stream:
                settled.append([turn.seconds, len(new)])
                accepted[answer.target_passes] += len(new)
                reader.read(new)
        reader.finish()
        turn.text = reader.text
        turn.accepted = [accepted[number] for number in range(1, answer.target_passes + 1)]
        return turn

    def _line(self, job: Job, turns: Sequence[Turn]) -> dict[str, Any]:
        """An answer as it is written: EAGLE's and Spec-Bench's names, then ours. See docs/evaluation.md."""
        config, answers = self.config, [turn.answer for turn in turns]
        return {
            "question_id": job.question.id, "category": job.question.category,
            "answer_id": f"{job.method}-{job.set}-t{job.temperature:g}-r{job.repeat}-{job.question.id}",
            "model_id": f"{Path(config.model_dir or config.base_dir).name}-{job.method}",
            "choices": [{
                "index": 0, "turns": [turn.text for turn in turns],
                "idxs": [max(answer.target_passes, 1) - 1 for answer in answers],
                "new_tokens": [answer.new_tokens for answer in answers],
                "wall_time": [turn.seconds / self.scale for turn in turns],
                "accept_lengths": [count for turn in turns for count in turn.accepted]}],
            "tstamp": time.time(),
            "method": job.method, "set": job.set, "temperature": job.temperature, "repeat": job.repeat,
            "seed": config.seed + job.repeat, "profile": config.profile, "emulated": config.cluster is not None,
            "scale": self.scale, "launch": config.launch, "requests": [turn.request for turn in turns],
            "prompt_tokens": [answer.prompt_tokens for answer in answers],
            "token_ids": [answer.token_ids for answer in answers],
            "ttft": [answer.prefill_seconds / self.scale for answer in answers],
            "settled": [[[seconds / self.scale, count] for seconds, count in turn.settled] for turn in turns],
            "target_passes": [answer.target_passes for answer in answers],
            "tau": [answer.mean_accepted_length for answer in answers],
            "segments": [answer.segments for answer in answers],
            "same_as_ar": None, "first_difference": None}

    def _first_difference(self, job: Job, turns: Sequence[Turn], base: list[list[int]]) -> dict[str, Any] | None:
        """Where the answer leaves that of `ar`, and by how much the target itself prefers the token of `ar`."""
        for number, (turn, ours) in enumerate(zip(turns, base)):
            mine = turn.answer.token_ids
            if mine != ours:
                at = next((i for i, (a, b) in enumerate(zip(mine, ours)) if a != b), min(len(mine), len(ours)))
                token, other = (ids[at] if at < len(ids) else None for ids in (mine, ours))
                margin = None if token is None or other is None else self._margin(
                    job, [*turn.prompt, *ours[:at]], other, token)
                return {"turn": number, "position": at, "token": token, "ar_token": other, "margin": margin}
        return None

    def _margin(self, job: Job, before: list[int], token: int, other: int) -> float:
        """Ask the target once more what follows these tokens, which the prefill of a new request tells."""
        recorder = Recorder(**vars(self._sampler(job)))
        _, stream = self.decoders[job.method].decode(Request(before, recorder, 1))
        with closing(stream):  # type: ignore[type-var]
            next(stream)
        return recorder.margin(len(before), token, other)
