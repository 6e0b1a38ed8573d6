"""Data sets: the forms of the six published files, SpecInfer's lists, and errors in a file."""
import pytest

from config.presets import PRESETS, TOY
from config.questions import BUNDLED_FOLDER, TOY_QUESTIONS, UNFETCHED_TEXT, Question, bundled, categories, load, read
from eval.keys import EDITS, EvalConfig
from tests.checkpoints import refused
from tests.json_files import save_json_lines

# One line of each of the six files as EAGLE ships them, shortened.
REAL = {
    "mt_bench": {"question_id": 81, "category": "writing", "turns": ["Compose a travel post.", "Rewrite it."]},
    "humaneval": {"question_id": 0, "category": "code", "turns": ["Complete the code.\n\ndef f(l: list):\n    \"\"\""],
                  "reference": ["    return True\n"]},
    "gsm8k": {"question_id": 0, "category": "math", "turns": ["7:11? \u2019tis 162."], "reference": ["<<7+11=18>>18"]},
    "alpaca": {"question_id": 0, "category": "", "turns": ["What is best?"], "reference": ["Low impact."]},
    "sum": {"question_id": 241, "category": "summarization", "turns": ["Summarize: a\u2028b"], "reference": ["c"]},
    "qa": {"question_id": 321, "category": "qa", "turns": ["Who played anna?"]},
}


def write(path, *entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_json_lines(path, entries)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("form", ["{}/question.jsonl", "{}.jsonl"])
def test_a_real_file_is_read_in_a_folder_of_its_own_or_by_its_name(tmp_path, name, form):
    entry = REAL[name]
    write(tmp_path / form.format(name), entry)
    assert load(tmp_path, name) == [Question(entry["question_id"],
                                             entry["category"], tuple(entry["turns"]))]


@pytest.mark.parametrize("folder", [TOY_QUESTIONS, BUNDLED_FOLDER])
def test_the_bundled_sets_are_those_of_the_paper_and_have_twenty_questions_each(folder):
    sets = {name: load(folder, name) for name in EvalConfig.of().chosen_sets}
    assert list(sets) == list(REAL)
    assert {len(questions) for questions in sets.values()} == {20}
    further_sets = {EDITS} if folder == BUNDLED_FOLDER else set()
    assert {path.stem for path in folder.glob("*.jsonl")} == set(REAL) | further_sets
    asked = [question for questions in sets.values() for question in questions]
    assert [question.id for question in asked] == [*range(1, 121)]
    assert len({question.turns[0] for question in asked}) == 120
    assert [name for name, questions in sets.items()
            if any(len(each.turns) > 1 for each in questions)] == ["mt_bench"]
    assert {len(question.turns) for question in sets["mt_bench"]} == {2}


def test_the_edits_are_twenty_further_questions_which_the_toy_does_not_have():
    edits = load(BUNDLED_FOLDER, EDITS)
    assert [question.id for question in edits] == [*range(121, 141)]
    assert {(question.category, len(question.turns)) for question in edits} == {("edit", 1)}
    assert len({question.turns for question in edits}) == 20
    with refused("there is no data set edits", "choose others with sets="):
        load(TOY_QUESTIONS, EDITS)


def test_the_toy_is_asked_in_its_own_words_and_every_other_model_in_ours(tmp_path):
    for model in (TOY / "llama", TOY / "draft_a"):
        assert bundled(model) == TOY_QUESTIONS
    for model in (tmp_path, PRESETS["smollm2"].base_dir):
        assert bundled(model) == BUNDLED_FOLDER
    (tmp_path / "tokenizer.json").write_text("{}")
    assert bundled(tmp_path) == BUNDLED_FOLDER
    assert EvalConfig.of(base_dir=str(TOY / "llama")).folder == str(TOY_QUESTIONS)
    assert EvalConfig.of(base_dir=str(tmp_path)).folder == str(BUNDLED_FOLDER)
    assert EvalConfig.of(base_dir=str(tmp_path), data="mine").folder == "mine"


def test_a_slice_counts_lines_from_0_and_leaves_the_last_one_out(tmp_path):
    write(tmp_path / "qa.jsonl", *({"question_id": i, "turns": [f"{i}?"]} for i in range(5)))
    assert [question.id for question in load(tmp_path, "qa", 1, 3)] == [1, 2]
    assert [question.id for question in load(tmp_path, "qa", 3)] == [3, 4]
    assert load(tmp_path, "qa")[0].category == "qa"


def test_a_list_of_texts_is_a_set_of_single_turns_which_may_repeat(tmp_path):
    (tmp_path / "chatbot.json").write_text('["Hi.", "Who?", "Hi."]')
    assert load(tmp_path, "chatbot") == [
        Question(0, "chatbot", ("Hi.",)),
        Question(1, "chatbot", ("Who?",)), Question(2, "chatbot", ("Hi.",))]
    assert [question.id for question in load(tmp_path, "chatbot", 1, 2)] == [1]


@pytest.mark.parametrize("name, text, words", [
    ("a.jsonl", '{"question_id": 1, "turns": ["x"]}\n{"turns": ["y"]}', "line 2 of"),
    ("a.jsonl", '{"question_id": 1, "turns": ["x"]}\n\n{"question_id"', "line 3 of"),
    ("a.jsonl", '{"question_id": 1, "turns": []}', "a list of texts"),
    ("a.jsonl", '["x"]', "line 1 of"),
    ("a.jsonl", '{"question_id": 1, "turns": ["x"], "category": ["y"]}', "\"category\" that is not a text"),
    ("a.jsonl", "\n \n", "has no question"),
    ("a.json", "[]", "has no question"),
    ("a.jsonl", '{"question_id": 1, "turns": ["x"]}\n{"question_id": 1, "turns": ["y"]}', "of line 1"),
    ("a.json", '["x"', "write a list of texts"),
    ("a.json", '{"x": 1}', "is not a list"),
    ("a.json", '["x", 1]', "entry 2 of the list"),
    ("b.jsonl", "", "there is no data set a in"),
    ("a.jsonl", '{"question_id": 1, "turns": ["x"]}', "questions=1: leaves no question"),
])
def test_what_is_wrong_with_a_set_is_reported_with_its_place_and_the_fix(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with refused(words):
        load(tmp_path, "a", 1)


def test_a_file_by_itself_is_read_by_the_same_rules_and_may_do_without_ids(tmp_path):
    data = b'\xef\xbb\xbf{"turns": ["a", "b"]}\r\n\r\n{"turns": ["c\xe2\x80\xa8d"], "question_id": "x"}\r\n'
    (tmp_path / "asked").write_bytes(data)
    assert read(tmp_path / "asked") == [Question(None, "", ("a", "b")),
                                        Question("x", "", ("c\u2028d",))]
    assert read(tmp_path / "asked", 1) == read(tmp_path / "asked", 1, 5) == read(tmp_path / "asked")[1:]
    (tmp_path / "asked.json").write_text('["a", "a"]')

    assert [question.turns for question in read(tmp_path / "asked.json")] == [("a",), ("a",)]
    (tmp_path / "asked").write_text('{"turns": ["a"]}\n{"turns": "abc"}')
    with refused("line 2 of"):
        read(tmp_path / "asked")
    with refused("questions=2: leaves no question of"):
        read(tmp_path / "asked.json", 2)
    with refused("there is no file"):
        read(tmp_path / "nowhere")


# --- one file of several categories -----------------------------------------------------------------------------------

# Lines in the form of Spec-Bench's question.jsonl, and of SPEED-Bench's table as JSON lines; the texts are ours.
SPEC_BENCH = [{"question_id": 81, "category": "writing", "turns": ["Write a note.", "Shorten it."]},
              {"question_id": 161, "category": "translation", "turns": ["Translate: Guten Tag."]},
              {"question_id": 241, "category": "writing", "turns": ["Write a poem."], "reference": ["Roses"]}]
SPEED_BENCH = [{"question_id": "5d1f", "category": "coding", "sub_category": None, "turns": ["Sort a list."],
                "source": "ours", "src_id": "7", "difficulty": None, "multiturn": False},
               {"question_id": "a90c", "category": "rag", "sub_category": "x", "turns": ["Who?", "When?"],
                "source": "ours", "src_id": "8", "difficulty": "hard", "multiturn": True}]


@pytest.mark.parametrize("entries, names",
                         [(SPEC_BENCH, ["writing", "translation"]), (SPEED_BENCH, ["coding", "rag"])],
                         ids=["Spec-Bench", "SPEED-Bench"])
def test_the_categories_of_one_file_are_sets(tmp_path, entries, names):
    path = tmp_path / "question.jsonl"
    write(path, *entries)
    assert categories(path) == names
    found = [question for name in names for question in load(path, name)]
    assert sorted(question.turns for question in found) == sorted(tuple(entry["turns"]) for entry in entries)
    assert all(question.category == name for name in names for question in load(path, name))
    assert EvalConfig.of(data=str(path)).chosen_sets == tuple(names)
    assert EvalConfig.of(data=str(path), sets=names[1]).chosen_sets == (names[1],)
    assert len(load(path, names[0], 0, 1)) == 1
    with refused(f"poetry (known: {', '.join(sorted(names))}): choose others with sets="):
        load(path, "poetry")


def test_the_bundled_file_has_two_questions_of_each_category_of_speed_bench():
    path = BUNDLED_FOLDER.parent / "speed" / "question.jsonl"
    names = "coding humanities math multilingual qa rag reasoning roleplay stem summarization writing".split()
    assert categories(path) == names and [len(load(path, name)) for name in names] == [2] * 11


def test_a_text_of_speed_bench_that_was_not_fetched_is_refused(tmp_path):
    path = tmp_path / "question.jsonl"
    write(path, {**SPEED_BENCH[0], "turns": [f"{UNFETCHED_TEXT} FROM THE SOURCE"]})
    with refused("line 1 ", " fetch the texts"):
        categories(path)
