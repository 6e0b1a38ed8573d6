"""The options of a run, each with unit, meaning and default. Edit them here, or give key=value on the command line.

It knows nothing about models or devices. The layers below launch/ receive values, never a `RunConfig`.
`bash run_pipe.sh --help` prints the comment after each option.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Iterator

from config.drafts import DRAFTS, MODEL_KEY, reads
from config.keys import POSITIVE, Checked, Range, TextForm, listed, number, outside, unknown
from config.methods import METHODS, SHARINGS
from config.profiles import PROFILES, Profile, is_file, read
from config.trees import ENDLESS, FIXED, LEAST_SCORE, MOST_GUESSES, Growth, TreeConfig, by_policy, wrong_widths

CHOICES = {
    "pipeline_type": (*METHODS, "auto"),
    "draft": DRAFTS,
    "verify": ("match", "naive", "mss", "eagle1"),
    "template": ("auto", "vicuna", "llama-2", "own", "none"),
    "profile": ("none", *PROFILES),
    "time": ("real", "virtual"),
    "dtype": ("auto", "float64", "float32", "float16", "bfloat16"),
    "quant": ("auto", "none", "int8", "int4", "nf4", "fp4"),
    "quant_head": ("auto", "none", "int8", "int4"),
    "quant_kv": ("none", "int8"),
    "kernel": ("auto", "native", "torch"),
}
COUNT = 1_000_000_000  # the largest number of anything countable
GUESSES = Range(1, MOST_GUESSES)
LEVELS = Range(0, 65536)
ROWS = Range(1, 65536, {0: "the number that is measured to be best", -1: "no bound"})
PENALTY = Range(-2, 2)  # as OpenAI has it
ADDED = r"\s*[0-9]{1,18}\s*:\s*-?[0-9]{1,9}(?:\.[0-9]{1,9})?\s*"
BIASES = TextForm(f"{ADDED}(?:,{ADDED})*", "token ids and the bias of each one's logit, as 306:-100,626:2.5")
PATIENCE = Range(1, 2_592_000)  # seconds; a rank sends two heartbeats a second
RANGES = {  # of every key that is a number
    "temperature": Range(0.001, 1000, {0: "the likeliest token"}),
    "top_p": Range(0.000001, 1), "top_k": Range(1, COUNT, {0: "all tokens"}),
    "min_p": Range(0, 1), "repetition_penalty": Range(0.001, 1000),
    "presence_penalty": PENALTY, "frequency_penalty": PENALTY,
    "seed": Range(0, (1 << 64) - 1), "max_new_tokens": Range(1, COUNT),
    "init_total_token": GUESSES, "init_depth": LEVELS, "expand_total_token": GUESSES, "expand_depth": LEVELS,
    "width": GUESSES, "subseq_token": ROWS,
    "init_topk_pipedec": GUESSES,
    "min_probability": Range(0.000000001, 0.999, {0: "all guesses"}),
    "prefill_chunk": GUESSES, "max_length": Range(2, COUNT), "max_requests": Range(1, 256),
    "threads_per_rank": Range(1, 1024, {0: "a share of the cores"}),
    "timeout": PATIENCE, "wait": PATIENCE, "slowdown": Range(0.001, 1_000_000),
}
GAINS = Range(0.000001, 1)  # accepted guesses per level of policy=opt
SPEED = Range(0.001, 1000)  # of a rank, relative to those that share its layers
MBPS, MILLISECONDS = Range(0.001, 1_000_000), Range(0, 60_000)
PORTS, COPIES = Range(1, 65535), Range(0, 1024)
# Keys that change an emulated cluster, and their neutral values, the only ones allowed in other runs.
EMULATION = {"wires": "", "slowdown": 1, "time": "real"}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")  # applied before temperature
SAMPLING = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)  # all keys that decide how a token is chosen
ABLATIONS = ("expand", "none_expand", "score_order", "prune", "thrift", "forced")
ROOM = r"(?!0+(?:\.0*)?(?![0-9.]))[0-9]{1,6}(?:\.[0-9]{1,6})?"  # gigabytes of a board, above 0
ROOMS = f"{ROOM}(?:,{ROOM})+"
STAGES = TextForm(
    r"0(\+0*[1-9][0-9]{0,17})+|[1-9][0-9]{0,17}|auto(:[1-9][0-9]{0,17})?|auto:" + ROOMS,
    "the layers of every rank, as 0+2+2+2+2, where rank 0 has none and the others at least one; or the number of "
    "stages; or auto:4, 4 stages with equal bytes; or auto:8,8,16, stages for boards with this much memory in GB")
FORMS = {  # of keys that are texts, where they are given
    "prompt_ids": TextForm(
        r"\s*[0-9]{1,18}\s*(,\s*[0-9]{1,18}\s*)*,?\s*", "token ids with commas between, as 1,306,626"),
    "tp": TextForm(
        r"([0-9]{1,18})|\s*[0-9]*\.?[0-9]+(?:\s*,\s*[0-9]*\.?[0-9]+)+\s*", "0 for the number of the split, a number of "
        "ranks from 1 to 1024, or a speed for each rank of a stage, as 2,1,1,1", [Range(0, 1024)]),
    "questions": TextForm(
        "([0-9]{1,18})|([0-9]{1,18})?:([0-9]{1,18})?", "a number of questions, as 5, or the first one, counted from 0, "
        "and the one before which to stop, as 30:50 or 30:", [Range(1, COUNT), Range(0, COUNT), Range(1, COUNT)]),
    "stages": STAGES,
    "logit_bias": BIASES,
    "policy": TextForm(
        f"auto|eagle2|static|expansion|opt(?::({POSITIVE}))?", "auto, eagle2, static, expansion or opt, or opt:X, "
        f"where X is the number of accepted guesses that a level must bring, {GAINS.advice}", [GAINS]),
    "replicas": TextForm(
        "([0-9]{1,4})(?:x([1-9][0-9]{0,3}))?", "0 to fill four ranks, a number of copies from 1 to 1024, "
        "or copies and stages of each, as 2x2", [COPIES, COPIES]),
    "lookahead": TextForm("auto|([0-9]{1,9})", f"auto or {GUESSES.advice}", [GUESSES]),
    "recover": TextForm(
        f"(?i:true|false)|({POSITIVE})", f"false to end all, or seconds: {PATIENCE.advice}", [PATIENCE]),
    "device": TextForm("auto|cpu|cuda(:[0-9]{1,9})?", "auto, cpu, cuda or cuda:N"),
    "master": TextForm(
        "[^:]*(?::([0-9]{1,5}))?", "HOST:PORT, with a port from 1 to 65535, or only HOST or :PORT", [PORTS]),
    "wires": TextForm(
        f"({POSITIVE})?(?:,({POSITIVE})?)?", "Mbit/s from 0.001 to 1000000, a comma, and milliseconds from 0 to 60000, "
        "or one of the two, as 125 or ,2", [MBPS, MILLISECONDS]),
}
DRAWN = ("mss", "eagle1")  # rules for drawn guesses, which are judged for a whole tree
MEASURED = 16  # rows per segment until the best number is measured
RECOVERY = {"false": 0.0, "true": 60.0}  # seconds for each word
RUN = 4  # default of the guesses that pipeinfer sends at once
USUAL_RANKS = 4  # default of the ranks that share all layers, or that hold replicas


def is_template_file(template: str) -> bool:
    """Return whether a value of the key `template` is the path of a Jinja file, not a name."""
    return "." in template or "/" in template


@dataclass(frozen=True)
class RunConfig(Checked):
    """The options of one run. Paths are relative to the working directory of the command; empty means "not given"."""

    COMPARES: ClassVar[bool] = False  # as in `CommandKeys`

    # Method and models
    pipeline_type: str = "continuous"  # the method, as serial; streaming on boards and clusters; auto: by a plan
    model: str = ""  # a name at the hub, as Qwen/Qwen3-4B or NAME@REVISION; a folder; or a GGUF file
    model_dir: str = ""  # folder of a split model; empty: base_dir, split at the first start
    base_dir: str = ""  # folder of the whole model in Hugging Face form
    eagle_dir: str = ""  # folder of the EAGLE draft head of that model
    draft: str = "eagle"  # the head: eagle, dflash, spd; model, ssm, suffix (copies); eagle+suffix; none
    draft_dir: str = ""  # folder of a small whole model, for drafts with model; best with the target's vocabulary
    ssm: str = ""  # folders of small models, DIR,DIR, of specinfer, ssm; empty: rank 0's draft
    answers: str = ""  # file of prompts and answers, from which suffix also copies in later runs; empty: none
    models: str = ""  # folder of the presets' models, named as at Hugging Face; empty: models/ next to config/
    tp: str = "0"  # ranks that share layers, or a speed of each, as 2,1,1; 0: as split, or 4 (tp, galaxy)
    stages: str = ""  # layers per rank, as 0+2+2+2+2 (rank 0 drafts); number of stages; auto:4; empty: as split
    replicas: str = "0"  # copies of the model for dsi, or copies x stages of each, as 2x2; 0: to fill four ranks

    # The questions (one of the first three)
    prompt: str = ""  # the question; -: standard input, where a terminal gives a conversation
    prompt_ids: str = ""  # token ids with commas between, for models without a tokenizer
    question_file: str = ""  # questions in the format of MT-bench, one JSON object per line
    questions: str = ""  # how many of them, as 5, or the first, counted from 0, and the end, as 30:50; empty: all
    template: str = "auto"  # chat template: own (the tokenizer's), a Jinja FILE, vicuna, llama-2, none

    # How the answer is chosen, and when it ends
    temperature: float = 0.0  # 0: always the likeliest token; above: sampled
    top_p: float = 1.0  # sample from the likeliest tokens with this total probability; 1: from all
    top_k: int = 0  # sample from this many likeliest tokens; 0: from all
    min_p: float = 0.0  # sample from tokens with at least this share of the highest probability; 0: from all
    repetition_penalty: float = 1.0  # divides logits of tokens that occur in prompt or answer; 1: off
    presence_penalty: float = 0.0  # subtracted from logits of tokens that occur in the answer
    frequency_penalty: float = 0.0  # the same, for each occurrence of the token in the answer
    logit_bias: str = ""  # token ids and the bias of each one's logit, as 306:-100,626:2.5; empty: none
    seed: int = 0  # of the noise; with the same seed every method writes the same text
    verify: str = "match"  # rule for guesses: match, naive, mss (SpecInfer) or eagle1; all keep the distribution
    max_new_tokens: int = 256  # tokens, at most
    ignore_eos: bool = False  # continue after the end token (to measure speed)
    stop: str = ""  # text that ends the answer; empty: none

    # The tree of methods that draft whole trees, of pearl, and of continuous after a miss
    policy: str = "auto"  # eagle2; opt or opt:X (OPT-Tree); static (EAGLE-1); expansion; auto: the method's own
    expansion: str = "1,1,3,1,1,1,1,1"  # of specinfer, level by level: children of each guess of the level before
    init_total_token: int = 80  # guesses in the tree
    init_depth: int = 6  # levels after the first

    # The tree that continuous grows after a hit, from new features
    expand_total_token: int = 64  # guesses in the tree
    expand_depth: int = 6  # levels after the first

    # All trees and their segments
    width: int = 10  # children of a guess, and guesses of a level that get children
    subseq_token: int = 0  # rows per segment, at most; 0: as measured at the start; -1: no bound
    ablate: str = ""  # features to switch off: expand, none_expand, score_order, prune, thrift, forced

    # Other options of the pipeline
    init_topk_pipedec: int = 16  # guesses in a layer of pipedec
    lookahead: str = "auto"  # guesses that pipeinfer or dsi sends at once; auto: 4, for dsi as few as keep all busy
    min_probability: float = 0.0  # least probability of a path of guesses by the draft; 0: any (streaming: exp(-8))
    prefill_chunk: int = 64  # rows of the prompt per segment, at most

    # The machine
    device: str = "auto"  # auto, cpu, cuda or cuda:N; auto: a CUDA device per rank where there are any
    dtype: str = "auto"  # float64, float32, float16 or bfloat16; auto: float32 on a CPU, float16 on CUDA
    quant: str = "auto"  # weights of the layers: none, int4, int8, nf4 or fp4; auto: as in the split
    quant_draft: bool = False  # quantize the draft's layers in the same way
    quant_head: str = "auto"  # weights of the LM head: auto (as a GGUF file has them), none, int8 or int4
    quant_kv: str = "none"  # keys and values of the text: none, or int8 with a scale for each head and token
    kernel: str = "auto"  # of layers on a CPU: native, in C; torch; auto: native if AVX2 and a C compiler are here
    max_length: int = 2048  # tokens of prompt and answer together
    max_requests: int = 1  # requests answered at once; each needs a KV cache of max_length tokens in every rank
    reuse: bool = False  # skip the beginning that a prompt shares with a text that the ranks hold
    threads_per_rank: int = 0  # threads for arithmetic in each rank; 0: the cores are divided among the ranks
    processes: bool = True  # a process per rank; false: all ranks are threads of one process (for a debugger)
    timeout: float = 10.0  # seconds after which a silent rank counts as dead
    recover: str = "60"  # seconds for a lost rank to be restarted and come back; false: end all ranks with it
    master: str = ""  # where the ranks of several hosts meet: HOST:PORT of rank 0, or only HOST or :PORT
    hosts: str = ""  # file with a line for the board of each rank (docs/jetson.md); empty: all ranks are here
    keys: str = ""  # folder of the board's keys (scripts/make_keys.sh); empty: keys/, if it exists
    wait: float = 300.0  # seconds to wait until the ranks of several hosts have started, in any order

    # An emulated cluster: real processes, messages and tokens, in the time that other devices would need
    profile: str = "none"  # none (no emulation), jetson-7b, jetson-13b, lan-1g, wifi, server or FILE.json
    wires: str = ""  # Mbit/s of its wires, ms of a message, as 125,2 or 125 or ,2; empty: the profile's
    time: str = "real"  # how its time passes: real (ranks sleep until a step is due) or virtual (only counted)
    slowdown: float = 1.0  # factor of all modelled times; above 1 if this machine is too slow

    # Output
    trace: str = ""  # folder for a timeline of every rank; empty: none
    live: bool = False  # draw guesses and stages while the answer comes, then compare with plain decoding
    output: str = ""  # JSON file for the answers and their figures; empty: none
    debug: bool = False  # show the traceback of an error

    def problems(self) -> Iterator[str]:
        values = vars(self)
        by_file = {"profile": is_file(self.profile), "template": bool(self.chat_template)}
        choices = {name: known for name, known in CHOICES.items() if not by_file.get(name)}
        yield from unknown(values, choices)
        if self.pipeline_type == "auto":
            yield "pipeline_type=auto is only for a run or a server: name the method here"
        yield from outside(values, RANGES)
        yield from outside(values, {name: form for name, form in FORMS.items() if values[name]})
        for name, usual in EMULATION.items():
            if self.profile == "none" and values[name] != usual:
                yield f"{name} only works with an emulated cluster: name one, as in profile=jetson-7b"
        tokens = [entry.partition(":")[0] for entry in listed(self.logit_bias)]
        repeated = next((token for token in tokens if tokens.count(token) > 1), "")
        if repeated:
            yield f"logit_bias={self.logit_bias} has token {repeated} twice: leave one of them out"
        yield from _misfits(self)
        yield from _problems_of_small_models(self)
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
        added = {int(token): number(value.strip()) for token, value in pairs}
        return tuple(added.items())

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the draft's guesses, from the key `draft`; ("ssm",) if the method drafts with small models."""
        own = METHODS[self.pipeline_type].draft
        return (own,) if own == "ssm" else tuple(self.draft.split("+"))

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
        policy, off = (self.growth_policy, self.expansion, self.gain), self.ablated
        least = math.log(self.min_probability) if self.min_probability else -math.inf
        segment = None if self.subseq_token == -1 else self.subseq_token or MEASURED
        init = Growth(self.init_total_token, self.init_depth, self.width, segment, least)
        expand = by_policy(replace(init, nodes=self.expand_total_token, depth=self.expand_depth), *policy)
        idle = replace(TreeConfig.idle, width=self.width)
        wide, run = self.init_topk_pipedec, self.guesses or RUN
        chain = Growth(ENDLESS, ENDLESS, 1, least_score=least)
        stream = replace(TreeConfig.stream, width=self.width, segment=segment, least_score=max(least, LEAST_SCORE))
        return TreeConfig(
            init=by_policy(init, *policy), expand=init.nothing if "expand" in off else expand,
            idle=idle.nothing if "none_expand" in off else idle,
            layer=Growth(ENDLESS, ENDLESS, wide, wide, least), chain=chain, stream=stream,
            run=run, coupled=replace(chain, anywhere=True),
            lookahead=self.guesses or 1, chunk=self.prefill_chunk,
            best_first="score_order" not in off, prunes="prune" not in off, thrifty="thrift" not in off,
            forced="forced" not in off)

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
    if c.virtual and c.quant_kv != "none":
        yield "time=virtual computes each token once, with no cache in 8 bits: leave quant_kv out, or add time=real"
    if c.virtual and c.hosts:
        yield "time=virtual computes everything in one process: leave hosts out, or add time=real"
    given = [name for name in ("prompt", "prompt_ids", "question_file") if getattr(c, name)]
    if len(given) > 1:
        yield f"{' and '.join(given)} are both given: give only one of them"
    begin, end = c.question_range
    if 0 <= end <= begin:
        yield f"questions={c.questions} leaves no question: give more than {begin} after the colon, or nothing for all"
    if c.draft_dir and MODEL_KEY not in reads("+".join((*c.sources, c.draft))):
        fix = "name small models with ssm=DIR,DIR" if "ssm" in c.sources else "add draft=model, or leave it out"
        yield f"draft_dir={c.draft_dir} is ignored with draft={'+'.join(c.sources)}: {fix}"
    if c.answers and "suffix" not in c.sources:
        yield f"answers={c.answers} is not read with draft={c.draft}: add draft={c.draft}+suffix, or leave it out"


def _problems_of_small_models(c: RunConfig) -> Iterator[str]:
    if c.ssm and not c.small_models:
        yield f"ssm={c.ssm} names no folder: write ssm=DIR or ssm=DIR,DIR"


def _problems_of_trees(c: RunConfig) -> Iterator[str]:
    for name in c.ablated:
        if name not in ABLATIONS:
            yield f"ablate={c.ablate}: {name} is unknown: choose among {', '.join(ABLATIONS)}"
    wrong = wrong_widths(c.expansion)
    if wrong:
        yield f"expansion={c.expansion} {wrong}"
    copies = "suffix" in c.sources
    if copies and c.policy in FIXED:
        yield f"policy={c.policy} needs guesses of networks, and suffix is not one: leave it out of draft={c.draft}"
    models = len(c.small_models) if "ssm" in c.sources else 1
    if c.growth_policy == "opt" and (len(c.sources) > 1 or models > 1 or copies):
        yield "policy=opt grows the tree of one network: name only one, as draft=eagle or ssm=DIR"
    strategy = METHODS[c.pipeline_type].strategy
    drawn = strategy == "autoregressive" or strategy == "serial" and c.growth_policy in FIXED
    if c.verify in DRAWN and not drawn:
        yield (f"verify={c.verify} needs guesses that are drawn, but {c.pipeline_type} chooses them by their score: "
               "take pipeline_type=specinfer, or serial with policy=static")
