"""Measurements: the time of Python itself, the effect of accidents, latencies under load, and other programs' times.

Usage: python3 -m scripts.bench overhead|accidents|load [PRESET] [key=value ...]
       python3 -m scripts.bench peers|fidelity FILE.gguf [--help]
       python3 -m scripts.bench specinfer [key=value ...]

Without a PRESET the bundled model is measured.

overhead    rank 0's own time per turn and a stage's per segment, outside models, and the time from send to receive per
            link (medians), with trees of 64 nodes; with pipeline_type=serial ranks do not compute at the same time
load        latency, time to the first token and tokens/s of several requests on an emulated cluster: by arrivals per
            second, at random or recorded times, and by the number of concurrent requests (see --help)
accidents   accidents (100) at random times, by method, for one and four answers at once: a rank is killed or stopped,
            its cable cut, packets lost, a disk full under a trace, a board back with another split; how many answers
            are lost or have another text, and how long they wait. places=processes,namespaces: on one machine, and
            boards that run_jetson.sh starts in network namespaces, or loopback; csv=FILE.
specinfer   SpecInfer's Tables 1 to 3 for a target and a drafter, next to the paper's
peers       llama.cpp, transformers and this project alternately on one GGUF file: prompts of 16 and 64 tokens, or of
            others, and the tokens after them; several requests at once; --shapes 7b: random weights of a 7B model's
            shapes, two layers
fidelity    a GGUF file's model beside float32 arithmetic on the same weights, by transformers: how many positions keep
            the likeliest token, and the divergence of the laws of the next token
"""
from __future__ import annotations

import sys
from importlib import import_module
from typing import Sequence

from config.console import command
from config.keys import HELP_WORDS, check_name
from config.presets import ROOT

COMMANDS = {  # what is typed -> its module and function, which takes the words and returns the exit code
    "overhead": "eval.bench.overhead:overhead",
    "accidents": "eval.bench.accidents:accidents",
    "peers": "eval.bench.peers:peers",
    "fidelity": "eval.bench.fidelity:fidelity",
    "load": "eval.load.pipeline:load",
    "specinfer": "eval.specinfer.tables:specinfer",
}
OLD_COMMANDS = {  # a measurement that is gone -> the command that comes closest
    "acceptance": "bash run_eval.sh methods=serial",
    "layers": "python3 -m scripts.doctor gpu --device cpu",
    "links": "python3 -m scripts.bench overhead",
    "planner": "python3 -m scripts.plan profile=NAME",
    "profiles": "bash run_eval.sh profile=NAME drafts=DRAFT,DRAFT",
    "real_time": "bash run_eval.sh profile=none stages=2",
    "rpc": "python3 -m scripts.bench peers FILE.gguf",
    "stages": "python3 -m scripts.doctor gpu --device cpu",
}


@command
def main(argv: Sequence[str]) -> int:
    name = "".join(argv[:1])
    if name in HELP_WORDS:
        print(__doc__)
        return 0
    if name in OLD_COMMANDS:
        raise ValueError(f"there is no measurement {name} any more, and docs/ has its last figures: type "
                         f"{OLD_COMMANDS[name]} instead")
    check_name(name, COMMANDS, "measurement")

    module_name, function = COMMANDS[name].split(":")
    folder = module_name.rpartition(".")[0].replace(".", "/")
    if not (ROOT / folder).is_dir():
        raise ValueError(f"the measurement {name} needs {folder}/, which is not here: restore that folder")
    code: int = getattr(import_module(module_name), function)(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
