"""Plans: a trial is what a run would do, the best split is found, and what a plan prints and refuses."""
from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cluster.board import read_hosts
from config.cli import parse
from config.keys import raw_values
from config.profiles import PROFILES, Profile, read, touched, write
from eval.keys import Contender
from eval.plan import command
from eval.plan.keys import PlanConfig
from eval.plan.search import choice, climb, search
from eval.plan.trial import Trial, open_bench
from launch.measure import fit, times_as_long
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.splits import Split, best_splits
from launch.timing import Passed
from launch.virtual import as_virtual
from pipeline.answers import Answer
from tests.checkpoints import refused
from tests.json_files import save_json
from tests.test_thrift import SITE as ONE_DEVICE

SITE = replace(ONE_DEVICE, weights=8, factors=(1.0, 1.0, 1.0))
SHORT = "sets=qa", "max_new_tokens=8"


def config_of(*words: str) -> PlanConfig:
    profile = [] if any(word.startswith("profile=") for word in words) else ["profile=jetson-7b"]
    return parse(["toy", *profile, *words], keys_class=PlanConfig)


def jetson_with(folder: Path, **changes: Any) -> str:
    """The key of a profile that is jetson-7b but for some fields."""
    save_json(folder / "boards.json", {"like": "jetson-7b", **changes})
    return f"profile={folder / 'boards.json'}"


def cluster_of(*words: str) -> Profile:
    """The cluster that a plan with these words has."""
    return command.cluster_of(config_of(*words))


def all_splits(num_boards: int, num_layers: int):
    """Every split over any of these boards."""
    for count in range(1, 1 + num_boards):
        for boards in itertools.combinations(range(1, 1 + num_boards), count):
            for inner_cuts in itertools.combinations(range(1, num_layers), count - 1):
                cuts = 0, *inner_cuts, num_layers
                yield Split(0, 0, boards, tuple(end - begin for begin, end in zip(cuts, cuts[1:])))


def random_cluster(random: Random, num_boards: int) -> Profile:
    """A cluster with unequal boards and some unequal wires, on logarithmic scales."""
    def drawn(least: float, most: float) -> float:
        return math.exp(random.uniform(math.log(least), math.log(most)))

    links = tuple((a, b, drawn(0.05, 20), drawn(10, 1000))
                  for a, b in itertools.combinations(range(1 + num_boards), 2) if random.random() < 0.3)
    return replace(PROFILES["jetson-7b"], model=drawn(100, 800), row=drawn(0.05, 4), latency=drawn(0.05, 5),
                   mbps=drawn(10, 10_000), factors=tuple(drawn(1, 4) for _ in range(num_boards)), links=links)


# --- trials and splits ------------------------------------------------------------------------------------------------

def test_a_trial_takes_exactly_the_time_of_a_run(tmp_path):
    config = config_of(*SHORT, jetson_with(tmp_path, factors=[1, 3]), "methods=streaming,specinfer",
                       "drafts=eagle+suffix", "temperature=1")
    with open_bench(command.cluster_of(config), config) as bench:
        trials = [bench.trial(contender, Split(0, 0, (1, 2), (5, 3))) for contender in config.contenders]

    for (method, draft), _, answers in trials:
        run = config.with_draft(draft, pipeline_type=method, time="virtual", stages="0+5+3")
        with as_virtual(prepare(run)) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
            decoder = pipeline.decoder
            pipeline.reset_measurements()
            answer = pipeline.generate(question_of(config), max_new_tokens=8).answer
            assert decoder is pipeline.decoder
        assert [(each.token_ids, each.seconds) for each in answers] == [(answer.token_ids, answer.seconds)], method


def question_of(config: PlanConfig) -> str:
    [question] = config.questions_by_set["qa"]
    return question.turns[0]


def test_a_plan_reaches_nearly_the_speed_of_the_best_of_all_splits(tmp_path):
    """Two clusters of three boards, a model of five layers: plans try some splits, and here all are tried."""
    config, random = config_of(*SHORT, "drafts=eagle", jetson_with(tmp_path, level=120)), Random(1)
    contender = Contender("streaming", "eagle")
    with open_bench(SITE, config) as bench:
        bench.num_layers = 5
        for _ in range(2):
            bench.profile = random_cluster(random, 3)
            best_speed = max(bench.trial(contender, split).speed for split in all_splits(3, 5))
            chosen = choice(search(bench, config))
            assert chosen.speed >= 0.97 * best_speed, bench.profile


def test_the_splits_to_try_are_those_that_no_other_one_beats():
    random = Random(2)
    for _ in range(5):
        site, max_layers = random_cluster(random, 3), [6, 4, 6]
        fitting = [split for split in all_splits(3, 6) if all(
            count <= max_layers[board - 1] for board, count in zip(split.boards, split.layers))]
        times = {times_of(site, split): split for split in fitting}
        unbeaten = [pair for pair in times if not any(
            other != pair and other[0] <= pair[0] and other[1] <= pair[1] for other in times)]

        splits = best_splits(site, max_layers, 6, 16)
        assert [split[:2] for split in splits] == sorted(unbeaten)
        assert all(times_of(site, split) == split[:2] for split in splits)
    assert best_splits(SITE, [2, 2, 1], 6, 16) == []


def times_of(site: Profile, split: Split) -> tuple[int, int]:
    """The time of a round with 16 rows, and that of the slowest stage or wire, in nanoseconds."""
    layer_times = [round(1e9 * site.board(board).stage(1 / sum(split.layers), 16, 0)) for board in split.boards]
    stage_times = [count * layer_time for count, layer_time in zip(split.layers, layer_times)]
    wires = [site.link(*ends) for ends in zip((0, *split.boards), (*split.boards, 0))]
    transfer_times = [0, *(round(1e9 * wire.transfer(16 * wire.row_bytes)) for wire in wires[1:])]
    latency_times = [round(1e6 * wire.latency) for wire in wires]
    return sum(stage_times + transfer_times + latency_times), max(stage_times + transfer_times)


def trial_of(method: str, speed: float, boards: tuple[int, ...] = (1,)) -> Trial:
    """A trial of this speed."""
    split = Split(0, 0, boards, (1,) * len(boards))
    return Trial(Contender(method, "suffix"), split, [Answer(0, [0] * 100, 0, 100 / speed)])


def test_the_search_climbs_to_the_fastest_split_by_few_trials():
    splits, tried = [Split(number, -number, (1,), (number,)) for number in range(40)], []

    def try_split(split: Split) -> Trial:
        tried.append(split.round_time)
        return trial_of("streaming", 100 - abs(split.round_time - 23))

    assert max(climb(splits, try_split), key=lambda trial: trial.speed).speed == 100
    assert len(tried) == len(set(tried)) < 15
    assert len(climb(splits[:1], try_split)) == 1


def test_plain_decoding_is_chosen_where_guesses_gain_hardly_anything():
    plain = trial_of("ar", 10)
    assert choice([trial_of("streaming", 10.1), plain]) is plain
    assert choice([trial_of("streaming", 10.3), plain]).contender.method == "streaming"


# --- the command ------------------------------------------------------------------------------------------------------

def test_the_command_prints_the_trials_and_at_the_end_the_keys_of_the_choice(tmp_path, capsys):
    """Board 2 is slow, so that the plan leaves it out, and the written hosts file, too."""
    profile_file, hosts, chosen_hosts = tmp_path / "site.json", tmp_path / "hosts.txt", tmp_path / "chosen.txt"
    write(str(profile_file), replace(SITE, factors=(1.0, 90.0, 1.0)))
    hosts.write_text("127.0.0.1 user=a\n127.0.0.2\n# a remark\nb@127.0.0.3 folder=f interface=lo memory=8\n")
    hosts.write_text(hosts.read_text().replace("127.0.0.2\n", "127.0.0.2 memory=8\n127.0.0.4 memory=4.5\n"))
    words = ["toy", f"profile={profile_file}", f"hosts={hosts}", *SHORT, "drafts=suffix,eagle"]
    assert command.main([*words, f"write_hosts={chosen_hosts}"]) == 0

    about, heading, *rows, note, written, keys = capsys.readouterr().out.splitlines()
    assert about == "a test (simulated)" and heading.split()[:4] == ["method", "stages", "boards", "tokens/s"]
    assert {tuple(row.split()[:2]) for row in rows} == {("ar", "none"), ("streaming", "suffix"), ("streaming", "eagle")}
    method, draft, stages, boards, *_ = rows[0].split()
    assert keys == f"pipeline_type={method} draft={draft} stages={stages}"
    assert boards == "1,3" and "on boards 1, 3" in note and str(chosen_hosts) in written
    all_lines = read_hosts(str(hosts))
    assert read_hosts(str(chosen_hosts)) == [all_lines[rank] for rank in (0, 1, 3)]


def test_a_plan_has_the_boards_and_the_memory_that_are_described(tmp_path):
    hosts, three_boards = tmp_path / "hosts.txt", jetson_with(tmp_path, memory=[8, 8, 8])
    assert cluster_of(three_boards).factors == (1.0,) * 3
    assert cluster_of(three_boards, "boards=2").memory == (8.0, 8.0)
    assert cluster_of("memory=8,8,16").memory == (8.0, 8.0, 16.0)
    assert cluster_of("memory=8").memory == (8.0,) * 4

    hosts.write_text("b0\nb1 memory=4.5\nb2 memory=9\nb4 memory=9 spare\n")
    assert cluster_of(f"hosts={hosts}").memory == (4.5, 9.0)
    assert cluster_of(f"hosts={hosts}", "memory=8").memory == (8.0, 8.0)


@pytest.mark.parametrize("words, message", [
    ("memory=0.001", "no split fits: 8 layers take"), ("memory=1,2,3", "memory is given for 3 boards, and there are 2"),
    ("memory=0", "no list of gigabytes"), ("memory=nan", "no list of gigabytes"), ("write_hosts=x", "add hosts=FILE"),
    ("measured=x.json", "give only one of them"), ("profile=none", "the cluster is missing"),
    ("profile=none measured=x", "name one that ends with .json"), ("profile=nowhere.json", "there is no file"),
    ("profile=none measured=x.json", "x.json needs the boards of a hosts file"),
    ("methods=nothing", "nothing has no plans: choose one of ar,"), ("methods=tp", "tp has no plans"),
    ("drafts=x", "x is unknown"), ("pipeline_type=ar", "write methods="), ("stages=2", "stages is a key of single"),
    ("verify=mss", "verify is a key of single runs: leave it out"), ("measure=true", "write hosts=FILE measured=FILE"),
    ("traces=x", "unknown key traces: leave it out"), ("sets=", "sets is empty"), ("boards=0.5", "boards=0.5"),
    ("profile=jetsn", "choose one of none")])
def test_what_cannot_be_planned_is_one_sentence_and_exit_code_2(words, message, sentence_of):
    typed_words = words.split()
    typed_keys = raw_values(typed_words)
    other_words = [word for word in ("profile=jetson-7b", "boards=2", "drafts=suffix")
                   if word.partition("=")[0] not in typed_keys]
    assert message in sentence_of(command.main, ["toy", *other_words, *typed_words])


def test_a_profile_without_weights_has_no_memory(tmp_path):
    write(str(tmp_path / "site.json"), replace(SITE, weights=0.0))
    with refused("but not the size of layers: add weights"):
        cluster_of(f"profile={tmp_path / 'site.json'}", "memory=8")


# --- files and figures ------------------------------------------------------------------------------------------------

def test_a_cluster_file_is_read_as_it_was_written_and_what_is_wrong_is_reported(tmp_path):
    path = tmp_path / "site.json"
    site = replace(SITE, links=((1, 2, 3.0, 4.0),),
                   memory=(8.0,) * 3, levels=(("ssm1", 9.0),))
    write(str(path), site)
    assert read(str(path)) == site
    slow = site.slowed(2)
    assert slow.link(2, 1).latency == 6
    assert slow.link(2, 1).mbps == 2 and slow.drafting("ssm1").level == 18
    assert site.link(0, 1) is site and site.board(2) == site
    for number, (content, found) in enumerate((
            ({"like": "jetson-7b", "latency": -1}, "says latency=-1: write a number from 0"),
            ({"about": "x"}, "lacks layers"),
            ([1], "is not a JSON object"), ({"like": "nothing"}, "says like=.nothing.: write one of jetson-7b"),
            ({"like": "server", "factors": [1, 1e290]}, "says factors=.1, 1e.290.: write a list"),
            ({"like": "server", "mbps": 1e-200}, "says mbps=1e-200: write a number from 0.001"),
            ({"like": "server", "factors": [1, 1],
              "links": [[1, 3, 2, 10]]}, "names board 3, but has only 2"),
            ({"like": "server", "links": [[1, 1, 2, 10]]}, "has a link between 1 and 1: leave it out"),
            ({"like": "server", "links": [[1, 2, 2, 10],
                                          [2, 1, 3, 10]]}, "has a second link between 2 and 1: leave it out"),
            ({"like": "server", "factors": [1, 1], "memory": [8]}, "factors of 2 boards, but memory of 1"))):
        other = tmp_path / f"other{number}.json"
        save_json(other, content)
        with pytest.raises(ValueError, match=found):
            read(str(other))

    profile_word = jetson_with(tmp_path, factors=[1, 2], links=[[1, 2, 20, 100]])
    two_boards = read(profile_word.partition("=")[2])
    assert two_boards.board(2).model == 480
    assert parse([profile_word]).cluster == two_boards


def test_the_times_of_a_stage_are_found_again_out_of_its_passes():
    passes = [Passed(rows, context, 30 + 0.5 * max(0, rows - 16) + 0.01 * context)
              for rows in (1, 16, 32, 64, 128) for context in (16, 512)]
    assert fit(passes) == pytest.approx((30, 0.5, 16, 0.01, 0))
    sparse = [one._replace(took=one.took + 0.2 * (touched(32, 4, one.rows) - 4))
              for one in passes]
    assert fit(sparse, 32, 4) == pytest.approx((30, 0.5, 16, 0.01, 0.2))
    for times, expected in ((1.07, 1.0), (0.95, 1.0), (1.25, 1.25)):
        assert times_as_long([one._replace(took=times * one.took) for one in passes], passes) == expected
