"""SpecInfer's Python API (`flexflow.serve`) over a `Pipeline`: the same names, for programs that were written for it.

    import eval.specinfer.flexflow as ff

    ff.init(num_gpus=4, memory_per_gpu=14000, zero_copy_memory_per_node=30000, pipeline_parallelism_degree=4)
    llm, ssm = ff.LLM("toy/llama"), ff.SSM("toy/draft_a")
    llm.compile(ff.GenerationConfig(), ssms=[ssm])
    with llm:
        print(llm.generate("Once upon a time").output_text)

An option becomes the flag of SpecInfer's command line that means the same, and eval/specinfer/parse.py says what that
is.
"""
from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Any, Callable, Mapping, Sequence, Union

from config.files import append, check_output
from config.keys import raw_values
from eval.specinfer.parse import INCR_DECODING, PROGRAMS, SPEC_INFER, flags_of, options_in, read
from launch.pipeline import Pipeline
from pipeline.decode import Answer

Show = Callable[[str], Any]  # is given each piece of a text
Configs = Union[Mapping[str, Any], str, None]  # options as a dictionary, or the name of a file that holds one

ANOTHER_OUTPUT = "choose another output file"
GUIDS = count(1_000_000)  # of requests, as the original counts them
# What the original's example programs keep in the same dictionary for LLM, SSM and generate.
OF_PROGRAMS = ("llm_model", "cache_path", "refresh_cache", "full_precision", "ssms", "prompt", "output_file",
               "max_length", "max_requests_per_batch", "max_seq_length", "max_tokens_per_batch")

_machine: dict[str, Any] = {}  # what `init` was given


class DataType(Enum):
    """The number type of a model's weights; the value is the flag that asks for it."""

    DT_HALF = ""
    DT_FLOAT = "--use-full-precision"
    DT_BFLOAT16 = "--use-bf16-precision"


@dataclass(frozen=True)
class GenerationConfig:
    """How tokens are chosen: the likeliest one, or drawn if `do_sample`. With `topk=1` all tokens may be drawn."""

    do_sample: bool = False
    temperature: float = 0.9
    topp: float = 0.8
    topk: int = 1

    @property
    def words(self) -> list[str]:
        """The flags and keys that say the same."""
        if not self.do_sample:
            return []
        drawn = ["--do-sample", "--temperature", f"{self.temperature}", "--topp", f"{self.topp}"]
        return [*drawn, f"top_k={self.topk}"] if self.topk > 1 else drawn


@dataclass(frozen=True)
class Request:
    """A prompt with lengths of its own, in tokens; -1: none is said."""

    prompt: str
    max_length: int = -1
    max_new_tokens: int = -1


@dataclass(frozen=True)
class GenerationResult:
    """One answer. As in the original, output text and output tokens begin with those of the prompt."""

    guid: int
    input_text: str
    output_text: str
    input_tokens: Sequence[int]
    output_tokens: Sequence[int]
    answer: Answer  # the new tokens alone, with this project's figures

    def lines(self, ttft: bool) -> str:
        """What SpecInfer writes of a request: figures in microseconds, token ids, and text. Its incremental decoding
        gives the time to the first token, too.
        """
        answer = self.answer
        latency = answer.seconds * 1e6
        figures = f"guid({self.guid}) llm_decoding_steps({answer.target_passes}) latency({latency:.3f})"
        if ttft:
            figures += f" ttft({answer.prefill_seconds * 1e6:.3f})"
        ids = ",".join(map(str, self.output_tokens))
        return f"[Profile] {figures}\ntoken IDs: {ids}\n{self.output_text}\n"


def answer_to(pipeline: Pipeline, request: Request, show: Show = lambda piece: None) -> GenerationResult:
    """The answer to a request, shown piece by piece as it settles. Raises ValueError for lengths that cannot be."""
    prompt, room, length = request.prompt, request.max_new_tokens, request.max_length
    text, config = pipeline.text, pipeline.config
    if text is None:
        raise ValueError("SpecInfer's programs read texts: leave prompt_ids out")
    ids = pipeline.prompt_ids(prompt, config.template)
    if room == -1:
        room = config.max_new_tokens if length == -1 else length - len(ids)
    if room <= 0:
        raise ValueError(f"max_length={length} leaves no room behind a prompt of {len(ids)} tokens: give more, or "
                         "max_new_tokens")
    generation = pipeline.stream(ids, max_new_tokens=room)
    for piece in generation:
        show(piece)
    answer = generation.answer
    tokens = [*ids, *answer.token_ids]
    return GenerationResult(next(GUIDS), prompt, text.decode(tokens), ids, tokens, answer)


def keep(path: str, result: GenerationResult, ttft: bool) -> None:
    """Append SpecInfer's lines to the output file, if there is one."""
    if path:
        append(path, result.lines(ttft), ANOTHER_OUTPUT)


# --- models -----------------------------------------------------------------------------------------------------------

def init(configs: Configs = None, **options: Any) -> None:
    """Say what the machine is: a dictionary, the name of a file of JSON, or options; for all models compiled later.

    Raises ValueError for an option that is unknown.
    """
    table = options_in(configs) if isinstance(configs, str) else configs or {}
    given = {**table, **options}
    chosen = {name: value for name, value in given.items() if name not in OF_PROGRAMS}
    flags_of(chosen)
    _machine.clear()
    _machine.update(chosen)


class SSM:
    """A small model that guesses, by its folder or its name. What is said of it beside has no meaning here."""

    def __init__(self, model_name: str, data_type: DataType = DataType.DT_HALF, cache_path: str = "",
                 refresh_cache: bool = False, output_file: str = "") -> None:
        self.model_name = model_name

    def compile(self, generation_config: GenerationConfig | None = None, **options: Any) -> None:
        """Look the options over; a small model guesses as the LLM beside it wants. ValueError for unknown ones."""
        flags_of(options)


class LLM:
    """A model in Hugging Face form, by its folder or its name in `cache_path`; inside a `with` its ranks are alive."""

    def __init__(self, model_name: str, data_type: DataType = DataType.DT_HALF, cache_path: str = "",
                 refresh_cache: bool = False, output_file: str = "") -> None:
        self._own = {"llm_model": model_name, "cache_path": cache_path, "refresh_cache": refresh_cache}
        self.data_type, self.output_file = data_type, output_file
        self.keys: dict[str, str] = {}  # of the run, once it is compiled
        self._pipeline: Pipeline | None = None

    def compile(self, generation_config: GenerationConfig | None = None, *, ssms: Sequence[SSM] = (),
                keys: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Settle how answers are made: with `ssms` by their guesses, else token by token.

        `options` are the original's, and those without a meaning here are warned about. `keys` are keys of run_pipe.sh.
        Raises ValueError for what cannot work.
        """
        small = [{"ssm_model": ssm.model_name} for ssm in ssms]
        words = flags_of({"max_seq_length": 256, **_machine, **options, **self._own, "ssms": small})
        words += filter(None, [self.data_type.value])
        words += (generation_config or GenerationConfig()).words
        beside = {"template": "none", **(keys or {})}
        words += [f"{key}={value}" for key, value in beside.items()]
        call = read(SPEC_INFER if ssms else INCR_DECODING, words)
        if call.ignored:
            warnings.warn(call.ignored, stacklevel=2)
        if self.output_file:
            check_output(self.output_file, ANOTHER_OUTPUT)
        self.keys = raw_values(call.words)

    def start_server(self) -> None:
        """Start the ranks. Raises ValueError for what cannot work, in a sentence that names the fix."""
        if not self.keys:
            raise ValueError("the model is not compiled: call compile first, as in llm.compile(ssms=[ssm])")
        self._pipeline = self._pipeline or Pipeline.open("toy", **self.keys)

    def stop_server(self) -> None:
        """End all ranks in good order."""
        if self._pipeline:
            self._pipeline.close()
        self._pipeline = None

    def __enter__(self) -> LLM:
        self.start_server()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop_server()

    def generate(self, requests_or_prompts: Any, max_length: int = -1, max_new_tokens: int = -1) -> Any:
        """The GenerationResult of a prompt (a text or a `Request`), or a list of them for a list, one after the other.

        `max_length` counts prompt and answer, and `max_new_tokens` the answer alone; of both the latter counts, and
        without either prompt and answer stay below `max_seq_length`. A `Request` has lengths of its own.
        """
        self.start_server()
        if not isinstance(requests_or_prompts, (str, Request)):
            return [self._answer(prompt, max_length, max_new_tokens) for prompt in requests_or_prompts]
        return self._answer(requests_or_prompts, max_length, max_new_tokens)

    def _answer(self, prompt: Any, max_length: int, max_new_tokens: int) -> GenerationResult:
        """The answer to one prompt, which goes into the output file, too."""
        assert self._pipeline is not None
        request = Request(prompt, max_length, max_new_tokens) if isinstance(prompt, str) else prompt
        if not isinstance(request, Request):
            raise ValueError(f"{prompt!r} is no prompt: give a text, or a list of texts")
        longest = self._pipeline.config.max_length - 1
        if request.max_length == request.max_new_tokens == -1:
            request = replace(request, max_length=longest)
        most = max(request.max_length, request.max_new_tokens)
        if most > longest:
            raise ValueError(f"{most} tokens are more than max_seq_length={longest + 1} has room for: compile with a "
                             "larger one, or ask for less")
        result = answer_to(self._pipeline, request)
        keep(self.output_file, result, self.keys["pipeline_type"] == PROGRAMS[INCR_DECODING])
        return result
