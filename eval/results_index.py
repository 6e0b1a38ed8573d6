"""The content of a results folder: its answers by method, draft, set and temperature, and what is missing."""
from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence

from config.files import fits, lines
from config.methods import METHODS
from config.questions import BUNDLED_FOLDER, load
from config.run_config import RunConfig
from config.values import listed
from eval.keys import EDITS, SETS, Contender, drafted
from eval.metrics import AnswerRecord
from eval.observe.time_breakdown import FLIGHT_LINE, TALLY_LINE, TallyLine, TallyLines, by_request
from eval.results import DELETE, answer_files, read_answers, read_environment
from pipeline.trace import rank_files

GROUP = ("method", "draft", "set", "temperature")
BASELINES = ("naive", "ar")
RESTORE = "delete it, or put it back; without it the report cannot say what is missing"
GroupKey = tuple  # method, draft, set, temperature


class NoAnswers(ValueError):
    """Raised if there is nothing to report yet."""


@dataclass(frozen=True)
class ResultsFolder:
    """The content of a results folder; `env` is env.json, empty if missing, `tally` has the lines of all starts."""

    folder: Path
    groups: Mapping[GroupKey, Sequence[AnswerRecord]]
    env: Mapping[str, Any]
    tally: TallyLines

    @property
    def starts(self) -> Sequence[Mapping[str, Any]]:
        """The keys that each start requested, as in env.json."""
        return self.env.get("starts", ())

    @property
    def methods(self) -> list[str]:
        """The methods that have answers, in the order of the request."""
        requested = [name for start in self.starts for name in listed(start["methods"])]
        return _ordered({group[0] for group in self.groups}, [*requested, *METHODS])

    @property
    def drafts(self) -> list[str]:
        """The drafts of the answers, in the order of the request."""
        used_drafts = {group[1] for group in self.groups if not _needs_no_draft(group[0])}
        return _ordered(used_drafts, _requested_drafts(self.starts))

    @property
    def baseline_draft(self) -> str:
        """The draft of the `naive` with which all are compared: the given one, else the first that was requested."""
        config = self.env.get("config")
        baseline_draft = config and (config["baseline_draft"] or _drafts(config)[0])
        return baseline_draft if baseline_draft in self.drafts else [*self.drafts, "none"][0]

    @property
    def baseline(self) -> Contender:
        """The baseline of the first table and of the plots: the first of BASELINES that has answers."""
        method = next((name for name in BASELINES if name in self.methods), BASELINES[0])
        return Contender(method, self.baseline_draft)

    @property
    def contenders(self) -> list[Contender]:
        """The methods that have answers, each with its drafts."""
        answered_pairs = {group[:2] for group in self.groups}
        all_pairs = itertools.product(self.methods, [*self.drafts, "none"])
        return [Contender(*pair) for pair in all_pairs if pair in answered_pairs]

    def label(self, contender: Contender) -> str:
        """Return the name of a contender in tables and plots, with its draft if there are several."""
        has_several_drafts = len({*self.drafts, *_requested_drafts(self.starts)}) > 1
        shows_draft = has_several_drafts and not _needs_no_draft(contender.method)
        return ", ".join(contender) if shows_draft else contender.method

    @property
    def sets(self) -> list[str]:
        """The data sets that have answers, in the order of the papers."""
        return _ordered({group[2] for group in self.groups}, listed(SETS))

    @property
    def averaged_sets(self) -> list[str]:
        """The data sets of a mean: those that have answers but EDITS, or EDITS if it is the only one."""
        return [name for name in self.sets if name != EDITS] or self.sets

    @property
    def temperatures(self) -> list[float]:
        """The temperatures that have answers, in ascending order."""
        return sorted({group[3] for group in self.groups})

    @property
    def answers(self) -> list[AnswerRecord]:
        return [answer for group in self.groups.values() for answer in group]

    def of(self, contender: Contender, set_name: str, temperature: float) -> Sequence[AnswerRecord]:
        """Return the answers of a contender to the data set `set_name` at a temperature."""
        return self.groups.get((*contender, set_name, temperature), ())


def provenance(answers: Sequence[AnswerRecord]) -> str:
    """Return, for titles, whether answers were measured, emulated or simulated, the cluster, and a lossy rule."""
    kinds = sorted(set(map(_kind_of_times, answers)))
    profile_names = sorted({answer["profile"] for answer in answers} - {"none"})
    cluster_text = f", profile {', '.join(profile_names)}" if profile_names else ""
    lossy_rules = sorted({answer.get("lossy_rule", "") for answer in answers} - {""})
    lossy_text = f", lossy: verify={', '.join(lossy_rules)}" if lossy_rules else ""
    return " and ".join(kinds) + cluster_text + lossy_text


def _kind_of_times(answer: AnswerRecord) -> str:
    if answer.get("simulated"):
        return "simulated"
    return "emulated" if answer["emulated"] else "measured"


def read(folder: str | Path) -> ResultsFolder:
    """Read a results folder. Raise NoAnswers if it has none, and another ValueError for an invalid line."""
    folder = Path(folder)
    groups: dict[GroupKey, list[AnswerRecord]] = {}
    for path in answer_files(folder):
        for answer in read_answers(path):
            group = tuple(answer[key] for key in GROUP)
            groups.setdefault(group, []).append(answer)

    if not groups:
        raise NoAnswers(f"{folder} has no answers: make some with bash run_eval.sh results={folder}")
    tally = by_request(line for start_dir in sorted(folder.glob("tally/*")) for line in _tally(start_dir))
    return ResultsFolder(folder, groups, read_environment(folder, RESTORE), tally)


def _tally(start_dir: Path) -> Iterator[TallyLine]:
    """Yield the lines of all ranks of a start. Raise ValueError for an invalid one."""
    for path in rank_files(start_dir):
        for line_number, entry in lines(path, DELETE, growing=True):
            is_sound = fits(entry, TALLY_LINE)
            if is_sound and "flight" in entry:
                is_sound = fits(entry, FLIGHT_LINE)
            if not is_sound:
                raise ValueError(f"line {line_number} of {path} is not in the form that an evaluation writes: {DELETE}")
            yield {**entry, "launch": start_dir.name}


def _ordered(names: set[str], known_order: Sequence[str]) -> list[str]:
    """Return the names in the order of `known_order`, then the others in alphabetical order."""
    order = [*known_order, *sorted(names)]
    return sorted(names, key=order.index)


def missing(results: ResultsFolder) -> list[str]:
    """Return the missing answers, a sentence for each method, draft, set and temperature."""
    sentences = {}
    for start in results.starts:
        temperatures = [float(word) for word in listed(start["temperatures"])]
        contenders = drafted(listed(start["methods"]), _drafts(start))

        for set_name in listed(start["sets"]):
            num_wanted = _num_wanted(results, set_name, start)
            for group in itertools.product(contenders, [set_name], temperatures):
                num_existing = len(results.of(*group))
                if num_existing < num_wanted:
                    contender, _, temperature = group
                    sentences[group] = (f"{results.label(contender)} has {num_existing} of {num_wanted} answers on "
                                        f"{set_name} at temperature {temperature:g}")

    return [sentence for _, sentence in sorted(sentences.items())]


def _num_wanted(results: ResultsFolder, set_name: str, start: Mapping[str, Any]) -> int:
    """Return the number of answers to a set that each method should give; if the set is gone, the most of any."""
    try:
        data_dir = results.env["config"]["data"] or BUNDLED_FOLDER  # the toy's sets have as many
        question_range = RunConfig(questions=start["questions"]).question_range
        questions = load(data_dir, set_name, *question_range)
        return len(questions) * int(start["repeats"])
    except ValueError:
        set_sizes = [len(answers) for group, answers in results.groups.items() if group[2] == set_name]
        return max(set_sizes, default=0)


def _needs_no_draft(method: str) -> bool:
    """Whether a method works without a draft."""
    return method in METHODS and METHODS[method].draft == "none"


def _drafts(request: Mapping[str, Any]) -> Sequence[str]:
    """Return the drafts that a start or a configuration requests."""
    return listed(request["drafts"]) or (request["draft"],)


def _requested_drafts(starts: Iterable[Mapping[str, Any]]) -> list[str]:
    return [name for start in starts for name in _drafts(start)]
