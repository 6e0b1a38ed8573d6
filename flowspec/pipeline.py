"""`Pipeline` for a user's program: the methods of `launch/pipeline.py`, for a pipeline in a process of its own."""
from __future__ import annotations

import json
import weakref
from contextlib import ExitStack, closing
from itertools import islice
from types import SimpleNamespace, TracebackType
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence, Union

from flowspec.engine_process import BEGUN, ERROR, PIECE, RESULT, EngineProcess, Event, Mailbox

MessageDict = Mapping[str, Any]  # with `role` (system, user, assistant or tool) and `content`, a text
# A question; a conversation, as alternate texts of user and assistant or as messages with roles; or token ids.
Prompt = Union[str, Sequence[str], Sequence[MessageDict], Sequence[int]]


class Guide(NamedTuple):
    """A grammar as given by a request: `kind` is json_schema, regex, choice (a JSON list), grammar or lark."""

    kind: str
    source: str

    @staticmethod
    def json_schema(schema: Any = None) -> Guide:
        """Return the guide for JSON that follows a schema, or for any JSON object without one."""
        return Guide("json_schema", json.dumps({"type": "object"} if schema is None else schema))


class Answer(SimpleNamespace):
    """The token ids of an answer and its figures, as an attribute each; times are in seconds.

    `token_ids`, `prompt_tokens`, `new_tokens`, `finish_reason` (stop, length or context), `prefill_seconds`,
    `decode_seconds`, `tokens_per_second`, `mean_accepted_length`, `sources` (guesses of each source that became text),
    `logprobs` (of each token: itself, its log-probability, the likeliest tokens with theirs) and more, which
    `pipeline/answers.py` explains.
    """


class TreeNode(NamedTuple):
    """A guess, or the tip of the text; `text` is that of its token."""

    token: int
    parent: int
    score: float  # log-probability of the path by the draft, counted from the root
    text: str


class Tree:
    """The text and its live guesses at one moment, by the numbers of their nodes."""

    def __init__(self, trunk: list[int], unsent_guesses: list[int], node_rows: list[list[Any]]) -> None:
        self.trunk = trunk  # of the text, prompt included
        self.unsent_guesses = frozenset(unsent_guesses)
        self.nodes = {node: TreeNode(*fields) for node, *fields in node_rows}  # of the tip and the guesses
        self.tip = trunk[-1]
        self.live = self.nodes.keys() - {self.tip}


class Generation:
    """One answer while it is generated: iterate over its pieces of text, or close it to cancel it.

    Without a tokenizer the pieces are token ids. `answer` has the token ids and the figures so far.
    """

    def __init__(self, pipeline: Any, request: Sequence[Any], on_event: Callable[[], object] | None = None) -> None:
        self._pipeline = pipeline  # its process goes on as long as somebody reads
        self._engine: EngineProcess = pipeline.engine
        self._mailbox = Mailbox(on_event)
        self._request_number = self._engine.request(self._mailbox, "submit", *request)
        self._shown_pieces: list[str] = []
        self._has_text = self.is_over = False
        if on_event is None:
            self._receive()  # raises ValueError for an invalid request

    @property
    def ready(self) -> bool:
        """Whether the next piece, or the end, can be read without advancing any request."""
        return self.is_over or not self._mailbox.events.empty()

    def ready_pieces(self) -> Iterator[str]:
        """Yield the pieces that can be read at once; raises the error that ended the answer."""
        while self.ready and not self.is_over:
            yield from islice(self, 1)

    @property
    def tree(self) -> Tree:
        """The text and its live guesses at this moment."""
        return Tree(**self._state()["tree"])

    @property
    def segments_under_way(self) -> list[tuple[frozenset[int], float]]:
        """The nodes of each segment in flight, with the share of its way through the stages that it has gone."""
        return [(frozenset(nodes), share) for nodes, share in self._state()["segments_under_way"]]

    @property
    def accepted(self) -> int:
        """The number of tokens of the answer so far that were guesses in flight."""
        return sum(self.accepted_runs)

    @property
    def accepted_runs(self) -> list[int]:
        """The lengths of the runs of tokens that were guesses in flight, empty ones included.

        A token that no guess in flight covered begins the next run, unless it is the last one so far.
        """
        return list(self._state()["accepted_runs"])

    @property
    def answer(self) -> Answer:
        """The token ids and the figures so far, which may be ahead of the pieces that were read."""
        return Answer(**self._state()["answer"])

    @property
    def text(self) -> str:
        """The text so far; empty without a tokenizer."""
        return "".join(self._shown_pieces) if self._has_text else ""

    def __repr__(self) -> str:
        answer = self.answer
        shown_content = f"text={self.text!r}" if self._has_text else f"token_ids={answer.token_ids}"
        finish_reason = answer.finish_reason or "in progress"
        return f"Generation({shown_content}, new_tokens={answer.new_tokens}, finish_reason={finish_reason!r})"

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self.is_over:
            event_kind, value = self._receive()
            if event_kind == PIECE:
                return str(value)
        raise StopIteration

    def close(self) -> None:
        """Cancel the answer, even if it has not begun: no stage computes for it any more."""
        if not self.is_over:
            self.is_over = True
            self._engine.cancel(self._request_number)

    def __del__(self) -> None:
        if hasattr(self, "_request_number"):
            self._engine.forget(self._request_number)

    def _receive(self) -> Event:
        """Wait for the next event; raises the error that ended the answer."""
        event_kind, value = self._mailbox.events.get()
        self.is_over = event_kind in (RESULT, ERROR)
        if event_kind == ERROR:
            raise value
        if event_kind == BEGUN:
            self._has_text = value
        elif event_kind == PIECE:
            self._shown_pieces.append(value)
        return event_kind, value

    def _state(self) -> dict[str, Any]:
        """Return what the pipeline knows of the answer at this moment."""
        mailbox = self._mailbox
        # the last one is the state of an answer that ended meanwhile
        state = mailbox.state or self._engine.call("state", self._request_number) or mailbox.state
        if state is None:
            raise RuntimeError("this answer has no figures, since it ended with an error")
        return dict(state)


class Pipeline:
    """A split model on several ranks, ready to answer, in a process of its own.

        with Pipeline.open("smollm2", temperature=0.7) as pipeline:
            for piece in pipeline.stream("What does a baker do?"):
                print(piece, end="", flush=True)

    Up to `max_requests` answers are generated at once; further ones wait. Any thread may ask. The process ends with
    `close`, with the last reference to the pipeline, and with this program, however that ends.
    """

    def __init__(self, engine: EngineProcess, shown_facts: str) -> None:
        self.engine, self._shown_facts = engine, shown_facts
        weakref.finalize(self, engine.hang_up)

    @staticmethod
    def open(preset: str = "", **options: Any) -> Pipeline:
        """Start the ranks of a preset; `flowspec run --help` lists the options.

        The default model is SmolLM2, or the bundled model if SmolLM2 cannot be fetched.

        The ranks are processes, or threads of one process with `link="threads"`, as a single stage is by default. With
        `hosts=FILE` they are other boards, where a user starts run_jetson.sh; this returns once all have come. Raises
        ValueError, in a sentence that names the fix, for invalid options. If a rank is lost for good later, `stream`
        and `generate` raise PeerLost.
        """
        engine = EngineProcess()
        try:
            return Pipeline(engine, **engine.call("open", preset, options))
        except BaseException:
            engine.hang_up()
            raise

    def __repr__(self) -> str:
        return self._shown_facts.replace(")", ", closed)") if self.engine.end else self._shown_facts

    def close(self) -> None:
        """End all ranks in an orderly way; has no effect if that was done."""
        self.engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, error_class: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def generate(self, prompts: Any, progress: bool = True, **options: Any) -> Any:
        """Return the complete answer to a text or to token ids, or the answers to a list of these, in its order.

        Up to `max_requests` answers of a list are generated at once, and a bar shows its progress. Options are the keys
        of sampling and of an answer's end, and `template`. A conversation is for `chat`.
        """
        if is_one_prompt(prompts):
            return _completed(self.stream(prompts, **options))
        from tqdm import tqdm

        with ExitStack() as generations:
            submitted = [generations.enter_context(closing(self.stream(prompt, **options))) for prompt in prompts]
            progress_bar = tqdm(submitted, unit="answer", disable=None if progress else True)
            return [_completed(generation) for generation in progress_bar]

    def chat(self, messages: Sequence[MessageDict], **options: Any) -> Generation:
        """Return the assistant's answer to messages with a `role` (system, user or assistant) and a `content`."""
        return _completed(Generation(self, (messages, options, True)))

    def stream(self, prompt: Prompt, **options: Any) -> Generation:
        """Return an answer that is generated while its pieces are read; options as for `generate`.

        With `logprobs=N` the answer has the target's log-probabilities of each token and of the N likeliest ones, with
        `prompt_logprobs=True` also those of the prompt. `guide` is a grammar that the answer follows
        (`Guide.json_schema({"type": "object"})`). With `shows_marks` the text of GPT-OSS has its channels as the model
        writes them. The option `priority`, above 0 and 1 by default, weights its guesses and decides which request
        begins first.
        """
        return Generation(self, (prompt, options, False))

    submit = stream  # for programs of `launch.pipeline`, where only submitted answers are generated at once

    def check(self) -> None:
        """Raise PeerLost if a rank is lost and does not come back; takes no time otherwise."""
        self.engine.call("check")


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a text or a list of token ids, instead of a list of these."""
    return isinstance(prompts, str) or not isinstance(prompts, Sequence) or isinstance(next(iter(prompts), 0), int)


def _completed(generation: Generation) -> Generation:
    """Return an answer after its end."""
    with closing(generation):
        for _ in generation:
            pass
    return generation
