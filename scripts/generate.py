"""Ask a model that is split over a pipeline: the answer is printed as it settles, then what it cost.

Usage: bash run_pipe.sh [PRESET] [key=value ...]; --help shows all keys.
"""
from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Any, Callable

from tqdm import tqdm

from config.files import streams, write
from config.questions import Question, read
from config.run_config import RunConfig
from launch.pipeline import Session
from launch.run import Command, run
from model.sample import Sampler
from model.text import Text
from pipeline.decode import Answer, Request


class Reader:
    """The text of an answer, token by token, up to a stop string; what may become one is held back."""

    def __init__(self, text: Text | None, stop: str) -> None:
        self._stream, self._stop = text.stream() if text else None, stop
        self._held, self.text, self.stopped = "", "", False

    def read(self, token: int) -> bool:
        """Take one token; whether the stop string is complete."""
        if self._stream and not self.stopped:
            self._held += self._stream.add([token])
            if self._stop and self._stop in self._held:
                self._held, self.stopped = self._held[:self._held.index(self._stop)], True
        return self.stopped

    def take(self, last: bool = False) -> str:
        """What can be shown now."""
        if last and self._stream and not self.stopped:
            self._held += self._stream.finish()
        keep = 0 if last or self.stopped else next(
            (n for n in range(min(len(self._stop), len(self._held)), 0, -1) if self._held.endswith(self._stop[:n])), 0)
        shown, self._held = self._held[:len(self._held) - keep], self._held[len(self._held) - keep:]
        self.text += shown
        return shown


def request(config: RunConfig, prompt: list[int], text: Text | None, reader: Reader) -> Request:
    """A request as the configuration wants it."""
    end = frozenset() if config.ignore_eos or text is None else frozenset(text.end_ids)
    return Request(prompt, Sampler(config.temperature, config.top_p, config.top_k, config.seed),
                   config.max_new_tokens, end, reader.read)


def answer(session: Session, turns: list[str], show: Callable[[str], Any]) -> tuple[Answer, Reader]:
    """Decode one answer to the last of `turns`, or to `prompt_ids`, and show its text, or its ids, as they settle."""
    config, text = session.config, session.text
    prompt = text.prompt_ids(turns, config.template) if text else list(config.ids)
    reader = Reader(text, config.stop)
    got, stream = session.decoder.decode(request(config, prompt, text, reader))
    with session.trace.span("request", answer=got.token_ids), closing(stream):  # type: ignore[type-var]
        for new in stream:
            show(reader.take() if text else "".join(f"{token} " for token in new))
    show(reader.take(last=True))
    if got.finish_reason == "context":
        print(f"\nflowspec: {full(session, got)}", file=sys.stderr)
    return got, reader


def full(session: Session, got: Answer) -> str:
    """What to do about an answer that ends because the context is full."""
    size, asked = session.decoder.max_length, session.config.max_length
    more = "raise max_length" if size == asked else "the model has no more positions"
    return (f"the answer ends after {got.new_tokens} of max_new_tokens={session.config.max_new_tokens}, since the "
            f"context of {size} tokens is full: {more}, or shorten the prompt")


def record(config: RunConfig, prompt: str, got: Answer, text: str) -> dict[str, Any]:
    """What `output` keeps of an answer; times in seconds, rates in tokens per second, prefill included."""
    return {"prompt": prompt, "text": text, "token_ids": got.token_ids, "prompt_tokens": got.prompt_tokens,
            "new_tokens": got.new_tokens, "finish_reason": got.finish_reason, "prefill_seconds": got.prefill_seconds,
            "decode_seconds": got.decode_seconds, "ttft_seconds": got.prefill_seconds,
            "tokens_per_second": got.tokens_per_second, "target_passes": got.target_passes,
            "segments": got.segments, "mean_accepted_length": got.mean_accepted_length, "config": asdict(config)}


def table(answers: list[Answer]) -> str:
    """The short table at the end."""
    tokens, passes = sum(a.new_tokens for a in answers), sum(a.target_passes for a in answers)
    seconds = sum(a.prefill_seconds + a.decode_seconds for a in answers)
    rows = [("tokens", f"{tokens}"), ("seconds", f"{seconds:.2f}"), ("tokens/s", f"{tokens / max(seconds, 1e-9):.2f}"),
            ("time to first token", f"{sum(a.prefill_seconds for a in answers) / len(answers):.3f} s"),
            ("target passes", f"{passes}"),
            ("mean accepted length", f"{(tokens - len(answers)) / max(passes, 1):.2f} (with the target's own token)")]
    return "\n".join(f"  {name:<22}{value}" for name, value in rows)


def questions(config: RunConfig) -> list[Question]:
    """The chosen ones of a file."""
    return read(config.question_file, config.question_begin, config.question_end)


def save(path: str, data: Any) -> None:
    """Write JSON whole or not at all. What cannot be written is printed, so that no answer is lost."""
    content = json.dumps(data, indent=1, ensure_ascii=False)
    try:
        write(path, content, "what it should hold stands above; choose another output=")
    except ValueError:
        print(f"\n{content}", flush=True)
        raise


def ask_one(session: Session) -> None:
    """One prompt, streamed."""
    config = session.config
    if session.text:
        print(f"\033[1m{config.prompt}\033[0m\n" if sys.stdout.isatty() else f"{config.prompt}\n", flush=True)

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    got, reader = answer(session, [config.prompt], show)
    print("\n")
    print(table([got]))
    if config.output:
        save(config.output, record(config, config.prompt, got, reader.text))


def ask_many(session: Session) -> None:
    """A file of questions, turn by turn; what is answered is saved as it comes, or at the end into what streams."""
    config, asked = session.config, questions(session.config)
    answers: list[Answer] = []
    records: list[dict[str, Any]] = []
    at_once = bool(config.output) and not streams(config.output)
    try:
        with tqdm(total=sum(len(question.turns) for question in asked), unit="answer", file=sys.stderr) as bar:
            for question in asked:
                talk: list[str] = []
                for number, turn in enumerate(question.turns):
                    got, reader = answer(session, [*talk, turn], lambda piece: None)
                    talk += [turn, reader.text]
                    answers.append(got)
                    records.append({"question_id": question.id, "turn": number,
                                    **record(config, turn, got, reader.text)})
                    if at_once:
                        save(config.output, records)
                    bar.update()
    finally:
        if config.output and not at_once:
            save(config.output, records)
    print(table(answers))


def main(session: Session) -> None:
    positions, asked = session.decoder.max_length, session.config.max_length
    if positions < asked != RunConfig.max_length:
        print(f"flowspec: max_length={asked} is more than the {positions} positions of the model, which prompt and "
              "answer share", file=sys.stderr)
    (ask_many if session.config.question_file else ask_one)(session)


COMMAND = Command("scripts.generate", main)

if __name__ == "__main__":
    sys.exit(run(COMMAND, sys.argv[1:]))
