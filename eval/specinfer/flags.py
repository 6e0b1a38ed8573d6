"""The flags of SpecInfer's programs, as a table: the key of a run that each becomes here, or why it is ignored.

And the options of its Python API (FlexFlow's), which are flags by other names. How they are read stands in
`spec_infer.py`.
"""
from __future__ import annotations

from typing import Mapping, NamedTuple

SPEC_INFER, INCR_DECODING = "spec_infer", "incr_decoding"  # SpecInfer's two programs


class Flag(NamedTuple):
    """One flag of SpecInfer's programs, without its dashes.

    `takes` names the value behind it: N (a whole number), X (a number), another word for a text; empty: there is none.
    `key` gets the value in this `form`, or as `special` says. A flag without a key is ignored, and `about` says why.
    One that is `beside` another counts only with that one; `only` names the program that has it, if one alone has.
    """

    name: str
    takes: str
    key: str
    about: str
    form: str = "{}"
    special: tuple[tuple[str, str], ...] = ()
    beside: str = ""
    only: str = ""

    @property
    def typed(self) -> str:
        """The flag with its dashes and the name of its value, as SpecInfer's own pages write it."""
        dashes = "-" if self.name in SHORT or ":" in self.name else "--"
        return f"{dashes}{self.name} {self.takes}".rstrip()

    def written(self, value: str) -> str:
        """The value of the key for this value of the flag."""
        return dict(self.special).get(value) or self.form.format(value)


# Those that SpecInfer writes with one dash.
SHORT = ("llm-model", "ssm-model", "llm-weight", "ssm-weight", "llm-config", "ssm-config", "tokenizer", "cache-folder",
         "prompt", "output-file", "offload", "offload-reserve-space-size", "data-parallelism-degree",
         "tensor-parallelism-degree", "pipeline-parallelism-degree", "profiling-folder", "trace", "level", "logfile",
         "config-file")
# What the runtime below FlexFlow is given about devices and memory.
LEGION = ("ll:gpu", "ll:cpu", "ll:util", "ll:fsize", "ll:zsize", "ll:csize", "ll:rsize", "ll:streams", "ll:stacksize")
CHAIN = "1,1,1,1,1,1,1,1"
PLACED = "weights and caches take what they need, on the devices that device= names"
ONE = "one answer is made at a time"
SCHEDULED = "requests are answered in the order of the prompt file, with no times of arrival and no latency goals"
SHAPED = "the tree has the shape of --expansion-degree, or of expansion=1,1,3,1"
TRAINED = "models are not trained here"
TRACED = "trace=DIR records what every rank did, see docs/options.md"

FLAGS = (
    # models
    Flag("llm-model", "NAME", "base_dir", "the model: a folder in Hugging Face form, or its name in models/"),
    Flag("llm-weight", "DIR", "base_dir", "the same in SpecInfer's early days"),
    Flag("ssm-model", "NAME", "ssm", "a small model; repeat it for several", only=SPEC_INFER),
    Flag("ssm-weight", "DIR", "ssm", "the same in SpecInfer's early days", only=SPEC_INFER),
    Flag("cache-folder", "DIR", "models", "folder of models that are given by name"),
    Flag("tokenizer", "FILE", "", "the tokenizer is the one in the model's folder"),
    Flag("llm-config", "FILE", "", "config.json is the one in the model's folder"),
    Flag("ssm-config", "FILE", "", "config.json is the one in the model's folder"),
    Flag("refresh-cache", "", "", "nothing is downloaded"),
    # what is asked and written
    Flag("prompt", "FILE", "question_file", "prompts: a JSON list of texts in a file .json"),
    Flag("output-file", "FILE", "lines", "file to which SpecInfer's lines are appended"),
    Flag("max-sequence-length", "N", "max_length", "tokens of prompt and answer together, at most"),
    Flag("max-length", "N", "max_length", "the same; of both the smaller one counts"),
    Flag("max-output-length", "N", "max_new_tokens", "tokens of the answer, at most"),
    # how a token is chosen
    Flag("do-sample", "", "temperature", "draw tokens, at temperature 1 if none is given", "1"),
    Flag("temperature", "X", "temperature", "of drawing", beside="do-sample"),
    Flag("topp", "X", "top_p", "draw from the likeliest tokens that have this probability together",
         beside="do-sample"),
    Flag("sampling-seed", "N", "seed", "of the noise"),
    Flag("spec-sampling", "", "verify", "verify by multi-step speculative sampling", "mss", only=SPEC_INFER),
    # the tree of guesses
    Flag("expansion-degree", "N", "expansion", "guesses in the third step of the tree; -1: a chain",
         "1,1,{},1,1,1,1,1", (("-1", CHAIN),), only=SPEC_INFER),
    Flag("max-tree-width", "N", "", SHAPED, only=SPEC_INFER),
    Flag("max-tree-depth", "N", "", SHAPED, only=SPEC_INFER),
    # the machine
    Flag("use-full-precision", "", "dtype", "compute in float32; else in float16 on CUDA", "float32"),
    Flag("use-bf16-precision", "", "dtype", "compute in bfloat16", "bfloat16"),
    Flag("use-bf16", "", "dtype", "compute in bfloat16", "bfloat16"),
    Flag("4bit-quantization", "", "quant", "weights in 4 bits", "nf4"),
    Flag("8bit-quantization", "", "quant", "weights in 8 bits", "int8"),
    Flag("pipeline-parallelism-degree", "N", "stages", "ranks in a row, each with a share of the layers"),
    Flag("tensor-parallelism-degree", "N", "tp", "ranks that share the layers of a stage"),
    Flag("data-parallelism-degree", "N", "", "one copy of the model answers"),
    Flag("max-tokens-per-prefilling-batch", "N", "prefill_chunk", "tokens of the prompt in one segment"),
    Flag("max-requests-per-batch", "N", "", ONE),
    Flag("max-tokens-per-batch", "N", "", "a segment has as many rows as its tree"),
    Flag("max-tokens-per-ssm-batch", "N", "", "a small model reads each level of its tree at once"),
    Flag("num-kv-cache-slots", "N", "", "the cache has room for --max-sequence-length and the trees"),
    Flag("offload", "", "", "weights stay on their devices; more stages, or 4 bits, make them fit"),
    Flag("offload-reserve-space-size", "MB", "", "weights stay on their devices"),
    *(Flag(name, "N", "", PLACED) for name in LEGION),
    # tests and measurements of SpecInfer's own
    Flag("benchmarking", "", "", "weights are always read"),
    Flag("warmup", "", "", "what is measured at the start warms up"),
    *(Flag(name, "", "", TRACED) for name in ("verbose", "profiling", "inference-debugging")),
    *(Flag(name, "TEXT", "", TRACED) for name in (
        "profiling-folder", "level", "logfile", "lg:prof", "lg:prof_logfile")),
    Flag("fusion", "", "", "torch runs each operator by itself"),
    Flag("enable-peft", "", "", TRAINED),
    Flag("enable-peft-finetuning", "", "", TRAINED),
    # SpecInfer's scheduler
    Flag("no-special-tokens", "", "", "a prompt begins as its tokenizer wants it"),
    *(Flag(name, "X", "", SCHEDULED) for name in ("baseline-latency-ms", "ssm-spec-latency-ms", "llm-verify-latency-ms",
                                                  "request-per-second", "qps")),
    *(Flag(name, "FILE", "", SCHEDULED) for name in ("trace", "emission-file-path")),
    *(Flag(name, "", "", SCHEDULED) for name in ("enable-streaming-cache", "spec-infer-old-version", "greedy-schedule",
                                                 "equal-schedule", "slo-attainment-early-termination")),
)

CONFIG_FILE = Flag("config-file", "FILE", "", "options of SpecInfer's Python programs in a JSON object")
BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in (*FLAGS, CONFIG_FILE)}
OPTIONS: Mapping[str, str] = {  # of the Python API and its files, with the flags that mean the same
    "llm_model": "llm-model", "ssm_model": "ssm-model", "cache_path": "cache-folder",
    "full_precision": "use-full-precision", "max_seq_length": "max-sequence-length",
    "num_gpus": "ll:gpu", "memory_per_gpu": "ll:fsize", "zero_copy_memory_per_node": "ll:zsize", "num_cpus": "ll:cpu",
    "legion_utility_processors": "ll:util",
    "use_4bit_quantization": "4bit-quantization", "use_8bit_quantization": "8bit-quantization",
    "model_specific_data_parallelism_degree": "data-parallelism-degree",
    "model_specific_tensor_parallelism_degree": "tensor-parallelism-degree",
    "model_specific_pipeline_parallelism_degree": "pipeline-parallelism-degree",
    **{name: name.replace("_", "-") for name in (
        "refresh_cache", "prompt", "output_file", "max_length", "max_requests_per_batch", "max_tokens_per_batch",
        "data_parallelism_degree", "tensor_parallelism_degree", "pipeline_parallelism_degree", "offload",
        "offload_reserve_space_size", "profiling", "benchmarking", "inference_debugging", "fusion", "enable_peft",
        "enable_peft_finetuning", "num_kv_cache_slots")},
}
