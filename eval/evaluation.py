"""The evaluation's loop: all methods answer each question in turn, and each answer becomes one line of the results.

All seconds are modelled: the elapsed ones divided by the slowdown of this machine, compared with the modelled cluster
(1 without emulation).
"""
from __future__ import annotations

import itertools
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Generator, Mapping, Sequence, TypeVar

from torch import Tensor

from config.cli import parts
from config.console import say
from config.questions import Question
from eval.keys import Contender, EvalConfig
from eval.metrics import divergence
from eval.results import Key, Results
from launch.build import sampler_of
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from model.sample import Sampler, gumbel
from model.text import AnswerReader
from pipeline.decode import Coroutine, Decoder, Request, concurrent

WARM_UP = 16  # largest number of tokens
Sets = Mapping[str, Sequence[Question]]  # the questions of each data set
Questions = Mapping[Key, Question]  # the questions that methods have to answer
Texts = Sequence[Sequence[int]]  # the token ids of each turn
Turn = Mapping[str, Any]  # the fields of one turn
Line = dict  # an answer as written to the results
# Fields with an element for each turn: those from which Spec-Bench computes speed, and further ones; and those of both
# kinds that are copied from the pipeline's answer.
CHOICE = ("turns", "idxs", "new_tokens", "wall_time")
FURTHER_FIELDS = ("sources", "requests", "prompt_tokens", "token_ids", "finish_reason", "ttft", "settled",
                  "misses", "accepted_length", "tokens_per_miss", "segments", "divergence")
OF_ANSWER = ("new_tokens", "sources", "prompt_tokens", "token_ids", "finish_reason", "misses", "tokens_per_miss",
             "segments", "divergence")
T = TypeVar("T")
Steps = Generator[None, None, T]  # returns a result; yields while it waits for the pipeline


@dataclass(frozen=True)
class Recorder(Sampler):
    """A sampler that keeps the logits `[V]` of every position that it has sampled."""

    rows: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def __call__(self, logits_TV: Tensor, positions: Sequence[int]) -> list[int]:
        self.rows.update(zip(positions, logits_TV))
        return super().__call__(logits_TV, positions)

    def margin(self, position: int, token: int, other: int) -> float:
        """Return by how much `token` beats `other` in the values that the sampler compares: logits, or above
        temperature 0 warped logits with their noise."""
        row_V = self.rows[position]
        if self.temperature:
            [warped_V] = self.warped(row_V[None])
            row_V = warped_V + gumbel(self.seed, position, len(row_V)).to(row_V.device)
        return float(row_V[token] - row_V[other])


def all_questions(config: EvalConfig, sets: Sets, methods: Sequence[str]) -> Questions:
    """Return all questions in order. Each goes to all methods and drafts in turn, so that changes in the machine's
    speed affect them all. If several questions are answered at once, a method answers all those of a set together."""
    questions, contenders = {}, config.contenders(methods)
    for repeat in range(config.repeats):
        for name, temperature in itertools.product(config.chosen_sets, config.chosen_temperatures):
            pairs = list(itertools.product(sets[name], contenders))
            if config.concurrency > 1:
                pairs.sort(key=lambda pair: contenders.index(pair[1]))
            for question, contender in pairs:
                assert question.id is not None, f"a question of {name} has no id"
                questions[Key(*contender, name, temperature, repeat, question.id)] = question
    return questions


class Evaluation:
    """Methods that answer questions on one pipeline, which serves one group of the configuration's methods."""

    def __init__(self, config: EvalConfig, pipeline: Pipeline) -> None:
        self.config, self.pipeline, self.scale = config, pipeline, pipeline.config.slowdown
        self.methods = next(group for group in config.groups if config.run.pipeline_type in group)
        self.decoders: dict[Contender, Decoder] = {}
        for contender in config.contenders(self.methods):
            run = config.with_draft(contender.draft, pipeline_type=contender.method)
            self.decoders[contender] = pipeline.decoder_for(run, parts(contender.draft).head)
        assert pipeline.text, "an evaluation needs a tokenizer"
        self.text = pipeline.text

    def run(self, sets: Sets, results: Results,
            ready: Callable[[], None] = lambda: None) -> None:
        """Answer what `results` does not have yet, and write each answer once it is complete.

        `ready` is called once, after every method has warmed up and before anything is written. Raise ValueError before
        the first answer if a question and its answers do not fit into the context.
        """
        questions = all_questions(self.config, sets, self.methods)
        left = {key: question for key, question in questions.items() if key not in results.texts}
        if not left:
            return
        self._check(left)
        speeds = self._warm_up(left)
        ready()
        most = self.config.run.max_new_tokens
        seconds = sum(len(question.turns) * most / speeds[key.contender]
                      for key, question in left.items())
        say(f"{len(left)} answers, in {seconds / 60:.1f} minutes or less")
        with ProgressBar(total=len(questions), initial=len(questions) - len(left),
                         unit="answer", file=sys.stderr) as bar:
            asked: Sequence[Question] = ()
            several = self.config.concurrency > 1  # at once: keys that differ only in the question
            for first, group in itertools.groupby(left, lambda key: key._replace(question=0) if several else key):
                batch = list(group)
                before, asked = asked, [left[key] for key in batch]
                bar.set_description(f"{first.set} t={first.temperature:g} {' '.join(first.contender)}")
                same = asked == before and len(asked) == 1
                self.pipeline.reset_measurements(same)  # so that figures do not depend on the order of answers
                works = (self._answer(key, left[key], results.texts) for key in batch)
                for line in concurrent(works, self.decoders[first.contender], self.config.concurrency):
                    results.add(line)
                    bar.update()

    def _check(self, questions: Questions) -> None:
        """Raise ValueError, before any answer, if a question and its answers may not fit into the context."""
        room = min(decoder.max_length for decoder in self.decoders.values())
        for name, question in dict.fromkeys((key.set, question) for key, question in questions.items()):
            messages = [message for turn in question.turns for message in (turn, "")]
            least = len(self.text.prompt_ids(messages[:-1], self.config.run.template))
            need = least + (len(question.turns) - 1) * self.config.run.max_new_tokens
            if need >= room:
                raise ValueError(f"question {question.id} of {name} needs up to {need} tokens before its last answer, "
                                 f"but the context has {room}: leave it out with questions=BEGIN:END, "
                                 "leave the set out with sets=, or lower max_new_tokens or raise max_length")

    def _warm_up(self, questions: Questions) -> dict[Contender, float]:
        """Have each contender write a short, unrecorded answer; return their speeds in tokens per elapsed second."""
        key, question = next(iter(questions.items()))
        request = self._request(key, question.turns[:1])
        short = replace(request, max_new_tokens=min(WARM_UP, request.max_new_tokens))
        contenders = dict.fromkeys(key.contender for key in questions)
        return {contender: self.decoders[contender].complete(short).tokens_per_second for contender in contenders}

    def _request(self, key: Key, messages: Sequence[str]) -> Request:
        """Return the request for an answer to the last of these messages."""
        config = self.config.run
        prompt = self.pipeline.prompt_ids(messages, config.template)
        return replace(self.pipeline.request(prompt, config, config.stop), sampler=self._sampler(key))

    def _sampler(self, key: Key) -> Sampler:
        config = self.config.run
        return replace(sampler_of(config), temperature=key.temperature, seed=config.seed + key.repeat)

    def _answer(self, key: Key, question: Question, known: Mapping[Key, Texts]) -> Coroutine[Line]:
        """Answer a question and yield its line. `known` has the token ids of answers, for a comparison with `ar`."""
        clock = self.pipeline.ring.clock
        begun = clock.now()
        turns = yield from self._conversation(key, question)
        line = self._line(key, question, turns)
        if self.config.concurrency > 1:
            span = [begun / self.scale, clock.now() / self.scale]
            line.update(concurrency=self.config.concurrency, span=span)
        reference = known.get(key._replace(method="ar", draft="none"))
        one_text = self.config.run.verify == "match" or not key.temperature
        if reference is not None and one_text and key.method != "ar":
            difference = self._first_difference(key, turns, reference)
            line.update(same_as_ar=difference is None, first_difference=difference)
        yield line

    def _conversation(self, key: Key, question: Question) -> Steps[list[Turn]]:
        """Return all turns of a question, each after the method's own earlier answers; yield while waiting."""
        messages: list[str] = []
        turns = []
        for words in question.turns:
            messages.append(words)
            turn = yield from self._turn(key.contender, self._request(key, messages))
            messages.append(turn["turns"])
            turns.append(turn)
        return turns

    def _turn(self, contender: Contender, request: Request) -> Steps[Turn]:
        """Return one turn of a conversation, by the names of the fields with an element for each turn."""
        reader = AnswerReader(self.text, self.config.run.stop)
        answer, stream = self.decoders[contender].submit(request, waits=False)
        number = self.pipeline.ring.requests  # number of earlier requests, as in the tally
        settled: list[list[float]] = []  # modelled seconds since the request began, tokens settled then
        with self.pipeline.rank.trace.span("request", answer=answer.token_ids), closing(stream):  # type: ignore[type-var]
            for new in stream:
                if not new:
                    yield None
                    continue
                settled.append([answer.seconds / self.scale, len(new)])
                reader.read(new)
        assert answer.finish_reason, f"the stream of {contender} ended before its answer, at {answer.new_tokens} tokens"
        reader.finish()
        turn = {name: getattr(answer, name) for name in OF_ANSWER}
        turn.update(prompt=request.prompt, turns=reader.text, requests=number, settled=settled)
        turn.update(wall_time=answer.seconds / self.scale, ttft=answer.prefill_seconds / self.scale)
        lengths = answer.accepted_lengths
        turn.update(idxs=max(len(lengths), 1) - 1, accepted_length=answer.mean_accepted_length, accept_lengths=lengths)
        return turn

    def _line(self, key: Key, question: Question, turns: Sequence[Turn]) -> Line:
        """Return an answer's line: EAGLE's and Spec-Bench's fields, then ours. See docs/evaluation.md."""
        def by_turn(names: Sequence[str]) -> Line:
            return {name: [turn[name] for turn in turns] for name in names}

        config = self.config.run
        model = Path(config.model_dir or config.base_dir).name
        method, draft = key.contender
        trial = f"{key.set}-t{key.temperature:g}-r{key.repeat}-{key.question}"
        lengths = [count for turn in turns for count in turn["accept_lengths"]]
        choice = {"index": 0, **by_turn(CHOICE), "accept_lengths": lengths}
        line = {"question_id": key.question, "category": question.category,
                "answer_id": f"{method}-{draft}-{trial}", "model_id": f"{model}-{method}-{draft}",
                "choices": [choice], "tstamp": time.time()}
        asked = {"method": method, "draft": draft, "set": key.set, "temperature": key.temperature,
                 "repeat": key.repeat, "seed": config.seed + key.repeat,
                 "lossy_rule": config.lossy_rule if key.temperature else "",
                 "profile": config.profile, "emulated": config.cluster is not None,
                 "simulated": config.virtual, "scale": self.scale, "launch": self.config.launch}
        return {**line, **asked, **by_turn(FURTHER_FIELDS), "same_as_ar": None, "first_difference": None}

    def _first_difference(self, key: Key, turns: Sequence[Turn],
                          reference: Texts) -> dict[str, Any] | None:
        """Return where the answer first differs from that of `ar`, and by how much the target prefers `ar`'s token."""
        for number, (turn, others) in enumerate(zip(turns, reference)):
            texts = turn["token_ids"], others
            position = divergence(*texts)
            if position is not None:
                token, other = ([*text, None][position] for text in texts)  # None after the end
                margin = None
                if token is not None and other is not None:
                    before = [*turn["prompt"], *others[:position]]
                    margin = self._margin(key, before, other, token)
                return {"turn": number, "position": position, "token": token, "ar_token": other, "margin": margin}
        return None

    def _margin(self, key: Key, before: list[int],
                token: int, other: int) -> float:
        """Return the target's margin after the tokens `before`, from the prefill of a new request."""
        recorder = Recorder(**vars(self._sampler(key)))
        _, stream = self.decoders[key.contender].stream(Request(before, recorder, 1))
        with closing(stream):  # type: ignore[type-var]
            next(stream)
        return recorder.margin(len(before), token, other)
