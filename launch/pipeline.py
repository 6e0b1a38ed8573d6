"""A live pipeline, as whoever sits at rank 0 holds it: commands, the evaluation, a user's program.

It knows nothing about how its ranks were started, or how they end.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from config.methods import METHODS
from config.run_config import RunConfig, TreeConfig
from launch.build import build_decoder
from launch.probe import segment_rows
from launch.spec import RankSpec
from model.text import Text
from pipeline.decode import Decoder
from pipeline.interfaces import Draft
from pipeline.target import Ring
from pipeline.trace import NoTrace


@dataclass(frozen=True)
class Session:
    """The ring, the draft and the tokenizer; `text` is absent where prompts are token ids."""

    spec: RankSpec  # of rank 0
    ring: Ring
    draft: Draft
    text: Text | None
    trace: NoTrace

    @property
    def config(self) -> RunConfig:
        return self.spec.config

    @cached_property
    def decoder(self) -> Decoder:
        """That of the configuration itself."""
        return self.decoder_for(self.config)

    def decoder_for(self, config: RunConfig) -> Decoder:
        """A decoder of another method, or with other trees, over the same ring and draft."""
        return build_decoder(replace(self.spec, config=config), self.ring, self.draft, self.tree_for(config))

    def tree_for(self, config: RunConfig) -> TreeConfig:
        """What the strategy receives. Sizes of segments that were left open are measured, once."""
        tree = config.tree
        if not METHODS[config.pipeline_type].measured:
            return tree
        if config.init_subseq_token == 0:
            tree = replace(tree, init=replace(tree.init, segment=self.segment_rows))
        if config.expand_subseq_token == 0:
            tree = replace(tree, expand=replace(tree.expand, segment=self.segment_rows))
        return tree

    @cached_property
    def segment_rows(self) -> int:
        """How many rows a segment should hold, as a few passes of the pipeline tell."""
        return segment_rows(self.ring, self.spec.context)

    @property
    def scale(self) -> float:
        """Seconds that pass here for each second that is modelled."""
        return self.config.slowdown
