"""Names of keys, values and options in the original program and in earlier versions, for messages about unknown ones.

docs/moving.md explains those of the original.
"""
from __future__ import annotations

from typing import Collection

# the old name: the key of today, or an empty text if that depends on the command; and what to write
OLD_NAMES = {
    **dict.fromkeys(("init_topk", "expand_topk", "stream_topk"), ("width", "write width=NUMBER")),
    **dict.fromkeys(("init_subseq_token", "expand_subseq_token", "stream_subseq_token"),
                    ("subseq_token", "write subseq_token=NUMBER")),
    **dict.fromkeys(("none_expand", "none_expand_size", "none_expand_depth"),
                    ("ablate", "it is on, and ablate=none_expand turns it off")),
    **dict.fromkeys(("draft_gen_sort_score", "score_order"),
                    ("ablate", "it is on, and ablate=score_order turns it off")),
    **dict.fromkeys(("question_begin", "question_end"), ("questions", "write questions=BEGIN:END")),
    **dict.fromkeys(("hardware", "set_network", "rate_mbps"),
                    ("wires", "type sudo bash scripts/netem.sh, or give wires= on an emulated cluster")),
    **dict.fromkeys(("master_addr", "master_port"), ("master", "write master=HOST:PORT")),
    **dict.fromkeys(("rows", "context"), ("repeats", "passes over several tokens are not timed: leave it out")),
    "hop": ("ndim", "the maps compare no pipelines: leave it out"),
    "picture": ("accounting", "the table shows mean and deviation of the texts: leave it out"),
    "table": ("S", "all tables are printed: leave it out"),
    "simul_type": ("maximum_correct_tokens", "SI and DSI are both simulated: leave it out"),
    "EAGLE_model_path": ("eagle_dir", "write eagle_dir=FOLDER"),
    "your_message": ("prompt", "write prompt=TEXT"),
    "tp_type": ("pipeline_type", "write pipeline_type=tp or pipeline_type=galaxy"),
    "dataset_names": ("", "write sets=NAME,NAME in an evaluation, question_file=FILE in a run"),
    "extra_name": ("", "write results=FOLDER in an evaluation, output=FILE in a run"),
    "pipeline_types": ("", "write methods=NAME,NAME in an evaluation, pipeline_type=NAME in a run"),
    "model_name": ("", "write a preset first, as vicuna-7b, or model=NAME"),
    "password": ("", "no password is stored, since ssh and sudo ask for it: leave it out"),
    "interface": ("", "write interface=NAME on the board's line of the hosts file, or set GLOO_SOCKET_IFNAME"),
    **dict.fromkeys(("load_results", "load_csv"), ("", "a table takes seconds and is not loaded: leave it out")),
    "online": ("", "no map is drawn by events, which the published simulator does not end: leave it out"),
    "num_stage": ("stages", "write stages=NUMBER, without rank 0"),
    "temperatures": ("temperature", "write temperature=NUMBER; an evaluation takes temperatures"),
    "recover_seconds": ("recover", "write recover=SECONDS"),
    "opt_threshold": ("policy", "write policy=opt:NUMBER"),
    "tp_shares": ("tp", "write tp=SPEED,SPEED"),
    "run_pipeinfer": ("lookahead", "write lookahead=NUMBER"),
    "processes": ("link", "write link=threads for threads of one process"),
    "prune": ("ablate", "it is on, and ablate=prune turns it off"),
    # of plans
    "measure": ("measured", "write hosts=FILE measured=FILE.json"),
    "layer_gb": ("measured", "write weights, the GB of all layers, into profile=FILE.json"),
    "write_cluster": ("measured", "write the chosen boards' factors and links into another profile=FILE.json"),
    "preset": ("measured", "copy the keys of the last line"),
    **dict.fromkeys(("traces", "check", "splits", "show"), ("measured", "leave it out")),
}
SPD_ADVICE = ("write pipeline_type=streaming and draft=eagle+suffix, which are faster (docs/methods.md has the figures "
              "of SPD)")
# an old value of a key: what to write
OLD_VALUES = {
    "pipeline_type=auto": "leave pipeline_type out for the default, or simulate methods and splits by python3 -m "
                          "scripts.plan profile=NAME",
    **dict.fromkeys(("quant=True", "quant=true"), "write quant=fp4 for the original's 4 bits, or quant=int4, which is "
                                                  "faster on a CPU"),
    **dict.fromkeys(("quant=False", "quant=false"), "write quant=none"),
    **dict.fromkeys(("pipeline_type=spd", "draft=spd", "draft=spd+suffix"), SPD_ADVICE),
}

# the old option of a training: what to do instead
OLD_OPTIONS = {
    "--partial": "heads for features of guesses under way are not trained; leave it out, or add --eagle3",
    "--limit": "all conversations of the file are used; leave it out, or shorten the file",
    "--held-out": "a twentieth of the conversations is held out; leave it out",
}


def old_value_advice(key_name: str, value: str) -> str:
    """Return what to write in place of an old value of this key, or an empty text if it is none."""
    return OLD_VALUES.get(f"{key_name}={value}", "")


def instead_of(key_name: str, value: str, names: Collection[str]) -> str:
    """Return what to write in place of a value of this key that is not among these names."""
    return old_value_advice(key_name, value) or f"choose one of {', '.join(names)}"


def advice_for(old_name: str, keys: Collection[str]) -> str:
    """Return what to write in place of an old name, or an empty text if it is none, or a command lacks the key."""
    key, advice = OLD_NAMES.get(old_name, ("", ""))
    return advice if not key or key in keys else ""
