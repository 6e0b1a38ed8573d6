"""The pipeline of a program that imports the package `flowspec`: a process that answers requests over a socket.

`python -m launch.piped SOCKET` inherits one end of a private pair of sockets. Messages are lines of JSON, so what is
read is data: requests `[number, action, argument, ...]`, the first of which opens the pipeline, and events `[number,
kind, value]`. `flowspec/engine_process.py` is the other end. This process ends when that hangs up, or is gone.
"""
from __future__ import annotations

import json
import os
import socket
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Event, Lock
from typing import Any, Callable, Iterable, Mapping, NoReturn, Sequence

from config.console import EXIT_LOST, die, show
from config.failure import guarded
from launch.pipeline import Generation, Pipeline, Prompt
from launch.request_loop import POLL_SECONDS, Job, RequestLoop
from launch.run import TOKENIZERS_ONLY
from model.grammar import Guide
from model.text import TokenTexts, check_messages
from model.tree import TokenTree
from pipeline.answers import Answer

BEGUN, PIECE, RESULT, ERROR = "begun", "piece", "result", "error"  # kinds of events
END_SECONDS = 20  # for the ranks to end in an orderly way
COMPUTED_FIGURES = [name for name, member in vars(Answer).items() if isinstance(member, property)]


# --- answers as plain data --------------------------------------------------------------------------------------------

def state_of(generation: Generation, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return what `flowspec.Generation` shows of an answer at this moment; `text_of` spells a token."""
    answer = generation.answer
    computed_figures = {name: getattr(answer, name) for name in COMPUTED_FIGURES}
    segments = [(sorted(nodes), share) for nodes, share in generation.segments_under_way]
    return {"answer": {**vars(answer), **computed_figures}, "accepted_runs": generation.accepted_runs,
            "tree": _tree_data(generation.tree, text_of), "segments_under_way": segments}


def _tree_data(tree: TokenTree, text_of: Callable[[int], str]) -> dict[str, Any]:
    shown_nodes = [(node, tree.nodes[node]) for node in (tree.tip, *sorted(tree.live))]
    node_rows = [(node, guess.token, guess.parent, guess.score, text_of(guess.token)) for node, guess in shown_nodes]
    return {"trunk": tree.trunk, "unsent_guesses": sorted(tree.unsent_guesses), "node_rows": node_rows}


def event_of(outcome: Any) -> tuple[str, Any]:
    """Return the kind and the value of an event: a piece of text, an error by its classes, whether prompts and answers
    are texts, as soon as an answer begins, or else a result."""
    if isinstance(outcome, BaseException):
        return ERROR, ([error_class.__name__ for error_class in type(outcome).__mro__], str(outcome))
    return {str: PIECE, bool: BEGUN}.get(type(outcome), RESULT), outcome


# --- requests ---------------------------------------------------------------------------------------------------------

class PipedJob(Job):
    """An answer for the other process."""

    def __init__(self, prompt: Prompt, options: Mapping[str, Any], is_chat: bool) -> None:
        super().__init__(prompt, options)
        self._is_chat = is_chat

    def begin(self, pipeline: Pipeline) -> Generation:
        if self._is_chat:
            check_messages(self.prompt)
        guide = self.options.get("guide")
        options = {**self.options, "guide": Guide(*guide) if guide else None}
        generation = pipeline.submit(self.prompt, **options)
        self.report(pipeline.text is not None)
        return generation


class PipedRequests:
    """The requests of the other process, which a thread of their own reads, and the events that they cause."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._send_lock = Lock()
        self._request_loop = RequestLoop()
        self._jobs: dict[int, PipedJob] = {}  # by number, until they end
        self._text_of: Callable[[int], str] = lambda token: str(token)  # spells it
        self._is_open, self._has_hung_up = False, Event()

    def report(self, number: int, outcome: Any) -> None:
        """Send the event of an outcome; without a receiver this process is about to end."""
        if isinstance(outcome, Generation):
            self._jobs.pop(number, None)
            outcome = state_of(outcome, self._text_of)
        line = json.dumps((number, *event_of(outcome))).encode() + b"\n"
        with self._send_lock, suppress(OSError):
            self._connection.sendall(line)

    # --- called by the thread of requests -----------------------------------------------------------------------------

    def read(self, lines: Iterable[str]) -> NoReturn:
        """Pass on all requests until the other process hangs up; then end this one, at once if it cannot answer yet."""
        for line in lines:
            number, action, *arguments = json.loads(line)
            try:
                ACTIONS[action](self, number, *arguments)
            except Exception as error:  # the pipeline has ended
                self.report(number, error)
        self.hang_up()

    def hang_up(self) -> NoReturn:
        """End this process, in an orderly way if that is possible."""
        self._has_hung_up.set()
        self._request_loop.stop()
        time.sleep(END_SECONDS if self._is_open else 0)
        die(EXIT_LOST)

    def submit(self, number: int, prompt: Prompt, options: Mapping[str, Any], is_chat: bool) -> None:
        """Begin an answer."""
        job = self._jobs[number] = PipedJob(prompt, options, is_chat)
        job.report = partial(self.report, number)
        self._request_loop.submit([job])

    def cancel(self, number: int) -> None:
        """Give an answer up; its result is what it was until then."""
        if number in self._jobs:
            self.state(number, number)
            self._request_loop.cancel([self._jobs.pop(number)])

    def state(self, number: int, job_number: int) -> None:
        """Report the state of an answer; None once its own result was sent."""
        job = self._jobs.get(job_number)
        self._call(number, lambda pipeline: job and job.generation and state_of(job.generation, self._text_of))

    def check(self, number: int) -> None:
        """Report whether all ranks are there."""
        self._call(number, Pipeline.check)

    def _call(self, number: int, function: Callable[[Pipeline], Any]) -> None:
        def report_result(result: Future[Any]) -> None:
            self.report(number, result.exception() or result.result())

        self._request_loop.call(function).add_done_callback(report_result)

    # --- the pipeline's thread ----------------------------------------------------------------------------------------

    def work(self, number: int, preset: str, options: Mapping[str, Any]) -> None:
        """Open the pipeline, report that as the result of a request, and answer until the other process hangs up."""
        with Pipeline.open(preset, **options) as pipeline:
            if pipeline.text is not None:
                token_texts = TokenTexts(pipeline.text.tokenizer)
                self._text_of = lambda token: token_texts(token).name
            self._is_open = True
            self.report(number, {"shown_facts": repr(pipeline)})
            try:
                self._request_loop.work(pipeline)
            except BaseException as error:
                self._request_loop.drop(error)  # before the pipeline is closed, which may take time
                show(error, pipeline.config.debug)

        self._has_hung_up.wait()  # until then all requests are refused with that error


ACTIONS: Mapping[str, Callable[..., None]] = {
    action.__name__: action
    for action in (PipedRequests.submit, PipedRequests.cancel, PipedRequests.state, PipedRequests.check)}


def main(argv: Sequence[str]) -> NoReturn:
    """Answer the requests of the process at the other end of a socket, which is inherited by its number."""
    launcher = os.getppid()
    os.environ.update(TOKENIZERS_ONLY)
    connection = socket.socket(fileno=int(argv[0]))
    lines = connection.makefile(encoding="utf-8")
    number, _, *open_arguments = json.loads(next(lines))
    requests = PipedRequests(connection)

    def end_with_launcher() -> None:
        """End after the launcher, even if a fork of it still holds its end of the connection."""
        while os.getppid() == launcher:
            time.sleep(POLL_SECONDS)
        requests.hang_up()

    for name, function in (("requests", partial(requests.read, lines)), ("launcher", end_with_launcher)):
        guarded(name, function, lambda name, error: show(error, debug=True))
    try:
        requests.work(number, *open_arguments)
    except BaseException as error:
        requests.report(number, error)
    die(0)


if __name__ == "__main__":
    main(sys.argv[1:])
