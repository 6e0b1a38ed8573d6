"""Leave out each step of a file, one at a time, and report which of these mutants no test notices.

Usage: python3 -m scripts.mutants FILE [--jobs N] [--tests FILE ...] [--again]

A mutant of a Python or C file lacks one call statement, lacks one assignment that changes what it reads (`x = f(x)`,
`x += 1`), or has one condition negated: that of an `if`, a `while`, a `for` in C, a comprehension, or a conditional
expression (those inside f-strings excepted). Each is tried in a copy of the project by the tests that import the file,
and by those that --tests names, without those that compare with recorded output of this project (pytest's mark
`recorded`): these notice that something changed, not that it is wrong. Of a Python file, only tests run that execute
the changed line in their own process. A mutant with which a test ends its process, or takes more than ten times its
usual time and 20 s, is noticed.

Results are kept in out/mutants/, so that an interrupted command goes on where it stopped, as long as the file is the
same; --again tries the mutants that no test noticed once more, after a test was added.
"""
from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import pytest

from config.console import command, say
from config.presets import ROOT
from launch.progress import ProgressBar

RESULTS = ROOT / "out" / "mutants"
NATIVE = "model.native"  # what a test imports that runs the files in C
FIRST_SECONDS = 15  # of tests that run before the others are collected
HUNG_SECONDS, HUNG_TIMES = 20, 10  # a test that takes longer than this, plus ten times its usual time, has hung
SURVIVED = ""
ENDED = "the process ended, or hung"
MACRO = re.compile(rb"\b[A-Z][A-Z_]+(\(\w\))?(?=\s+[A-Za-z])")  # before a declaration or a statement of C
CHANGING_STATEMENTS = ("assignment_expression", "update_expression", "call_expression")  # of C


class Mutation(NamedTuple):
    """A change of a file: `replacement` instead of the bytes from `start` to `end`."""

    line: int
    start: int
    end: int
    action: str
    replacement: bytes

    def applied(self, content: bytes) -> bytes:
        return content[:self.start] + self.replacement + content[self.end:]

    def described(self, content: bytes) -> str:
        """Return the line and what was changed in it, shortened to one line."""
        changed_text = " ".join(content[self.start:self.end].decode().split())
        return f"line {self.line}: {self.action} `{changed_text[:90]}`"


class TimedTest(NamedTuple):
    """A test as it went without a mutant: its seconds, and the lines of the file that it executed."""

    name: str
    seconds: float
    lines: Sequence[int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


# --- what is changed --------------------------------------------------------------------------------------------------

def mutations(path: Path, content: bytes) -> list[Mutation]:
    """Return every mutation of a file, in the order of its text."""
    find_mutations = _in_python if path.suffix == ".py" else _in_c
    return sorted(find_mutations(content))


def _in_python(content: bytes) -> Iterator[Mutation]:
    starts_of_lines = [0]
    for line in content.splitlines(keepends=True):
        starts_of_lines.append(starts_of_lines[-1] + len(line))

    def change_of(node: Any, action: str) -> Mutation:
        start = starts_of_lines[node.lineno - 1] + node.col_offset
        end = starts_of_lines[node.end_lineno - 1] + node.end_col_offset
        replacement = b"pass" if action == "removed" else b"(not (%s))" % content[start:end]
        return Mutation(node.lineno, start, end, action, replacement)

    pending_nodes: list[ast.AST] = [ast.parse(content)]
    while pending_nodes:
        node = pending_nodes.pop()
        if isinstance(node, ast.JoinedStr):
            continue  # before Python 3.12, what is inside has no true position
        pending_nodes.extend(ast.iter_child_nodes(node))

        if _is_step(node):
            yield change_of(node, "removed")
        for condition in _conditions(node):
            yield change_of(condition, "negated")


def _is_step(node: ast.AST) -> bool:
    """Whether a program without this statement is still a program: a call, or a change of what exists already."""
    if isinstance(node, ast.Assign):
        targets = {ast.unparse(name) for target in node.targets for name in getattr(target, "elts", [target])}
        sources = {ast.unparse(source) for source in ast.walk(node.value) if isinstance(source, ast.expr)}
        return bool(targets & sources)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
    return is_call or isinstance(node, ast.AugAssign)


def _conditions(node: ast.AST) -> Sequence[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else ()


def _in_c(content: bytes) -> Iterator[Mutation]:
    import tree_sitter_c
    from tree_sitter import Language, Parser

    without_macros = MACRO.sub(lambda macro: b" " * len(macro.group()), content)
    pending_nodes = [Parser(Language(tree_sitter_c.language())).parse(without_macros).root_node]
    while pending_nodes:
        node = pending_nodes.pop()
        pending_nodes.extend(node.children)
        line = node.start_point[0] + 1

        if node.type == "expression_statement" and _is_step_of_c(node.children[0]):
            yield Mutation(line, node.start_byte, node.end_byte, "removed", b";")

        condition = node.child_by_field_name("condition")
        if condition is not None and not node.type.startswith("preproc"):
            condition_text = content[condition.start_byte:condition.end_byte]
            yield Mutation(condition.start_point[0] + 1, condition.start_byte, condition.end_byte, "negated",
                           b"(!(%s))" % condition_text)


def _is_step_of_c(expression: Any) -> bool:
    if expression.type != "assignment_expression":
        return expression.type in CHANGING_STATEMENTS
    target, value = (expression.child_by_field_name(side) for side in ("left", "right"))
    is_plain = expression.child_by_field_name("operator").text == b"="
    return not is_plain or value.type == "call_expression" or target.text in value.text


# --- which tests run --------------------------------------------------------------------------------------------------

def files_testing(path: str) -> list[str]:
    """Return the files of tests that import a file of the project; for one in C, those that run the native kernels."""
    module = path[:-3].replace("/", ".") if path.endswith(".py") else NATIVE
    importing_files = []
    for test_file in sorted((ROOT / "tests").glob("test_*.py")):
        imported_names = set()
        for node in ast.walk(ast.parse(test_file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported_names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
            elif isinstance(node, ast.Import):
                imported_names.update(alias.name for alias in node.names)

        if any(f"{name}.".startswith(f"{module}.") for name in imported_names):
            importing_files.append(test_file.relative_to(ROOT).as_posix())
    return importing_files


class Observer:
    """A plugin of pytest: it selects and orders tests, and passes on what became of each.

    With `traced_file` it also passes on which lines of that file each test executes.
    """

    def __init__(self, report: Callable[[dict[str, Any]], None], planned_tests: Sequence[TimedTest],
                 traced_file: Path | None = None) -> None:
        self._report, self._planned_tests, self._traced_file = report, planned_tests, traced_file
        self._lines: set[int] = set()

    def pytest_configure(self) -> None:
        if self._traced_file:  # lines of the file that run while it is imported belong to every test
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if not self._planned_tests:
            return

        items_by_name = {item.nodeid: item for item in items}
        items[:] = [items_by_name[test.name] for test in self._planned_tests]
        for item, test in zip(items, self._planned_tests):
            item.add_marker(pytest.mark.timeout(HUNG_SECONDS + HUNG_TIMES * test.seconds, method="thread"))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started_at = time.monotonic()
        self._failed = False
        self._lines.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._failed |= report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = time.monotonic() - self._started_at
        self._report({"test": nodeid, "seconds": seconds, "failed": self._failed, "lines": sorted(self._lines)})

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        return self._trace_lines if frame.f_code.co_filename == str(self._traced_file) else None

    def _trace_lines(self, frame: Any, event: str, argument: object) -> Any:
        self._lines.add(frame.f_lineno)
        return self._trace_lines


# --- the copy in which they run ---------------------------------------------------------------------------------------

class Workplace:
    """A copy of the project, in which a forked process runs tests with one file changed.

    The process has the packages of this one, so that a mutant does not wait for their imports, but nothing of the
    project: that is imported from the copy.
    """

    def __init__(self, folder: Path, path: str) -> None:
        self._folder, self._path = folder, path
        listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                 stdout=subprocess.PIPE, check=True)
        for name in filter(None, listing.stdout.decode().split("\0")):
            copied_file = folder / "project" / name
            copied_file.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy2(ROOT / name, copied_file)

        self._compiler = folder / "compiler"  # it does not optimize, which takes most of its time
        self._compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
        self._compiler.chmod(0o700)

    @property
    def file(self) -> Path:
        return self._folder / "project" / self._path

    def run(self, content: bytes, names: Sequence[str], planned_tests: Sequence[TimedTest] = ()
            ) -> tuple[int, list[dict[str, Any]]]:
        """Run the planned tests of these files up to the first that fails; without a plan run all, and trace them.

        Return the status with which the process ended, and what the `Observer` reported.
        """
        self.file.write_bytes(content)
        for compiled_file in self.file.parent.glob(f"__pycache__/{self.file.stem}.*"):
            compiled_file.unlink()  # it may be as old, in seconds, as what was written now

        report_file = self._folder / "report"
        report_file.write_bytes(b"")

        pid = os.fork()
        if not pid:
            self._run_forked(names, planned_tests, report_file)

        try:
            _, status = os.waitpid(pid, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return status, [json.loads(line) for line in report_file.read_text().splitlines()]

    def last_words(self) -> str:
        """Return the last line that pytest printed."""
        return (self._folder / "output").read_text(errors="replace").strip().rpartition("\n")[2]

    def _run_forked(self, names: Sequence[str], planned_tests: Sequence[TimedTest], report_file: Path) -> None:
        """Run tests in this forked process, and end it."""
        exit_code = 1
        try:
            os.setsid()
            self._leave_project()

            with report_file.open("w", buffering=1) as reports:
                def report(outcome: dict[str, Any]) -> None:
                    print(json.dumps(outcome), file=reports)

                is_traced = not planned_tests and self.file.suffix == ".py"
                observer = Observer(report, planned_tests, self.file if is_traced else None)

                exit_code = self._run_pytest(names, observer, ends_early=bool(planned_tests))
                if not planned_tests:
                    report({"modules": _package_modules()})
        finally:
            os._exit(exit_code)

    def _leave_project(self) -> None:
        """Forget what is imported of the project, and go on in its copy, with caches and output of its own."""
        for name, module in list(sys.modules.items()):
            if _file_of(module).startswith(f"{ROOT}{os.sep}") and "site-packages" not in _file_of(module):
                del sys.modules[name]
        project = str(self._folder / "project")
        sys.path[:] = [project, *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        os.chdir(project)

        os.environ.update(XDG_CACHE_HOME=str(self._folder / "cache"), PYTHONPATH=project, CC=str(self._compiler))
        output = os.open(self._folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)

    def _run_pytest(self, names: Sequence[str], observer: Observer, ends_early: bool) -> int:
        options = ["-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not recorded",
                   f"--basetemp={self._folder / 'temporary'}"]
        if ends_early:
            options.append("-x")
        return int(pytest.main([*options, *names], plugins=[observer]))


def _package_modules() -> list[str]:
    """Return the names of the packages' modules that are imported here."""
    return [name for name, module in list(sys.modules.items()) if "site-packages" in _file_of(module)]


def _file_of(module: Any) -> str:
    return str(getattr(module, "__file__", None))


# --- the trials -------------------------------------------------------------------------------------------------------

class Trials:
    """The mutants of a file, what became of those that were tried, and the tests by which the others are tried."""

    def __init__(self, path: str, more_test_files: Sequence[str] = ()) -> None:
        self.path = path
        self.test_files = sorted({*files_testing(path), *more_test_files})
        self.content = (ROOT / path).read_bytes()
        self.mutations = mutations(Path(path), self.content)
        self.tests: list[TimedTest] = []

        digest = hashlib.sha256(self.content).hexdigest()[:16]
        self._result_file = RESULTS / f"{path.replace('/', '.')}-{digest}.jsonl"
        self.outcomes: dict[int, str] = {}  # by the number of a mutation: the test that noticed it, or SURVIVED
        if self._result_file.exists():
            for line in self._result_file.read_text().splitlines():
                result = json.loads(line)
                self.outcomes[result["mutation"]] = result["outcome"]

    def record(self, mutant_number: int, outcome: str) -> None:
        self.outcomes[mutant_number] = outcome
        RESULTS.mkdir(parents=True, exist_ok=True)
        with self._result_file.open("a") as results:
            print(json.dumps({"mutation": mutant_number, "outcome": outcome}), file=results)

    def survivors(self) -> list[int]:
        """Return the numbers of the mutants that no test noticed."""
        return sorted(number for number, outcome in self.outcomes.items() if outcome == SURVIVED)

    def measure(self, workplace: Workplace) -> None:
        """Run the tests without a mutant, and keep those that succeed. Raises ValueError if there are none."""
        if not self.test_files:
            raise ValueError(f"no file of tests imports {self.path}: name some, as in --tests tests/test_tree.py")
        _, reports = workplace.run(self.content, self.test_files)

        for report in reports:
            for name in report.get("modules", ()):
                with suppress(Exception):
                    importlib.import_module(name)  # now, so that no mutant has to

            if report.get("failed"):
                say(f"{report['test']} fails without a mutant and is left out")
            elif "test" in report:
                self.tests.append(TimedTest(report["test"], report["seconds"], report["lines"]))

        if not self.tests:
            raise ValueError(f"no test that imports {self.path} succeeds without a mutant: {workplace.last_words()}")

    def attempt(self, mutant_number: int, workplace: Workplace) -> str:
        """Return the test that notices a mutant, or SURVIVED."""
        mutant = self.mutations[mutant_number].applied(self.content)
        for planned_tests in self._batches(self.mutations[mutant_number]):
            names = sorted({test.file for test in planned_tests})
            exit_code, reports = workplace.run(mutant, names, planned_tests)
            failed_tests = [report["test"] for report in reports if report["failed"]]
            if failed_tests:
                return str(failed_tests[0])
            if exit_code:
                return ENDED
        return SURVIVED

    def _batches(self, mutation: Mutation) -> Iterator[Sequence[TimedTest]]:
        """Yield the tests that may notice a mutant: a few that are quick or noticed many, then the others."""
        num_lines = self.content.count(b"\n", mutation.start, mutation.end) + 1
        changed_lines = set(range(mutation.line, mutation.line + num_lines))
        executing_tests = [test for test in self.tests if changed_lines.intersection(test.lines)]
        chosen_tests = executing_tests or self.tests  # others reach it in a process of their own

        num_noticed = Counter(self.outcomes.values())
        num_noticed_by_file = Counter(outcome.partition("::")[0] for outcome in self.outcomes.values())
        seconds_by_file: dict[str, float] = {}
        for test in chosen_tests:
            seconds_by_file[test.file] = seconds_by_file.get(test.file, 0) + test.seconds
        files = sorted(seconds_by_file, key=lambda file: (-num_noticed_by_file[file], seconds_by_file[file]))
        planned_tests = sorted(chosen_tests, key=lambda test: (
            files.index(test.file), -num_noticed[test.name], test.seconds))

        seconds_so_far = accumulate(test.seconds for test in planned_tests)
        num_first = max(1, sum(seconds <= FIRST_SECONDS for seconds in seconds_so_far))
        for batch in (planned_tests[:num_first], planned_tests[num_first:]):
            if batch:
                yield batch


def run_trials(trials: Trials, mutant_numbers: Sequence[int], num_jobs: int) -> None:
    """Try these mutants, `num_jobs` at a time, and record what becomes of each."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workplaces = [Workplace(Path(folder, str(number)), trials.path) for number in range(num_jobs)]
        trials.measure(workplaces[0])

        free_workplaces = get_context("fork").SimpleQueue()
        for workplace in workplaces:
            free_workplaces.put(workplace)
        with ProcessPoolExecutor(num_jobs, get_context("fork"), _start_job, (trials, free_workplaces)) as jobs:
            attempts = [jobs.submit(_attempt, mutant_number) for mutant_number in mutant_numbers]
            for attempt in ProgressBar(as_completed(attempts), total=len(mutant_numbers), unit="mutant"):
                trials.record(*attempt.result())


_job: list[Any] = []  # of a process that tries mutants: the trials, and its workplace


def _start_job(trials: Trials, free_workplaces: Any) -> None:
    _job[:] = trials, free_workplaces.get()


def _attempt(mutant_number: int) -> tuple[int, str]:
    trials, workplace = _job
    outcome = trials.attempt(mutant_number, workplace)
    trials.outcomes[mutant_number] = outcome  # in this process too, which then knows the tests that notice many
    return mutant_number, outcome


# --- the command ------------------------------------------------------------------------------------------------------

@command
def main(argv: Sequence[str]) -> int:
    """Try the mutants of a file that were not tried before, and print those that no test notices."""
    parser = argparse.ArgumentParser(prog="python3 -m scripts.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser.add_argument("file", help="a Python or C file of the project")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants tried at a time")
    parser.add_argument("--tests", nargs="+", default=(), metavar="FILE", help="files of tests that run in addition")
    parser.add_argument("--again", action="store_true", help="also try those that no test noticed before")
    options = parser.parse_args(argv)

    trials = Trials(_path_in_project(options.file), [_path_in_project(name) for name in options.tests])
    untried = [number for number in range(len(trials.mutations)) if number not in trials.outcomes]
    pending_numbers = untried + trials.survivors() if options.again else untried
    if pending_numbers:
        run_trials(trials, pending_numbers, max(1, options.jobs))

    num_tried, num_mutants = len(trials.outcomes), len(trials.mutations)
    survivors = trials.survivors()
    print(f"{trials.path}: {num_tried} mutants tried, of {num_mutants}; no test notices {len(survivors)}")
    for mutant_number in survivors:
        print(f"  {trials.mutations[mutant_number].described(trials.content)}")
    return 0


def _path_in_project(name: str) -> str:
    """Return a file's path in the repository. Raises ValueError if it cannot have mutants."""
    path = Path(name).resolve()
    if path.suffix not in (".py", ".c", ".h") or ROOT not in path.parents:
        raise ValueError(f"{name} is no Python or C file of this project: name one, as model/tree.py")
    if not path.is_file():
        raise ValueError(f"{name} does not exist: name a Python or C file of this project, as model/tree.py")
    return path.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
