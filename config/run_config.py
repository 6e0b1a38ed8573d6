"""What a run is: every option with its unit, its meaning and its default. Edit here, or say key=value at the command.

It knows nothing about models or devices. Only the composition root reads a `RunConfig`; what is below receives values.
The comment behind an option is also what `bash run_pipe.sh --help` prints.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Iterator

from config.boards import cluster_of, is_file
from config.methods import METHODS
from config.profiles import PROFILES, Profile
from config.ranges import Checked, Range, outside, unknown
from config.small_models import problems as problems_of_small_models
from config.tensor_parallel import TensorParallel
from config.trees import ENDLESS, FIXED, LEAST, MOST, Growth, TreeConfig, by_policy, wrong_widths

CHOICES = {
    "pipeline_type": tuple(METHODS),
    "draft": ("eagle", "model", "suffix", "eagle+suffix", "model+suffix", "eagle+model", "eagle+model+suffix", "ssm",
              "none"),
    "verify": ("match", "naive", "mss", "eagle1"),
    "policy": ("auto", "eagle2", "static", "opt", "expansion"),
    "template": ("auto", "vicuna", "llama-2", "own", "none"),
    "profile": ("none", *PROFILES),
    "time": ("real", "virtual"),
    "dtype": ("auto", "float64", "float32", "float16", "bfloat16"),
    "quant": ("auto", "none", "int8", "nf4", "fp4"),
}
COUNT = 1_000_000_000  # the most of anything that is counted
GUESSES = Range(1, MOST)
LEVELS = Range(0, 65536)
ROWS = Range(1, 65536, {0: "as many as is measured to pay", -1: "no bound"})
PATIENCE = Range(1, 2_592_000)  # seconds; a rank says twice a second that it lives
RANGES = {  # of every key that is a number, but those of sharing
    "question_begin": Range(0, COUNT), "question_end": Range(1, COUNT, {-1: "all"}),
    "temperature": Range(0.001, 1000, {0: "the likeliest token"}),
    "top_p": Range(0.000001, 1), "top_k": Range(1, COUNT, {0: "all tokens"}),
    "seed": Range(0, (1 << 64) - 1), "max_new_tokens": Range(1, COUNT),
    "init_total_token": GUESSES, "init_topk": GUESSES, "init_depth": LEVELS, "init_subseq_token": ROWS,
    "expand_total_token": GUESSES, "expand_topk": GUESSES, "expand_depth": LEVELS, "expand_subseq_token": ROWS,
    "stream_total_token": GUESSES, "stream_topk": GUESSES, "stream_subseq_token": ROWS,
    "opt_threshold": Range(0.000001, 1, {0: "what pays, as measured"}),
    "none_expand_size": Range(0, 65536), "none_expand_depth": LEVELS, "init_topk_pipedec": GUESSES,
    "run_pipeinfer": GUESSES,
    "replicas": Range(1, 1024, {0: "as many as fill four ranks"}),
    "replica_stages": Range(1, 1024, {0: "as split"}),
    "min_probability": Range(0.000000001, 0.999, {0: "all guesses"}),
    "prefill_chunk": GUESSES, "max_length": Range(2, COUNT), "max_requests": Range(1, 256),
    "threads_per_rank": Range(1, 1024, {0: "a share of the cores"}),
    "timeout": PATIENCE, "wait": PATIENCE, "master_port": Range(1, 65535, {0: "the usual one"}),
    "rate_mbps": Range(0.001, 1_000_000, {0: "that of the profile"}),
    "delay_ms": Range(0, 60_000, {-1: "that of the profile"}), "slowdown": Range(0.001, 1_000_000),
}
# Keys that change an emulated cluster, and the values that leave it, and every other run, as it is.
EMULATION = {"rate_mbps": 0, "delay_ms": -1, "slowdown": 1, "time": "real"}
TOKEN_IDS = re.compile(r"\s*[0-9]{1,18}\s*(,\s*[0-9]{1,18}\s*)*,?\s*")
STAGES = re.compile(r"0(\+0*[1-9][0-9]{0,17})+|[1-9][0-9]{0,17}|auto(:[1-9][0-9]{0,17})?")
COUNTED = re.compile(r"[0-9]{1,9}")
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,9})?")
DRAWN = ("mss", "eagle1")  # rules that judge guesses which were drawn, all of a tree together
MEASURED = 16  # rows per segment until it is measured how many there should be
USUAL_RANKS = 4  # beside rank 0, of a method with replicas


@dataclass(frozen=True)
class RunConfig(Checked):
    """One run. A path is relative to the folder where the command was typed; an empty text means "not given"."""

    # What runs
    pipeline_type: str = "continuous"  # the method, a row of config/methods.py, as serial; auto: what a plan says
    model_dir: str = ""  # folder of a split model; empty: base_dir, split at the first start
    base_dir: str = ""  # folder of the whole model in Hugging Face form
    eagle_dir: str = ""  # folder of the EAGLE draft head of that model
    draft: str = "eagle"  # eagle (the head; without one suffix), model, ssm, suffix (copies), eagle+suffix, none
    draft_dir: str = ""  # folder of a small whole model that has the same vocabulary, for drafts with model
    ssm: str = ""  # folders of such models, as DIR,DIR, for specinfer and draft=ssm; empty: rank 0's draft
    ssm_ranks: bool = False  # a rank for each model of ssm, so that all draft at once; false: all on rank 0, by turns
    answers: str = ""  # file that keeps prompts and answers, which suffix copies from in later runs; empty: none
    models: str = ""  # folder of the presets' models, named as at Hugging Face; empty: models/ beside config/
    tp: int = 0  # ranks that share a stage's layers (tensor parallel); 0: as split, or 4 for tp and galaxy
    tp_shares: str = ""  # speeds of those ranks, as 2,1,1,1, to which their shares are cut; empty: all alike
    tp_type: str = ""  # how they add up: tp (Megatron) or galaxy; empty: as pipeline_type says, and else tp
    stages: str = ""  # layers per rank, as 0+2+2+2+2 (rank 0 drafts); number of stages; auto:4; empty: as split
    replicas: int = 0  # copies of the model that verify for dsi; 0: as many as fill four ranks
    replica_stages: int = 0  # ranks of each copy, which may be a pipeline of its own; 0: as split, or 1

    # What is asked (one of the first three)
    prompt: str = ""  # the question
    prompt_ids: str = ""  # token ids with commas between, for models without a tokenizer
    question_file: str = ""  # questions in the format of MT-bench, one JSON object a line
    question_begin: int = 0  # first line of question_file that is asked, from 0
    question_end: int = -1  # line before which to stop; -1: ask all
    template: str = "auto"  # around a question: own (the tokenizer's), vicuna, llama-2, none; auto: own or vicuna

    # How the answer is chosen, and when it ends
    temperature: float = 0.0  # 0: always the likeliest token; above: sampled
    top_p: float = 1.0  # sample from the likeliest tokens that have this probability together; 1: from all
    top_k: int = 0  # sample from this many likeliest tokens; 0: from all
    seed: int = 0  # of the noise; with one seed every method writes the same text
    verify: str = "match"  # the rule for guesses: match, naive, mss (SpecInfer) or eagle1; texts differ, laws do not
    max_new_tokens: int = 256  # tokens, at most
    ignore_eos: bool = False  # go on after the end token (to measure speed)
    stop: str = ""  # text that ends the answer; empty: none

    # The tree that serial, naive, pruned and specinfer draft, and continuous after a miss
    policy: str = "auto"  # eagle2, opt (OPT-Tree), static (EAGLE-1), expansion; auto: the method's own, or eagle2
    expansion: str = "1,1,3,1,1,1,1,1"  # of specinfer, step by step: children of each guess of the step before
    opt_threshold: float = 0.0  # accepted guesses that a level of opt must bring; 0: as many as pay, as measured
    init_total_token: int = 80  # guesses in the tree
    init_topk: int = 10  # children of a guess, and guesses of a level that get children
    init_depth: int = 6  # levels after the first
    init_subseq_token: int = 0  # rows per segment of pruned and continuous; 0: as measured at the start; -1: no bound

    # The tree that continuous grows after a hit, from fresh features
    expand: bool = True  # whether it grows one at all
    expand_total_token: int = 64  # guesses in the tree
    expand_topk: int = 10  # children of a guess, and guesses of a level that get children
    expand_depth: int = 6  # levels after the first
    expand_subseq_token: int = 0  # rows per segment, at most; 0: as measured at the start; -1: no bound

    # What continuous adds in a turn that settles nothing
    none_expand: bool = True  # whether it deepens the tree at all
    none_expand_size: int = 48  # more guesses
    none_expand_depth: int = 1  # more levels

    # The tree of streaming, which grows wherever its likeliest guess stands
    stream_total_token: int = 1024  # guesses in the tree
    stream_topk: int = 10  # guesses that are read at once, and children of each
    stream_subseq_token: int = 0  # rows per segment, at most; 0: as measured at the start; -1: no bound
    stream_thrift: bool = True  # send and draft only what pays, by what stages and levels took recently

    # Other habits of the pipeline
    score_order: bool = True  # send the best guesses first; false: in the order in which they were drafted
    prune: bool = True  # drop what died on its way; false: every guess that was sent is computed to its end
    init_topk_pipedec: int = 16  # guesses in a layer of pipedec
    run_pipeinfer: int = 4  # guesses in a run of pipeinfer
    lookahead: str = "auto"  # guesses of dsi in a verification; auto: the fewest with which none waits, as measured
    min_probability: float = 0.0  # a guess whose path the draft finds less likely than this is not drafted; 0: all are
    prefill_chunk: int = 64  # rows of the prompt per segment, at most

    # The machine
    device: str = "auto"  # auto, cpu, cuda or cuda:N; auto: a CUDA device per rank where there are any
    dtype: str = "auto"  # float64, float32, float16 or bfloat16; auto: float32 on a CPU, float16 on CUDA
    quant: str = "auto"  # weights of the layers: none, int8, nf4 or fp4 (bitsandbytes); auto: what the split holds
    quant_draft: bool = False  # quantize the draft's layers in the same way
    max_length: int = 2048  # tokens of prompt and answer together
    max_requests: int = 1  # answers that are made at once; each takes a KV cache of max_length tokens in every rank
    reuse: bool = False  # begin behind the tokens that a prompt shares with a text that the ranks hold
    threads_per_rank: int = 0  # threads for arithmetic in each rank; 0: the cores are shared out
    processes: bool = True  # a process per rank; false: all ranks are threads of one (for a debugger)
    timeout: float = 10.0  # seconds after which a silent rank counts as dead
    master_addr: str = "127.0.0.1"  # where the ranks of several hosts meet: address of rank 0's machine
    master_port: int = 0  # and its port; 0: 29500. Ranks of one machine need neither
    hosts: str = ""  # file with a line for the board of each rank (docs/jetson.md); empty: all ranks are here
    wait: float = 300.0  # seconds for the ranks of several hosts to come, in any order

    # An emulated cluster: real processes, messages and tokens, in the time that other devices would need
    profile: str = "none"  # none (this machine as it is), jetson-7b, jetson-13b, lan-1g, wifi, server or FILE.json
    rate_mbps: float = 0.0  # Mbit/s of its wires; 0: as the profile says
    delay_ms: float = -1.0  # milliseconds of a message on its wires; -1: as the profile says
    time: str = "real"  # how its time passes: real (who is done early sleeps) or virtual (it is only counted)
    slowdown: float = 1.0  # every modelled time is so many times as long; more if this machine is too slow

    # What is written
    trace: str = ""  # folder for a timeline of every rank; empty: none
    output: str = ""  # JSON file for the answers and their figures; empty: none
    debug: bool = False  # show the traceback of an error

    def problems(self) -> Iterator[str]:
        yield from _problems(self)

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids that the key `prompt_ids` lists, in order; none if it is empty."""
        return tuple(int(word) for word in self.prompt_ids.split(",") if word.strip())

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the draft's guesses, as the key `draft` sums them up, or as the method has its own."""
        own = METHODS[self.pipeline_type].draft
        return (own,) if own == "ssm" else tuple(self.draft.split("+"))

    @property
    def small_models(self) -> tuple[str, ...]:
        """The folders that the key `ssm` lists."""
        folders = map(str.strip, self.ssm.split(","))
        return tuple(filter(None, folders))

    @property
    def asked_methods(self) -> tuple[str, ...]:
        """The methods that may be run."""
        return (self.pipeline_type,)

    @property
    def virtual(self) -> bool:
        """Whether the time of an emulated cluster is only counted."""
        return self.time == "virtual"

    @property
    def kind(self) -> str:
        """What the figures of a run are: real, emulated or simulated."""
        if self.profile == "none":
            return "real"
        return "simulated" if self.virtual else "emulated"

    @property
    def cluster(self) -> Profile | None:
        """The profile of the cluster to emulate, or None to run on this machine as it is.

        `rate_mbps` and `delay_ms` replace the profile's rate and latency; a step of a collective, which is a message
        and more, is longer by as much as the latency is. In the end `slowdown` stretches every time.
        """
        if self.profile == "none":
            return None
        usual = cluster_of(self.profile)
        rate = self.rate_mbps or usual.mbps
        delay = usual.latency if self.delay_ms < 0 else self.delay_ms
        step = usual.step + (delay - usual.latency)
        return replace(usual, mbps=rate, latency=delay, step=step).slowed(self.slowdown)

    @property
    def tensor_parallel(self) -> TensorParallel:
        """How the ranks of a stage share its layers, as the keys about tensor parallelism say."""
        return TensorParallel(self.pipeline_type, self.tp, self.tp_shares, self.tp_type)

    @property
    def replicated(self) -> bool:
        """Whether the method has copies of the model, each split into `replica_stages` instead of `stages`."""
        return METHODS[self.pipeline_type].target == "replicas"

    @property
    def guesses(self) -> int:
        """How many guesses of dsi make a verification; 0 if that is to be measured."""
        return 0 if self.lookahead == "auto" else int(self.lookahead)

    def copies(self, stages: int) -> int:
        """How many copies of a model of so many stages, rank 0's included, verify; 1 if the method has no replicas."""
        if not self.replicated:
            return 1
        return self.replicas or max(1, USUAL_RANKS // max(1, stages - 1))

    @property
    def tree(self) -> TreeConfig:
        """The hyperparameters of drafting, sending and pruning, as the strategies and the draft read them.

        A growth that is switched off has no nodes and no levels; `min_probability` becomes a log-probability.
        """
        policy = self.policy_of(self.pipeline_type)
        worth = math.log(self.min_probability) if self.min_probability else -math.inf
        init = Growth(self.init_total_token, self.init_depth, self.init_topk, _bound(self.init_subseq_token), worth)
        expand = replace(init, nodes=0, depth=0)
        if self.expand:
            segment = _bound(self.expand_subseq_token)
            expand = Growth(self.expand_total_token, self.expand_depth, self.expand_topk, segment, worth)
            expand = by_policy(expand, policy, self.expansion, self.opt_threshold)
        init = by_policy(init, policy, self.expansion, self.opt_threshold)
        idle = Growth(0, 0, self.expand_topk)
        if self.none_expand:
            idle = Growth(self.none_expand_size, self.none_expand_depth, self.expand_topk)
        width = self.init_topk_pipedec
        layer = Growth(ENDLESS, ENDLESS, width, segment=width, worth=worth)
        chain = Growth(ENDLESS, ENDLESS, 1, worth=worth)
        stream = Growth(self.stream_total_token, ENDLESS, self.stream_topk, _bound(self.stream_subseq_token),
                        max(worth, LEAST), anywhere=True)
        coupled = replace(chain, anywhere=True)
        return TreeConfig(init, expand, idle, layer, chain, stream, self.run_pipeinfer, coupled, self.guesses or 1,
                          self.prefill_chunk, self.score_order, self.prune, self.stream_thrift)

    def policy_of(self, method: str) -> str:
        """How a method grows its trees: by a policy of its own, if the key `policy` leaves that open."""
        if self.policy != "auto":
            return self.policy
        return "expansion" if METHODS[method].draft == "ssm" else "eagle2"


def _bound(size: int) -> int | None:
    """The most rows of a segment, as a key says it; None: there is no bound."""
    return None if size == -1 else size or MEASURED


def _problems(c: RunConfig) -> Iterator[str]:
    """What is wrong with a configuration, each in a sentence that names the fix."""
    values = vars(c)
    choices = {name: words for name, words in CHOICES.items() if name != "profile" or not is_file(c.profile)}
    yield from unknown(values, choices)
    yield from outside(values, RANGES)
    for name, usual in EMULATION.items():
        if c.profile == "none" and values[name] != usual:
            yield f"{name} only works with an emulated cluster: name one, as in profile=jetson-7b"
    yield from c.tensor_parallel.problems()
    yield from problems_of_small_models(c)
    yield from _problems_of_time(c)
    yield from _problems_of_questions(c)
    yield from _problems_of_machine(c)
    yield from _problems_of_trees(c)


def _problems_of_time(c: RunConfig) -> Iterator[str]:
    if c.virtual and c.slowdown != 1:
        yield f"slowdown={c.slowdown:g} means nothing where nobody waits: leave it out, or add time=real"
    if c.virtual and c.hosts:
        yield "time=virtual computes everything in one process: leave hosts out, or add time=real"


def _problems_of_questions(c: RunConfig) -> Iterator[str]:
    given = [name for name in ("prompt", "prompt_ids", "question_file") if getattr(c, name)]
    if len(given) > 1:
        yield f"{' and '.join(given)} are both given: give only one of them"
    if c.prompt_ids and not TOKEN_IDS.fullmatch(c.prompt_ids):
        yield f"prompt_ids={c.prompt_ids} is not a list of token ids: write numbers with commas between, as 1,306,626"
    if 0 <= c.question_end <= c.question_begin:
        yield f"question_end={c.question_end} leaves no question: give more than {c.question_begin}, or -1 for all"


def _problems_of_machine(c: RunConfig) -> Iterator[str]:
    if c.draft_dir and "model" not in (*c.sources, *c.draft.split("+")):
        fix = "name small models with ssm=DIR,DIR" if "ssm" in c.sources else "add draft=model, or leave it out"
        yield f"draft_dir={c.draft_dir} is ignored with draft={'+'.join(c.sources)}: {fix}"
    if c.answers and "suffix" not in c.sources:
        yield f"answers={c.answers} is not read with draft={c.draft}: add draft={c.draft}+suffix, or leave it out"
    if c.stages and not STAGES.fullmatch(c.stages):
        yield (f"stages={c.stages} is no split: write the layers of every rank, as 0+2+2+2+2, where rank 0 has none "
               "and the others at least one; or the number of stages; or auto:4, 4 stages with bytes alike")
    if c.lookahead != "auto" and not (COUNTED.fullmatch(c.lookahead) and GUESSES.holds(int(c.lookahead))):
        yield f"lookahead={c.lookahead} is not possible: give auto or {GUESSES.advice}"
    if not DEVICE.fullmatch(c.device):
        yield f"device={c.device} is unknown: choose auto, cpu, cuda or cuda:N"


def _problems_of_trees(c: RunConfig) -> Iterator[str]:
    wrong = wrong_widths(c.expansion)
    if wrong:
        yield f"expansion={c.expansion} {wrong}"
    copies = "suffix" in c.sources
    if copies and c.policy in FIXED:
        yield f"policy={c.policy} asks networks for guesses, and suffix is none: leave it out of draft={c.draft}"
    models = len(c.small_models) if "ssm" in c.sources else 1
    if c.policy == "opt" and (len(c.sources) > 1 or models > 1 or copies):
        yield "policy=opt grows the tree of one network: name one alone, as draft=eagle or ssm=DIR"
    for method in c.asked_methods if c.verify in DRAWN else ():
        strategy = METHODS[method].strategy
        whole = strategy == "serial" and c.policy_of(method) in FIXED
        if strategy != "autoregressive" and not whole:
            yield (f"verify={c.verify} judges guesses that were drawn, which {method} would choose by their worth: "
                   "take pipeline_type=specinfer, or serial with policy=static")
