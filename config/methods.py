"""The methods: the values of `pipeline_type`, and the project's table of contents.

A method is a strategy (when to draft, send, verify and prune), a target (where segments are sent) and a draft (the
source of guesses). launch/build.py maps the names to code.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One method: the names of its strategy (pipeline/strategies.py), target and draft, and a line for `--help`.

    The key `draft` replaces the draft `eagle`, but not `none` or `ssm` (small models). The other fields have defaults
    that suit any method.
    """

    strategy: str
    target: str
    draft: str
    about: str
    tree: str = "grown"  # none; round: drafted and verified whole; whole: drafted whole; chain; grown: at any time
    look: tuple[str, str] = ("white", "")  # colour and hatch in plots
    measured: bool = False  # whether it has many segments under way, with a size that is measured by default
    falls_back: bool = False  # whether it falls back to plain decoding where that is measured to be faster


METHODS = {
    "ar": Method(
        "autoregressive", "ring", "none", "one token per round of the pipeline, no guesses",
        tree="none", look=("#ededed", "")),
    "serial": Method(
        "serial", "ring", "eagle", "a token tree sent whole: one stage works, the others wait",
        tree="round", look=("#e8a33d", "////")),
    "naive": Method(
        "naive", "ring", "eagle", "equal shares of a tree, one per rank, verified once all are back",
        tree="round", look=("#d9a5c7", "xxx")),
    "pruned": Method(
        "pruned", "ring", "eagle", "a tree in segments, each verified when it returns; dead guesses are pruned",
        tree="whole", look=("#f7e26b", "...."), measured=True),
    "continuous": Method(
        "continuous", "ring", "eagle", "FlowSpec: verify, prune and regrow at every return",
        look=("#1b9e77", "---"), measured=True, falls_back=True),
    "pipedec": Method(
        "pipedec", "ring", "eagle", "PipeDec: one more layer of the tree at every step",
        look=("#8ccbea", "\\\\\\\\")),
    "pipeinfer": Method(
        "pipeinfer", "ring", "eagle", "PipeInfer: first the tip, then short runs of one drafted chain",
        tree="chain", look=("#cfe8cf", "++")),
    "windows": Method(
        "windows", "ring", "eagle", "Mesh-LLM, shard: one drafted chain, in windows that fill the round trip",
        tree="chain", look=("#b5c99a", "oo.")),
    "pearl": Method(
        "pearl", "ring", "eagle", "PEARL, AMUSD: drafts a chain further while its first part is verified",
        tree="chain", look=("#e3b5a4", "..")),
    "ssd": Method(
        "ssd", "ring", "eagle", "SSD (Saguaro): while a tree is verified, grow below its likely outcomes",
        look=("#a98467", "oo"), measured=True),
    "streaming": Method(
        "streaming", "ring", "eagle", "the best guesses of the whole tree, sent when the first stage becomes free",
        look=("#5b6fb5", "||"), measured=True, falls_back=True),
    "dsi": Method(
        "dsi", "replicas", "eagle", "DSI: a drafter that never waits; copies of the model verify in turn",
        tree="chain", look=("#20639b", "oo")),
    "specinfer": Method(
        "serial", "ring", "ssm", "SpecInfer: trees of small models, merged into one and sent whole",
        tree="round", look=("#c7b299", "**")),
    "tp": Method(
        "naive", "tp", "eagle", "no pipeline: all ranks compute each layer together (Megatron)",
        tree="round", look=("white", "//")),
    "galaxy": Method(
        "naive", "galaxy", "eagle", "as tp, but ranks share rows between blocks, and send them during matmuls",
        tree="round", look=("white", "\\\\")),
}
BEST_METHOD = "streaming"  # the default on boards and emulated clusters
SHARINGS = ("tp", "galaxy")  # targets without a pipeline; ranks that share a pipeline's stage use the first
