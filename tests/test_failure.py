"""What cannot work ends in one sentence that names the fix; what breaks ends everywhere, and leaves no process.

Started as a program, this is a command whose rank 2 fails in mid-run.
"""
import os
import shutil
import signal
import subprocess
import sys

import pytest

from config.presets import ROOT
from launch import ask as generate
from launch.run import Command, run
from launch.words import HEADLESS_REASON
from model.cache import TreeCache
from model.weights.parts import Part
from scripts import generate as command
from tests import forked
from tests.checkpoints import split_quietly
from tests.json_files import change_json, edited_json, save_json_lines
from tests.saved import ENDLESS, here, run_program, save_tokenizer, wait_until

FIVE = "0+1+1+1+1"
FEW = ("prompt_ids=5,17,40", "ignore_eos=true", "max_new_tokens=4")


@pytest.fixture
def own(saved, tmp_path):
    """A split that a test may spoil."""
    return shutil.copytree(saved / FIVE, tmp_path / "own")


def sentence(text):
    """What was printed, if it is one sentence of ours."""
    found = text.strip()
    assert found.startswith("flowspec: ") and "\n" not in found and "Traceback" not in found, text
    return found


# --- bad input --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, message", [
    (["prompt_ids=,"], "prompt_ids=, is not possible: give token ids with commas between"),
    (["prompt_ids=5,53"], "prompt_ids has 53, but the model knows 0 to 52 only: take ids of this model's tokenizer"),
    (["prompt_ids=" + "5," * 20, "max_length=20"], "the prompt has 20 tokens and the context only 20: shorten"),
    (["prompt=" + "a" * 300, "template=none", "max_length=300"],
     "the prompt has 300 tokens and the context only 300: shorten"),
    (["stages=0+2+2"], "is split as 0+1+1+1+1, not as stages=0+2+2: leave stages out"),
    (["stages=0+2+2+2+2"], "adds up to 8 layers, but the model has 4; try 0+1+1+1+1"),
    (["question_file=nowhere.jsonl"], "there is no file"),
    (["threads_per_rank=1024"], "threads_per_rank=1024 is more than the"),
    (["template=own"], "has no chat template of its own; use template=vicuna"),
])
def test_what_cannot_be_asked_is_answered_with_the_fix(saved, error_of, words, message):
    asks = any(word.startswith(("prompt", "question")) for word in words)
    assert message in sentence(error_of(here, f"model_dir={saved / FIVE}", *words, *([] if asks else ["prompt=hello"])))


def test_a_model_that_is_not_there_is_named(tmp_path, error_of):
    printed = error_of(here, f"model_dir={tmp_path / 'x'}", "prompt_ids=5")
    assert "x/stage_0; split the model first: python split_and_save" in sentence(printed)
    printed = error_of(here, f"base_dir={tmp_path / 'x'}", "prompt_ids=5")
    assert "give the path of a model in Hugging Face form" in sentence(printed)


def other_manifest(own, **change):
    change_json(own / "stage_3" / "manifest.json", **change)


def longer_file(own):
    with (own / "stage_3" / "model.safetensors").open("ab") as file:
        file.write(b"x")


def other_split(own):
    shutil.rmtree(own / "stage_3")
    split_quietly(own.parent.parent / "saved" / "base", own.parent / "other", "0+1+1+1+1")
    shutil.copytree(own.parent / "other" / "stage_3", own / "stage_3")


@pytest.mark.parametrize("spoil, message", [
    (lambda own: shutil.rmtree(own / "stage_3"), "there is no folder"),
    (lambda own: other_manifest(own, version=99), "split again"),
    (lambda own: other_manifest(own, files={"config.json": {"bytes": 3, "sha256": ""}}), "split again"),
    (longer_file, "but its manifest says"),
    (other_split, "is a part of another split than rank 0's: copy the parts of one split"),
    (lambda own: (shutil.rmtree(own / "stage_3"), shutil.copytree(own / "stage_2", own / "stage_3")),
     "holds the part of rank 2: copy stage_3 of the split there"),
])
def test_parts_that_do_not_belong_together_are_refused_before_anything_starts(own, error_of, spoil, message):
    spoil(own)
    assert message in sentence(error_of(here, f"model_dir={own}", "prompt_ids=5"))


def test_without_a_tokenizer_a_text_is_refused_and_ids_are_not_and_of_a_large_one_a_line_is_said(own, capsys, error_of):
    (own / "stage_0" / "tokenizer.json").unlink()
    with edited_json(own / "stage_0" / "manifest.json") as content:
        del content["files"]["tokenizer.json"]
    assert "has no tokenizer" in sentence(error_of(here, f"model_dir={own}", "prompt=hello"))
    save_tokenizer(own / "stage_0", more=20)
    assert here(f"model_dir={own}", "prompt=hello", "max_new_tokens=3") == 0
    assert "has 67 tokens, but the model knows only 53: a prompt with" in capsys.readouterr().err
    assert here(f"model_dir={own}", "prompt_ids=5", "max_new_tokens=3") == 0


def test_without_a_draft_head_suffix_drafts_and_a_head_that_is_named_is_refused(saved, tmp_path, capsys, error_of):
    headless = tmp_path / "headless"
    split_quietly(saved / "base", headless, "0+4")
    words = [f"model_dir={headless}", "prompt_ids=5", "max_new_tokens=9"]
    assert here(*words, "pipeline_type=ar") == 0
    plain = capsys.readouterr()
    assert plain.err == ""
    assert here(*words) == 0
    shown = capsys.readouterr()
    assert sentence(shown.err) == f"flowspec: draft=suffix, since {HEADLESS_REASON}"
    assert shown.out.split("tokens ")[0] == plain.out.split("tokens ")[0]
    (headless / "stage_1" / "model.safetensors").unlink()  # what is refused now was refused before loading
    printed = error_of(here, *words, "draft=eagle+suffix")

    assert "has no draft head: take draft=suffix, which needs none" in sentence(printed)


@pytest.mark.parametrize("key", ["output", "trace"])
def test_a_place_that_cannot_be_written_is_refused_before_the_answer(saved, tmp_path, capsys, key):
    (tmp_path / "file").write_text("")
    assert here(f"model_dir={saved / FIVE}", "prompt_ids=5", f"{key}={tmp_path / 'file' / 'x'}") == 2
    shown = capsys.readouterr()
    assert f"choose another {key}=" in sentence(shown.err) and shown.out == ""


@pytest.mark.parametrize("words", [["link=threads"], []], ids=["threads", "processes"])
def test_damaged_weights_of_rank_0_end_all_ranks(own, tmp_path, words):
    weights = own / "stage_0" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with forked.command(tmp_path, "scripts.generate", f"model_dir={own}", "prompt_ids=5", *words) as run:
        assert run.end(60) == 2, run.stderr
    assert "model.safetensors is damaged: " in sentence(run.stderr)


def test_debug_shows_where_an_error_comes_from(saved, error_of):
    printed = error_of(here, f"model_dir={saved / FIVE}", "prompt_ids=5,53", "debug=true")
    assert "Traceback" in printed and "flowspec: prompt_ids has 53" in printed


def test_bad_input_ends_all_processes_in_one_sentence_too(saved, tmp_path):
    words = [f"model_dir={saved / '0+2+2'}", "prompt_ids=5,5,5", "max_length=3"]
    with forked.command(tmp_path, "scripts.generate", *words) as run:
        assert run.end(90) == 2  # found by rank 0, when all have started
    assert "the prompt has 3 tokens and the context only 3" in sentence(run.stderr)


@pytest.mark.parametrize("word", ["draft=\33[2J", "temprature\33=1", "seed=" + "9" * 5000, "stages=" + "1+" * 20000,
                                  "question_file=\33[2Jx", "x" * 100_000 + "=1"])
def test_what_was_typed_is_reported_in_one_short_line_that_no_terminal_obeys(error_of, word):
    printed = error_of(run, command.GENERATE, [word]).strip()
    assert printed.isprintable() and len(printed) < 1100 and printed.startswith("flowspec: ")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_rank_that_no_launcher_of_ours_has_set_is_reported(monkeypatch, error_of, name):
    monkeypatch.setenv(name, "1")
    assert f"{name}=1 in the environment was not set by FlowSpec: unset it" in error_of(run, command.GENERATE, ["toy"])


def test_an_output_destroys_nothing_that_the_run_reads(saved, tmp_path, error_of):
    questions = tmp_path / "q.jsonl"
    save_json_lines(questions, [{"turns": ["who?"]}])
    parts = saved / "0+2+2"
    printed = error_of(here, f"model_dir={parts}", f"question_file={questions}", f"output={questions}")
    assert "is the question file" in printed
    printed = error_of(here, f"model_dir={parts}", *FEW, f"output={parts / 'stage_0' / 'config.json'}")
    assert "which the run reads" in printed
    Part(parts / "stage_0").verify()


def test_a_trace_forgets_only_its_own_files(saved, tmp_path):
    (tmp_path / "rank_list.jsonl").write_text("mine")
    (tmp_path / "rank_7.jsonl").write_text("")
    assert here(f"model_dir={saved / '0+2+2'}", *FEW, f"trace={tmp_path}") == 0
    assert (tmp_path / "rank_list.jsonl").read_text() == "mine" and not (tmp_path / "rank_7.jsonl").exists()


def test_a_closed_stdout_is_no_traceback(saved):
    words = ["-m", "scripts.generate", f"model_dir={saved / '0+2+2'}", "link=threads", *FEW]
    ended = run_program("bash", "-c", 'exec "$@" >&-', "bash", sys.executable, *words)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr


# --- what breaks ------------------------------------------------------------------------------------------------------

def started(folder, saved, *words):
    """A launcher and three ranks in mid-generation."""
    return forked.command(folder, "scripts.generate", f"model_dir={saved / '0+2+2'}", *ENDLESS, *words)


def in_full_flow(run):
    return wait_until(lambda: len(run.stdout) > 50 or run.process.poll() is not None, 90) and len(run.ranks()) == 3


@pytest.mark.parametrize("lost", [0, 1])
def test_when_a_rank_is_killed_all_end_and_its_name_is_reported(saved, tmp_path, lost):
    with started(tmp_path, saved, "recover=false") as run:
        assert in_full_flow(run), run.stderr
        printed = run.stdout
        os.kill(run.ranks()[lost], signal.SIGKILL)
        assert run.end(10) == 75, run.stderr
    assert f"rank {lost} was " in run.stderr and "Traceback" not in run.stderr
    assert run.stdout.startswith(printed)


def test_when_the_launcher_is_killed_no_rank_stays(saved, tmp_path):
    with started(tmp_path, saved) as run:
        assert in_full_flow(run), run.stderr
        run.process.kill()
        assert run.end(10) == -signal.SIGKILL, run.ranks()
    assert "Traceback" not in run.stderr


def test_when_the_launcher_is_killed_while_the_ranks_start_no_rank_stays(saved, tmp_path):
    with started(tmp_path, saved) as run:
        assert wait_until(run.ranks, 60), run.stderr
        run.process.kill()
        assert run.end(60) == -signal.SIGKILL, run.ranks()
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("number, early", [(signal.SIGINT, False),
                                               (signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_and_a_polite_kill_end_all_ranks_in_one_line(saved, tmp_path, number, early):
    with started(tmp_path, saved) as run:
        assert wait_until(run.ranks, 60) if early else in_full_flow(run), run.stderr
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal does
        else:
            run.process.send_signal(number)
        assert run.end(20 if early else 10) == 128 + number, run.stderr
    assert sentence(run.stderr) == "flowspec: stopped"


def close_stdout(run):
    run.stdout.close()  # as `head` does
    return run.stderr.read()


def press_ctrl_c(run):
    run.send_signal(signal.SIGINT)
    return run.communicate()[1]


@pytest.mark.parametrize("stop, number", [(close_stdout, signal.SIGPIPE), (press_ctrl_c, signal.SIGINT)])
def test_a_reader_who_has_had_enough_and_ctrl_c_end_the_threads_in_one_line(saved, stop, number):
    words = [f"model_dir={saved / FIVE}", *ENDLESS, "link=threads"]
    with subprocess.Popen([sys.executable, "-m", "scripts.generate", *words], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout.read(20)
        assert sentence(stop(run)) == "flowspec: stopped"
    assert run.returncode == 128 + number


def failing(part):
    """A cache of which the one for `part` of all ranks has room for a few tokens only."""
    admit = TreeCache.admit

    def full(cache, nodes, parents, text):
        if cache.settled > 20 and cache.slots[0].tensors[0].shape[0] == part:
            raise ValueError("the cache is full: raise max_length")
        admit(cache, nodes, parents, text)

    return full


def test_a_stage_that_fails_in_mid_run_ends_the_threads_with_its_name(saved, monkeypatch, capsys):
    monkeypatch.setattr(TreeCache, "admit", failing(part=2))
    assert here(f"model_dir={saved / '0+1+1+2'}", *ENDLESS, "pipeline_type=ar") == 75
    shown = capsys.readouterr()
    assert "rank 3: the cache is full: raise max_length" in sentence(shown.err) and shown.out.count(" ") > 10


def test_a_stage_that_fails_in_mid_run_ends_the_processes_with_its_name(saved, tmp_path):
    words = [f"model_dir={saved / '0+1+1+2'}", *ENDLESS, "pipeline_type=ar"]
    with forked.command(tmp_path, "tests.test_failure", *words) as run:
        assert run.end(90) == 2, run.stderr
    assert run.stderr.splitlines()[1] == "flowspec: rank 3 failed: the cache is full: raise max_length"
    assert run.stdout.count(" ") > 10


if __name__ == "__main__":
    TreeCache.admit = failing(part=2)  # type: ignore[method-assign]
    sys.exit(run(Command("tests.test_failure", generate.main), sys.argv[1:]))
