"""Reference cases, computed anew: which of them agree, and how far the worst value is off."""
from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Iterator, NamedTuple, Sequence

from config.foreign import LARGEST, parse_object, plain, read_bytes, shown
from config.keys import HELP, read_keys
from scripts.simulate.quantities import Case, computed, named

COMMAND = "python -m scripts.simulate cases"
REMEDY = "name a JSON file of reference cases, as tests/golden/dsi/cases.json"
LARGE = 1e300  # so that differences are finite
TOLERANCE = 1e-9  # relative, of a case that names none
BEGINS = ("nonsi", "si", "dsi", "ideal_dsi_cost", "expected", "required_at_k", "useful_max_SP", "nonsi_cost")
EXAMPLES = f"  {COMMAND} tests/golden/dsi/cases.json"


@dataclass(frozen=True)
class Cases:
    """Computes reference cases of the paper's offline simulator and of its analysis anew, and compares.

    Exits with 0 if all agree, with 1 if one does not, and with 2 if the file makes no sense. A counted cost agrees
    within the relative tolerance of its case (rel_tol, or 1e-9), an analytic value also if it rounds to the digits that
    the file shows.
    """

    EXAMPLES: ClassVar[str] = EXAMPLES
    PATHS: ClassVar[Sequence[str]] = ("file",)

    # What is read
    file: str = ""  # the JSON file; it may also stand alone as the first word

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError(f"there is no file of cases: {REMEDY}")


class Value(NamedTuple):
    """One expected value of a case and what was computed for it."""

    name: str
    expected: float
    got: float

    @property
    def deviation(self) -> float:
        """Relative, unless 0 is expected."""
        if self.got == self.expected:
            return 0.0
        return abs(self.got - self.expected) / (abs(self.expected) or 1.0)

    def agrees(self, tolerance: float, rounded: bool) -> bool:
        """Whether it is within the tolerance, or rounds to what is shown if the expected values are rounded."""
        return self.deviation <= tolerance or rounded and abs(self.got - self.expected) <= half_unit(self.expected)


class Found(NamedTuple):
    """What came of a case: a line for each value that does not agree, and the worst deviation."""

    problems: list[str]
    worst: float


def half_unit(value: float) -> float:
    """Half a unit of the last digit that a number shows, and a bit for the rounding of doubles."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    return 0.5 * 10.0 ** exponent * (1 + 1e-6) if isinstance(exponent, int) else 0.0


def main(argv: Sequence[str]) -> int:
    """Print how many cases of each group agree; the exit code."""
    alone = bool(argv) and "=" not in argv[0] and argv[0] not in HELP and not argv[0].startswith("-")
    asked = read_keys([f"file={argv[0]}", *argv[1:]] if alone else argv, Cases, COMMAND)
    groups = {group: [compared(case, group) for case in cases] for group, cases in read(asked.file).items()}
    every = [found for cases in groups.values() for found in cases]
    for group, cases in groups.items():
        print(plain(line(group, cases)))
    for found in every:
        for problem in found.problems:
            print(plain(problem))
    print(line("all", every))
    return 1 if any(found.problems for found in every) else 0


def line(name: str, cases: Sequence[Found]) -> str:
    """One line about a group, or about all."""
    agreed = sum(not found.problems for found in cases)
    worst = max((found.worst for found in cases), default=0.0)
    return f"{name:<24}{agreed:>5} of {len(cases)} agree, worst deviation {worst:.1e}"


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
    rounded = "inputs" in case
    wrong = [f"{case.get('id', '?')}: {name} expected {expected}, got {got}" for name, expected, got in (
        value for value in values if not value.agrees(tolerance, rounded))]
    return Found(wrong, max(value.deviation for value in values))


def pairs(expected: Any, got: Any, name: str, case: Case) -> Iterator[Value]:
    """The expected numbers of a case beside those that were computed, whatever they stand in."""
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
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGE
