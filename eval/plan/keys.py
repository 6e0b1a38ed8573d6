"""What a plan is: the cluster that it is for, the questions that are recorded, and what may be chosen.

It knows nothing about how plans are made; all other keys are those of a single run.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterator, Sequence

from config.cli import headless, needs_head, no_head
from config.drafts import FOLDERS, HEAD_KEY, MODEL_KEY, MODELS_KEY, reads
from config.keys import NUMBER, Range, listed, over
from config.methods import METHODS
from config.run_config import CHOICES as OF_RUNS
from config.run_config import RunConfig
from eval.keys import AsksSets

COMMAND = "python -m scripts.plan"
DEFAULTS = {"max_new_tokens": "48", "questions": "2"}
NETWORKS = ("eagle", "model", "ssm")  # that a plan considers where it names no drafts
OPEN = ("pipeline_type", "draft", "hosts", "questions")  # keys that a single run has its own of


@dataclass(frozen=True)
class PlanConfig(AsksSets):
    """One plan. The comments are what `--help` prints, as those of `RunConfig` are."""

    USUAL = {"draft": "model"}  # no run has it, but draft_dir is for those that will
    REFUSED = ("pipeline_type", "draft", "verify", "tp", "replicas", "prompt_ids", "question_file", "stop",
               "ignore_eos", "answers", "time", "trace", "output")
    RANGES = {"boards": Range(1, 1024, {0: "as many as the cluster is said to have, or 4"}),
              "layer_gb": Range(0.000001, 1000, {0: "as the profile says"}),
              "check": Range(1, 64, {0: "none"})}
    CHOICES = {"splits": ("any", "first", "given")}
    WRITES = ("measured", "traces", "preset", "write_hosts", "write_cluster")
    EXAMPLES = """\
  python -m scripts.plan profile=jetson-7b
  python -m scripts.plan profile=boards.json memory=8 preset=ours.json
  python -m scripts.plan toy measure=true measured=here.json
  python -m scripts.plan profile=jetson-7b boards=64 methods=ar,serial,streaming drafts=eagle,eagle+suffix"""

    # The cluster that is planned for: that of profile, or what is measured
    boards: int = 0  # boards that may hold layers, beside rank 0's; 0: as many as the profile tells apart, or 4
    memory: str = ""  # GB of each of these boards, one for all or each (commas between); empty: as hosts or profile say
    layer_gb: float = 0.0  # GB of a layer's weights; 0: as the profile says
    measure: bool = False  # measure the pipeline that these keys start, in place of a profile
    measured: str = ""  # JSON file for what was measured, which is read if it is there; empty: none

    # What may be chosen (commas between)
    splits: str = "any"  # any; first: over the first boards in their order, as keys alone can say; given: as split
    methods: str = ""  # methods; empty: all but pipeinfer, pearl, ssd and spd
    drafts: str = ""  # drafts, as the key draft takes them; empty: those that are there

    # What is recorded
    traces: str = ""  # JSON file for the record of texts and guesses, which is read if it is there; empty: none

    # What comes out
    check: int = 0  # of the best candidates, those that also answer on this machine, beside ar; 0: none
    preset: str = ""  # JSON file for the chosen keys, which other commands take in place of a preset; empty: none
    write_hosts: str = ""  # hosts file for the chosen boards of hosts, rank 0's first; empty: none
    write_cluster: str = ""  # JSON file for the chosen boards as a cluster, for profile=FILE.json; empty: none
    show: int = 12  # rows of the table

    def problems(self) -> Iterator[str]:
        run, drafts = self.run, listed(self.drafts)
        for key, known in (("methods", tuple(METHODS)), ("drafts", OF_RUNS["draft"])):
            for name in listed(getattr(self, key)):
                if name not in known:
                    yield f"{key}={getattr(self, key)}: there is no {name}: choose among {', '.join(known)}"
        yield from super().problems()
        if headless(run) and any(map(needs_head, drafts)):
            yield no_head(run)
        for number in listed(self.memory):
            if not NUMBER.fullmatch(number) or float(number) <= 0:
                yield f"memory={self.memory} is no list of gigabytes: write numbers above 0, as 8,8,16"
        is_measured = bool(self.measure or self.measured)
        if run.profile == "none" and not is_measured:
            yield "there is no cluster to plan for: give profile=jetson-7b or profile=FILE.json, or measure=true"
        if run.profile != "none" and is_measured:
            yield f"profile={run.profile} and a measurement are both given: give only one of them"
        others = f"hosts={run.hosts}" if run.hosts else "" if run.profile == "none" else f"profile={run.profile}"
        if self.check and others:
            yield f"check={self.check} is for this machine as it is, and {others} for others: leave one of them out"
        if self.write_hosts and not run.hosts:
            yield f"write_hosts={self.write_hosts} wants the lines of a hosts file: add hosts=FILE"

    def single(self, **changes: Any) -> RunConfig:
        """The configuration of a single run, with these keys in place of the plan's."""
        usual = {key: getattr(RunConfig, key) for key in OPEN}
        values = {**usual, **changes}
        if MODEL_KEY not in reads(values["draft"]):
            values["draft_dir"] = ""
        return replace(self.run, **values)

    @property
    def asked_drafts(self) -> tuple[str, ...]:
        """The sources of guesses that may be chosen."""
        return _sources(self.chosen_drafts)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of networks that are there to draft."""
        run, asked = self.run, _sources(listed(self.drafts))
        head = "" if headless(run) else run.eagle_dir or run.model_dir or run.base_dir
        folders = {HEAD_KEY: head, MODEL_KEY: run.draft_dir, MODELS_KEY: run.ssm}
        if "cascade" in asked or any(METHODS[name].draft == "ssm" for name in self.chosen_methods):
            asked += "ssm",
        considered = asked if self.drafts else NETWORKS
        there = (kind for kind, key in FOLDERS.items() if folders[key])
        return tuple(kind for kind in there if kind in considered and kind != "cascade")  # made of those of ssm

    @property
    def chosen_drafts(self) -> tuple[str, ...]:
        """The drafts that may be chosen, as the key `draft` takes them."""
        mixed = (f"{kind}+suffix" for kind in self.kinds)
        possible = [name for name in mixed if name in OF_RUNS["draft"]]
        rows = ("cascade", "cascade+suffix") if len(self.run.small_models) > 1 else ()
        return listed(self.drafts) or ("suffix", *self.kinds, *possible, *rows)

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods that may be chosen; plain decoding always may, small models only if there are any."""
        there = (name for name in METHODS if self.run.ssm or METHODS[name].draft != "ssm")
        named = listed(self.methods) or tuple(name for name in there if METHODS[name].planned)
        return ("ar", *(name for name in named if name != "ar"))

    def gigabytes(self, boards: int) -> tuple[float, ...]:
        """The memory of each board, or nothing if it is not said. Raises ValueError for another number of boards."""
        given = tuple(map(float, listed(self.memory)))
        if len(given) == 1:
            return given * boards
        if given and len(given) != boards:
            raise ValueError(f"memory={self.memory} is for {len(given)} boards, but there are {boards}: give one "
                             "number for all, or one for each")
        return given


def _sources(drafts: Sequence[str]) -> tuple[str, ...]:
    """The sources of guesses in these drafts, each once."""
    return tuple(dict.fromkeys("+".join(drafts).split("+")))


def words(argv: Sequence[str]) -> list[str]:
    """The words of a plan: those that were typed, and the size of a record where nothing is said."""
    return over(argv, DEFAULTS)
