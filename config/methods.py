"""The methods: what a user names with `pipeline_type`, and the project's table of contents.

A method is a strategy (when to draft, send, judge and prune), a target (where segments are streamed) and a draft (who
guesses). It knows nothing about their code: launch/build.py looks the names up.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One row: names of a strategy (pipeline/strategies.py), a target and a draft; `about` is one line for people.

    The draft `eagle` gives way to what the key `draft` says; `none` and `ssm`, the small models, do not. The rest has
    defaults that suit any method. `sizes` are what a plan varies, by the names of eval/plan/candidates.py.
    """

    strategy: str
    target: str
    draft: str
    about: str
    tree: str = "grown"  # none; round: drafted and verified whole; whole: drafted whole; chain; grown at any time
    sizes: tuple[str, ...] = ()
    look: tuple[str, str] = ("white", "")  # tone and hatch on maps
    measured: bool = False  # whether it has many segments under way, whose size is measured if nothing is said
    falls_back: bool = False  # whether it decodes plainly where guesses are measured to bring less
    planned: bool = True  # whether plans try it without being asked


METHODS = {
    "ar": Method(
        "autoregressive", "ring", "none", "one token per round of the pipeline, no guesses",
        tree="none", look=("#ededed", "")),
    "serial": Method(
        "serial", "ring", "eagle", "a token tree sent whole: one stage works, the others wait",
        tree="round", sizes=("init_depth",), look=("#e8a33d", "////")),
    "naive": Method(
        "naive", "ring", "eagle", "equal shares of a tree, one per rank, verified once all are back",
        tree="round", sizes=("init_depth",), look=("#d9a5c7", "xxx")),
    "pruned": Method(
        "pruned", "ring", "eagle", "a tree in segments, each verified as it returns, what is dead pruned",
        tree="whole", sizes=("rows", "init_depth"), look=("#f7e26b", "...."), measured=True),
    "continuous": Method(
        "continuous", "ring", "eagle", "FlowSpec: verify, prune and regrow at every return",
        sizes=("rows", "depths"), look=("#1b9e77", "---"), measured=True, falls_back=True),
    "pipedec": Method(
        "pipedec", "ring", "eagle", "PipeDec: one more layer of the tree at every step",
        sizes=("init_topk_pipedec",), look=("#8ccbea", "\\\\\\\\")),
    "pipeinfer": Method(
        "pipeinfer", "ring", "eagle", "PipeInfer: the tip alone, then short runs of one drafted chain",
        tree="chain", sizes=("run",), look=("#cfe8cf", "++"), planned=False),
    "pearl": Method(
        "pearl", "ring", "eagle", "PEARL, AMUSD: one chain is drafted on while what there is of it is verified",
        tree="chain", look=("#e3b5a4", ".."), planned=False),
    "ssd": Method(
        "ssd", "ring", "eagle", "SSD (Saguaro): while a tree is verified, grow below all outcomes that it may have",
        sizes=("stream_rows", "init_depth"), look=("#a98467", "oo"), measured=True, planned=False),
    "streaming": Method(
        "streaming", "ring", "eagle", "best guesses anywhere, sent just as the first stage gets free",
        sizes=("stream_rows",), look=("#5b6fb5", "||"), measured=True, falls_back=True),
    "spd": Method(
        "spd", "ring", "eagle", "SPD: one guess for each step of a stage, out of what is known of those under way",
        tree="chain", look=("#b7b7a4", "//"), planned=False),
    "dsi": Method(
        "dsi", "replicas", "eagle", "DSI: a drafter that never waits, copies of the model verify by turns",
        tree="chain", sizes=("lookahead",), look=("#20639b", "oo")),
    "specinfer": Method(
        "serial", "ring", "ssm", "SpecInfer: trees of small models, merged into one and sent whole",
        tree="round", sizes=("expansion",), look=("#c7b299", "**")),
    "tp": Method(
        "naive", "tp", "eagle", "no pipeline: all ranks compute each layer together (Megatron)",
        tree="round", sizes=("init_depth",), look=("white", "//")),
    "galaxy": Method(
        "naive", "galaxy", "eagle", "as tp, but rows are shared between blocks, and travel under matmuls",
        tree="round", sizes=("init_depth",), look=("white", "\\\\")),
}
SHARINGS = ("tp", "galaxy")  # targets without a pipeline; ranks of a pipeline's stage share it as the first does
