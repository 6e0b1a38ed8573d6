"""What a results folder holds: its answers by method, draft, set and temperature, and what is missing in it.

It knows no figures, and nothing about how answers were made. It works on what is there.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from config.drafts import listed
from config.files import fits, lines, whole
from config.methods import METHODS
from config.questions import load
from eval import metrics
from eval.keys import Contender
from eval.metrics import Answer
from eval.results import read_answers
from pipeline.trace import rank_files

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")  # in the order of the papers
GROUP = ("method", "draft", "set", "temperature")
NAMED = ("draft", "drafts", "baseline_draft")  # keys about drafts, which older folders do not have
DELETE = "delete this line"
GONE = "delete it, or put it back; without it the report cannot say what is missing"
Group = tuple  # method, draft, set, temperature


def _temperatures(value: Any) -> bool:
    """Whether a value is a text of numbers with commas between."""
    try:
        return fits([float(word) for word in listed(value)], [float])
    except (ValueError, AttributeError):
        return False


ENVIRONMENT = {"config": dict, "machine": dict, "starts": [{
    "methods": str, "sets": str, "temperatures": _temperatures, "question_begin": int, "question_end": int,
    "repeats": int}]}


@dataclass(frozen=True)
class Found:
    """What a results folder holds: the answers by method, draft, set and temperature, env.json, and the tally's lines.
    """

    folder: Path
    groups: Mapping[Group, Sequence[Answer]]
    env: Mapping[str, Any]
    tally: Sequence[metrics.TallyLine]

    @property
    def methods(self) -> list[str]:
        """The methods that have answers, in the order in which they were asked for."""
        starts = self.env.get("starts", ())
        asked = dict.fromkeys(name for start in starts for name in listed(start["methods"]))
        return _ordered({group[0] for group in self.groups}, [*asked, *METHODS])

    @property
    def drafts(self) -> list[str]:
        """The drafts that answers were made with, in the order in which they were asked for."""
        return _ordered({group[1] for group in self.groups if not _needs_none(group[0])}, self._asked_drafts)

    @property
    def baseline_draft(self) -> str:
        """The draft whose `naive` all are compared with: the one that was named, else the first that was asked for."""
        config = self.env.get("config", {})
        named = config.get("baseline_draft") or next(iter(_drafts(config)), "")
        return named if named in self.drafts else next(iter(self.drafts), "none")

    @property
    def _asked_drafts(self) -> list[str]:
        """The drafts that any start asked for."""
        return list(dict.fromkeys(name for start in self.env.get("starts", ()) for name in _drafts(start)))

    @property
    def contenders(self) -> list[Contender]:
        """The methods that have answers, each with its drafts."""
        there = {Contender(*group[:2]) for group in self.groups}
        drafts = dict.fromkeys([*self.drafts, "none"])
        every = [Contender(method, draft) for method in self.methods for draft in drafts]
        return [contender for contender in every if contender in there]

    def label(self, contender: Contender) -> str:
        """A contender as tables and plots call it: by its draft too, if there are several."""
        several = len({*self.drafts, *self._asked_drafts}) > 1
        return contender.method if _needs_none(contender.method) or not several else ", ".join(contender)

    @property
    def sets(self) -> list[str]:
        """The data sets that have answers, in the order of the papers."""
        return _ordered({group[2] for group in self.groups}, SETS)

    @property
    def temperatures(self) -> list[float]:
        """The temperatures that have answers, rising."""
        return sorted({group[3] for group in self.groups})

    @property
    def answers(self) -> list[Answer]:
        """All answers, group by group."""
        return [answer for group in self.groups.values() for answer in group]

    @property
    def provenance(self) -> str:
        """Where the figures come from, as every table and plot has to say."""
        return provenance(self.answers)

    def of(self, contender: Contender, name: str, temperature: float) -> Sequence[Answer]:
        """The answers of a contender to the data set `name` at a temperature; none if it was not asked."""
        return self.groups.get((*contender, name, temperature), ())

    def of_all_sets(self, contender: Contender, temperature: float) -> list[Answer]:
        """The answers of a contender to all data sets at a temperature."""
        return [answer for name in self.sets for answer in self.of(contender, name, temperature)]


class NoAnswers(ValueError):
    """There is nothing to report yet."""


def provenance(answers: Sequence[Answer]) -> str:
    """Whether answers were measured, emulated or simulated, and on which cluster."""
    kinds = sorted({_kind(answer) for answer in answers})
    profiles = sorted({answer["profile"] for answer in answers} - {"none"})
    cluster = f", profile {', '.join(profiles)}" if profiles else ""
    return " and ".join(kinds) + cluster


def _kind(answer: Answer) -> str:
    if answer.get("simulated"):
        return "simulated"
    return "emulated" if answer["emulated"] else "measured"


def read(folder: str | Path) -> Found:
    """Read a results folder. Raises NoAnswers if it has none, and another ValueError for a line that is spoiled."""
    folder = Path(folder)
    groups: dict[Group, list[Answer]] = {}
    for path in sorted(folder.glob("answers/*/*.jsonl")):
        for answer in read_answers(path):
            group = tuple(answer[key] for key in GROUP)
            groups.setdefault(group, []).append(answer)
    if not groups:
        raise NoAnswers(f"{folder} has no answers: make some with bash run_eval.sh results={folder}")
    tally = []
    for start in sorted(folder.glob("tally/*")):
        for path in rank_files(start):
            tally += [{**line, "launch": start.name} for line in _tally_lines(path)]
    return Found(folder, groups, _environment(folder / "env.json"), tally)


def _environment(path: Path) -> dict[str, Any]:
    """What env.json says; nothing if it is not there. Raises ValueError if no evaluation wrote it."""
    if not path.is_file():
        return {}
    env: dict[str, Any] = whole(path, GONE)
    empty: dict[str, Any] = {"starts": [], "config": {}, "machine": {}}
    if not isinstance(env, dict) or not fits({**empty, **env}, ENVIRONMENT) or not _names_drafts(env):
        raise ValueError(f"{path} is not what an evaluation writes: {GONE}")
    return env


def _names_drafts(env: Mapping[str, Any]) -> bool:
    """Whether the drafts that were asked for are texts, where env.json names them."""
    usual, form = dict.fromkeys(NAMED, ""), dict.fromkeys(NAMED, str)
    asked = [env.get("config", {}), *env.get("starts", ())]
    return all(fits({**usual, **keys}, form) for keys in asked)


def _tally_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that somebody may still be writing. Raises ValueError for one of another form."""
    for number, entry in lines(path, DELETE, growing=True):
        sound = fits(entry, metrics.TALLY_LINE)
        if sound and "flight" in entry:
            sound = fits(entry, metrics.FLIGHT_LINE)
        if not sound:
            raise ValueError(f"line {number} of {path} is not what an evaluation writes: {DELETE}")
        yield entry


def _ordered(names: set[str], known: Sequence[str]) -> list[str]:
    """Names that are known in their order, then the others by the alphabet."""
    first = dict.fromkeys(name for name in known if name in names)
    return [*first, *sorted(names - set(known))]


def missing(found: Found) -> list[str]:
    """What was asked for and is not there yet, a sentence for each method, draft, set and temperature."""
    gaps = {}
    for start in found.env.get("starts", ()):
        temperatures = [float(word) for word in listed(start["temperatures"])]
        for name in listed(start["sets"]):
            wanted = _wanted(found, name, start)
            for group in itertools.product(_asked(start), [name], temperatures):
                there = len(found.of(*group))
                if there < wanted:
                    who = found.label(group[0])
                    gaps[group] = f"{who} has {there} of {wanted} answers on {name} at temperature {group[2]:g}"
    return [text for _, text in sorted(gaps.items())]


def _wanted(found: Found, name: str, start: Mapping[str, Any]) -> int:
    """How many answers to a data set each method was asked for; where the set is gone, the most that one has given."""
    try:
        data = found.env["config"]["data"]
        questions = load(data, name, start["question_begin"], start["question_end"])
        return len(questions) * int(start["repeats"])
    except (ValueError, KeyError):
        groups = [answers for group, answers in found.groups.items() if group[2] == name]
        return max(map(len, groups), default=0)


def _asked(start: Mapping[str, Any]) -> list[Contender]:
    """The methods that a start asked for, each with its drafts."""
    found = []
    for method in listed(start["methods"]):
        own = METHODS[method].draft if method in METHODS else "eagle"
        drafts = _drafts(start) if own == "eagle" else [own]
        found += [Contender(method, draft) for draft in drafts]
    return found


def _needs_none(method: str) -> bool:
    """Whether a method works without a draft."""
    return method in METHODS and METHODS[method].draft == "none"


def _drafts(asked: Mapping[str, Any]) -> list[str]:
    """The drafts that a start or a configuration asks for; one that says nothing knew heads alone."""
    return [*listed(asked.get("drafts", ""))] or [asked.get("draft", "eagle")]
