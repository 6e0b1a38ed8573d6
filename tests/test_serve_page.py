"""The chat page: it loads nothing, sets what a model writes as text only, and hears of the guesses under way."""
from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from serve.app import PAGE
from tests.browser import MISSING, browser
from tests.saved import wait_until
from tests.serving import QUESTION, live

HTML = PAGE.read_text(encoding="utf-8")
SCRIPT = re.search(r"<script>(.*)</script>", HTML, re.S)[1]


@pytest.fixture(scope="module")
def server():
    with live("processes=false", "ablate=thrift") as started:  # where all is slow it would not guess
        yield started


def test_the_page_is_served_under_a_policy_that_lets_it_load_nothing(server):
    got = server.client.get("/")
    assert got.status_code == 200 and got.text == HTML
    assert got.headers["content-type"].startswith("text/html")
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "http" not in policy


def test_the_page_names_no_other_address_and_makes_no_markup_of_a_text():
    addresses = set(re.findall(r"https?://[^\"'\s]+", HTML))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language
    assert re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\bsrc=|<link", HTML) is None


def test_every_element_that_the_script_asks_for_is_on_the_page():
    asked = set(re.findall(r'at\("(\w+)"\)', SCRIPT))
    assert len(asked) > 8 and asked <= set(re.findall(r'id="(\w+)"', HTML))


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the script with")
def test_the_likeliest_path_of_a_tree_is_its_first_line_and_depth_is_a_column(tmp_path: Path):
    places = re.search(r"^function places.*?^}", SCRIPT, re.S | re.M)[0]
    guesses = [{"id": number, "parent": parent, "score": score} for number, parent, score in (
        (4, None, -0.1), (5, 4, -0.9),
        (7, 4, -0.2), (9, None, -3))]
    program = tmp_path / "places.js"
    program.write_text(f"{places}\nconst found = [...places({json.dumps(guesses)}).entries()]\n"
                       "console.log(JSON.stringify(found.map(([id, one]) => [id, one.depth, one.line])))")
    ran = subprocess.run(["node", program], capture_output=True, text=True, check=True)
    assert sorted(json.loads(ran.stdout)) == [[4, 0, 0],
                                              [5, 1, 1], [7, 1, 0], [9, 0, 2]]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the script with")
def test_emulated_figures_are_marked_and_a_rate_says_whether_it_was_measured(tmp_path: Path):
    functions = "\n".join(re.search(rf"^function {name}.*?}}$", SCRIPT, re.S | re.M)[0]
                          for name in ("markOf", "plainOf", "speedOf", "figuresOf"))
    sights = [{"kind": "real", "profile": "none", "plain": 60.04, "measured": False},
              {"kind": "emulated", "profile": "jetson-7b", "plain": 3.84, "measured": True},
              {"kind": "real", "profile": "none", "plain": 0, "measured": False}]
    counts = {"tokens": 11, "decode": 1, "passes": 5, "accepted": 3, "sent": 9}
    program = tmp_path / "figures.js"
    program.write_text(f"{functions}\nconsole.log(JSON.stringify("
                       f"{json.dumps([{**sight, **counts} for sight in sights])}.map(figuresOf)))")
    ran = subprocess.run(["node", program], capture_output=True, text=True, check=True)
    rest = "; 2.00 tokens per pass of the model (1 without guesses); 3 of 9 guesses accepted"
    assert json.loads(ran.stdout) == [
        f"11 tokens, 10.0 tokens/s, plain decoding: about 60.0 (estimate){rest}",
        f"11 tokens, 10.0 tokens/s (emulated, jetson-7b), plain decoding: 3.8 (measured){rest}",
        f"11 tokens, 10.0 tokens/s{rest}"]


def test_a_watched_stream_shows_trees_of_live_guesses_and_has_the_same_text(server):
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}
    plain = server.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"]
    got = server.post("/v1/chat/completions", **asked, stream=True, flowspec_tree=True).text
    events = [event.partition("data: ") for event in got.split("\n\n") if event]
    trees = [json.loads(data) for kind, _, data in events if kind == "event: tree\n"]
    chunks = [json.loads(data) for kind, _, data in events if not kind and data != "[DONE]"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == plain
    assert any(tree["guesses"] for tree in trees)
    assert [tree["tokens"] for tree in trees] == sorted(tree["tokens"] for tree in trees)
    for tree in trees:
        ids = [guess["id"] for guess in tree["guesses"]]
        assert len(ids) == len(set(ids)) <= tree["live"]
        assert all(guess["parent"] in (None, *ids) and guess["score"] <= 0 for guess in tree["guesses"])
        assert tree["accepted"] <= min(tree["sent"], tree["tokens"])
        assert len(tree["busy"]) in (0, 5)
        assert all(0 <= share <= 1 for share in tree["busy"]) and tree["plain"] > 0
        assert (tree["kind"], tree["profile"], tree["measured"]) == ("real", "none", False)


# --- in a browser -----------------------------------------------------------------------------------------------------

ENTER = "\ue007"
NOTE = """window.seen = [];
  const [draw, meter] = [showTree, showMeters];
  showTree = (...found) => { draw(...found); if (window.weary) key("Escape"); };
  showMeters = (found) => { meter(found); seen.push([count("#tree circle"), count("#tree path"), count(".rank")]); };
  window.count = (what) => document.querySelectorAll(what).length;
  window.key = (key, alt) => document.dispatchEvent(new KeyboardEvent("keydown", { key, altKey: Boolean(alt) }));"""
SAID = "return [...document.querySelectorAll('.assistant > div:first-child')].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def window():
    if MISSING:
        pytest.skip(f"{MISSING} to look at the page with")
    with browser() as opened:
        yield opened


@pytest.fixture
def page(server, window):
    """The page, as somebody sees it first, who wants 40 tokens."""
    window.open(server.url)
    window.run("""localStorage.setItem("flowspec.talk", "[]");
        localStorage.setItem("flowspec.settings", '{"max_tokens": "40"}')""")
    window.open(server.url)
    window.run(NOTE)
    return window


def over(page):
    return wait_until(lambda: page.run("return !asking && talk.length && talk.at(-1).role === 'assistant'"), 60)


def test_a_person_asks_and_sees_the_text_the_guesses_and_how_busy_the_ranks_are(server, page):
    page.press(*QUESTION, ENTER)
    assert over(page)
    found = server.chat(max_tokens=40).json()["choices"][0]["message"]["content"]
    assert page.run(SAID) == [found]
    seen = page.run("return seen")
    assert any(circles > 3 and paths == circles and ranks == 5 for circles, paths, ranks in seen), seen
    assert page.run("return at('live').hidden") is True
    assert "plain decoding: about" in page.run("return document.querySelector('.assistant .figures').textContent")


def test_keys_stop_an_answer_and_ask_again(page):
    page.run("window.weary = true")
    page.press(*"Tell me a story.", ENTER)
    assert over(page)
    assert page.run("return talk.at(-1).error") == "stopped"
    stopped = page.run(SAID)[-1]
    page.run("window.weary = false; key('r', true)")
    assert over(page) and page.run("return talk.length") == 2
    assert page.run("return talk.at(-1).error") is None and page.run(SAID)[-1].startswith(stopped)


def test_a_text_that_looks_like_markup_stays_a_text(page):
    page.press(*"<b>hello</b>", ENTER)
    assert over(page)
    assert page.run("return document.querySelector('.user > div').textContent") == "<b>hello</b>"
    assert page.run("return count('.turn b')") == 0


def test_nothing_is_wider_than_a_narrow_screen_and_a_tree_fits_its_place(page):
    phone = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    page.do("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=phone)
    try:
        page.run("""at("live").hidden = false;
            const guesses = [...Array(60).keys()].map((id) => ({ id, parent: id < 4 ? null : id >> 2, sent: id < 9,
                text: " guess", score: -id / 9 }));
            showTree({ guesses }, "a text"); showMeters({ busy: Array(9).fill(.5), plain: 3, tokens: 5, decode: 1 })""")
        assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [360, 360]
        assert page.run("return at('tree').scrollHeight - at('tree').offsetHeight") <= 0
        assert page.run("return count('#tree circle')") > 6
    finally:
        page.do("goog/cdp/execute", cmd="Emulation.clearDeviceMetricsOverride", params={})
