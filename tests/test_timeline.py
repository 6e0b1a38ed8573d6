"""The timeline: what a run leaves behind, its story, and the page in a real browser."""
import json
import re
import shutil
import time

import pytest
import torch.distributed as dist

from eval.observe import timeline_page as timeline
from eval.observe.timeline import RunHistory
from launch.trace import learn_time, send_time
from pipeline.trace import CLOCK, Trace, read
from tests.browser import ARGUMENTS
from tests.json_files import load_json, load_json_lines, save_json_lines
from tests.saved import here, run_program
from tests.tiny import in_threads

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (*ARGUMENTS, "--virtual-time-budget=2000", "--window-size=1400,900")
SMALL = ("init_total_token=20", "width=4", "init_depth=4", "expand_total_token=16",
         "subseq_token=4", "max_new_tokens=12", "ignore_eos=true", "template=none")
QUESTIONS = ("what does a fox do?", "and a crow?")


@pytest.fixture(scope="module", params=["ar", "naive", "continuous", "pipedec"])
def ran(saved, tmp_path_factory, request):
    """Two requests over three ranks: the trace's folder, and the token ids of the answers."""
    folder = tmp_path_factory.mktemp(request.param)
    asked = folder / "questions.jsonl"
    save_json_lines(asked, ({"turns": [question]} for question in QUESTIONS))
    assert here(f"model_dir={saved / '0+2+2'}", f"pipeline_type={request.param}", f"question_file={asked}",
                f"trace={folder / 'trace'}", f"output={folder / 'out.json'}", *SMALL) == 0
    return folder / "trace", [record["token_ids"] for record in load_json(folder / "out.json")]


def story(folder):
    found = RunHistory(read(folder)).data()
    return found, {node["id"]: node for node in found["nodes"]}


def guesses_among(nodes):
    return [node for node in nodes.values() if node["kind"] == "guess"]


def text(message, nodes, number):
    """The settled tokens of a request behind its prompt, up from the node that nothing settled stands on."""
    settled = {i: node for i, node in nodes.items()
               if node["request"] == number and node["settled"] is not None}
    tip, = set(settled) - {node["parent"] for node in settled.values()}
    chain = []
    while settled[tip]["kind"] != "prompt":
        chain.insert(0, settled[tip]["token"])
        tip = settled[tip]["parent"]
    return chain


def test_the_settled_nodes_spell_the_answers(ran):
    folder, answers = ran
    found, nodes = story(folder)
    assert [request["answer"] for request in found["requests"]] == answers
    for number, answer in enumerate(answers):
        assert text(found, nodes, number)[:len(answer)] == answer
    assert all(node["settled"] is None or node["died"] is None for node in nodes.values())
    assert all((node["settled"] is None) != (node["died"] is None) for node in guesses_among(nodes))
    for node in nodes.values():
        if node["settled"] is not None and node["kind"] != "prompt":
            assert nodes[node["parent"]]["said"] == node["token"]


def test_a_guess_has_its_score_from_the_growth_before_it_was_sent(ran):
    found, nodes = story(ran[0])
    guesses = guesses_among(nodes)
    assert all(node["score"] is not None for node in guesses)
    for node in guesses:
        if node["segment"] is not None:
            assert node["born"] <= found["segments"][node["segment"]]["sent"]


def test_every_segment_visits_the_ranks_in_order_and_only_loses_rows(ran):
    found, nodes = story(ran[0])
    for number, segment in enumerate(found["segments"]):
        assert [stop["rank"] for stop in segment["stops"]] == [1, 2]
        times, rows = [segment["sent"]], [len(segment["nodes"])]
        for stop in segment["stops"]:
            times += [at for at in (stop["came"], stop["from"], stop["to"], stop["left"])
                      if at is not None]
            rows += [stop["rows"], stop["computed"], stop["passed"]]
        assert times == sorted(times) and rows == sorted(rows, reverse=True)
        assert [nodes[node]["segment"] for node in segment["nodes"]] == [number] * len(segment["nodes"])
    sent = [node for segment in found["segments"] for node in segment["nodes"]]
    assert len(sent) == len(set(sent))
    assert {event["kind"] for event in found["events"]} >= {"send", "judge", "settle", "end"}


def test_what_ran_lies_beside_the_spans_with_the_texts_of_its_tokens(ran):
    folder, answers = ran
    run = load_json(folder / "run.json")
    assert (run["kind"], run["profile"], run["stages"], run["temperature"]) == ("real", "none", "0+2+2", 0.0)
    letters = {str(token) for answer in answers for token in answer} & set(run["tokens"])
    assert letters
    assert all(len(run["tokens"][token]) == 1
               or run["tokens"][token].startswith("<") for token in letters)


def test_the_page_holds_the_data_whole_and_nothing_from_elsewhere(ran, tmp_path, capsys, error_of):
    folder, answers = ran
    assert timeline.main([str(folder), "-o", str(tmp_path / "page.html"), "--requests", "1"]) == 0
    html = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])
    assert [request["answer"] for request in data["requests"]] == answers[1:]
    assert data["left_out"] == 1
    assert data["segments"][data["nodes"][0]["segment"]]["nodes"][0] == data["nodes"][0]["id"]
    assert not re.search(r"https?://|src=|<link|@import|url\((?!#)", html.replace(json.dumps(data), ""))
    assert "2 requests" in error_of(timeline.main, [str(folder), "--requests", "7:"])
    assert timeline.main([str(tmp_path)]) == 2 and "trace=FOLDER" in capsys.readouterr().err


def test_a_guess_that_grew_before_anything_was_sent_belongs_to_its_request_and_not_to_a_measurement():
    def span(begin, name, **fields):
        return {"rank": 0, "name": name, "t0": begin, "t1": begin + 0.5, "thread": "main", **fields}

    def sent(begin, nodes, parents, num_text):
        return span(begin, "send", nodes=nodes, tokens=nodes, parents=parents, text=num_text)

    spans = [sent(0, [0], [0], 1), span(1, "reset", tip=0, token=0, parent=0),
             span(2, "request", answer=[12]),
             span(3, "grow", nodes=[12], tokens=[12], parents=[11], scores=[0.0], gone=[]),
             sent(4, [10, 11], [10, 10], 2), sent(5, [12], [11], 0)]
    history = RunHistory(spans).data()
    assert [(node["id"], node["request"]) for node in history["nodes"]] == [(12, 0), (10, 0), (11, 0)]
    assert [segment["nodes"] for segment in history["segments"]] == [[10, 11], [12]]
    assert [(event["kind"], event["what"]) for event in history["events"]] == [("grow", 12), ("send", 0), ("send", 1)]
    assert [request["answer"] for request in history["requests"]] == [[12]]


of_one_method = pytest.mark.parametrize("ran", ["continuous"], indirect=True)


@pytest.fixture
def spoilt(ran, tmp_path):
    return shutil.copytree(ran[0], tmp_path / "spoilt")


@of_one_method
@pytest.mark.parametrize("name, junk", [
    *(("rank_1.jsonl", junk) for junk in ("null", "[]", "{cut", "[" * 100_000, '{"name": "clock"}')),
    ("rank_1.jsonl", '{"rank": 1, "name": "clock", "t0": 1, "t1": 2, "thread": "x"}'),
    *(("run.json", junk) for junk in ("null", "{", '{"tokens": []}'))], ids=lambda value: value[:8])
def test_what_is_spoiled_is_named_by_file_and_line(spoilt, name, junk, error_of):
    path, place = spoilt / name, str(spoilt / name)
    if name != "run.json":
        place, junk = f"line 1 of {path}", f"{junk}\n{path.read_text()}"
    path.write_text(junk)

    printed = error_of(timeline.main, [str(spoilt)])
    assert printed.startswith(f"flowspec: {place} is ") and printed.count("\n") == 1


@of_one_method
@pytest.mark.parametrize("more", [{"nodes": 5}, {"nodes": None},
                                  {"parents": [1 << 40] * 99}, {"tokens": []}, {}],
                         ids=str)
def test_spans_that_do_not_belong_together_are_one_sentence(spoilt, more, capsys):
    path = spoilt / "rank_0.jsonl"
    spans = load_json_lines(path)
    if more:
        next(span for span in spans if span["name"] == "send").update(more)
    else:
        spans = [span for span in spans if span["name"] != "send"]
    save_json_lines(path, spans)
    code, printed = timeline.main([str(spoilt)]), capsys.readouterr().err
    assert (code, printed.count("\n")) in ((0, 0), (2, 1))
    assert more in ({"tokens": []}, {}) or f"the spans in {spoilt} do not make one run" in printed


@of_one_method
@pytest.mark.parametrize("words, message", [
    (["--requests", "x"], "is no range"), (["--requests", "9" * 5000], "is no range"),
    (["--requests", "5:"], "there are 2 requests"), (["-o", "."], "cannot be written (it is a folder)")],
    ids=lambda value: value[-1][:10])
def test_what_a_page_cannot_be_made_of_or_written_to_is_reported(ran, tmp_path, monkeypatch, words, message, error_of):
    monkeypatch.chdir(tmp_path)
    said = error_of(timeline.main, [str(ran[0]), *words])
    assert message in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_clocks_of_other_machines_are_set_by_rank_0s(tmp_path):
    store = dist.HashStore()
    traces = [Trace(str(tmp_path), rank) for rank in range(3)]
    with in_threads(learn_time, [(store, 1, "same", traces[1]), (store, 2, "other", traces[2])]):
        send_time(store, (1, 2), "same", lambda: time.monotonic() + 1000)
    now = time.monotonic()
    for trace in traces:
        trace.note("wait", now)
        trace.close()
    spans = {span["rank"]: span for span in read(tmp_path)}
    assert CLOCK not in {span["name"] for span in spans.values()}
    assert (spans[0]["t0"], spans[1]["t0"]) == (now, now)
    assert abs(spans[2]["t0"] - now - 1000) < 0.5


def body(page, profile, mark=""):
    """The attributes that the page's script left at its body, once it ran in a browser."""
    dumped = run_program(BROWSER, *QUIET, f"--user-data-dir={profile}", "--dump-dom", f"file://{page}{mark}",
                         timeout=600)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<body[^>]*>", dumped.stdout)[0]))


KEYS = """<script>
const seen = [];
const press = key => { document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true})); drawNow();
  seen.push(document.body.dataset.event + ":" + document.body.dataset.settled); };
["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "."].forEach(press);
document.body.dataset.seen = seen.join(" "); document.body.dataset.lit = String(view.lit);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@of_one_method
def test_in_a_browser_the_page_runs_and_steps_through_time(ran, tmp_path):
    folder, answers = ran
    page = tmp_path / "page.html"
    assert timeline.main([str(folder), "-o", str(page)]) == 0
    found, nodes = story(folder)
    request = found["requests"][1]
    settles = [event for event in found["events"] if event["kind"] == "settle"]
    at = [event for event in settles if event["at"] > request["from"]][1]["at"]
    got = body(page, tmp_path / "one", f"#t={at}")
    assert got["ready"] == "yes" and "error" not in got
    assert (int(got["segments"]), int(got["nodes"])) == (len(found["segments"]), len(nodes))
    settled = [node for node in nodes.values() if node["request"] == 1 and node["kind"] != "prompt"
               and node["settled"] is not None and node["settled"] <= at]
    assert got["request"] == "1"
    assert got["answer"] == ",".join(map(str, answers[1][:len(settled)]))
    page.write_text(page.read_text().replace("</body>", KEYS + "</body>"))
    seen = body(page, tmp_path / "two")
    steps = [[int(number) for number in step.split(":")]
             for step in seen["seen"].split()]
    assert "error" not in seen and seen["lit"] != "null"
    moments = sorted({event["at"] for event in found["events"]})
    indices = [max(i for i, event in enumerate(found["events"]) if event["at"] <= t)
               for t in moments[:3]]
    assert [step[0] for step in steps[:4]] == [indices[0],
                                               indices[1], indices[2], indices[1]]
    assert steps[4] == [len(found["events"]) - 1, len(answers[1])]


TREE = """
const segments = [], view = { now: 1 };
const unborn = { born: 0, settled: null, died: null, saidAt: null, segment: null };
const guess = (id, parent, score) => ({ id, parent, score, ...unborn });
const tip = { ...guess(0, 0, 0), settled: 0, kind: "prompt" };
const live = Array.from({ length: 110 }, (_, i) => guess(i + 1, i < 10 ? 0 : 1 + i % 10, -i - 1));
const { entries, lines } = layTree({ text: [tip], live, dead: [], fresh: null });
console.log(JSON.stringify([entries.length, lines, entries.reduce((sum, entry) => sum + (entry.more ?? 0), 0)]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the script with")
def test_of_many_unsent_guesses_the_likeliest_are_shown_and_the_others_counted():
    page = timeline.PAGE.read_text(encoding="utf-8")
    script = "".join(page[page.index(begin):page.index(end)] for begin, end in (
        ("/** The state of a node", "/** The content of the panels"), ("const LINE =", "function drawTree")))
    ran = run_program("node", "-e", script + TREE, check=True)
    num_shown, num_lines, num_hidden = json.loads(ran.stdout)
    assert num_shown + num_hidden == 111
    assert num_lines <= num_shown <= 25
