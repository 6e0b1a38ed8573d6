"""The contest of all methods: its clusters and points, and who wins by how much, reckoned by hand."""
import io
import math

import pytest

from config.cli import parse
from config.profiles import PROFILES, read
from eval import contest
from eval.keys import EvalConfig, words
from eval.results_index import read as read_results
from eval.sweep import SWEEPS, commands
from eval.sweep import main as sweep_command
from eval.sweep import write as write_sweep
from tests.test_report import csv_rows, put

METHODS = {"ar": "none", "serial": "eagle+suffix", "continuous": "eagle+suffix", "streaming": "eagle+suffix"}
SPEEDS = {"qa": (1, 4, 5, 6), "gsm8k": (1, 5, 2, 4)}  # tokens per second of each method


def put_speeds(folder, **more):
    """Answers of 16 tokens to a question of each set."""
    for name, speeds in SPEEDS.items():
        for (method, draft), speed in zip(METHODS.items(), speeds):
            put(folder, method=method, draft=draft, set=name, tokens=(16,), seconds=(16 / speed,), **more)


def test_the_ratio_is_that_of_means_and_of_the_worst_set_each_to_the_best_other_method(tmp_path):
    put_speeds(tmp_path)
    for temperature in (0, 1):  # what only one method has answered does not count
        put(tmp_path, method="serial", draft="eagle+suffix", set="mt_bench", temperature=temperature, tokens=(16,),
            seconds=(1.0,))
    [row] = contest.judge({"here 1": read_results(tmp_path)})

    assert (row["point"], row["sets"], row["best_other"], row["equal"]) == ("here 1", 2, "serial", "same")
    assert row["streaming_mean"] == pytest.approx((6 + 4) / (4 + 5))
    assert row["streaming_worst"] == pytest.approx(min(6 / 5, 4 / 5))
    assert row["continuous_mean"] == pytest.approx((5 + 2) / (6 + 4))
    assert row["continuous_worst"] == pytest.approx(min(5 / 6, 2 / 5))


def test_plain_decoding_is_a_rival_with_every_draft(tmp_path):
    for method, draft, seconds in (("ar", "none", 1.0), ("serial", "eagle", 4.0), ("streaming", "eagle", 2.0)):
        put(tmp_path, method=method, draft=draft, tokens=(16,), seconds=(seconds,))
    [row] = contest.judge({"here 1": read_results(tmp_path)})
    assert (row["draft"], row["best_other"], row["streaming_mean"]) == ("eagle", "ar", 0.5)


def test_of_several_requests_the_speed_is_that_of_all_together(tmp_path):
    """Two answers of 16 tokens in 4 s are 8 tokens per second, with 4 s of waiting 4."""
    for method, seconds in (("serial", 8.0), ("streaming", 4.0)):
        for question in (1, 2):
            put(tmp_path, method=method, draft="eagle", question=question, tokens=(16,), seconds=(3.0,),
                span=[100.0, 100.0 + seconds])
    [row] = contest.judge({"here 4": read_results(tmp_path)})
    assert row["streaming_mean"] == row["streaming_worst"] == 2.0
    assert math.isnan(row["continuous_mean"])


def test_a_contest_that_is_not_complete_is_a_table_of_what_is_there(tmp_path):
    put_speeds(tmp_path / "server_1")
    screen = io.StringIO()
    text = write_sweep(tmp_path, "profiles", SWEEPS["profiles"], screen).read_text(encoding="utf-8")
    assert "| server 1 | eagle+suffix | 0 | serial | 1.111 | 0.800 | 0.700 | 0.400 |" in text
    assert "Missing: jetson-7b 1, " in text and "png" not in text and "1.111" in screen.getvalue()
    [row] = csv_rows(tmp_path / "contest.csv")
    assert row["best_other"] == "serial" and not (tmp_path / "sweep.png").exists()


def test_most_clusters_are_compared_before_more_requests_and_other_drafts():
    points = list(SWEEPS["profiles"].points)
    assert points[:len(PROFILES)] == [f"{name} 1" for name in PROFILES]
    assert points[-1] == "wan other drafts" and len(points) == 4 * len(PROFILES)


def test_every_cluster_has_as_many_stages_as_its_links_and_boards_name():
    for point, keys in SWEEPS["profiles"].points.items():
        profile = PROFILES[keys["profile"]]
        last_rank = max((rank for link in profile.links for rank in link[:2]), default=0)
        assert last_rank in (0, int(keys["stages"]), 1) and len(profile.factors) in (0, int(keys["stages"])), point


def test_clusters_are_drawn_again_from_a_seed_and_read_as_they_were_written(tmp_path):
    assert contest.draw(3) == contest.draw(3) != contest.draw(4)
    _, points = commands("random_profiles", SWEEPS["random_profiles"], [f"results={tmp_path}", "questions=2"])
    config = parse(words("emulated", points["cluster7.json 4"]), keys_class=EvalConfig)
    [cluster] = [cluster for cluster in contest.draw(0) if cluster == read(f"{tmp_path}/cluster7.json")]
    assert config.run.cluster == cluster and config.run.stages == f"{len(cluster.factors)}"
    assert config.run.questions == "4" and config.concurrency == 4, "as many questions as run at once"


def test_the_seed_of_the_contest_chooses_its_clusters(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.sweep.evaluate_points", lambda *_: 1)
    sweep_command(["random_profiles", "seed=3", f"results={tmp_path}"])
    assert read(f"{tmp_path}/cluster1.json") == contest.draw(3)[0]


def test_random_clusters_cover_what_the_named_ones_do():
    clusters = [cluster for seed in range(20) for cluster in contest.draw(seed)]
    assert {len(cluster.factors) for cluster in clusters} == set(range(2, 7))
    for name in ("model", "latency", "mbps"):
        logarithms = sorted(math.log(getattr(cluster, name)) for cluster in clusters)
        low, high = logarithms[0], logarithms[-1]
        assert logarithms[len(clusters) // 2] == pytest.approx((low + high) / 2, abs=0.1 * (high - low)), name
        named = [getattr(profile, name) for profile in PROFILES.values() if profile.mbps < 1e5]
        assert math.exp(low) <= 1.1 * min(named) or name == "mbps", name
    assert all(cluster.row <= 0.03 * cluster.model for cluster in clusters)
    assert all(len({link[2] for link in cluster.links}) > 1 for cluster in clusters)
