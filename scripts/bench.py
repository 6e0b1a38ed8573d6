"""Measurements: the time of Python itself, the accuracy of drafts, the cost of number types and quantized weights.

Usage: python3 -m scripts.bench overhead|clocks|real_time|accidents|load|server|turns|conversation|acceptance|schema
                               [PRESET] [key=value ...]
       python3 -m scripts.bench specinfer [key=value ...]
       python3 -m scripts.bench stages|layers|head|long [--help]
       python3 -m scripts.bench peers FILE.gguf [--help]
       python3 -m scripts.bench planner|planner_emulated [key=value ...]
       python3 -m scripts.bench planner_map|profiles [PRESET] [key=value ...]
       python3 -m scripts.bench thrift|spd

Without a PRESET the bundled model is measured, by real_time and schema SmolLM2.

overhead    rank 0's own time per turn and a stage's per segment, outside models, and the time from send to receive per
            link (medians), with trees of 64 nodes; with pipeline_type=serial ranks do not compute at the same time
clocks      an emulated cluster in real time and the same in virtual time: tokens/s of both, and of the latter with
            Python's own time for a turn, a message and a segment, measured in the former
real_time   methods on this machine as it is, alternately in 1, 2 and 4 stages: speed relative to plain decoding, time
            to the first token, and the memory of all processes
load        latency, time to the first token and tokens/s of several requests on an emulated cluster: by arrivals per
            second, at random or recorded times, and by the number of concurrent requests (see --help)
server      the same for a server that receives requests over HTTP for some minutes; whether each text equals that of
            its request alone; and the memory, open files and threads of the server's processes (see --help)
turns       rank 0's own time in a turn, outside models, by the number of concurrent requests
conversation  ten turns: the time to the first token of each, with and without reuse=true; context=8000: an agent's
            conversation, with about this many tokens in the tenth prompt
acceptance  the mean accepted length, the target's own token included, on questions of the six sets with EAGLE-2's tree:
            60 nodes with the root, six levels, ten children
schema      answers with and without a JSON schema, in virtual time: tokens/s by method, also without the guesses that a
            schema forces (ablate=forced); whether all methods write the same texts
accidents   accidents (100) at random times, by method, for one and four answers at once: a rank is killed or stopped,
            its cable cut, packets lost, a disk full under a trace, a board back with another split; how many answers
            are lost or have another text, and how long they wait. places=processes,namespaces: on one machine, and
            boards that run_jetson.sh starts in network namespaces, or loopback; csv=FILE.
specinfer   SpecInfer's Tables 1 to 3 for a target and a drafter, next to the paper's
stages      number types and quantized weights compared: a stage's time per segment, its error, the share of the
            memory's bandwidth, and how often the bundled model still finds the same token likeliest
layers      how a layer's time divides: kernels, torch's dispatch, Python; by width, form and rows
head        a model's LM head in every form: the time of a verdict, and how often it finds the same token likeliest
long        a model's layers on texts of 8,192 and 32,768 tokens, by prefill_chunk and quant_kv: time of prefill and of
            decoding, memory used and stated; and how often quant_kv=int8 finds the same token likeliest
peers       llama.cpp, transformers and this project alternately on one GGUF file: plain decoding, and prompts of 16 and
            64 tokens; --shapes 7b: random weights of a 7B model's shapes, two layers; --over 4: four processes
planner     plans for many random clusters, each made with some questions and judged by others in virtual time: the
            speed of the choice relative to the best one, and to plain decoding
planner_map  the method that a plan chooses, by the time of a stage and the cost of a row or a message: table and map
planner_emulated  plans for a few of the random clusters, and their speed in virtual and in real time
profiles    every method with every draft on every emulated cluster, in virtual time; it takes the keys of scripts.plan:
            traces=FILE keeps the record, profile=NAME takes one cluster
thrift      streaming with and without ablate=thrift relative to plain decoding, in virtual time: on devices with costly
            guesses, with guesses for another text, and with a board that slows down in the middle of an answer
spd         one guess for each step of a stage (arXiv 2605.30852), from published acceptance: in lock step and without
"""
from __future__ import annotations

import sys
from importlib import import_module
from typing import Sequence

from config.keys import HELP_WORDS, check_name
from launch.console import command

COMMANDS = {  # what is typed -> its module and function, which takes the words and returns the exit code
    "overhead": "eval.bench.overhead:overhead",
    "clocks": "eval.bench.clocks:clocks",
    "real_time": "eval.bench.real_time:real_time",
    "accidents": "eval.bench.accidents:accidents",
    "acceptance": "eval.bench.acceptance:acceptance",
    "schema": "eval.bench.schema:schema",
    "spd": "eval.bench.spd:spd",
    "stages": "eval.bench.forms:stages",
    "layers": "eval.bench.layers:layers",
    "head": "eval.bench.head:head",
    "long": "eval.bench.long:long",
    "peers": "eval.bench.peers:peers",
    "load": "eval.load.pipeline:load",
    "server": "eval.load.server:server",
    "turns": "eval.load.pipeline:turns",
    "conversation": "eval.load.conversation:conversation",
    "specinfer": "eval.specinfer.tables:specinfer",
    "planner": "eval.plan.bench:planner",
    "planner_map": "eval.plan.map:planner_map",
    "planner_emulated": "eval.plan.bench:planner_emulated",
    "profiles": "eval.plan.profiles:profiles",
    "thrift": "eval.plan.profiles:thrift",
}


@command
def main(argv: Sequence[str]) -> int:
    name = "".join(argv[:1])
    if name in HELP_WORDS:
        print(__doc__)
        return 0
    check_name(name, COMMANDS, "measurement")
    module, function = COMMANDS[name].split(":")
    code: int = getattr(import_module(module), function)(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
