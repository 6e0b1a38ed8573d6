"""The options of a run, each with its meaning and default. Edit them here, or give key=value on the command line.

It knows nothing about models or devices. `launch/` turns it into values for model/, pipeline/, tp/ and sim/.
`bash run_pipe.sh --help all` prints them.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Iterator

from config import forms
from config.drafts import DRAFTS, MODEL_KEY, reads
from config.keys import BoardKeys, keys_with, local_key, shared_key
from config.methods import METHODS, SHARINGS
from config.profiles import PROFILES, Profile, is_file, read
from config.trees import FIXED_POLICIES, MAX_GUESSES, MIN_SCORE, NO_BOUND, Growth, TreeConfig, by_policy, wrong_widths
from config.values import COUNT, Choices, Range, listed, number

GUESSES = Range(1, MAX_GUESSES)
LEVELS = Range(0, 65536)
PENALTY = Range(-2, 2)  # as OpenAI has it
TEMPERATURE = Range(0.001, 1000, {0: "the likeliest token"})
SEED = Range(0, (1 << 64) - 1)
REQUESTS_AT_ONCE = Range(1, 256)
SPEED = Range(0.001, 1000)  # of a rank, relative to those that share its layers
NUMBER_TYPES = Choices(("auto", "float64", "float32", "float16", "bfloat16"))
QUANTIZATIONS = ("none", "int8", "int4", "nf4", "fp4")  # of the layers' weights

MODEL_FOLDERS = ("model_dir", "base_dir")  # either names another model than a preset's
TUNED_TO = (*MODEL_FOLDERS, "profile")  # what a preset is tuned to: its model, in the time of this machine
QUESTION_KEYS = ("prompt", "prompt_ids", "question_file")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")  # applied before temperature
AUTO_HOSTS = "auto"  # hosts that are found
SAMPLING = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)  # keys that change the distribution of a token
ABLATIONS = ("expand", "none_expand", "score_order", "prune", "thrift", "forced")
DRAWN = ("mss", "eagle1")  # rules for drawn guesses, of methods that draft whole trees
LOSSY = ("typical",)  # rules that change the distribution of texts above temperature 0
ROWS_BEFORE_MEASUREMENT = 16  # rows per segment until the best number is measured
RECOVERY = {"false": 0.0, "true": 60.0}  # seconds for each word
RUN = 4  # default of the rows that pipeinfer and windows send at once
USUAL_RANKS = 4  # default of the ranks that share all layers, or that hold replicas


def is_template_file(template: str) -> bool:
    """Return whether a value of the key `template` is the path of a Jinja file, not a name."""
    return "." in template or "/" in template


TEMPLATES = Choices(("auto", "vicuna", "llama-2", "own", "none"), is_template_file)


@dataclass(frozen=True)
class RunConfig(BoardKeys):
    """The options of one run. Paths are relative to the working directory of the command; empty means "not given"."""

    COMPARES: ClassVar[bool] = False  # as in `CommandKeys`

    pipeline_type: str = shared_key(
        "continuous", "the method, as serial; streaming on boards and clusters",
        Choices(METHODS), heading="Method and models")
    model: str = shared_key("", "a name at the hub, as Qwen/Qwen3-4B or NAME@REVISION; a folder; or a GGUF file")
    model_dir: str = local_key("", "folder of a split model; empty: base_dir, split at the first start",
        names_file=True, discarded_by=MODEL_FOLDERS, divides_model=True)
    base_dir: str = local_key("", "folder of the whole model in Hugging Face form",
        names_file=True, discarded_by=MODEL_FOLDERS)
    eagle_dir: str = local_key("", "folder of the EAGLE draft head of that model",
        names_file=True, discarded_by=MODEL_FOLDERS)
    draft: str = shared_key(
        "eagle", "the head: eagle, dflash, dspark; model, ssm, suffix (copies); eagle+suffix; none",
        Choices(DRAFTS), discarded_by=MODEL_FOLDERS)
    draft_dir: str = local_key(
        "", "folder of a small whole model, for drafts with model; best with the target's vocabulary",
        names_file=True)
    ssm: str = local_key("", "folders of small models, DIR,DIR, of specinfer, ssm; empty: rank 0's draft",
        discarded_by=MODEL_FOLDERS)
    answers: str = local_key(
        "", "file of prompts and answers, from which suffix also copies in later runs; empty: none",
        names_file=True)
    models: str = local_key(
        "", "folder of the presets' models, named as at Hugging Face; empty: models/ next to config/",
        names_file=True)
    tp: str = shared_key("0", "ranks that share layers, or a speed of each, as 2,1,1; 0: as split, or 4 (tp, galaxy)",
        forms.TENSOR_SHARES, divides_model=True)
    stages: str = shared_key(
        "", "layers per rank, as 0+2+2+2+2 (rank 0 drafts); number of stages; auto:4; empty: as split",
        forms.STAGES, discarded_by=MODEL_FOLDERS, divides_model=True)
    replicas: str = shared_key(
        "0", "copies of the model for dsi, or copies x stages of each, as 2x2; 0: to fill four ranks",
        forms.REPLICAS, divides_model=True)

    prompt: str = local_key("", "the question; -: standard input, where a terminal gives a conversation",
        discarded_by=QUESTION_KEYS, heading="The questions (one of the first three)")
    prompt_ids: str = local_key("", "token ids with commas between, for models without a tokenizer",
        forms.TOKEN_IDS, discarded_by=QUESTION_KEYS)
    question_file: str = local_key("", "questions in the format of MT-bench, one JSON object per line",
        names_file=True, discarded_by=QUESTION_KEYS)
    questions: str = shared_key(
        "", "how many of them, as 5, or the first, counted from 0, and the end, as 30:50; empty: all",
        forms.QUESTION_RANGE)
    template: str = local_key("auto", "chat template: own (the tokenizer's), a Jinja FILE, vicuna, llama-2, none",
        TEMPLATES, names_file=is_template_file, per_answer=True)

    temperature: float = shared_key(0.0, "0: always the likeliest token; above: sampled",
        TEMPERATURE, per_answer=True, heading="How the answer is chosen, and when it ends")
    top_p: float = shared_key(1.0, "sample from the likeliest tokens with this total probability; 1: from all",
        Range(0.000001, 1), per_answer=True)
    top_k: int = shared_key(0, "sample from this many likeliest tokens; 0: from all",
        Range(1, COUNT, {0: "all tokens"}), per_answer=True)
    min_p: float = shared_key(
        0.0, "sample from tokens with at least this share of the highest probability; 0: from all",
        Range(0, 1), per_answer=True)
    repetition_penalty: float = shared_key(1.0, "divides logits of tokens that occur in prompt or answer; 1: off",
        Range(0.001, 1000), per_answer=True)
    presence_penalty: float = shared_key(0.0, "subtracted from logits of tokens that occur in the answer",
        PENALTY, per_answer=True)
    frequency_penalty: float = shared_key(0.0, "the same, for each occurrence of the token in the answer",
        PENALTY, per_answer=True)
    logit_bias: str = shared_key("", "token ids and the bias of each one's logit, as 306:-100,626:2.5; empty: none",
        forms.LOGIT_BIAS, per_answer=True)
    seed: int = shared_key(0, "of the noise; with the same seed every method writes the same text",
        SEED, per_answer=True)
    verify: str = shared_key(
        "match", "rule for guesses: match, naive, mss (SpecInfer), eagle1; typical (Medusa) is lossy",
        Choices(("match", "naive", "mss", "eagle1", *LOSSY)), per_answer=True)
    max_new_tokens: int = shared_key(256, "tokens, at most", Range(1, COUNT), per_answer=True)
    ignore_eos: bool = shared_key(False, "continue after the end token (to measure speed)", per_answer=True)
    stop: str = shared_key("", "text that ends the answer; empty: none")
    stop_loops: bool = local_key(False, "end an answer that writes a sentence or phrase three times in succession")

    policy: str = shared_key(
        "auto", "eagle2; opt or opt:X (OPT-Tree); static (EAGLE-1); expansion; auto: the method's own",
        forms.POLICY, sizes_tree=True, is_rare=True,
        heading="The tree of methods that draft whole trees, of pearl, and of continuous after a miss")
    expansion: str = shared_key(
        "1,1,3,1,1,1,1,1", "of specinfer, level by level: children of each guess of the level before",
        sizes_tree=True)
    init_total_token: int = shared_key(80, "guesses in the tree", GUESSES, sizes_tree=True)
    init_depth: int = shared_key(6, "levels after the first", LEVELS, sizes_tree=True)

    expand_total_token: int = shared_key(64, "guesses in the tree",
        GUESSES, sizes_tree=True, is_rare=True, heading="The tree that continuous grows after a hit, from new features")
    expand_depth: int = shared_key(6, "levels after the first", LEVELS, discarded_by=TUNED_TO, sizes_tree=True)

    width: int = shared_key(10, "children of a guess, and guesses of a level that get children",
        GUESSES, is_rare=True, heading="All trees and their segments")
    subseq_token: int = shared_key(0, "rows per segment, at most; 0: as measured at the start; -1: no bound",
        Range(1, 65536, {0: "the number that is measured to be best", -1: "no bound"}))
    ablate: str = shared_key("", "features to switch off: expand, none_expand, score_order, prune, thrift, forced",
        discarded_by=TUNED_TO)

    init_topk_pipedec: int = shared_key(16, "guesses in a layer of pipedec",
        GUESSES, is_rare=True, heading="Other options of the pipeline")
    lookahead: str = shared_key(
        "auto", "rows sent at once by pipeinfer, windows, dsi; auto: 4, for dsi as few as keep all busy",
        forms.LOOKAHEAD, divides_model=True)
    min_probability: float = shared_key(
        0.0, "least probability of a path of guesses by the draft; 0: any (streaming: exp(-8))",
        Range(0.000000001, 0.999, {0: "all guesses"}), discarded_by=TUNED_TO)
    prefill_chunk: int = shared_key(64, "rows of the prompt per segment, at most", GUESSES)

    device: str = local_key("auto", "auto, cpu, cuda or cuda:N; auto: a CUDA device per rank where there are any",
        forms.DEVICE, heading="The machine")
    dtype: str = shared_key("auto", "float64, float32, float16 or bfloat16; auto: float32 on a CPU, float16 on CUDA",
        NUMBER_TYPES)
    quant: str = shared_key("auto", "weights of the layers: none, int4, int8, nf4 or fp4; auto: as in the split",
        Choices(("auto", *QUANTIZATIONS)))
    quant_draft: bool = shared_key(False, "quantize the draft's layers in the same way")
    quant_head: str = shared_key("auto", "weights of the LM head: auto (as a GGUF file has them), none, int8 or int4",
        Choices(("auto", "none", "int8", "int4")))
    quant_kv: str = shared_key(
        "auto", "keys and values: none, or int16 or int8 with scales; auto: int16 if kernel=native",
        Choices(("auto", "none", "int16", "int8")))
    kernel: str = shared_key(
        "auto", "of layers on a CPU: native, in C; torch; auto: native if AVX2 and a C compiler are here",
        Choices(("auto", "native", "torch")))
    max_length: int = shared_key(2048, "tokens of prompt and answer together", Range(2, COUNT))
    max_requests: int = shared_key(
        1, "requests answered at once; each needs a KV cache of max_length tokens in every rank",
        REQUESTS_AT_ONCE)
    reuse: bool = shared_key(False, "skip the beginning that a prompt shares with a text that the ranks hold")
    threads_per_rank: int = local_key(
        0, "threads for arithmetic in each rank; 0: the cores are divided among the ranks",
        Range(1, 1024, {0: "a share of the cores"}))
    timeout: float = shared_key(10.0, "seconds after which a silent rank counts as dead", forms.WAITING_SECONDS)
    link: str = shared_key(
        "sockets", "between ranks: sockets; torch (torch.distributed: gloo, nccl); threads, in one process",
        Choices(("sockets", "torch", "threads")))
    recover: str = shared_key(
        "60", "seconds for a lost rank to be restarted and come back; false: end all ranks with it",
        forms.RECOVER)
    master: str = local_key("", "where the ranks of several hosts meet: HOST:PORT of rank 0, or only HOST or :PORT",
        forms.MASTER)
    hosts: str = local_key(
        "", "auto: boards that run run_worker.sh; FILE: a line for each rank's board; empty: all here",
        names_file=lambda value: value != AUTO_HOSTS)
    codes: str = local_key("", "with hosts=auto: pairing codes of new boards; empty: ask", forms.CODES)
    keys: str = local_key("", "folder of the board's keys (scripts/make_keys.sh); empty: keys/, if it exists",
        names_file=True)
    wait: float = local_key(300.0, "seconds to wait until the ranks of several hosts have started, in any order",
        forms.WAITING_SECONDS)

    profile: str = shared_key("none", f"none, {', '.join(PROFILES)}, or FILE.json",
        Choices(("none", *PROFILES), is_file), names_file=is_file,
        heading="An emulated cluster: real processes, messages and tokens, in the time that other devices would need")
    wires: str = shared_key("", "Mbit/s of its wires, ms of a message, as 125,2 or 125 or ,2; empty: the profile's",
        forms.WIRES, emulates=True)
    time: str = shared_key(
        "real", "how its time passes: real (ranks sleep until a step is due) or virtual (only counted)",
        Choices(("real", "virtual")), emulates=True)
    slowdown: float = shared_key(1.0, "factor of all modelled times; above 1 if this machine is too slow",
        Range(0.001, 1_000_000), emulates=True)

    trace: str = shared_key("", "folder for a timeline of every rank; empty: none", names_file=True, heading="Output")
    live: bool = shared_key(False, "draw guesses and stages while the answer comes, then compare with plain decoding")
    output: str = local_key("", "JSON file for the answers and their figures; empty: none", names_file=True)
    debug: bool = local_key(False, "show the traceback of an error")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for key_name in sorted(keys_with(RunConfig, "emulates")):
            if self.profile == "none" and getattr(self, key_name) != getattr(RunConfig, key_name):
                yield f"{key_name} only works with an emulated cluster: name one, as in profile=jetson-7b"

        token_ids = [entry.partition(":")[0] for entry in listed(self.logit_bias)]
        repeated_id = next((token_id for token_id in token_ids if token_ids.count(token_id) > 1), "")
        if repeated_id:
            yield f"logit_bias={self.logit_bias} has token {repeated_id} twice: leave one of them out"

        yield from _misfits(self)
        yield from _problems_of_trees(self)

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the key `prompt_ids`, in order; empty if there are none."""
        return tuple(map(int, listed(self.prompt_ids)))

    @property
    def question_range(self) -> tuple[int, int]:
        """The first question of a file or set to answer, counted from 0, and the one before which to stop; -1: all."""
        begin, colon, end = self.questions.partition(":")
        return (int(begin or 0), int(end or -1)) if colon else (0, int(begin or -1))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The tokens of the key `logit_bias`, with the bias of each one's logit."""
        pairs = (entry.split(":") for entry in listed(self.logit_bias))
        bias_by_token = {int(token): number(value.strip()) for token, value in pairs}
        return tuple(bias_by_token.items())

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the draft's guesses, from the key `draft`; ("ssm",) if the method drafts with small models."""
        method_draft = METHODS[self.pipeline_type].draft
        return (method_draft,) if method_draft == "ssm" else tuple(self.draft.split("+"))

    @property
    def small_models(self) -> tuple[str, ...]:
        """The folders of the key `ssm`."""
        return listed(self.ssm)

    @property
    def chat_template(self) -> str:
        """The file of the chat template, if the key `template` names one, else empty."""
        return self.template if is_template_file(self.template) else ""

    @property
    def uses_jinja(self) -> bool:
        """Whether a chat template in Jinja wraps the questions, from a file or the tokenizer."""
        return self.template == "own" or bool(self.chat_template)

    @property
    def first_folder(self) -> Path:
        """The folder of the tokenizer: rank 0's part of a split, or the whole model."""
        return Path(self.model_dir) / "stage_0" if self.model_dir else Path(self.base_dir)

    @property
    def run(self) -> RunConfig:
        """This configuration, under the name that `CommandKeys` has for it."""
        return self

    @property
    def known_methods(self) -> tuple[str, ...]:
        """The only method, as a tuple, under the name that `CommandKeys` has for it."""
        return (self.pipeline_type,)

    @property
    def virtual(self) -> bool:
        """Whether the cluster is emulated in virtual time, which is only counted."""
        return self.time == "virtual"

    @property
    def kind(self) -> str:
        """The kind of the run's figures: real, emulated or simulated."""
        if self.profile == "none":
            return "real"
        return "simulated" if self.virtual else "emulated"

    @property
    def cluster(self) -> Profile | None:
        """The cluster to emulate, with the rate and latency of `wires`, slowed by `slowdown`; None: no emulation."""
        if self.profile == "none":
            return None
        usual = read(self.profile) if is_file(self.profile) else PROFILES[self.profile]
        mbps, _, milliseconds = self.wires.partition(",")
        rate = number(mbps) if mbps else usual.mbps
        delay = number(milliseconds) if milliseconds else usual.latency
        return usual.wired(delay, rate).slowed(self.slowdown)

    @property
    def lossy_rule(self) -> str:
        """The rule of the key `verify` if it changes the distribution of texts above temperature 0; else empty."""
        return self.verify if self.verify in LOSSY else ""

    @property
    def unpiped(self) -> bool:
        """Whether the method has no pipeline, so that all ranks share all layers."""
        return METHODS[self.pipeline_type].target in SHARINGS

    @property
    def comm(self) -> str:
        """The method by which the ranks of a stage combine partial sums: tp or galaxy, a target in `METHODS`."""
        return METHODS[self.pipeline_type].target if self.unpiped else SHARINGS[0]

    @property
    def speeds(self) -> tuple[float, ...]:
        """The relative speeds of the ranks that share a stage; a single one if stages are not shared."""
        if "," in self.tp:
            return tuple(map(number, listed(self.tp)))
        return (1.0,) * (int(self.tp) or (USUAL_RANKS if self.unpiped else 1))

    @property
    def replicated(self) -> bool:
        """Whether the method has copies of the model, each split by the key `replicas` instead of `stages`."""
        return METHODS[self.pipeline_type].target == "replicas"

    @property
    def replica_stages(self) -> int:
        """The number of stages of each copy; 0 if the key `replicas` does not give it."""
        return int(self.replicas.partition("x")[2] or 0)

    @property
    def recovery(self) -> float:
        """Seconds for a lost rank to come back; 0: all ranks end with it."""
        word = self.recover.lower()
        return RECOVERY[word] if word in RECOVERY else number(word)

    @property
    def master_address(self) -> tuple[str, int]:
        """Host and port of the key `master`; empty or 0 where it does not give them."""
        host, _, port = self.master.partition(":")
        return host, int(port or 0)

    @property
    def ablated(self) -> tuple[str, ...]:
        """The features that the key `ablate` switches off."""
        return listed(self.ablate)

    @property
    def guesses(self) -> int:
        """The number of guesses of a chain that are sent at once; 0: the method's own number."""
        return 0 if self.lookahead == "auto" else int(self.lookahead)

    def copies(self, stages: int) -> int:
        """Return the number of copies of a model with `stages` stages, rank 0 included; 1 without replicas."""
        if not self.replicated:
            return 1
        return int(self.replicas.partition("x")[0]) or max(1, USUAL_RANKS // max(1, stages - 1))

    @property
    def tree(self) -> TreeConfig:
        """The hyperparameters that strategies and draft read; `min_probability` becomes a log-probability."""
        policy = self.growth_policy, self.expansion, self.gain
        least_score = math.log(self.min_probability) if self.min_probability else -math.inf
        segment = None if self.subseq_token == -1 else self.subseq_token or ROWS_BEFORE_MEASUREMENT

        init = Growth(self.init_total_token, self.init_depth, self.width, segment, least_score)
        expand = by_policy(replace(init, nodes=self.expand_total_token, depth=self.expand_depth), *policy)
        idle = replace(TreeConfig.idle, width=self.width)
        layer_width = self.init_topk_pipedec
        chain = Growth(NO_BOUND, NO_BOUND, 1, least_score=least_score)
        stream_score = max(least_score, MIN_SCORE)

        growths = TreeConfig(
            init=by_policy(init, *policy),
            expand=init.nothing if "expand" in self.ablated else expand,
            idle=idle.nothing if "none_expand" in self.ablated else idle,
            layer=Growth(NO_BOUND, NO_BOUND, layer_width, layer_width, least_score),
            chain=chain,
            stream=replace(TreeConfig.stream, width=self.width, segment=segment, least_score=stream_score),
            coupled=replace(chain, anywhere=True))

        return replace(
            growths,
            run=self.guesses or RUN,
            lookahead=self.guesses or 1,
            chunk=self.prefill_chunk,
            best_first="score_order" not in self.ablated,
            prunes="prune" not in self.ablated,
            thrifty="thrift" not in self.ablated,
            forced="forced" not in self.ablated)

    @property
    def gain(self) -> float:
        """The accepted guesses that each level of policy=opt:X must bring; 0: a measured number."""
        return number(self.policy.partition(":")[2] or "0")

    @property
    def growth_policy(self) -> str:
        """The policy by which trees are grown: that of the key `policy`, or, with `auto`, the method's own."""
        if self.policy != "auto":
            return self.policy.partition(":")[0]
        return "expansion" if METHODS[self.pipeline_type].draft == "ssm" else "eagle2"


def _misfits(c: RunConfig) -> Iterator[str]:
    """Yield the problems of keys that are valid alone, but not together."""
    if not all(map(SPEED.holds, c.speeds)):
        yield f"tp={c.tp} is not possible: give {SPEED.advice} for each rank"
    if c.virtual and c.slowdown != 1:
        yield f"slowdown={c.slowdown:g} has no effect in virtual time: leave it out, or add time=real"
    if c.virtual and c.hosts:
        yield "time=virtual computes everything in one process: leave hosts out, or add time=real"
    if c.link == "torch":
        yield from _problems_of_groups(c)

    question_keys = [name for name in QUESTION_KEYS if getattr(c, name)]
    if len(question_keys) > 1:
        yield f"{' and '.join(question_keys)} are both given: give only one of them"
    begin, end = c.question_range
    if 0 <= end <= begin:
        yield f"questions={c.questions} leaves no question: give more than {begin} after the colon, or nothing for all"

    if c.draft_dir and MODEL_KEY not in reads("+".join((*c.sources, c.draft))):
        fix = "name small models with ssm=DIR,DIR" if "ssm" in c.sources else "add draft=model, or leave it out"
        yield f"draft_dir={c.draft_dir} is ignored with draft={'+'.join(c.sources)}: {fix}"
    if c.ssm and not c.small_models:
        yield f"ssm={c.ssm} names no folder: write ssm=DIR or ssm=DIR,DIR"
    if c.answers and "suffix" not in c.sources:
        yield f"answers={c.answers} is not read with draft={c.draft}: add draft={c.draft}+suffix, or leave it out"


def _problems_of_groups(c: RunConfig) -> Iterator[str]:
    """Yield the problems of keys that process groups of torch.distributed cannot honour."""
    if c.recovery:
        yield "link=torch cannot regain a lost rank: add recover=false, or leave link out"
    if c.keys:
        yield f"keys={c.keys} cannot encrypt what link=torch sends: leave one of the two out"
    if c.virtual:
        yield "link=torch connects processes, and with time=virtual all ranks are in one: leave link out"


def _problems_of_trees(c: RunConfig) -> Iterator[str]:
    for name in c.ablated:
        if name not in ABLATIONS:
            yield f"ablate={c.ablate}: {name} is unknown: choose among {', '.join(ABLATIONS)}"
    wrong_shape = wrong_widths(c.expansion)
    if wrong_shape:
        yield f"expansion={c.expansion} {wrong_shape}"

    has_suffix = "suffix" in c.sources
    if has_suffix and c.policy in FIXED_POLICIES:
        yield f"policy={c.policy} needs guesses of networks, and suffix is not one: leave it out of draft={c.draft}"
    num_models = len(c.small_models) if "ssm" in c.sources else 1
    if c.growth_policy == "opt" and (len(c.sources) > 1 or num_models > 1 or has_suffix):
        yield "policy=opt grows the tree of one network: name only one, as draft=eagle or ssm=DIR"

    strategy = METHODS[c.pipeline_type].strategy
    has_drawn_guesses = strategy == "autoregressive" or strategy == "serial" and c.growth_policy in FIXED_POLICIES
    if c.verify in DRAWN and not has_drawn_guesses:
        yield (f"verify={c.verify} needs guesses that are drawn, but {c.pipeline_type} chooses them by their score: "
               "take pipeline_type=specinfer, or serial with policy=static")
