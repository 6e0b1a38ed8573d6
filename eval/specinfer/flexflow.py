"""SpecInfer's Python API (`flexflow.serve`) on top of `Pipeline`: the same names, for programs written for it.

    import eval.specinfer.flexflow as ff

    ff.init(num_gpus=4, memory_per_gpu=14000, zero_copy_memory_per_node=30000, pipeline_parallelism_degree=4)
    llm, ssm = ff.LLM("toy/llama"), ff.SSM("toy/draft_a")
    llm.compile(ff.GenerationConfig(), ssms=[ssm])
    with llm:
        print(llm.generate("Once upon a time").output_text)

Each option becomes the equivalent flag of SpecInfer's command line; eval/specinfer/parse.py maps the flag to keys of a
run.
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

Show = Callable[[str], Any]  # called with each piece of a text
Configs = Union[Mapping[str, Any], str, None]  # options as a dictionary, or the path of a JSON file that holds one

ANOTHER_OUTPUT = "choose another output file"
GUIDS = count(1_000_000)  # ids of requests, numbered as in the original
# Options for LLM, SSM and generate, which the original's example programs keep in the dictionary of `init`.
OF_PROGRAMS = ("llm_model", "cache_path", "refresh_cache", "full_precision", "ssms", "prompt", "output_file",
               "max_length", "max_requests_per_batch", "max_seq_length", "max_tokens_per_batch")

_machine: dict[str, Any] = {}  # the options of `init`


class DataType(Enum):
    """The number type of a model's weights; the value is its flag."""

    DT_HALF = ""
    DT_FLOAT = "--use-full-precision"
    DT_BFLOAT16 = "--use-bf16-precision"


@dataclass(frozen=True)
class GenerationConfig:
    """Options of decoding: greedy, or sampling if `do_sample`, where `topk=1` allows all tokens."""

    do_sample: bool = False
    temperature: float = 0.9
    topp: float = 0.8
    topk: int = 1

    @property
    def words(self) -> list[str]:
        """The equivalent flags and keys."""
        if not self.do_sample:
            return []
        sampling = ["--do-sample", "--temperature", f"{self.temperature}", "--topp", f"{self.topp}"]
        return [*sampling, f"top_k={self.topk}"] if self.topk > 1 else sampling


@dataclass(frozen=True)
class Request:
    """A prompt with length limits of its own, in tokens; -1: not given."""

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
    answer: Answer  # only the new tokens, with this project's figures

    def lines(self, ttft: bool) -> str:
        """Return SpecInfer's output for a request: figures in microseconds, token ids, and text. With `ttft` it has the
        time to the first token, as in incremental decoding.
        """
        answer = self.answer
        latency = answer.seconds * 1e6
        figures = f"guid({self.guid}) llm_decoding_steps({answer.target_passes}) latency({latency:.3f})"
        if ttft:
            figures += f" ttft({answer.prefill_seconds * 1e6:.3f})"
        ids = ",".join(map(str, self.output_tokens))
        return f"[Profile] {figures}\ntoken IDs: {ids}\n{self.output_text}\n"


def answer_to(pipeline: Pipeline, request: Request, show: Show = lambda piece: None) -> GenerationResult:
    """Answer a request, and call `show` with each piece once it is settled. Raise ValueError for impossible lengths."""
    prompt, room, length = request.prompt, request.max_new_tokens, request.max_length
    text, config = pipeline.text, pipeline.config
    if text is None:
        raise ValueError("SpecInfer's programs require texts: omit prompt_ids")
    ids = pipeline.prompt_ids(prompt, config.template)
    if room == -1:
        room = config.max_new_tokens if length == -1 else length - len(ids)
    if room <= 0:
        raise ValueError(f"max_length={length} leaves no room after a prompt of {len(ids)} tokens: raise it, or give "
                         "max_new_tokens")
    generation = pipeline.stream(ids, max_new_tokens=room)
    for piece in generation:
        show(piece)
    answer = generation.answer
    tokens = [*ids, *answer.token_ids]
    return GenerationResult(next(GUIDS), prompt, text.decode(tokens), ids, tokens, answer)


def keep(path: str, result: GenerationResult, ttft: bool) -> None:
    """Append SpecInfer's lines to the output file, if one is given."""
    if path:
        append(path, result.lines(ttft), ANOTHER_OUTPUT)


# --- models -----------------------------------------------------------------------------------------------------------

def init(configs: Configs = None, **options: Any) -> None:
    """Set the options of the machine, from a dictionary, a JSON file or arguments, for all models compiled later.

    Raises ValueError for an unknown option.
    """
    table = options_in(configs) if isinstance(configs, str) else configs or {}
    given = {**table, **options}
    chosen = {name: value for name, value in given.items() if name not in OF_PROGRAMS}
    flags_of(chosen)
    _machine.clear()
    _machine.update(chosen)


class SSM:
    """A small model for speculation, given by its folder or its name. The other parameters are ignored."""

    def __init__(self, model_name: str, data_type: DataType = DataType.DT_HALF, cache_path: str = "",
                 refresh_cache: bool = False, output_file: str = "") -> None:
        self.model_name = model_name

    def compile(self, generation_config: GenerationConfig | None = None, **options: Any) -> None:
        """Check the options; otherwise ignore them, since the LLM controls speculation. ValueError for unknown ones."""
        flags_of(options)


class LLM:
    """A model in Hugging Face format, by its folder or its name in `cache_path`; its ranks run inside a `with`."""

    def __init__(self, model_name: str, data_type: DataType = DataType.DT_HALF, cache_path: str = "",
                 refresh_cache: bool = False, output_file: str = "") -> None:
        self._own = {"llm_model": model_name, "cache_path": cache_path, "refresh_cache": refresh_cache}
        self.data_type, self.output_file = data_type, output_file
        self.keys: dict[str, str] = {}  # of the run, once it is compiled
        self._pipeline: Pipeline | None = None

    def compile(self, generation_config: GenerationConfig | None = None, *, ssms: Sequence[SSM] = (),
                keys: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Configure the model for speculation with `ssms`, or without them for decoding token by token.

        `options` are the original's; those without a meaning here cause a warning. `keys` are keys of run_pipe.sh.
        Raises ValueError for settings that cannot work.
        """
        small = [{"ssm_model": ssm.model_name} for ssm in ssms]
        words = flags_of({"max_seq_length": 256, **_machine, **options, **self._own, "ssms": small})
        words += filter(None, [self.data_type.value])
        words += (generation_config or GenerationConfig()).words
        own = {"template": "none", **(keys or {})}
        words += [f"{key}={value}" for key, value in own.items()]
        call = read(SPEC_INFER if ssms else INCR_DECODING, words)
        if call.ignored:
            warnings.warn(call.ignored, stacklevel=2)
        if self.output_file:
            check_output(self.output_file, ANOTHER_OUTPUT)
        self.keys = raw_values(call.words)

    def start_server(self) -> None:
        """Start the ranks. Raise ValueError for settings that cannot work, with the fix."""
        if not self.keys:
            raise ValueError("the model is not compiled: call compile first, such as llm.compile(ssms=[ssm])")
        self._pipeline = self._pipeline or Pipeline.open("toy", **self.keys)

    def stop_server(self) -> None:
        """Shut down all ranks."""
        if self._pipeline:
            self._pipeline.close()
        self._pipeline = None

    def __enter__(self) -> LLM:
        self.start_server()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop_server()

    def generate(self, requests_or_prompts: Any, max_length: int = -1, max_new_tokens: int = -1) -> Any:
        """Return the GenerationResult of a prompt (a text or a `Request`), or a list of results for a list of prompts.

        `max_length` limits prompt and answer together, `max_new_tokens` only the answer. If both are given, the latter
        applies. Without either, prompt and answer stay below `max_seq_length`. A `Request` has its own limits.
        """
        self.start_server()
        if not isinstance(requests_or_prompts, (str, Request)):
            return [self._answer(prompt, max_length, max_new_tokens) for prompt in requests_or_prompts]
        return self._answer(requests_or_prompts, max_length, max_new_tokens)

    def _answer(self, prompt: Any, max_length: int, max_new_tokens: int) -> GenerationResult:
        """Answer one prompt, and append the answer to the output file."""
        assert self._pipeline is not None
        request = Request(prompt, max_length, max_new_tokens) if isinstance(prompt, str) else prompt
        if not isinstance(request, Request):
            raise ValueError(f"{prompt!r} is not a prompt: give a text, or a list of texts")
        longest = self._pipeline.config.max_length - 1
        if request.max_length == request.max_new_tokens == -1:
            request = replace(request, max_length=longest)
        most = max(request.max_length, request.max_new_tokens)
        if most > longest:
            raise ValueError(f"{most} tokens do not fit into max_seq_length={longest + 1}: compile with a larger one, "
                             "or request fewer")
        result = answer_to(self._pipeline, request)
        keep(self.output_file, result, self.keys["pipeline_type"] == PROGRAMS[INCR_DECODING])
        return result
