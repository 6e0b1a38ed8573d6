"""Plans: what is tried is what would happen, the best is found, what is hopeless is left out, advice says why."""
from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import lru_cache
from shutil import copytree

import numpy as np
import pytest

from cluster.board import read_hosts
from config.cli import parse
from config.files import write_json
from config.methods import METHODS
from config.profiles import PROFILES, Profile, read, touched, write
from eval.metrics import speed
from eval.plan import command
from eval.plan.advice import advice, limit, table
from eval.plan.candidates import PLAIN_METHOD, Candidate, families, shares, splits, typed
from eval.plan.hosts import write_hosts
from eval.plan.keys import COMMAND, PlanConfig, words
from eval.plan.measure import Passed, fit, times_as_long
from eval.plan.plan import Plan, cluster, plan, planned
from eval.plan.profiles import Row, compared, profiles, tried
from eval.plan.record import SETTINGS, NetworkTraits, PlanRecord, RecordedAnswer, make_record, record_of
from eval.plan.search import WORTH, Search, choice
from eval.plan.trial import Bench, Trial
from eval.recorded import OFF_TEXT, Recorded, save, settings_of
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.virtual import as_virtual
from model.sample import Sampler
from pipeline.answers import Answer, Request

VOCAB = 50
SITE = Profile("a test", layers=8, row_bytes=4096, model=80, row=0.5,
               free=8, token=0, level=4, verdict=1, latency=1,
               mbps=1000, step=2, weights=8, factors=(1.0, 1.0, 1.0, 1.0, 1.0))


def config_of(*given: str) -> PlanConfig:
    return parse(words(["toy", "profile=server", *given]), COMMAND, kind=PlanConfig)


def book(right: float = 0.8, answers: int = 2, tokens: int = 16) -> PlanRecord:
    """A made record: at each place the first of four guesses is right with this chance, or else perhaps the second."""
    chance = random.Random(7)

    def listed(token: int) -> list[list[float]]:
        others = [(token + step) % VOCAB for step in (1, 2, 3)]
        place = 0 if chance.random() < right else chance.choice([1, 3])
        return [[*others[:place], token, *others[place:]][:4],
                [-0.3, -1.5, -2.5, -3.5]]

    found = []
    for _ in range(answers):
        text = [chance.randrange(VOCAB) for _ in range(tokens)]
        tables = {name: [[listed(token) for _ in range(depths)] for token in text]
                  for name, depths in (("eagle", 6), ("ssm1", 1))}
        found.append(RecordedAnswer([1, 2, 3, 4, 5], text, tables))
    networks = {"eagle": NetworkTraits("eagle", 1, True), "ssm1": NetworkTraits("ssm1", 0, False)}
    return PlanRecord(found, networks, VOCAB, [], 8)


def bench_of(site: Profile, made_book: PlanRecord | None = None) -> Bench:
    return Bench(site, config_of(), made_book or book())


def everything(bench: Bench, methods: list[str], drafts: list[str]) -> list[Trial]:
    """Every candidate and every one with a size changed, tried with the whole record."""
    site = bench.site
    first = [one for family in families(site, 8, methods, drafts) for one in family]
    once = dict.fromkeys([*first, *(near for one in first for near in one.varied())])
    return [bench.trial(one, bench.record.answers, 99) for one in once if bench.fits(one)]


# --- what is tried is what would happen -------------------------------------------------------------------------------

@lru_cache(maxsize=None)
def recorded(temperature: int) -> tuple[PlanConfig, PlanRecord]:
    config = config_of("sets=gsm8k,humaneval", "questions=1", "max_new_tokens=24", "drafts=eagle,suffix,ssm",
                       f"temperature={temperature}")
    return config, make_record(config)


@pytest.mark.parametrize(("method", "draft", "temperature"), [
    ("ar", "none", 0), ("pipedec", "eagle", 0), ("streaming", "eagle+suffix", 0),
    ("continuous", "suffix", 0), ("specinfer", "ssm", 0), ("pruned", "ssm", 0),
    ("naive", "eagle", 1), ("streaming", "suffix", 1)])
def test_a_trial_takes_what_the_models_themselves_take_in_virtual_time(method, draft, temperature):
    """Beside the text a replayed draft guesses as it does on it, so the times are near and not the same."""
    config, found = recorded(temperature)
    site = PROFILES["jetson-7b"]
    candidate = Candidate(method, draft, ((1,), (2,)),
                          (4, 4), (("stream_rows", "16"),))
    trial = Bench(site, config, found).trial(candidate, found.answers, 24)
    keys = {"draft": draft} if method not in ("ar", "specinfer") else {}
    run = config.single(pipeline_type=method, time="virtual", profile="jetson-7b", stages="0+4+4", subseq_token=16,
                        **keys)
    with as_virtual(prepare(run)) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
        took = 0.0
        for one in found.answers:
            request = Request(one.prompt, Sampler(float(temperature)), 24, frozenset(found.ends))
            answer = pipeline.decoder.complete(request)
            assert answer.token_ids == one.text
            took += answer.prefill_seconds + answer.decode_seconds
    expected = sum(len(one.text) for one in found.answers) / took
    assert trial.speed == pytest.approx(expected, rel=1e-9 if method == "ar" else 0.1)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_tried_with_a_record(method):
    bench = bench_of(SITE, book(answers=1, tokens=6))
    first = families(SITE, 8, [method], ["eagle"])[0][0]
    found = bench.trial(first, bench.record.answers, 99)
    assert [one.new_tokens for one in found.answers] == [6] and found.candidate.method == method


def test_a_head_of_blocks_is_tried_with_its_record():
    found = book()
    for one in found.answers:
        one.guesses["dflash"] = [depths[:5] for depths in one.guesses["eagle"]]
    found.networks["dflash"] = NetworkTraits("dflash", 0, False, 6)
    bench = bench_of(SITE, found)
    speeds = {}
    for method, draft in (("ar", "none"), ("serial", "eagle"),
                          ("serial", "dflash"), ("streaming", "dflash+suffix")):
        candidate = Candidate(method, draft, ((1,), (2,)), (4, 4), ())
        speeds[method, draft] = bench.trial(candidate, found.answers, 99).speed
    assert max(speeds, key=speeds.get)[1] == "dflash+suffix"
    assert min(speeds, key=speeds.get)[0] == "ar"
    assert speeds["serial", "dflash"] > speeds["serial", "eagle"], "a block is one pass for five levels"


def test_a_record_says_the_next_token_on_a_text_and_nothing_beside_it():
    known = Recorded(9, [4, 7], [1, 2, 3])
    path = known.root
    numbers = [path := known.after(path, token) for token in (4, 7, 1, 2)]
    assert numbers == [0, 1, 2, 3]
    wrong = known.after(numbers[2], 5)
    assert wrong == OFF_TEXT == known.after(wrong, 3)
    said, inner = known.outputs(numbers[1:])
    assert said.shape == (3, 1) and inner.shape == (3, 0)
    assert known.lm_head(said).argmax(-1).tolist() == [1, 2, 3]


def test_a_slow_board_and_a_slow_link_take_their_time():
    site = replace(SITE, factors=(1.0, 3.0), links=((2, 1, 11.0, 1000.0),))
    candidate = Candidate(PLAIN_METHOD, "none", ((1,), (2,)), (2, 6))
    trial = bench_of(site).trial(candidate, book().answers[:1], 24)
    row = 20 + 180 + 1 + (1 + 11 + 1) + 1e3 * (SITE.transfer(4096 + 24) * 2 + SITE.transfer(24 + 8))
    one, = trial.answers
    assert 1e3 * one.decode_seconds == pytest.approx(15 * row, rel=1e-6)
    assert trial.busy["board 2"] == pytest.approx(180 / row, rel=0.05)
    assert limit(trial).startswith("board 2, busy 8")


# --- the search -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("site", [
    replace(SITE, model=12.0, level=20.0), replace(SITE, factors=(1.0, 3.0, 1.0)),
    replace(SITE, row=4.0, free=0, mbps=20.0)])
def test_the_choice_is_as_fast_as_the_best_of_all_candidates(site):
    site = replace(site, factors=site.factors[:3])
    bench = bench_of(site, book(answers=1))
    methods, drafts = ["ar", "serial", "continuous", "dsi"], ["eagle"]
    best = max(everything(bench, methods, drafts), key=lambda trial: trial.speed)
    search = Search(bench, families(site, 8, methods, drafts), shows_progress=False)
    chosen = choice(search.run())
    assert chosen.speed >= 0.97 * best.speed, (chosen.candidate.about, best.candidate.about)
    assert search.tried > 0


def test_where_a_level_takes_longer_than_a_token_nothing_is_guessed():
    site = replace(SITE, model=4.0, level=200.0, verdict=0.1, latency=0.01, factors=(1.0,))
    found = planned(config_of("methods=serial,pipedec", "drafts=eagle"), site, book())
    assert found.chosen.candidate.method == PLAIN_METHOD
    assert "guesses do not pay: " in advice(found)


def test_plain_decoding_is_chosen_if_the_best_is_hardly_faster():
    bench = bench_of(SITE)
    plain = bench.trial(Candidate(PLAIN_METHOD, "none", ((1,),), (8,)),
                        bench.record.answers, 9)
    slower = [spent(one.seconds / (WORTH - 0.01), one.new_tokens) for one in plain.answers]
    near = Trial(Candidate("serial", "eagle", ((1,),),
                           (8,), (("init_depth", "6"),)),
                 slower, plain.busy)
    assert choice([near, plain]) is plain
    faster = [spent(one.seconds / (WORTH + 0.01), one.new_tokens) for one in plain.answers]
    assert choice([near._replace(answers=faster), plain]).candidate.method == "serial"


def test_a_slow_link_between_boards_3_and_4_leaves_three_boards_and_the_advice_says_so():
    site = replace(SITE, links=((3, 4, 400.0, 10.0),
                                (5, 0, 400.0, 10.0), (4, 0, 400.0, 10.0)))
    found = planned(config_of("methods=continuous", "drafts=eagle"), site, book())
    assert set(found.chosen.candidate.boards) <= {1, 2, 3}
    said = advice(found)
    assert "faster than all 5 boards" in said and "the link between" in said
    assert "tokens/s" in table(found.bench, found.trials)
    assert "limited by" in table(found.bench, found.trials)


def test_memory_decides_how_few_boards_are_enough():
    site = replace(SITE, memory=(3.5,) * 5)
    bench = bench_of(site)
    fitting = [one for family in families(site, 8, ["ar"], ["suffix"])
               for one in family if bench.fits(one)]
    assert min(len(one.boards) for one in fitting) == 3
    with pytest.raises(ValueError, match="no split fits, since even the smallest part takes"):
        Search(bench_of(replace(site, memory=(0.5,) * 5)),
               families(site, 8, ["ar"], ["suffix"]))


def test_splits_follow_the_speeds_and_leave_out_the_slowest():
    assert shares([1.0, 1.0, 1.0], 8) == (3, 3, 2) or sum(shares([1.0, 1.0, 1.0], 8)) == 8
    assert shares([3.0, 1.0], 8) == (6, 2)
    assert shares([100.0, 1.0], 4) == (3, 1)
    site = replace(SITE, factors=(4.0, 1.0, 1.0))
    found = list(splits(site, 8))
    assert (((2,), (3,)), (4, 4)) in found
    assert (((2,),), (8,)) in found
    assert all(sum(held) == 8 and len(held) == len(groups) for groups, held in found)
    assert len(found) == len(set(found))


# --- files ------------------------------------------------------------------------------------------------------------

def test_a_cluster_file_is_read_as_it_was_written_and_what_is_wrong_is_reported(tmp_path):
    path = tmp_path / "site.json"
    site = replace(SITE, links=((1, 2, 3.0, 4.0),),
                   memory=(8.0,) * 5, levels=(("ssm1", 9.0),), model_of="toy")
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
        other.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=found):
            read(str(other))
    like = tmp_path / "like.json"
    like.write_text(json.dumps({"like": "jetson-7b", "factors": [1, 2],
                                "links": [[1, 2, 20, 100]]}))
    assert read(str(like)).board(2).model == 480
    assert parse([f"profile={like}"]).cluster == read(str(like))


def test_a_plan_has_as_many_boards_as_the_memory_tells_of_and_no_more(tmp_path):
    path = tmp_path / "three.json"
    path.write_text(json.dumps({"like": "jetson-7b", "memory": [8, 8, 8]}))
    usual = config_of()
    config = replace(usual, run=replace(usual.run, profile=str(path)))
    assert cluster(config).factors == (1.0, 1.0, 1.0)
    assert cluster(replace(config, boards=2)).memory == (8.0, 8.0)
    with pytest.raises(ValueError, match="memory is given for 3 of 4 boards"):
        cluster(replace(config, boards=4))
    assert cluster(replace(usual, memory="8,8,16")).memory == (8.0, 8.0, 16.0)
    assert cluster(replace(usual, memory="8")).memory == (8.0,) * 4
    with pytest.raises(ValueError, match="has 4 stages, but there are 2 boards: give boards=4"):
        planned(config_of("splits=given"), replace(SITE, factors=(1.0, 1.0)), book())


def test_the_memory_that_a_hosts_file_gives_counts_for_a_plan(tmp_path):
    hosts = tmp_path / "hosts.txt"
    usual = config_of("methods=ar")
    write(str(tmp_path / "site.json"), replace(SITE, factors=()))
    config = replace(usual, run=replace(usual.run, hosts=str(hosts), profile=str(tmp_path / "site.json")))
    hosts.write_text("b0\nb1 memory=4.5\nb2 memory=9\nb3 memory=0.5\nb4 memory=9 spare\n")
    site = cluster(config)
    assert site.memory == (4.5, 9.0, 0.5)
    assert cluster(replace(config, memory="8")).memory == (8.0,) * 3
    found = planned(config, site, book())
    assert all(3 not in one.candidate.boards for one in found.trials) and found.boards == 3
    hosts.write_text("b0\nb1 memory=0.5\nb2 memory=0.5\n")
    with pytest.raises(ValueError, match="no split fits, since even the smallest part takes"):
        planned(config, cluster(config), book())
    hosts.write_text("b0\nb1 memory=4\nb2\n")
    with pytest.raises(ValueError, match="memory is given for 1 of 2 boards: give memory= for all"):
        cluster(config)


def test_the_times_of_a_stage_are_found_again_out_of_its_passes():
    passes = [Passed(rows, context, 30 + 0.5 * max(0, rows - 16) + 0.01 * context)
              for rows in (1, 16, 32, 64, 128) for context in (16, 512)]
    assert fit(passes) == pytest.approx((30, 0.5, 16, 0.01, 0))
    sparse = [one._replace(took=one.took + 0.2 * (touched(32, 4, one.rows) - 4))
              for one in passes]
    assert fit(sparse, 32, 4) == pytest.approx((30, 0.5, 16, 0.01, 0.2))
    for times, expected in ((1.07, 1.0), (0.95, 1.0), (1.25, 1.25)):
        assert times_as_long([one._replace(took=times * one.took) for one in passes], passes) == expected


def test_a_preset_of_a_plan_stands_in_place_of_a_name(tmp_path):
    path = tmp_path / "ours.json"
    keys = {"pipeline_type": "serial", "stages": "0+4+4", "init_depth": "3"}
    write_json(path, {"preset": "toy", "keys": keys, "chosen": {}})
    config = parse([str(path), "init_depth=1"])
    assert (config.pipeline_type, config.stages, config.init_depth) == ("serial", "0+4+4", 1)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a preset"):
        parse([str(path)])


def recorded_in(path, given):
    """The words of a plan whose record, a made one, stands in a file."""
    given = [*given, f"traces={path}"]
    config = parse(words(given), COMMAND, kind=PlanConfig)
    settings = settings_of(config, SETTINGS)
    found = book()
    save(str(path), settings,
         {**found._asdict(), "answers": [one._asdict() for one in found.answers]})
    return given


def test_a_record_is_good_for_the_same_models_elsewhere_and_for_no_others(tmp_path):
    found = recorded_in(tmp_path / "traces.json", ["toy", "profile=server", "drafts=eagle"])
    config = parse(words(found), COMMAND, kind=PlanConfig)
    moved = tmp_path / "llama"
    copytree(config.run.base_dir, moved)
    assert record_of(replace(config, run=replace(config.run, base_dir=str(moved)))) == record_of(config)
    with open(moved / "config.json", "a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match=r"recorded with base_dir=llama \(.*\), and base_dir=llama \(.* is requested"):
        record_of(replace(config, run=replace(config.run, base_dir=str(moved))))
    with pytest.raises(ValueError, match="recorded with eagle_dir=eagle_deep .*, and eagle_dir=llama .* is requested"):
        record_of(replace(config, run=replace(config.run, eagle_dir=str(moved))))
    held = json.loads((tmp_path / "traces.json").read_text())
    for one in (held["networks"], *(answer["guesses"] for answer in held["answers"])):
        one.pop("eagle")
    save(str(tmp_path / "traces.json"), held["keys"], {key: held[key] for key in PlanRecord._fields})
    with pytest.raises(ValueError, match="has no guesses of eagle: name another traces="):
        record_of(config)


@pytest.mark.parametrize("damage", [
    lambda one, found: one["guesses"]["eagle"].pop(),
    lambda one, found: one["guesses"].pop("eagle"),
    lambda one, found: one["text"].__setitem__(0, VOCAB),
    lambda one, found: one["guesses"]["eagle"].__setitem__(2, []),
    lambda one, found: one["guesses"]["eagle"][0][0][1].pop(),
    lambda one, found: found["answers"].clear()])
def test_a_record_with_something_missing_is_refused(tmp_path, damage):
    path = tmp_path / "traces.json"
    config = parse(words(recorded_in(path, ["profile=server", "drafts=eagle"])), COMMAND, kind=PlanConfig)
    found = json.loads(path.read_text())
    damage(found["answers"][0], found)
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="holds no record of drafts"):
        record_of(config)


def spent(seconds, tokens=100):
    """An answer that took so long, a second of it until its first token."""
    return Answer(0, [0] * tokens, 1.0, seconds - 1.0)


def trial_of(bench, method, groups, layers, speed_):
    """A trial whose speed is said, of boards that are not busy."""
    one = Candidate(method, "eagle", groups, layers, (("init_depth", "6"),))
    return Trial(one, [spent(100 / speed_)],
                 {"drafting": 0.6, "verdicts": 0.1, "board 1": 0.3})


@pytest.mark.parametrize(("changes", "speeds", "said"), [
    ({}, (9, 8, 7), "boards 1 to 3 are faster than all 4 boards (which reach 8 tokens/s): the limit is drafting"),
    ({"factors": (1.0, 1.0, 1.0, 4.0)}, (9, 8, 7), "board 4 takes 4 times as long per layer as the slowest"),
    ({"links": ((3, 4, 90.0, 9.0),)}, (9, 9, 7), "as fast as all 4 boards (which reach 9 tokens/s): the link between 3 "
                                                 "and 4 takes"),
    ({}, (8, 9, 7), "all 4 boards are worth having, 12% faster than boards 1 to 3; limited by drafting"),
    ({}, (9, 9.1, 7), "all 4 boards are hardly worth having: 1% faster than boards 1 to 3"),
    ({}, (7, 7, 9), "guesses do not pay: a token takes 111 ms without guesses, and a level of guesses 50 ms; "
                    "serial, the best with guesses, reaches 0.78 of the speed")])
def test_advice_is_about_what_was_tried(changes, speeds, said):
    """Three boards, four boards, and plain decoding on four, as fast as is said."""
    bench = bench_of(replace(SITE, **{"factors": (1.0,) * 4, "level": 50.0, **changes}))
    three, four = (tuple((rank,) for rank in range(1, 1 + count))
                   for count in (3, 4))
    trials = [trial_of(bench, "serial", three, (3, 3, 2), speeds[0]),
              trial_of(bench, "serial", four, (2, 2, 2, 2), speeds[1]),
              trial_of(bench, PLAIN_METHOD, four, (2, 2, 2, 2), speeds[2])]
    best = sorted(trials, key=lambda trial: -trial.speed)
    assert said in advice(Plan(bench, best[0], best, 4, 3, 3))


def test_the_advice_of_a_choice_of_this_machine_is_about_what_it_measured():
    bench = bench_of(SITE)
    def tried(serial, plain):
        return [trial_of(bench, method, ((1,),), (8,), number)
                for method, number in (("serial", serial), (PLAIN_METHOD, plain))]

    trials = tried(9, 5)
    here = Plan(bench, trials[1], trials, 4,
                2, 2, tried(4, 8)[::-1])
    assert advice(here) == "guesses do not pay: serial reaches 0.50 of plain decoding"
    here = Plan(bench, trials[0], trials, 4, 2, 2, tried(6, 4))
    assert advice(here).endswith("serial over board 1 is the fastest, 1.50 times as fast as plain decoding")


def test_a_hosts_file_and_a_cluster_file_of_the_chosen_boards_alone_are_written(tmp_path, capsys):
    """Board 2 is slow, so boards 1 and 3 are chosen; as ranks 1 and 2 of a cluster of their own they take the same."""
    hosts, ours, alone_file = tmp_path / "hosts.txt", tmp_path / "ours.txt", tmp_path / "alone.json"
    site = tmp_path / "site.json"
    write(str(site), replace(SITE, factors=(1.0, 9.0, 1.0),
                             memory=(4.5, 9.0, 4.5), links=((3, 0, 2.0, 500.0),)))
    given = recorded_in(tmp_path / "traces.json", ["toy", f"profile={site}", "methods=serial", "drafts=eagle"])
    assert command.main([*given, f"write_cluster={alone_file}", f"preset={tmp_path / 'ours.json'}"]) == 0
    out = capsys.readouterr().out
    found = plan(parse(words(given), COMMAND, kind=PlanConfig))
    one = found.chosen.candidate
    assert one.boards == (1, 3) and "note:" not in out
    there = read(str(alone_file))
    assert there.factors == (1.0, 1.0) and there.memory == (4.5, 4.5)
    assert there.links == ((2, 0, 2.0, 500.0),)
    config = parse([str(tmp_path / "ours.json")])
    assert config.profile == str(alone_file)
    assert config.stages == "+".join(map(str, (0, *one.layers)))
    moved = bench_of(there).trial(replace(one, groups=((1,), (2,))),
                                  found.bench.record.answers, 99)
    assert moved.speed == pytest.approx(found.chosen.speed)
    assert command.main(given) == 0 and "add write_cluster=FILE.json" in capsys.readouterr().out
    hosts.write_text("127.0.0.1 user=a\n127.0.0.2\n# a remark\nb@127.0.0.3 folder=f interface=lo\n127.0.0.4\n")
    write_hosts(str(ours), str(hosts), one)
    assert read_hosts(str(ours)) == [read_hosts(str(hosts))[rank]
                                     for rank in (0, 1, 3)]


@pytest.mark.parametrize(("wrong", "message"), [
    ("memory=0.001", "no split fits, since even the smallest part takes"), ("memory=1,2,3", "has 3 numbers for"),
    ("memory=0", "no list of gigabytes"), ("memory=nan", "no list of gigabytes"), ("splits=x", "splits=x is unknown"),
    ("write_hosts=x", "add hosts=FILE"), ("check=2", "runs on this machine, but"),
    ("measured={}", "give only one of them"), ("preset=/dev/null/x", "cannot be written")])
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys, wrong, message):
    given = recorded_in(tmp_path / "traces.json", ["profile=jetson-7b", "boards=2", "methods=serial", "drafts=eagle"])
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("127.0.0.1\n127.0.0.2\n")
    assert command.main([*given, wrong.format(hosts)]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err)
    assert len(said.err.splitlines()) == 1 and said.out == ""


def test_a_file_of_another_measurement_is_one_sentence_and_exit_code_2(tmp_path, capsys):
    path = tmp_path / "here.json"
    for content, message in ((json.dumps({"like": "lan-1g", "model_of": "other"}), "was measured with other, but the"),
                             ("{", "is not JSON"), ("[]", "is not a JSON object")):
        path.write_text(content)
        assert command.main([f"measured={path}"]) == 2
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == 1
        read.cache_clear()
    assert command.main([f"measured={tmp_path / 'none.json'}"]) == 2
    assert "add measure=true to write it" in capsys.readouterr().err


def test_the_command_tells_a_table_advice_and_the_keys_at_the_end(tmp_path, capsys):
    traces, preset = tmp_path / "traces.json", tmp_path / "ours.json"
    given = recorded_in(traces, ["toy", "profile=lan-1g", "boards=2", "methods=serial,dsi", "drafts=eagle"])
    config = parse(words(given), COMMAND, kind=PlanConfig)
    assert command.main([*given, f"preset={preset}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("five desktops") and "tokens/s" in lines[2]
    assert any(line.startswith("advice: ") for line in lines)
    assert any(line.startswith("split: ") for line in lines)
    assert lines[-1].startswith("pipeline_type=")
    chosen = plan(config).chosen
    assert lines[-1] == typed(chosen.candidate.keys)
    found = speed([np.array([(one.new_tokens, one.seconds) for one in chosen.answers])])
    assert found.low <= found.value <= found.high and f"{found.low:.3g} to {found.high:.3g}" in lines[3]
    assert parse([str(preset)]).pipeline_type == chosen.candidate.method
    assert command.main([*given, "seed=1", "max_new_tokens=9"]) == 2
    assert "was recorded with max_new_tokens=48" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "message"), [
    ("methods=nothing", "holds nothing, which"), ("drafts=x", "holds x, which"), ("memory=-1", "no list of gigabytes"),
    ("memory=8,8", "memory=8,8 has 2 numbers for"), ("measure=true", "give only one of them"),
    ("verify=mss", "verify is a key of single runs: leave it out"), ("pipeline_type=ar", "write methods="),
    ("stop=x", "stop is a key of single runs"),
    ("profile=none", "the cluster is missing"), ("profile=nowhere.json", "there is no file"),
    ("boards=0.5", "boards"), ("profile=jetsn", "choose one of none"), ("sets=", "sets is empty")])
def test_what_cannot_be_planned_is_refused_with_the_fix(word, message, capsys):
    given = ["profile=jetson-7b"] if not word.startswith("profile") else []
    assert command.main([*given, "boards=3", word]
                        if not word.startswith("boards") else [*given, word]) == 2
    assert message in capsys.readouterr().err


def test_profiles_compare_every_method_set_by_set(monkeypatch, capsys):
    asked = ("methods=ar,streaming", "drafts=eagle", "sets=qa,gsm8k", "max_new_tokens=16")
    monkeypatch.setattr("eval.plan.profiles.record_of", lambda config: book(answers=2))
    assert profiles(["toy", *asked]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[1:11:2]] == [line.split(",")[0] for line in printed[11:]] == [*PROFILES]
    plain, _ = tried(config_of(*asked), {"wifi": PROFILES["wifi"]})
    on_wifi = replace(PROFILES["wifi"], factors=(1.0,) * 4)
    trial = bench_of(on_wifi, book(answers=2)).trial(Candidate("ar", "none",
                                                               tuple(zip(range(1, 5))), (8,) * 4),
                                                     book(answers=2).answers, 16)
    assert plain.speeds == [sum(one.new_tokens for one in trial.answers[place::2]) / sum(
        one.seconds for one in trial.answers[place::2]) for place in (0, 1)]
    rows = [Row("a", "none", "ar", (2.0, 2.0)),
            Row("a", "eagle", "pruned", (4.0, 1.0)),
            Row("a", "eagle", "streaming", (3.6, 3.0)),
            Row("a", "suffix", "naive", (9.0, 9.0))]
    assert list(compared(rows)) == ["a, eagle: streaming is 1.320 times the best other on average, 0.900 on its worst "
                                    "set (simulated)"]
