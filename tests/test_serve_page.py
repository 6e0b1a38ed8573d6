"""The chat page: its files and policy, and what a person sees of it in a browser on a desk and on a phone.

One command runs it all, with Debian's packages chromium and chromium-driver: python3 -m pytest tests/test_serve_page.py
"""
import hashlib
import json
import re
import shutil
from types import SimpleNamespace

import pytest

from launch.pipeline import Pipeline
from serve.page_files import FILES
from serve.text_chunks import END_TOKEN, readable_token, snapshot
from tests.browser import MISSING, browser
from tests.saved import run_program, wait_until
from tests.serving import QUESTION, live, text_of
from tests.sources import ROOT

PAGE = ROOT / "serve" / "page"
HTML = (PAGE / "chat.html").read_text(encoding="utf-8")
SCRIPT = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PAGE.glob("*.js")))
SIZES = {"desk": (1280, 800), "phone": (390, 844)}


@pytest.fixture(scope="module")
def server():
    with live("link=threads", "ablate=thrift") as started:  # where all is slow it would not guess
        yield started


@pytest.mark.parametrize("path", FILES)
def test_the_page_is_served_under_a_policy_that_lets_it_load_only_from_here(server, path):
    got = server.client.get(path)
    assert got.status_code == 200 and got.content == FILES[path].read_bytes()
    assert got.headers["content-type"].startswith(
        {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}[FILES[path].suffix])
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy and "http" not in policy


def test_the_page_names_no_other_address_and_makes_no_markup_of_a_text():
    written = HTML + SCRIPT + (PAGE / "chat.css").read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"'\s]+", written))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language
    assert re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|<style|style=|url\(|@import", written
                     ) is None
    assert set(re.findall(r'(?:src|href)="([^"]+)"', HTML)) == FILES.keys() - {"/"}


def test_every_element_that_the_script_asks_for_is_on_the_page():
    asked = set(re.findall(r'at\("(\w+)"\)', SCRIPT))
    assert len(asked) > 8 and asked <= set(re.findall(r'id="(\w+)"', HTML))


def test_all_of_the_page_lies_in_landmarks_or_live_regions():
    """As axe's rules landmark-one-main, region and aria-allowed-role ask, by their texts of version 4.10."""
    page = (ROOT / "serve" / "page" / "chat.html").read_text(encoding="utf-8")
    page_body = re.sub(r"<script.*?</script>", "", page.partition("<body>")[2].partition("</body>")[0])
    assert re.findall(r"<main[^>]*>", page_body) == ["<main>"], "another role would take its landmark away"
    outside = re.sub(r"<(header|main|dialog)\b.*?</\1>", "", page_body, flags=re.DOTALL)
    assert all('role="status"' in tag for tag in re.findall(r"<(?!/)[^>]*>", outside))


def test_vendored_files_are_those_of_their_releases_and_have_their_licences():
    table = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\S+)` .* `([0-9a-f]{64})` \|$", table, re.M))
    scripts = sorted((ROOT / "serve" / "vendor").rglob("*.js"))
    assert {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in scripts} == rows
    assert all("License" in (path.parent / "LICENSE").read_text(encoding="utf-8") for path in scripts)


def test_a_token_that_ends_an_answer_has_a_name_and_others_read_as_text():
    pieces = {2: "</s>", 7: "▁fox", 8: "es", 9: "<0x0A>"}
    decoded = {"▁fox": "fox", "es": "es", "<0x0A>": "\n"}
    tokenizer = SimpleNamespace(convert_ids_to_tokens=pieces.get,
                                convert_tokens_to_string=lambda tokens: decoded[tokens[0]])
    text = SimpleNamespace(end_ids={2}, tokenizer=tokenizer)
    assert [readable_token(token, text) for token in pieces] == [END_TOKEN, " fox", "es", "\n"]


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the script with")


def printed_by_node(folder, program):
    """What a program prints, read as JSON."""
    path = folder / "program.js"
    path.write_text(program)
    return json.loads(run_program("node", path, check=True).stdout)


@needs_node
def test_the_likeliest_path_of_a_tree_is_its_first_line_and_depth_is_a_column(tmp_path):
    layout = re.search(r"^function layout.*?^}", SCRIPT, re.S | re.M)[0]
    guesses = [{"id": number, "parent": parent, "score": score} for number, parent, score in (
        (4, None, -0.1), (5, 4, -0.9),
        (7, 4, -0.2), (9, None, -3))]
    rows = printed_by_node(tmp_path, f"{layout}\nconst found = [...layout({json.dumps(guesses)}).entries()]\n"
                           "console.log(JSON.stringify(found.map(([id, one]) => [id, one.depth, one.line])))")
    assert sorted(rows) == [[4, 0, 0], [5, 1, 1], [7, 1, 0], [9, 0, 2]]


@needs_node
def test_emulated_figures_are_marked_and_plain_decoding_is_named_where_the_answer_had_it(tmp_path):
    functions = "\n".join(re.search(rf"^function {name}.*?}}$", SCRIPT, re.S | re.M)[0]
                          for name in ("markOf", "speedOf", "figuresOf"))
    sights = [{"kind": "real", "profile": "none", "plain": 60.04},
              {"kind": "emulated", "profile": "jetson-7b", "plain": 3.84},
              {"kind": "real", "profile": "none", "plain": 0}]
    counts = {"tokens": 11, "decode": 1, "tokens_per_miss": 2, "accepted": 3, "sent": 9}
    lines = printed_by_node(tmp_path, f"{functions}\nconsole.log(JSON.stringify("
                            f"{json.dumps([{**sight, **counts} for sight in sights])}.map(figuresOf)))")
    rest = "; 3 of 9 guesses accepted, 2.00 tokens per miss"

    assert lines == [
        f"11 tokens, 10.0 tokens/s, while guessing rested 60.0{rest}",
        f"11 tokens, 10.0 tokens/s (emulated, jetson-7b), while guessing rested 3.8{rest}",
        f"11 tokens, 10.0 tokens/s{rest}"]


@needs_node
def test_the_page_takes_thoughts_apart_from_the_answer(tmp_path):
    take = re.search(r"^function take.*?^}", SCRIPT, re.S | re.M)[0]
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "2 and"}, {"reasoning_content": " 2."},
              {"content": "Four."}, {}]
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    message = printed_by_node(tmp_path, f"{take}\nconst message = {{ content: '', thoughts: '' }};\n"
                              f"for (const chunk of {json.dumps(chunks)}) take(message, '', chunk);\n"
                              "console.log(JSON.stringify(message))")
    assert message == {"content": "Four.", "thoughts": "2 and 2."}


TABS = """
const vm = require("vm");
function storage() {
  const hidden = (value) => ({ value, enumerable: false });
  return Object.defineProperties({}, {
    getItem: hidden(function (name) { return this[name] ?? null; }),
    setItem: hidden(function (name, text) { this[name] = text; }),
    removeItem: hidden(function (name) { delete this[name]; }) });
}
const channels = [], shared = storage();
class BroadcastChannel {
  constructor() { this.heard = []; channels.push(this); }
  addEventListener(kind, hear) { this.heard.push(hear); }
  postMessage(data) {
    for (const other of channels) if (other !== this) for (const hear of other.heard) hear({ data });
  }
}
function tab(session) {
  const place = vm.createContext({ localStorage: shared, sessionStorage: session, BroadcastChannel, Date, Math,
    performance, JSON });
  vm.runInContext(SECTION, place);
  return (code) => JSON.parse(vm.runInContext(`JSON.stringify((() => { ${code} })() ?? null)`, place));
}
"""


KEPT = "".join(re.search(rf"// --- {name}.*?(?=\n// --- )", SCRIPT, re.S)[0] + "\n"
               for name in ("the browser's stores", "what a reload keeps", "conversations"))


@needs_node
def test_a_page_whose_browser_forbids_its_stores_works_and_foreign_values_are_not_read(tmp_path):
    steps = """
      const forbidden = { get() { throw new Error("Access is denied"); } };
      const parts = vm.createContext({ BroadcastChannel, Date, Math, performance, JSON });
      Object.defineProperties(parts, { localStorage: forbidden, sessionStorage: forbidden });
      vm.runInContext(SECTION, parts);
      const seen = vm.runInContext(`restoreTalk(); talk.push({ content: "1" }); keepTalk(); newTalk();
        JSON.stringify(idsKept().map((id) => kept(local, "talk." + id, [])))`, parts);
      const values = ["5", '"abc"', "{}", "[1]", "null", "{"], first = tab(storage());
      const read = values.map((text) => first(`local.setItem("flowspec.x", ${JSON.stringify(text)});
        return [kept(local, "x", []), kept(local, "x", ""), kept(local, "x", {})];`));
      console.log(JSON.stringify([JSON.parse(seen), read]));
    """
    seen, read = printed_by_node(tmp_path, f"const SECTION = {json.dumps(KEPT)};\n{TABS}\n{steps}")
    assert seen == [[{"content": "1"}]]
    empty = [[], "", {}]
    assert read == [empty, [[], "abc", {}], empty, [[1], "", {}], empty, empty]


@needs_node
def test_two_tabs_never_touch_one_anothers_conversation_and_a_new_one_deletes_none(tmp_path):
    steps = """
      shared.setItem("flowspec.talk", JSON.stringify([{ content: "of an earlier version" }]));
      const say = (text) => `talk.push({ content: "${text}" }); keepTalk();`;
      const texts = "return talk.map((m) => m.content)";
      const session = storage(), first = tab(session), second = tab(storage());
      const seen = [];
      first("restoreTalk()"); seen.push(first(texts));
      second("restoreTalk()"); seen.push(second(texts));
      first(say("1")); second(say("2")); first(say("3"));
      const twin_session = storage();
      for (const name of Object.keys(session)) twin_session.setItem(name, session[name]);
      const twin = tab(twin_session);
      twin("restoreTalk()"); seen.push(twin(texts));
      twin(say("4")); first(say("5"));
      const again = tab(session); channels.splice(0, 1);
      again("restoreTalk(); newTalk();");
      const kept = again("return idsKept().map((id) => kept(localStorage, 'talk.' + id, []).map((m) => m.content))");
      again("for (const id of idsKept()) deleteTalk(id)");
      console.log(JSON.stringify([seen, kept.sort(), again("return idsKept()"), Object.keys(shared)]));
    """
    seen, kept, left, names = printed_by_node(tmp_path, f"const SECTION = {json.dumps(KEPT)};\n{TABS}\n{steps}")
    old = "of an earlier version"
    assert seen == [[old], [], [old, "1", "3"]]
    assert kept[:1] == [["2"]] and sorted(kept[1:3]) == [[old, "1", "3", "4"], [old, "1", "3", "5"]]
    assert left == names == []


def test_a_watched_stream_shows_trees_of_live_guesses_and_has_the_same_text(server):
    plain = text_of(server.chat(max_tokens=60))
    streamed = server.chat(max_tokens=60, stream=True, flowspec_tree=True).text
    events = [event.partition("data: ") for event in streamed.split("\n\n") if event]
    trees = [json.loads(data) for kind, _, data in events if kind == "event: tree\n"]
    chunks = [json.loads(data) for kind, _, data in events if not kind and data != "[DONE]"]

    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == plain
    assert trees and [tree["tokens"] for tree in trees] == sorted(tree["tokens"] for tree in trees)
    for tree in trees:
        ids = [guess["id"] for guess in tree["guesses"]]
        assert len(ids) == len(set(ids)) <= tree["live"]
        assert all(guess["parent"] in (None, *ids) and guess["score"] <= 0 for guess in tree["guesses"])
        assert tree["accepted"] <= min(tree["sent"], tree["tokens"])
        assert len(tree["busy"]) in (0, 5)
        assert all(0 <= share <= 1 for share in tree["busy"]) and tree["plain"] == 0
        assert (tree["kind"], tree["profile"]) == ("real", "none")
        assert tree["tokens_per_miss"] >= (tree["tokens"] > 0)


def test_a_snapshot_shows_the_likeliest_live_guesses_with_their_text_and_whether_they_were_sent():
    options = {"profile": "jetson-7b", "time": "virtual", "max_new_tokens": 24, "link": "threads"}
    with Pipeline.open("toy", **options) as pipeline:
        generation, guesses = pipeline.submit(QUESTION), []
        for _ in generation:
            guesses += snapshot(generation, pipeline.text)["guesses"]
    assert {guess["sent"] for guess in guesses} == {True, False}
    assert any(guess["parent"] is None for guess in guesses) and all(guess["text"] for guess in guesses)


# --- in a browser -----------------------------------------------------------------------------------------------------

ENTER = "\ue007"
WATCH = """window.seen = [];
  const [draw, meter, events] = [showTree, showMeters, eventsOf];
  showTree = (...given) => { draw(...given); if (window.weary) key("Escape"); };
  showMeters = (sight) => { meter(sight); seen.push([count("#tree circle"), count("#tree path"), count(".rank")]); };
  eventsOf = async function* (response) {
    for await (const event of events(response)) {
      yield event;
      if (window.reloads && talk.at(-1).content.length > 20) { location.reload(); await new Promise(() => {}); } } };
  window.count = (what) => document.querySelectorAll(what).length;
  window.key = (key, alt) => document.dispatchEvent(new KeyboardEvent("keydown", { key, altKey: Boolean(alt) }));"""
ANSWERS = "return [...document.querySelectorAll('.assistant .content')].map((shown) => shown.textContent.trim())"
QUESTIONS = "return [...document.querySelectorAll('#questions button')].map((button) => button.textContent)"
FITS = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def window():
    if MISSING:
        pytest.skip(f"{MISSING} to look at the page with")
    with browser() as opened:
        yield opened


def visit(window, url, size="desk", **stored):
    """Show the page as somebody sees it first, but for what a browser has stored."""
    window.resize(*SIZES[size])
    window.open(url)
    window.run("localStorage.clear(); sessionStorage.clear();" + "".join(
        f"localStorage.setItem('flowspec.{name}', {json.dumps(json.dumps(value))});" for name, value in stored.items()))
    window.open(url)
    window.run(WATCH)
    return window


@pytest.fixture(params=SIZES)
def page(server, window, request):
    """The page on a desk or a phone, for a person who wants 40 tokens."""
    return visit(window, server.url, request.param, settings={"max_tokens": "40"})


@pytest.fixture
def desk(server, window):
    return visit(window, server.url, settings={"max_tokens": "40"})


def becomes(page, condition):
    """Whether something gets true on the page."""
    return wait_until(lambda: page.run(f"return {condition}"), 60)


def over(page):
    return becomes(page, "!asking && talk.length && talk.at(-1).role === 'assistant'")


def ask(page, question=QUESTION):
    page.run("at('prompt').focus()")
    page.press(*question, ENTER)


def hear_out(page, question=QUESTION):
    """Ask, and wait for the whole answer."""
    ask(page, question)
    assert over(page)


def test_an_empty_start_names_model_and_method_and_offers_three_questions(page):
    assert becomes(page, "Boolean(at('empty') && model)")
    assert page.run("return at('empty').querySelector('h2').textContent") == "Ask toy"
    method = "continuous with guesses from eagle, 4 stages"
    assert page.run("return at('empty').querySelector('p').textContent") == method
    assert len(page.run(QUESTIONS)) == 3
    page.run("document.querySelector('#questions button').click()")
    assert over(page) and page.run("return talk[0].content") == QUESTION
    assert page.run("return at('empty')") is None


def test_a_person_asks_and_sees_the_text_the_guesses_and_how_busy_the_ranks_are(server, page):
    hear_out(page)
    assert page.run(ANSWERS) == [text_of(server.chat(max_tokens=40)).strip()]
    seen = page.run("return seen")
    assert any(circles > 0 and paths == circles and ranks == 5 for circles, paths, ranks in seen), seen
    assert "tokens per miss" in page.run("return document.querySelector('.assistant .figures').textContent")
    assert "</s>" not in page.run("return document.body.textContent")
    assert page.run(FITS)


def test_the_last_guesses_stay_and_can_be_stepped_through(page):
    hear_out(page)
    last = page.run("return sights.length - 1")
    shown = page.run("return Number(at('step').value)")
    assert page.run("return at('live').hidden || at('steps').hidden") is False
    assert page.run("return count('#tree circle')") > 0
    page.run(f"showStep({last})")
    page.run("at('step_back').click()")
    assert page.run("return at('step_text').textContent") == f"step {last} of {last + 1}" and shown <= last
    page.run("at('step').value = 0; at('step').dispatchEvent(new Event('input'))")
    assert page.run("return [at('step_back').disabled, at('step_on').disabled]") == [True, False]
    assert page.run("return count('#tree circle')") == len(page.run("return sights[0].sight.guesses")) <= 24


def test_stopping_is_no_error_and_keys_ask_again(desk):
    desk.run("window.weary = true")
    hear_out(desk, "Tell me a story.")
    assert desk.run("return [talk.at(-1).note, talk.at(-1).error]") == ["stopped", None]
    assert desk.run("return [...document.querySelectorAll('.error')].every((line) => line.hidden)") is True
    stopped = desk.run(ANSWERS)[-1]
    desk.run("window.weary = false; key('r', true)")
    assert over(desk) and desk.run("return talk.length") == 2
    assert not desk.run("return talk.at(-1).note") and desk.run(ANSWERS)[-1].startswith(stopped)


def test_a_reload_keeps_the_question_and_what_had_arrived_of_the_answer(server, desk):
    desk.run("window.reloads = true")
    ask(desk)
    assert becomes(desk, "typeof seen === 'undefined' && talk.length === 2")
    whole = text_of(server.chat(max_tokens=40))
    [partial] = desk.run(ANSWERS)
    assert desk.run("return talk[0].content") == QUESTION and len(partial) > 20 and whole.strip().startswith(partial)
    assert desk.run("return document.querySelector('.assistant .note').textContent").startswith("interrupted: ")
    desk.run("[...document.querySelectorAll('.tools button')].at(-1).click()")
    assert over(desk) and desk.run(ANSWERS) == [whole.strip()]


def test_theme_settings_conversation_and_an_unsent_question_survive_a_reload(server, desk):
    desk.run("at('theme').click(); at('settings').click(); at('fields').elements.top_p.value = '0.5';"
             "at('settings_dialog').close()")
    hear_out(desk)
    theme, answers = desk.run("return document.documentElement.dataset.theme"), desk.run(ANSWERS)
    desk.press(*"And then")
    desk.open(server.url)
    assert desk.run("return document.documentElement.dataset.theme") == theme != ""
    assert desk.run(ANSWERS) == answers and desk.run("return [settings.top_p, settings.max_tokens]") == ["0.5", "40"]
    assert desk.run("return at('prompt').value") == "And then"


def test_a_new_conversation_keeps_the_earlier_one_which_can_be_opened_and_deleted(desk):
    hear_out(desk)
    desk.run("at('fresh').click()")
    assert desk.run("return [talk.length, Boolean(at('empty'))]") == [0, True]
    assert desk.run("return document.querySelector('.earlier button').textContent") == QUESTION.strip()[:60]
    desk.run("document.querySelector('.earlier button').click()")
    assert desk.run("return [talk.length, talk[0].content]") == [2, QUESTION]
    desk.run("at('fresh').click(); document.querySelector('.earlier .quiet').click()")
    assert desk.run("return idsKept().length") == 0


def test_a_text_that_looks_like_markup_stays_a_text(desk):
    hear_out(desk, "<b>hello</b>")
    assert desk.run("return document.querySelector('.user .content').textContent") == "<b>hello</b>"
    assert desk.run("return count('.turn b')") == 0


MARKDOWN = """# Title
Some *text* and `code`, a <img src=x onerror="window.harmed = true"> and <script>window.harmed = true</script>.
[good](https://example.org/) [bad](javascript:window.harmed=true) ![picture](https://example.org/x.png)

| a | b |
|---|---|
| 1 | 2 |

```python
print("</s> <b>")
```
"""


def test_markdown_is_shown_without_a_models_own_markup_and_code_can_be_copied(server, window):
    page = visit(window, server.url, "phone", talk=[{"role": "user", "content": "?"},
                                                    {"role": "assistant", "content": MARKDOWN}])
    assert page.run("return ['h1', 'em', 'table', 'pre code', 'script', 'img', 'iframe'].map("
                    "(name) => count('.content ' + name))") == [1, 1, 1, 1, 0, 0, 0]
    assert page.run("return [...document.querySelectorAll('.content a')].map((link) => [link.textContent, link.href])"
                    ) == [["good", "https://example.org/"], ["bad", ""]]
    assert "<img src=x" in page.run("return document.querySelector('.assistant .content').textContent")
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; };"
             "document.querySelector('.block button').click()")
    assert becomes(page, "document.querySelector('.block button').textContent === 'Copied'")
    assert page.run("return [copied, window.harmed]") == ['print("</s> <b>")\n', None]
    assert page.run(FITS)
    hosts = page.run("return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)")

    assert len(hosts) >= len(FILES) - 1 and set(hosts) == {server.url}


def test_a_key_is_asked_for_in_place(window):
    with live("link=threads", "api_key=secret") as locked:
        page = visit(window, locked.url, "phone")
        assert becomes(page, "Boolean(at('unlock'))")
        assert page.accessible("#unlock_key")[1] == "This server asks for its key:"
        page.run("at('unlock_key').value = 'wrong'; at('unlock').requestSubmit()")
        assert becomes(page, "at('talk').textContent.includes('does not accept')")
        hear_out(page)  # a question waits for the key
        page.run("at('unlock_key').value = 'secret'; at('unlock').requestSubmit()")
        assert becomes(page, "!asking && talk.length === 2 && talk[1].content.length > 0")
        assert page.run("return [at('unlock'), model.id]") == [None, "toy"]
        page.open(locked.url)
        assert becomes(page, "model && model.id === 'toy'")
        assert "secret" not in page.run("return JSON.stringify(localStorage)")


def test_a_screen_reader_hears_what_each_part_is(desk):
    hear_out(desk)
    assert desk.accessible("#talk") == ("log", "Conversation")
    assert desk.accessible(".user") == ("article", "You") and desk.accessible(".assistant") == ("article", "toy")
    assert desk.accessible("#prompt") == ("textbox", "Your message")
    assert desk.accessible("#step")[1] == "Step of the answer"
    assert "guesses after" in desk.accessible("#tree")[1]
    assert desk.run("return at('announcement').textContent") == "The answer is complete."
    desk.run("at('settings').click()")
    assert desk.accessible("#settings_dialog") == ("dialog", "Settings")
    desk.run("at('settings_dialog').close()")


def test_nothing_is_wider_than_a_narrow_screen_and_a_tree_fits_its_place(page):
    page.run("""at("live").hidden = false;
        const guesses = [...Array(60).keys()].map((id) => ({ id, parent: id < 4 ? null : id >> 2, sent: id < 9,
            text: " guess", score: -id / 9 }));
        showTree({ guesses }, "a text");
        showMeters({ busy: Array(9).fill(.5), plain: 3, tokens: 5, decode: 1, kind: "emulated",
            profile: "jetson-7b" })""")
    assert page.run(FITS)
    assert page.run("return at('tree').scrollHeight - at('tree').offsetHeight") <= 0
    assert page.run("return count('#tree circle')") > 6


BOARD = {"free_gb": 20.64, "rows_per_second": 31.2, "segment_ms": 24.0, "round_trip_ms": 0.8, "mbps": 1055.0,
         "sent_mbps": 0.29}
CLUSTER = {"version": "ef1226484aa6", "kind": "real", "slowest": 2, "advice": "1 layer fewer on pi-2: 14 % faster",
           "boards": [{"name": "laptop", "rank": "rank 0 (laptop)", "state": "here", "layers": 0, "busy": 0.5},
                      {"name": "pi-1", "rank": "rank 1 (pi-1)", "state": "lost", "layers": 5, "busy": 0, **BOARD},
                      {"name": "pi-2", "rank": "rank 2 (pi-2)", "state": "here", "layers": 3, "busy": 1, **BOARD}]}


def test_the_boards_are_shown_beside_the_chat_and_can_be_reached_by_keys(page):
    page.run("at('show_boards').focus()")
    page.press(ENTER)
    assert becomes(page, "count('.card') === 5 && !at('boards').hidden")
    assert page.run("return [...document.querySelectorAll('.card h3')].map((name) => name.textContent)") == [
        f"rank {rank}" for rank in range(5)]
    page.run(f"readBoards = () => {{}}; showCluster({json.dumps(CLUSTER)})")
    texts = page.run("return [...document.querySelectorAll('.card')].map((card) => [card.className, card.innerText])")
    assert [class_name for class_name, _ in texts] == ["card", "card lost", "card slowest"]
    assert "20.6 GB" in texts[1][1] and "GB" not in texts[0][1] and "the slowest" in texts[2][1]
    assert page.run("return at('advice').textContent") == CLUSTER["advice"]
    assert page.accessible("#boards") == ("region", "Boards")
    assert page.accessible("#show_boards") == ("button", "Boards")
    assert page.accessible(".card.lost") == ("article", "pi-1")
    assert page.accessible(".card.lost .bar") == ("meter", "pi-1 at work")
    assert page.run(FITS)
    assert page.run("return at('boards').scrollWidth <= at('boards').clientWidth")
    assert page.run("return at('ask').getBoundingClientRect().bottom <= innerHeight + 1")
    page.press(ENTER)
    assert page.run("return [at('boards').hidden, at('show_boards').ariaExpanded]") == [True, "false"]
