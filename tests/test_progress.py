"""A terminal shows a bar; a log gets a line for each tenth, and no control characters."""
import io
import re

import pytest

from launch.progress import ProgressBar
from tests.sources import measured_files


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written_to(stream, num_items=200, **options):
    for _ in ProgressBar(range(num_items), desc="splitting", file=stream, mininterval=0, miniters=1, **options):
        pass
    return stream.getvalue()


def steps_of(line):
    """A line without its time."""
    return re.sub(r" after \d\d:\d\d", "", line)


def test_a_log_gets_a_line_for_each_tenth_and_no_frames():
    lines = written_to(io.StringIO()).splitlines()

    assert [steps_of(line) for line in lines] == [f"{10 * tenth} %, splitting" for tenth in range(1, 11)]


def test_a_terminal_gets_frames():
    assert "\r" in written_to(Terminal())


@pytest.mark.parametrize("options", [{"leave": False}, {"disable": True}])
def test_what_would_not_stay_on_a_terminal_is_not_in_a_log(options):
    assert written_to(io.StringIO(), **options) == ""


def test_short_work_ends_in_one_line_and_unfinished_work_in_none():
    log = io.StringIO()
    with ProgressBar(total=4, file=log, unit="answer", mininterval=1e9) as whole:
        whole.update(4)
    with ProgressBar(total=20, file=log) as interrupted:
        interrupted.update(1)

    assert [steps_of(line) for line in log.getvalue().splitlines()] == ["100 %, answers"]


def test_a_message_disturbs_no_log():
    log = io.StringIO()
    with ProgressBar(total=4, file=log):
        ProgressBar.write("lost: rank 2", file=log)

    assert log.getvalue() == "lost: rank 2\n"


def test_all_progress_is_shown_in_this_way():
    importing = {source.path for source in measured_files() if "import tqdm" in source.text}
    # the package flowspec shows what its engine says, and imports nothing of the project
    assert importing == {"launch/progress.py", "flowspec/pipeline.py"}
