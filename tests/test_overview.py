"""What is known of a pipeline's boards: figures against hand-made visits, the planner's advice, and the terminal."""
from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from cluster.agreement import clean, code_version
from cluster.heartbeat import RankState
from config import cli
from launch import status
from launch.overview import Overview, short_name
from pipeline import trace
from pipeline.messages import Visit
from pipeline.stage_times import StageTimes
from tests.checkpoints import refused
from tests.serving import live
from tp.links import Placement

HIDDEN, LAYERS, ROUND_TRIP = 1000, (0, 5, 3), 0.5  # ms
NAMES = "rank 0 (laptop, 10.0.0.1)", "rank 1 (pi-1, 10.0.0.2)", "rank 2 (pi-2, 10.0.0.3)"
HOSTS = "10.0.0.1 name=laptop\n10.0.0.2 name=pi-1 layers=5 wire=100,0.3\n10.0.0.3 name=pi-2 layers=3 wire=50,0.3\n"


@pytest.fixture
def pipeline(tmp_path):
    """A pipeline over two boards without a process; each has room for two further layers."""
    (tmp_path / "hosts").write_text(HOSTS)
    states = {name: RankState(0.25, ROUND_TRIP, 1.0, 0.4) for name in NAMES}
    spec = SimpleNamespace(placement=Placement.of(LAYERS, 1), part=SimpleNamespace(stages=LAYERS), like=torch.empty(0),
                           sizes=SimpleNamespace(hidden=HIDDEN, layers=sum(LAYERS)))
    config = SimpleNamespace(hosts=str(tmp_path / "hosts"), cluster=None, kind="real")
    ring = SimpleNamespace(loss="", pacing=SimpleNamespace(times=StageTimes()))
    return SimpleNamespace(spec=spec, config=config, ring=ring, rank=SimpleNamespace(states=lambda: states))


@pytest.fixture
def visited(pipeline, monkeypatch):
    """Makes an overview after ten messages a second have made these visits for four seconds."""
    def overview_after(*visits):
        overview = Overview(pipeline)
        for _ in range(40):
            moment[0] += 0.1
            pipeline.ring.pacing.times.learn([Visit(*visit) for visit in visits], 1.0)
            overview.sample()
        return overview

    moment = [0.0]
    monkeypatch.setattr(trace.time, "monotonic", lambda: moment[0])
    return overview_after


def test_a_card_has_the_rows_times_and_wire_of_its_board(pipeline, visited):
    overview = visited((4, 0.050), (3, 0.009))
    laptop, first, second = overview.cards()
    assert (laptop.name, laptop.layers, laptop.rows_per_second, laptop.round_trip_ms) == ("laptop", 0, None, None)
    assert (first.name, first.rank, first.state, first.layers) == ("pi-1", NAMES[1], "here", 5)
    assert (first.busy, first.free_gb, first.room, first.round_trip_ms, first.mbps) == (0.25, 1.0, 2, ROUND_TRIP, 100.0)
    assert first.rows_per_second == pytest.approx(4 * 10) and second.rows_per_second == pytest.approx(3 * 10)
    assert first.segment_ms == pytest.approx(50) and second.segment_ms == pytest.approx(9)
    assert second.sent_mbps == pytest.approx(30 * HIDDEN * 4 * 8 / 1e6) and second.mbps == 50.0


def test_the_advice_is_the_best_of_all_splits_that_fit(pipeline, visited):
    """Times of all splits, written down: each board's layers, half a round trip to each, the wire between both."""
    slowest, advice = (overview := visited((4, 0.050), (4, 0.009))).advice(overview.cards())
    layer_ms, row_ms = (10, 3), 4 * HIDDEN * 4 * 8 / 1e3
    wire_ms = (row_ms / 75, row_ms / 50)  # between the boards the usual rate; from the last one its own

    def milliseconds(counts):
        stages = [count * each for count, each in zip(counts, layer_ms)]
        return sum(stages) + 3 * ROUND_TRIP / 2 + sum(wire_ms) + max(*stages, *wire_ms)

    splits = [counts for counts in product(range(1, 8), range(1, 6)) if sum(counts) == 8]
    best = min(splits, key=milliseconds)
    assert (slowest, best) == (1, (3, 5))
    percent = 100 * (milliseconds((5, 3)) / milliseconds(best) - 1)
    assert advice == f"2 layers fewer on pi-1 (layers 3+5): {percent:.0f} % faster, by the planner"


def test_boards_with_the_best_split_stay_as_they_are_and_unknown_times_give_no_advice(pipeline, visited):
    overview = visited((4, 0.040), (4, 0.036))
    assert overview.advice(overview.cards()) == (1, "no other split of these boards is faster, by the planner")
    pipeline.ring.pacing.times = StageTimes()
    overview = visited((4, 0.050))
    assert overview.advice(overview.cards()) == (0, "")
    assert overview.cards()[2].rows_per_second is None


def test_a_lost_board_is_lost_then_coming_back_and_a_spare_has_no_measured_wire(pipeline, visited):
    overview, states = visited((4, 0.050), (4, 0.009)), pipeline.rank.states()
    here = states[NAMES[2]]
    states[NAMES[2]], pipeline.ring.loss = None, f"{NAMES[2]} was lost: its connection broke"
    assert [(card.state, card.round_trip_ms) for card in overview.cards()[1:]] == [("here", ROUND_TRIP), ("lost", None)]
    assert overview.cards()[1].rows_per_second is None and overview.advice(overview.cards()) == (0, "")
    states[NAMES[2]] = here
    assert overview.cards()[2].state == "coming back"
    pipeline.ring.loss = ""
    del states[NAMES[2]]
    states["rank 2 (pi-9, 10.0.0.9)"] = here
    assert [(card.name, card.state, card.mbps) for card in overview.cards()[1:]] == [
        ("pi-1", "here", 100.0), ("pi-9", "here", None)]


def test_members_of_a_group_have_its_work_and_replicas_none(pipeline, visited):
    pipeline.spec.placement = Placement.of(LAYERS, 2)
    overview = visited((4, 0.050), (4, 0.009))
    assert [overview._work_of(rank) and overview._work_of(rank).seconds for rank in range(5)] == [
        None, *[pytest.approx(0.05)] * 2, *[pytest.approx(0.009)] * 2]
    assert overview._layer_counts == [0, 5, 5, 3, 3] and overview.advice(overview.cards()) == (0, "")
    pipeline.spec.placement = Placement.of(LAYERS, 1, copies=2)
    overview = visited((4, 0.050), (4, 0.009))
    assert overview._layer_counts == [0, 5, 3, 5, 3]
    assert [overview._work_of(rank) for rank in range(5)] == [None] * 5


def test_a_state_in_the_store_is_numbers():
    state = RankState(0.5, 1.0, 2.0, 0.1)._asdict()
    assert json.loads(clean("state/1", json.dumps(state).encode())) == state
    for junk in ({**state, "busy": "x"}, {"busy": 0.5}, [1], {**state, "busy": None}):
        with refused("state/1: it has another form"):
            clean("state/1", json.dumps(junk).encode())


@pytest.mark.parametrize("name, short", [
    ("rank 1", "rank 1"), ("rank 1 (pi-1)", "pi-1"), ("rank 1 (pi-1, 10.0.0.2)", "pi-1"),
    ("rank 1 (pi-9, a spare, 10.0.0.2)", "pi-9")])
def test_a_board_is_called_by_its_host(name, short):
    assert short_name(name) == short


# --- the server and the terminal --------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def server():
    with live("link=threads", "stages=0+5+3", "profile=jetson-7b", "slowdown=0.01") as started:
        yield started


def test_the_server_tells_what_is_known_and_the_terminal_shows_it(server, capsys):
    server.chat(max_tokens=8)
    cluster = server.client.get("/cluster").json()
    assert (cluster["status"], cluster["model"], cluster["version"]) == ("ready", "toy", code_version())
    assert [(card["rank"], card["state"], card["layers"]) for card in cluster["boards"]] == [
        ("rank 0", "here", 0), ("rank 1", "here", 5), ("rank 2", "here", 3)]
    assert all(card["segment_ms"] > 0 and card["free_gb"] > 0 for card in cluster["boards"][1:])

    assert status.main([f"port={server.client.base_url.port}"]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first == "ready" and head.split()[:4] == ["board", "state", "layers", "busy"]
    assert [row.split()[1] for row in rows[:3]] == ["0", "1", "2"]


def test_the_terminal_shows_a_lost_board_and_the_advice():
    card = {"rank": "rank 1 (pi-1, 10.0.0.2)", "state": "lost", "layers": 5, "busy": 0.0,
            **dict.fromkeys(status.COLUMNS)}
    cluster = {"status": "recovering", "reason": "pi-1 was lost\x1b", "boards": [card], "slowest": 0, "advice": "wait"}
    assert list(status.lines_of(cluster)) == [
        "recovering: pi-1 was lost\\x1b",
        "board                    state  layers  busy  GB free  rows/s  ms a segment  ms round trip  Mbit/s  sent",
        "rank 1 (pi-1, 10.0.0.2)  lost   5       0%    -        -       -             -              -       -", "wait"]


def test_the_terminal_says_what_is_needed(tmp_path, monkeypatch, capsys, server):
    monkeypatch.setattr(status, "HOME", tmp_path)
    with refused("no server answers at 127.0.0.1:1: type it on the machine where bash run_server.sh hosts=auto runs"):
        status.main(["--port", "1"])
    (tmp_path / "boards.txt").write_text(HOSTS)
    with refused("no server answers"):
        status.main(["port=1"])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["board", "address", "layers"], ["laptop", "10.0.0.1", "none"], ["pi-1", "10.0.0.2", "5"],
        ["pi-2", "10.0.0.3", "3"]]
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "root").write_text("10.0.0.1:29500")
    with refused("this board computes for rank 0 at 10.0.0.1; type it there"):
        status.main(["port=1"])
    monkeypatch.setattr(status, "read_cluster", lambda *words: (401, ""))
    with refused("asks for its key: give api_key=SECRET"):
        status.main([])
    for text in ("<html>", "[]", '{"status": "ok", "reason": "", "boards": [{}]}'):
        monkeypatch.setattr(status, "read_cluster", lambda *words, text=text: (200, text))
        with refused("give the port= of bash run_server.sh"):
            status.main([])


@pytest.mark.parametrize("words, reason", [(["nonsense=3"], "unknown key nonsense"),
                                           (["toy", "x"], "is not key=value")])
def test_a_worker_refuses_a_mistyped_word_once(words, reason):
    with refused(reason):
        cli.main(words)
    assert cli.main(["hosts=auto", "wait=86400"]) == 0
