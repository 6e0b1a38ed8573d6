"""Reference cases, recomputed: which of them agree, and how far the worst value is off."""
from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Any, ClassVar, Iterator, NamedTuple, Sequence

from config.keys import HELP, read_keys
from config.schema.untrusted import LARGEST, parse_object, plain, read_bytes, shown
from eval.dsi.keys import COMMAND
from eval.dsi.quantities import Case, computed, named

REMEDY = "name a JSON file of reference cases, as tests/golden/dsi/cases.json"
LARGE = 1e300  # so that differences are finite
TOLERANCE = 1e-9  # relative, of a case that names none
BEGINS = ("nonsi", "si", "dsi", "ideal_dsi_cost", "expected", "required_at_k", "useful_max_SP", "nonsi_cost")


@dataclass(frozen=True)
class Cases:
    """Computes reference cases of the paper's offline simulator and of its analysis, and compares.

    Exits with 0 if all agree, with 1 if one does not, and with 2 if the file makes no sense. A counted cost agrees
    within the relative tolerance of its case (rel_tol, or 1e-9), an analytic value also if it rounds to the digits that
    the file shows. The deviation of such a rounded value is not counted.
    """

    EXAMPLES: ClassVar[str] = f"  {COMMAND} cases tests/golden/dsi/cases.json"
    PATHS: ClassVar[Sequence[str]] = ("file",)

    # What is read
    file: str = ""  # the JSON file; also the first word alone

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError(f"there is no file of cases: {REMEDY}")


class Value(NamedTuple):
    """One expected value of a case and what was computed for it."""

    name: str
    expected: float
    got: float

    @property
    def off(self) -> float:
        """How far what was computed is off."""
        return 0.0 if self.got == self.expected else abs(self.got - self.expected)

    @property
    def deviation(self) -> float:
        """Relative, unless 0 is expected."""
        return self.off / (abs(self.expected) or 1.0)


class Found(NamedTuple):
    """What came of a case."""

    problems: list[str]  # a line for each value that does not agree
    worst: float  # deviation of the values that are not rounded in the file, or do not round to what it shows
    rounded: int  # values that round to what the file shows, which is all that can be said of them


def half_unit(value: float) -> float:
    """Half a unit of the last digit that a number shows, and a bit for the rounding of doubles."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    return 0.5 * 10.0 ** exponent * (1 + 1e-6) if isinstance(exponent, int) else 0.0


def main(argv: Sequence[str]) -> int:
    """Print how many cases of each group agree; the exit code."""
    first = [_key(word) for word in argv[:1]]
    asked = read_keys([*first, *argv[1:]], Cases, f"{COMMAND} cases")
    groups = {}
    for group, cases in read(asked.file).items():
        groups[group] = [compared(case, group) for case in cases]
    every = list(chain(*groups.values()))
    for group, results in groups.items():
        print(plain(line(group, results)))
    for found in every:
        for problem in found.problems:
            print(plain(problem))
    print(line("all", every))
    return 1 if any(found.problems for found in every) else 0


def _key(word: str) -> str:
    """The first word as a key: it may be the file alone."""
    is_key = "=" in word or word.startswith("-") or word in HELP
    return word if is_key else f"file={word}"


def line(name: str, cases: Sequence[Found]) -> str:
    """One line about a group, or about all."""
    agreed = sum(not found.problems for found in cases)
    worst = max((found.worst for found in cases), default=0.0)
    rounded = sum(found.rounded for found in cases)
    apart = f", not counting {rounded} rounded in the file" if rounded else ""
    return f"{name:<24}{agreed:>5} of {len(cases)} agree, worst deviation {worst:.1e}{apart}"


def read(path: str) -> dict[str, list[Case]]:
    """The cases of a file by group. Raises ValueError if it is none."""
    groups = parse_object(read_bytes(path, REMEDY, LARGEST), path, REMEDY).get("groups")
    if not isinstance(groups, dict):
        raise ValueError(f'{path} has no object "groups": {REMEDY}')
    for group, cases in groups.items():
        if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
            raise ValueError(f"the group {shown(group)} of {path} is not a list of objects: {REMEDY}")
    if not any(groups.values()):
        raise ValueError(f"{path} has no cases: {REMEDY}")
    return groups


def compared(case: Case, group: str) -> Found:
    """A case beside what is computed for it. Raises ValueError if it has nothing to compare, or makes no sense."""
    found = computed(case, group)
    given = {name: case[name] for name in BEGINS if name in case}
    values = list(pairs(given, found, "", case))
    if not values:
        raise ValueError(f"{named(case)} expects nothing: give it an expected value")
    tolerance = case.get("rel_tol", TOLERANCE)
    if not is_number(tolerance) or tolerance < 0:
        raise ValueError(f"{named(case)} says rel_tol={shown(tolerance)}, which should be a number from 0")
    exact = [value for value in values if value.deviation <= tolerance]
    others = [value for value in values if value.deviation > tolerance]
    rounded = [value for value in others if "inputs" in case and value.off <= half_unit(value.expected)]
    wrong = [value for value in others if value not in rounded]
    problems = [f"{case.get('id', '?')}: {name} expected {expected}, got {got}" for name, expected, got in wrong]
    worst = max((value.deviation for value in exact + wrong), default=0.0)
    return Found(problems, worst, len(rounded))


def pairs(expected: Any, got: Any, name: str, case: Case) -> Iterator[Value]:
    """The expected numbers of a case beside those that were computed, at any depth."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            if key not in got:
                raise ValueError(f"{named(case)} expects {shown(key)}, which is unknown: leave it out")
            yield from pairs(value, got[key], f"{name}.{key}".lstrip("."), case)
    elif isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            raise ValueError(f"{named(case)} expects {len(expected)} values of {name or 'it'} for {len(got)} inputs")
        for index, (value, other) in enumerate(zip(expected, got)):
            yield from pairs(value, other, f"{name}[{index}]", case)
    elif is_number(expected) and not isinstance(got, (dict, list)):
        yield Value(name, expected, float(got))
    else:
        raise ValueError(f"{named(case)} expects {name}={shown(expected)}, which has not the form of what it asks for")


def is_number(value: object) -> bool:
    """Whether JSON gave a number that can be compared."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= LARGE
