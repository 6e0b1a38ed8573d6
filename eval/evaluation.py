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
from typing import Any, Generator, Mapping, Sequence, TypeVar

from torch import Tensor

from config.cli import parts
from config.questions import Question
from eval.keys import Contender, EvalConfig
from eval.metrics import divergence
from eval.results import Key, Results
from launch.build import sampler_of
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from model.sample import Sampler, gumbel
from model.text import AnswerReader
from pipeline.answers import Request
from pipeline.concurrent import Coroutine, concurrent
from pipeline.decode import Decoder

WARM_UP = 16  # largest number of tokens
Sets = Mapping[str, Sequence[Question]]  # the questions of each data set
Questions = Mapping[Key, Question]  # the questions that methods have to answer
TurnTexts = Sequence[Sequence[int]]  # the token ids of each turn
Turn = Mapping[str, Any]  # the fields of one turn
AnswerLine = dict  # an answer as written to the results
# Fields with an element for each turn: those from which Spec-Bench computes speed, and further ones; and those of both
# kinds that are copied from the pipeline's answer.
CHOICE_FIELDS = ("turns", "idxs", "new_tokens", "wall_time")
FURTHER_FIELDS = ("sources", "requests", "prompt_tokens", "token_ids", "finish_reason", "ttft", "settled",
                  "misses", "accepted_length", "tokens_per_miss", "segments", "divergence")
COPIED_FIELDS = ("new_tokens", "sources", "prompt_tokens", "token_ids", "finish_reason", "misses", "tokens_per_miss",
                 "segments", "divergence")
T = TypeVar("T")
DecodingSteps = Generator[None, None, T]  # returns a result; yields while it waits for the pipeline


@dataclass(frozen=True)
class Recorder(Sampler):
    """A sampler that keeps the logits `[V]` of every position that it has sampled."""

    logits_by_position: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def __call__(self, logits_TV: Tensor, positions: Sequence[int]) -> list[int]:
        self.logits_by_position.update(zip(positions, logits_TV))
        return super().__call__(logits_TV, positions)

    def margin(self, position: int, token: int, other_token: int) -> float:
        """Return by how much `token` beats `other_token` in the values that the sampler compares: logits, or above
        temperature 0 warped logits with their noise."""
        row_V = self.logits_by_position[position]
        if self.temperature:
            [warped_V] = self.warped(row_V[None])
            row_V = warped_V + gumbel(self.seed, position, len(row_V)).to(row_V.device)
        return float(row_V[token] - row_V[other_token])


def all_questions(config: EvalConfig, questions_by_set: Sets, methods: Sequence[str]) -> Questions:
    """Return all questions in order. Each goes to all methods and drafts in turn, so that changes in the machine's
    speed affect them all. If several questions are answered at once, a method answers all those of a set together."""
    questions, contenders = {}, config.contenders(methods)

    for repeat in range(config.repeats):
        for set_name, temperature in itertools.product(config.chosen_sets, config.chosen_temperatures):
            contests = list(itertools.product(questions_by_set[set_name], contenders))

            if config.concurrency > 1:
                contests.sort(key=lambda contest: contenders.index(contest[1]))

            for question, contender in contests:
                assert question.id is not None, f"a question of {set_name} has no id"
                questions[Key(*contender, set_name, temperature, repeat, question.id)] = question

    return questions


class Evaluation:
    """Methods that answer questions on one pipeline, which serves one group of the configuration's methods."""

    def __init__(self, config: EvalConfig, pipeline: Pipeline) -> None:
        self.config, self.pipeline, self.scale = config, pipeline, pipeline.config.slowdown
        self.methods = next(group for group in config.groups if config.run.pipeline_type in group)

        self.decoders: dict[Contender, Decoder] = {}
        for contender in config.contenders(self.methods):
            run_config = config.with_draft(contender.draft, pipeline_type=contender.method)
            self.decoders[contender] = pipeline.decoder_for(run_config, parts(contender.draft).head)

        assert pipeline.text, "an evaluation needs a tokenizer"
        self.text = pipeline.text

    def run(self, questions_by_set: Sets, results: Results) -> None:
        """Answer what `results` does not have yet, and write each answer once it is complete.

        Raise ValueError before the first answer if a question and its answers do not fit into the context.
        """
        questions = all_questions(self.config, questions_by_set, self.methods)
        unanswered = {key: question for key, question in questions.items() if key not in results.texts}
        if not unanswered:
            return

        self._check(unanswered)
        self._warm_up(unanswered)

        num_existing = len(questions) - len(unanswered)
        answers_together = self.config.concurrency > 1  # then a batch has the keys that differ only in the question
        with ProgressBar(total=len(questions), initial=num_existing,
                         unit="answer", file=sys.stderr) as progress_bar:
            batch_questions: Sequence[Question] = ()
            batches = itertools.groupby(unanswered, lambda key: key._replace(question=0) if answers_together else key)
            for first_key, batch in batches:
                batch_keys = list(batch)
                former_questions, batch_questions = batch_questions, [unanswered[key] for key in batch_keys]
                contender_name = " ".join(first_key.contender)
                progress_bar.set_description(f"{first_key.set} t={first_key.temperature:g} {contender_name}")

                is_repeated = batch_questions == former_questions and len(batch_questions) == 1
                self.pipeline.reset_measurements(is_repeated)  # so that figures do not depend on the order of answers

                coroutines = (self._answer(key, unanswered[key], results.texts) for key in batch_keys)
                for line in concurrent(coroutines, self.decoders[first_key.contender], self.config.concurrency):
                    results.add(line)
                    progress_bar.update()

    def _check(self, questions: Questions) -> None:
        """Raise ValueError, before any answer, if a question and its answers may not fit into the context."""
        context_length = min(decoder.max_length for decoder in self.decoders.values())
        distinct_questions = dict.fromkeys((key.set, question) for key, question in questions.items())

        for set_name, question in distinct_questions:
            messages = [message for turn in question.turns for message in (turn, "")]
            min_length = len(self.text.prompt_ids(messages[:-1], self.config.run.template))
            max_length = min_length + (len(question.turns) - 1) * self.config.run.max_new_tokens

            if max_length >= context_length:
                raise ValueError(f"question {question.id} of {set_name} needs up to {max_length} tokens before its "
                                 f"last answer, but the context has {context_length}: leave it out with "
                                 "questions=BEGIN:END, leave the set out with sets=, or lower max_new_tokens or raise "
                                 "max_length")

    def _warm_up(self, questions: Questions) -> None:
        """Have each contender write a short, unrecorded answer."""
        key, question = next(iter(questions.items()))
        request = self._request(key, question.turns[:1])
        short_request = replace(request, max_new_tokens=min(WARM_UP, request.max_new_tokens))
        for contender in dict.fromkeys(key.contender for key in questions):
            self.decoders[contender].complete(short_request)

    def _request(self, key: Key, messages: Sequence[str]) -> Request:
        """Return the request for an answer to the last of these messages."""
        run_config = self.config.run
        prompt = self.pipeline.prompt_ids(messages, run_config.template)
        request = self.pipeline.request(prompt, run_config, run_config.stop)
        return replace(request, sampler=self._sampler(key))

    def _sampler(self, key: Key) -> Sampler:
        run_config = self.config.run
        return replace(sampler_of(run_config), temperature=key.temperature, seed=run_config.seed + key.repeat)

    def _answer(self, key: Key, question: Question,
                existing_texts: Mapping[Key, TurnTexts]) -> Coroutine[AnswerLine]:
        """Answer a question and yield its line; `existing_texts` are token ids, for the comparison with `ar`."""
        clock = self.pipeline.ring.clock
        begun_at = clock.now()
        turns = yield from self._conversation(key, question)
        line = self._line(key, question, turns)

        if self.config.concurrency > 1:
            span = [begun_at / self.scale, clock.now() / self.scale]
            line.update(concurrency=self.config.concurrency, span=span)

        reference_text = existing_texts.get(key._replace(method="ar", draft="none"))
        has_one_text = self.config.run.verify == "match" or not key.temperature
        if reference_text is not None and has_one_text and key.method != "ar":
            difference = self._first_difference(key, turns, reference_text)
            line.update(same_as_ar=difference is None, first_difference=difference)

        yield line

    def _conversation(self, key: Key, question: Question) -> DecodingSteps[list[Turn]]:
        """Return all turns of a question, each after the method's own earlier answers; yield while waiting."""
        messages: list[str] = []
        turns = []
        for question_text in question.turns:
            messages.append(question_text)
            turn = yield from self._turn(key.contender, self._request(key, messages))
            messages.append(turn["turns"])
            turns.append(turn)
        return turns

    def _turn(self, contender: Contender, request: Request) -> DecodingSteps[Turn]:
        """Return one turn of a conversation, by the names of the fields with an element for each turn."""
        reader = AnswerReader(self.text, self.config.run.stop)
        answer, stream = self.decoders[contender].submit(request, waits=False)
        request_number = self.pipeline.ring.num_closed_requests  # number of earlier requests, as in the tally
        settled: list[list[float]] = []  # modelled seconds since the request began, tokens settled then

        with self.pipeline.rank.trace.span("request", answer=answer.token_ids), closing(stream):  # type: ignore[type-var]
            for new_tokens in stream:
                if not new_tokens:
                    yield None
                    continue
                settled.append([answer.seconds / self.scale, len(new_tokens)])
                reader.read(new_tokens)
        assert answer.finish_reason, f"the stream of {contender} ended before its answer, at {answer.new_tokens} tokens"
        reader.finish()

        accept_lengths = answer.accepted_lengths
        return {**{name: getattr(answer, name) for name in COPIED_FIELDS},
                "prompt": request.prompt, "turns": reader.text, "requests": request_number, "settled": settled,
                "wall_time": answer.seconds / self.scale, "ttft": answer.prefill_seconds / self.scale,
                "accepted_length": answer.mean_accepted_length, "accept_lengths": accept_lengths,
                "idxs": max(len(accept_lengths), 1) - 1}

    def _line(self, key: Key, question: Question, turns: Sequence[Turn]) -> AnswerLine:
        """Return an answer's line: EAGLE's and Spec-Bench's fields, then ours. See docs/evaluation.md."""
        def by_turn(field_names: Sequence[str]) -> AnswerLine:
            return {name: [turn[name] for turn in turns] for name in field_names}

        run_config = self.config.run
        model_name = Path(run_config.model_dir or run_config.base_dir).name
        method, draft = key.contender
        trial_name = f"{key.set}-t{key.temperature:g}-r{key.repeat}-{key.question}"
        accept_lengths = [count for turn in turns for count in turn["accept_lengths"]]

        choice = {"index": 0, **by_turn(CHOICE_FIELDS), "accept_lengths": accept_lengths}

        line = {"question_id": key.question, "category": question.category,
                "answer_id": f"{method}-{draft}-{trial_name}", "model_id": f"{model_name}-{method}-{draft}",
                "choices": [choice], "tstamp": time.time()}

        trial_fields = {
            "method": method, "draft": draft, "set": key.set, "temperature": key.temperature,
            "repeat": key.repeat, "seed": run_config.seed + key.repeat,
            "lossy_rule": run_config.lossy_rule if key.temperature else "",
            "profile": run_config.profile, "emulated": run_config.cluster is not None,
            "simulated": run_config.virtual, "scale": self.scale, "launch": self.config.launch}
        return {**line, **trial_fields, **by_turn(FURTHER_FIELDS), "same_as_ar": None, "first_difference": None}

    def _first_difference(self, key: Key, turns: Sequence[Turn],
                          reference: TurnTexts) -> dict[str, Any] | None:
        """Return where the answer first differs from that of `ar`, and by how much the target prefers `ar`'s token."""
        for number, (turn, reference_ids) in enumerate(zip(turns, reference)):
            token_ids = turn["token_ids"]
            position = divergence(token_ids, reference_ids)
            if position is None:
                continue

            token = [*token_ids, None][position]  # None after the end
            ar_token = [*reference_ids, None][position]
            margin = None
            if token is not None and ar_token is not None:
                context_ids = [*turn["prompt"], *reference_ids[:position]]
                margin = self._margin(key, context_ids, ar_token, token)
            return {"turn": number, "position": position, "token": token, "ar_token": ar_token, "margin": margin}
        return None

    def _margin(self, key: Key, context_ids: list[int],
                token: int, other_token: int) -> float:
        """Return the target's margin after the tokens `context_ids`, from the prefill of a new request."""
        recorder = Recorder(**vars(self._sampler(key)))
        _, stream = self.decoders[key.contender].stream(Request(context_ids, recorder, 1))
        with closing(stream):  # type: ignore[type-var]
            next(stream)
        return recorder.margin(len(context_ids), token, other_token)
