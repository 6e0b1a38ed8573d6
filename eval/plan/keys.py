"""What a plan is: the cluster that it is for, the questions that are recorded, and what may be chosen.

It knows nothing about how plans are made; all other keys are those of a single run.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Iterator, Sequence

from config.drafts import headless, listed, needs_head, no_head
from config.files import check_output
from config.methods import METHODS
from config.ranges import NUMBER, Range, outside, unknown
from config.run_config import CHOICES, RunConfig
from config.typed import over
from eval.prompts import problems as problems_of_sets

COMMAND = "python -m scripts.plan"
USUAL = {"max_new_tokens": "48", "question_end": "2"}
COUNTS = {"boards": Range(1, 1024, {0: "as many as the cluster is said to have, or 4"}),
          "layer_gb": Range(0.000001, 1000, {0: "as the profile says"}),
          "check": Range(1, 64, {0: "none"})}
SPLITS = {"splits": ("any", "first", "given")}
EXAMPLES = """\
  python -m scripts.plan profile=jetson-7b
  python -m scripts.plan profile=boards.json memory=8 preset=ours.json
  python -m scripts.plan toy measure=true measured=here.json
  python -m scripts.plan profile=jetson-7b boards=64 methods=ar,serial,streaming drafts=eagle,eagle+suffix"""


@dataclass(frozen=True)
class PlanConfig(RunConfig):
    """One plan. The comments are what `--help` prints, as those of `RunConfig` are."""

    EXAMPLES: ClassVar[str] = EXAMPLES

    # The cluster that is planned for: that of profile, or what is measured
    boards: int = 0  # boards that may hold layers, beside rank 0's; 0: as many as the profile tells apart, or 4
    memory: str = ""  # GB of each of these boards, one number for all or one for each (commas between); empty: enough
    layer_gb: float = 0.0  # GB of a layer's weights; 0: as the profile says
    measure: bool = False  # measure the pipeline that these keys start, in place of a profile
    measured: str = ""  # JSON file for what was measured, which is read if it is there; empty: none

    # What may be chosen (commas between)
    splits: str = "any"  # any; first: over the first boards in their order, as keys alone can say; given: as split
    methods: str = ""  # methods; empty: all but pipeinfer
    drafts: str = ""  # drafts, as the key draft takes them; empty: those that are there

    # The questions that are recorded
    sets: str = "mt_bench,humaneval,gsm8k,alpaca,sum,qa"  # the data sets; question_begin and question_end are of each
    data: str = ""  # folder with SET/question.jsonl, SET.jsonl, or SET.json (a list of texts); empty: the bundled sets
    traces: str = ""  # JSON file for the record of texts and guesses, which is read if it is there; empty: none

    # What comes out
    check: int = 0  # of the best candidates, those that also answer on this machine, beside ar; 0: none
    preset: str = ""  # JSON file for the chosen keys, which other commands take in place of a preset; empty: none
    write_hosts: str = ""  # hosts file for the chosen boards of hosts, rank 0's first; empty: none
    write_cluster: str = ""  # JSON file for the chosen boards as a cluster, for profile=FILE.json; empty: none
    show: int = 12  # rows of the table

    def problems(self) -> Iterator[str]:
        yield from _unknown_names(self)
        yield from super().problems()
        yield from _problems(self)

    def run(self, **changes: Any) -> RunConfig:
        """The configuration of a single run, with these keys in place of the plan's."""
        own = {key.name: getattr(self, key.name) for key in fields(RunConfig)}
        own.update(output="", trace="", hosts="", question_begin=0, question_end=-1)
        own.update(changes)
        if "model" not in own["draft"].split("+"):
            own["draft_dir"] = ""
        return RunConfig(**own)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of guesses that may be chosen."""
        return tuple({source: None for name in self.chosen_drafts for source in name.split("+")})

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of networks that are there to draft."""
        head = "" if headless(self) else self.eagle_dir or self.model_dir
        there = {"eagle": head, "model": self.draft_dir, "ssm": self.ssm}
        asked = {source for name in listed(self.drafts) for source in name.split("+")}
        asked.update(METHODS[name].draft for name in self.chosen_methods if METHODS[name].draft == "ssm")
        return tuple(kind for kind, folder in there.items() if folder and (not self.drafts or kind in asked))

    @property
    def chosen_drafts(self) -> tuple[str, ...]:
        """The drafts that may be chosen, as the key `draft` takes them."""
        mixed = (f"{kind}+suffix" for kind in self.kinds)
        return listed(self.drafts) or ("suffix", *self.kinds, *(name for name in mixed if name in CHOICES["draft"]))

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods that may be chosen; plain decoding always may, small models only if there are any."""
        there = (name for name in METHODS if self.ssm or METHODS[name].draft != "ssm")
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


def words(argv: Sequence[str]) -> list[str]:
    """The words of a plan: those that were typed, and the size of a record where nothing is said."""
    return over(argv, USUAL)


def _unknown_names(c: PlanConfig) -> Iterator[str]:
    for key, known in (("methods", tuple(METHODS)), ("drafts", CHOICES["draft"])):
        for name in listed(getattr(c, key)):
            if name not in known:
                yield f"{key}={getattr(c, key)}: there is no {name}: choose among {', '.join(known)}"


def _problems(c: PlanConfig) -> Iterator[str]:
    """What is wrong with a plan, each in a sentence that names the fix."""
    yield from outside(vars(c), COUNTS)
    yield from unknown(vars(c), SPLITS)
    if headless(c) and any(map(needs_head, listed(c.drafts))):
        yield no_head(c)
    yield from problems_of_sets(listed(c.sets))
    for number in listed(c.memory):
        if not NUMBER.fullmatch(number) or float(number) <= 0:
            yield f"memory={c.memory} is no list of gigabytes: write numbers above 0, as 8,8,16"
    if c.profile == "none" and not (c.measure or c.measured):
        yield "there is no cluster to plan for: give profile=jetson-7b or profile=FILE.json, or measure=true"
    if c.profile != "none" and (c.measure or c.measured):
        yield f"profile={c.profile} and a measurement are both given: give only one of them"
    if c.temperature or c.verify != "match":
        yield "a plan is made for temperature 0: leave temperature and verify out"
    others = f"hosts={c.hosts}" if c.hosts else "" if c.profile == "none" else f"profile={c.profile}"
    if c.check and others:
        yield f"check={c.check} is for this machine as it is, and {others} for others: leave one of them out"
    if c.write_hosts and not c.hosts:
        yield f"write_hosts={c.write_hosts} wants the lines of a hosts file: add hosts=FILE"
    yield from _problems_of_runs(c)


def _problems_of_runs(c: PlanConfig) -> Iterator[str]:
    """What a single run may have, but not a plan."""
    if c.pipeline_type != RunConfig.pipeline_type or c.draft != RunConfig.draft:
        yield "a plan chooses pipeline_type and draft: write methods=NAME,NAME and drafts=NAME,NAME"
    for key in ("tp", "prompt_ids", "question_file", "stop", "ignore_eos", "trace", "output"):
        if getattr(c, key):
            yield f"a plan has no {key}: leave it out"
    if c.virtual:
        yield "a plan is made in virtual time anyhow: leave time out"
    try:
        for key in ("measured", "traces", "preset", "write_hosts", "write_cluster"):
            if getattr(c, key):
                check_output(getattr(c, key), f"choose another {key}=")
    except ValueError as error:
        yield str(error)
