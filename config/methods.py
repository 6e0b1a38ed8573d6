"""The methods: what a user names with `pipeline_type`, and the project's table of contents.

A method is a strategy (when to draft, send, judge and prune), a target (where segments are streamed) and a draft (who
guesses). It knows nothing about their code: the composition root, launch/run.py, looks the names up.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """One row: names of a strategy (pipeline/strategies.py), a target and a draft; `about` is one line for people.

    The draft `eagle` gives way to what the key `draft` says; `none` and `ssm`, the small models, do not.
    """

    strategy: str
    target: str
    draft: str
    about: str
    measured: bool = False  # whether it has many segments under way, whose size is measured if nothing is said


METHODS = {
    "ar": Method("autoregressive", "ring", "none", "one token per round of the pipeline, no guesses"),
    "serial": Method("serial", "ring", "eagle", "a token tree sent whole: one stage works, the others wait"),
    "naive": Method("naive", "ring", "eagle", "equal shares of a tree, one per rank, verified once all are back"),
    "pruned": Method("pruned", "ring", "eagle", "a tree in segments, each verified as it returns, what is dead pruned",
                     measured=True),
    "continuous": Method("continuous", "ring", "eagle", "FlowSpec: verify, prune and regrow at every return",
                         measured=True),
    "pipedec": Method("pipedec", "ring", "eagle", "PipeDec: one more layer of the tree at every step"),
    "pipeinfer": Method("pipeinfer", "ring", "eagle", "PipeInfer: the tip alone, then short runs of one drafted chain"),
    "streaming": Method("streaming", "ring", "eagle", "best guesses anywhere, sent just as the first stage gets free",
                        measured=True),
    "dsi": Method("dsi", "replicas", "eagle", "DSI: a drafter that never waits, copies of the model verify by turns"),
    "specinfer": Method("serial", "ring", "ssm", "SpecInfer: trees of small models, merged into one and sent whole"),
    "tp": Method("naive", "tp", "eagle", "no pipeline: all ranks compute each layer together (Megatron)"),
    "galaxy": Method("naive", "galaxy", "eagle", "as tp, but rows are shared between blocks, and travel under matmuls"),
}
SHARINGS = ("tp", "galaxy")  # targets without a pipeline; also how the ranks of a pipeline's stage may share it
