"""The keys of a plan: the cluster, the recorded questions, and the possible choices.

This module knows nothing about how plans are made; all other keys are those of a single run.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterator, Sequence

from config.cli import headless, needs_head, no_head
from config.drafts import DRAFTS, FOLDERS, HEAD_KEY, MODEL_KEY, MODELS_KEY, reads
from config.keys import shared_key, with_defaults
from config.methods import METHODS
from config.old_names import instead_of
from config.run_config import RunConfig
from config.values import NUMBER, Choices, Range, listed
from eval.keys import DataSetKeys

COMMAND = "python3 -m scripts.plan"
PLAN_DEFAULTS = {"max_new_tokens": "48", "questions": "2"}
DEFAULT_NETWORKS = ("eagle", "model", "ssm")  # kinds of networks that a plan considers by default
RUN_DEFAULT_KEYS = ("pipeline_type", "draft", "hosts", "questions")  # of a plan's single run


@dataclass(frozen=True)
class PlanConfig(DataSetKeys):
    """One plan. `--help` prints the comments, as for `RunConfig`."""

    DEFAULTS = {"draft": "model"}  # not the draft of a run; it makes draft_dir a valid key
    UNSUPPORTED = ("pipeline_type", "draft", "verify", "tp", "replicas", "prompt_ids", "question_file", "stop", "live",
                   "ignore_eos", "answers", "time", "trace", "output")
    EXAMPLES = """\
  python3 -m scripts.plan profile=jetson-7b
  python3 -m scripts.plan profile=boards.json memory=8 preset=out/ours.json
  python3 -m scripts.plan toy measure=true measured=here.json
  python3 -m scripts.plan profile=jetson-7b boards=64 methods=ar,serial,streaming drafts=eagle,eagle+suffix"""

    boards: int = shared_key(0, "boards that may hold layers, besides rank 0's; 0: the number in the profile, or 4",
        Range(1, 1024, {0: "the number of the cluster, or 4"}),
        heading="The cluster to plan for, from profile or from a measurement")
    memory: str = shared_key(
        "", "GB of these boards, one for all or each (comma-separated); empty: from hosts or profile")
    layer_gb: float = shared_key(0.0, "GB of a layer's weights; 0: the figure of the profile",
        Range(0.000001, 1000, {0: "the figure of the profile"}))
    measure: bool = shared_key(False, "measure the pipeline that these keys start, in place of a profile")
    measured: str = shared_key("", "JSON file for the measurement, read if it exists; empty: none",
        names_file=True, is_output=True)

    splits: str = shared_key("any", "any; first: over the first boards, which need no file of boards; given: as split",
        Choices(("any", "first", "given")), heading="Possible choices (comma-separated)")
    methods: str = shared_key("", "methods; empty: all that have no planned=False in config/methods.py")
    drafts: str = shared_key("", "drafts, as for the key draft; empty: all that are available")

    traces: str = shared_key("", "JSON file for the record of texts and guesses, read if it exists; empty: none",
        heading="Record", names_file=True, is_output=True)

    check: int = shared_key(0, "number of the best candidates to also run on this machine, in addition to ar; 0: none",
        Range(1, 64, {0: "none"}), heading="Output")
    preset: str = shared_key("", "JSON file for the chosen keys, which other commands take as a preset; empty: none",
        names_file=True, is_output=True)
    write_hosts: str = shared_key("", "hosts file for the chosen boards of hosts, rank 0's first; empty: none",
        names_file=True, is_output=True)
    write_cluster: str = shared_key(
        "", "JSON file for the chosen boards as a cluster, for profile=FILE.json; empty: none",
        names_file=True, is_output=True)
    show: int = shared_key(12, "rows of the table")

    def problems(self) -> Iterator[str]:
        run, drafts = self.run, listed(self.drafts)
        for list_name, valid_names in (("methods", tuple(METHODS)), ("drafts", DRAFTS)):
            typed_list = getattr(self, list_name)
            for name in listed(typed_list):
                if name not in valid_names:
                    yield f"{list_name}={typed_list} holds {name}, which is unknown: {instead_of(name, valid_names)}"

        yield from super().problems()
        if headless(run) and any(map(needs_head, drafts)):
            yield no_head(run)

        for number in listed(self.memory):
            if not NUMBER.fullmatch(number) or float(number) <= 0:
                yield f"memory={self.memory} is no list of gigabytes: give numbers above 0, such as 8,8,16"

        # the cluster
        is_measured = bool(self.measure or self.measured)
        has_profile = run.profile != "none"
        if not has_profile and not is_measured:
            yield "the cluster is missing: give profile=jetson-7b or profile=FILE.json, or measure=true"
        if has_profile and is_measured:
            yield f"profile={run.profile} and a measurement are both given: give only one of them"

        other_machines = f"hosts={run.hosts}" if run.hosts else f"profile={run.profile}"
        if self.check and (run.hosts or has_profile):
            yield f"check={self.check} runs on this machine, but {other_machines} describes others: omit one of them"
        if self.write_hosts and not run.hosts:
            yield f"write_hosts={self.write_hosts} needs the lines of a hosts file: add hosts=FILE"

    def single(self, **changes: Any) -> RunConfig:
        """Return the configuration of a single run, with these keys in place of the plan's."""
        run_defaults = {key: getattr(RunConfig, key) for key in RUN_DEFAULT_KEYS}
        values = {**run_defaults, **changes}
        if MODEL_KEY not in reads(values["draft"]):
            values["draft_dir"] = ""
        return replace(self.run, **values)

    @property
    def asked_drafts(self) -> tuple[str, ...]:
        """The sources of guesses that may be chosen."""
        return _sources(self.chosen_drafts)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of drafting networks to consider for which a folder is given."""
        run = self.run
        head_dir = "" if headless(run) else run.eagle_dir or run.model_dir or run.base_dir
        dirs = {HEAD_KEY: head_dir, MODEL_KEY: run.draft_dir, MODELS_KEY: run.ssm}
        available = (kind for kind, key in FOLDERS.items() if dirs[key])

        considered: tuple[str, ...] = DEFAULT_NETWORKS
        if self.drafts:
            considered = _sources(listed(self.drafts))
            if any(METHODS[name].draft == "ssm" for name in self.chosen_methods):
                considered += "ssm",
        return tuple(kind for kind in available if kind in considered)

    @property
    def chosen_drafts(self) -> tuple[str, ...]:
        """The drafts that may be chosen, as the key `draft` takes them."""
        with_suffix = (f"{kind}+suffix" for kind in self.kinds)
        possible_mixtures = [name for name in with_suffix if name in DRAFTS]
        return listed(self.drafts) or ("suffix", *self.kinds, *possible_mixtures)

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods that may be chosen, plain decoding always; by default, those for small models only with some."""
        possible = (name for name in METHODS if self.run.ssm or METHODS[name].draft != "ssm")
        typed_methods = listed(self.methods) or tuple(name for name in possible if METHODS[name].planned)
        return ("ar", *(name for name in typed_methods if name != "ar"))

    def gigabytes(self, num_boards: int) -> tuple[float, ...]:
        """Return the memory of each board, or () if it is not given. Raise ValueError for another number of boards."""
        board_sizes = tuple(map(float, listed(self.memory)))
        if len(board_sizes) == 1:
            return board_sizes * num_boards
        if board_sizes and len(board_sizes) != num_boards:
            raise ValueError(f"memory={self.memory} has {len(board_sizes)} numbers for {num_boards} boards: give one "
                             "number for all, or one for each")
        return board_sizes


def _sources(drafts: Sequence[str]) -> tuple[str, ...]:
    """Return the sources of guesses in these drafts, each once."""
    return tuple(dict.fromkeys("+".join(drafts).split("+")))


def words(argv: Sequence[str]) -> list[str]:
    """Return the given words of a plan, plus the default size of a record."""
    return with_defaults(argv, PLAN_DEFAULTS)
