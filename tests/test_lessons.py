"""Lessons of a training: conversations become tokens with one process and one vocabulary, once."""
from __future__ import annotations

import stat

import pytest
import torch
from safetensors.torch import save_file

from model.drafts.suffix import add_texts
from model.text import Text
from tests.checkpoints import refused
from tests.json_files import save_json, save_json_lines
from tests.saved import FORM
from tests.test_text import bytelevel, copied, sentencepiece
from train.data import make_rows
from train.eagle import lessons as made
from train.eagle.lessons import LESSON_FILES, fingerprint, read_lessons
from train.eagle.options import parser

WORDS = ["the dog", "  def add(a, b):", "naïve café 世界", "\n\n", " fine", "How are you?", "🎉", "x"]
TALKS = [[WORDS[(i * k + k) % len(WORDS)] + WORDS[i % 5]
          for k in range(2 * (1 + i % 3))]
         for i in range(150)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    from transformers import LlamaTokenizer

    folder = tmp_path_factory.mktemp("lessons")
    slow = Text(sentencepiece(folder / "llama"))
    slow.tokenizer = LlamaTokenizer.from_pretrained(str(slow.folder))
    own = Text(bytelevel(folder / "own"))
    return {"sentencepiece": Text(slow.folder), "slow sentencepiece": slow, "byte level": own}


@pytest.fixture
def args(texts, tmp_path):
    data = tmp_path / "talks.jsonl"
    save_json_lines(data, ({"turns": talk[::2], "reference": talk[1::2]} for talk in TALKS[:60]))
    (tmp_path / "out").mkdir()
    folder = copied(texts["byte level"], tmp_path / "model")
    return parser().parse_args([str(folder),
                                str(tmp_path / "out"), "--data", str(data), "--template", "own"])


def same(some, others) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a.ids, b.ids) and torch.equal(a.answers, b.answers)
        for a, b in zip(some, others))


def file_of(args):
    [path] = args.out_dir.glob(LESSON_FILES)
    return path


@pytest.mark.parametrize("kind, template", [
    ("sentencepiece", "vicuna"), ("sentencepiece", "llama-2"), ("slow sentencepiece", "vicuna"), ("byte level", "own")])
def test_an_answer_begins_where_its_prompt_ends_as_the_prompt_alone_is_read(texts, monkeypatch, kind, template):
    text, spans = texts[kind], Text.spans
    rows = make_rows(text, TALKS, template, 4096)
    assert len(rows) == len(TALKS)
    half = sorted(len(row.ids) for row in rows)[len(rows) // 2]
    cut = make_rows(text, TALKS, template, half)
    assert max(len(row.ids) for row in cut) == half
    monkeypatch.setattr(Text, "spans",
                        lambda *given: ((ids, []) for ids, _ in spans(*given)))
    assert same(rows, make_rows(text, TALKS, template, 4096))
    assert same(cut, make_rows(text, TALKS, template, half))


def test_lessons_are_kept_for_this_user_alone_and_made_once(args, monkeypatch, capsys):
    first = read_lessons(args, 512)
    path = file_of(args)
    assert f"conversations, whose tokens {path} keeps" in capsys.readouterr().out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(made, "Text", lambda folder: pytest.fail("a tokenizer was opened"))
        again = read_lessons(args, 512)
    assert same(first.rows, again.rows)
    assert (first.prompts, first.end_ids) == (again.prompts, again.end_ids)


def test_texts_that_a_user_has_kept_are_learned_whole(args):
    texts = [list(range(30, 50)), list(range(7, 12))]
    save_json(args.model_dir / "config.json", FORM)
    save_file({"lm_head.weight": torch.zeros(1)}, args.model_dir / "model.safetensors")
    args.data.unlink()
    add_texts(args.data, texts, FORM["vocab_size"], 1000)
    lessons = read_lessons(args, 15)
    assert [row.ids.tolist() for row in lessons.rows] == [texts[0][:15], texts[1]] and lessons.prompts == []
    assert all(bool(row.answers.all()) for row in lessons.rows)

    args.data.unlink()
    add_texts(args.data, texts, FORM["vocab_size"] + 1, 1000)
    with refused("holds answers of another vocabulary"):
        read_lessons(args, 15)
    save_json(args.data, {"vocabulary": FORM["vocab_size"]})
    with refused("holds no answers yet: ask run_pipe.sh something with answers="):
        read_lessons(args, 15)


def shorter(args):
    lines = args.data.read_text().splitlines(keepends=True)
    args.data.write_text("".join(lines[1:]))


def other_tokenizer(args):
    path = args.model_dir / "tokenizer_config.json"
    path.write_text(path.read_text().replace("assistant:", "bot:"))


def broken(args):
    path = file_of(args)
    path.write_bytes(path.read_bytes()[:-1])


def empty(args):
    file_of(args).write_bytes(b"")


def seed(args):
    args.seed = 5


@pytest.mark.parametrize("change", [shorter, other_tokenizer, broken, empty, seed])
def test_lessons_of_anything_else_are_made_again(args, change, monkeypatch):
    opened_texts = []
    monkeypatch.setattr(made, "Text", lambda folder: opened_texts.append(folder) or Text(folder))
    read_lessons(args, 512)
    change(args)
    fresh = read_lessons(args, 512)
    assert len(opened_texts) == 2
    assert same(fresh.rows, read_lessons(args, 512).rows)
    for path in args.out_dir.glob(LESSON_FILES):
        path.unlink()
    assert same(fresh.rows, read_lessons(args, 512).rows)


def test_every_word_that_decides_what_the_lessons_are_is_in_their_fingerprint(args):
    marks = [fingerprint(args, 512), fingerprint(args, 511)]
    for name, value in {"template": "vicuna", "judged": 3, "seed": 5}.items():
        setattr(args, name, value)
        marks.append(fingerprint(args, 512))
    assert len(set(marks)) == 5
