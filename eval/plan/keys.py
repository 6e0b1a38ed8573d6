"""The keys of a plan: the cluster, the questions, and the possible choices; all others are those of a single run."""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Iterator

from cluster.board import COMMAND_VARIABLE
from config.drafts import BEST_DRAFT
from config.keys import keys_with, shared_key
from config.methods import BEST_METHOD, METHODS
from config.old_names import instead_of
from config.profiles import is_file
from config.values import NUMBER, Range, listed
from eval.keys import ComparedDrafts, Contender, DataSetKeys, drafted

COMMAND = os.environ.get(COMMAND_VARIABLE, "python3 -m scripts.plan")
PLAIN_METHOD = "ar"


@dataclass(frozen=True)
class PlanConfig(ComparedDrafts, DataSetKeys):
    """One plan. `--help` prints the comments, as for `RunConfig`."""

    DEFAULTS = {"draft": BEST_DRAFT, "questions": "1", "max_new_tokens": 24}
    UNSUPPORTED = ("pipeline_type", "verify", "stages", "tp", "replicas", "prompt_ids", "question_file", "stop", "live",
                   "ignore_eos", "answers", "time", "trace", "output")
    LISTS = {**DataSetKeys.LISTS, "methods": "chosen_methods", "drafts": "asked_drafts"}
    EXAMPLES = """\
  python3 -m scripts.plan profile=jetson-7b
  python3 -m scripts.plan toy profile=boards.json memory=8
  python3 -m scripts.plan hosts=hosts.txt measured=boards.json write_hosts=chosen.txt
  python3 -m scripts.plan profile=jetson-7b methods=continuous,streaming drafts=eagle,suffix"""

    boards: int = shared_key(0, "boards that may hold layers, besides rank 0's; 0: the number of the cluster, or 4",
        Range(1, 64, {0: "the number of the cluster, or 4"}), heading="The boards to plan for, from profile or hosts")
    memory: str = shared_key(
        "", "GB of these boards, one for all or each (comma-separated); empty: from hosts or profile")
    measured: str = shared_key(
        "", "JSON file to write: the boards of hosts, measured over ssh, as a profile; empty: none",
        names_file=True, is_output=True)
    methods: str = shared_key(BEST_METHOD, "methods that may be chosen, in addition to ar", heading="Possible choices")
    write_hosts: str = shared_key("", "hosts file to write: the chosen boards of hosts, rank 0's first; empty: none",
        names_file=True, is_output=True, heading="Output")

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods that may be chosen, plain decoding always."""
        return PLAIN_METHOD, *(name for name in listed(self.methods) if name != PLAIN_METHOD)

    @property
    def contenders(self) -> list[Contender]:
        """The methods with the drafts that they may use."""
        return drafted(self.chosen_methods, self.asked_drafts)

    def problems(self) -> Iterator[str]:
        pipelined_methods = [name for name, method in METHODS.items() if method.target == "ring"]
        for name in self.chosen_methods:
            if name not in pipelined_methods:
                advice = instead_of("pipeline_type", name, pipelined_methods)
                yield f"methods={self.methods}: {name} has no plans: {advice}"

        yield from self.draft_problems()
        yield from super().problems()
        yield from self.method_problems()

        for number in listed(self.memory):
            if not NUMBER.fullmatch(number) or float(number) <= 0:
                yield f"memory={self.memory} is no list of gigabytes: give numbers above 0, such as 8,8,16"

        has_profile = self.run.profile != "none"
        if self.measured and has_profile:
            yield f"profile={self.run.profile} and measured={self.measured} are both given: give only one of them"
        if not has_profile and not self.measured:
            yield ("the cluster is missing: give profile=jetson-7b or profile=FILE.json, or hosts=FILE "
                   "measured=FILE.json")
        if self.measured and not is_file(self.measured):
            yield f"measured={self.measured} is no profile's file: name one that ends with .json"
        for key_name in sorted(keys_with(type(self), "is_output")):
            if getattr(self, key_name) and not self.run.hosts:
                yield f"{key_name}={getattr(self, key_name)} needs the boards of a hosts file: add hosts=FILE"
