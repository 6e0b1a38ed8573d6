"""Training of heads: it reads what decoding reads, its losses are EAGLE's, and an interruption changes nothing."""
from __future__ import annotations

import json
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from launch.split.write import split
from model.checkpoint import Checkpoint
from model.eagle import Eagle3Head, EagleHead, fit_head, inner_layers
from model.text import Text
from pipeline.decode import Request
from scripts.train_eagle import __main__ as train_eagle
from scripts.train_eagle import heads
from scripts.train_eagle.course import Course
from scripts.train_eagle.data import Row, draw, make_row, read_conversations
from scripts.train_eagle.judge import accepted_length, open_decoder
from scripts.train_eagle.loss import FeatureTask, Objective, WordTask
from scripts.train_eagle.teacher import Teacher
from scripts.train_eagle.unroll import unroll
from tests.checkpoints import refused
from tests.saved import FORM, here, save_tokenizer
from tests.test_families import MODELS
from tests.tiny import CONFIG, Tiny

CPU = torch.device("cpu")
TALK = json.dumps({"conversations": [{"from": "human", "value": "a\u2028b"}, {"from": "gpt", "value": "c"}]},
                  ensure_ascii=False)
both = pytest.mark.parametrize("third", [False, True], ids=["eagle", "eagle3"])
ANSWERED = [10, 11, 12, 13, 17, 18, 19, 20, 23]  # a row's tokens that are an answer's


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model with seven layers, in float64, and a tokenizer of single characters."""
    folder, tiny = tmp_path_factory.mktemp("training") / "base", Tiny(7)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**FORM, "num_hidden_layers": 7, "max_position_embeddings": 512}))
    tensors = {f"model.{name}": x for name, x in tiny.tensors.items()}
    save_file({**tensors, "lm_head.weight": tiny.lm_head.weight.detach()}, folder / "model.safetensors")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(base):
    return Teacher(Checkpoint(base), torch.float64, CPU)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Conversations about letters, as ShareGPT writes them."""
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    said = [[("human", f"what follows {a}?"), ("gpt", f"{b} follows {a}.")] * (1 + i % 2)
            for i, (a, b) in enumerate(zip("abcdefghi", "bcdefghij"))]
    path.write_text("".join(json.dumps({"conversations": [{"from": who, "value": what} for who, what in talk]}) + "\n"
                            for talk in said))
    return path


def make_head(teacher, third, vocab=40):
    own = torch.arange(3, 3 + vocab) if third else None
    config = heads.describe(teacher, vocab if third else None)
    return heads.begin(teacher, config, own, seed=1), config


def make_task(teacher, third, method):
    return (WordTask if third else FeatureTask)(teacher, make_head(teacher, third)[0], method)


def make_rows():
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in (27, 40):
        answers = torch.zeros(length, dtype=torch.bool)
        answers[ANSWERED] = True
        rows.append(Row(torch.randint(3, CONFIG.vocab, (length,), generator=generator).int(), answers))
    return rows


@both
def test_every_pass_reads_what_the_draft_would_read_there(teacher, third):
    head, _ = make_head(teacher, third)
    ids = make_rows()[0].ids.long()[:12]
    last, inner = teacher.read(ids)
    feature = (inner if third else last)[:-1]
    trained = list(unroll(head, ids[1:], feature, passes=4))
    for pair in range(len(ids) - 4):  # the text up to this pair, then three guesses, each with what was made before
        cache, nodes, out = CONFIG.cache(1, 64, teacher.embedding), count(), None
        for step in range(4):
            rows = range(pair + 1) if step == 0 else [pair + step]
            new = [next(nodes) for _ in rows]
            cache.admit(new, [max(node - 1, 0) for node in new], len(new))
            out = head(ids[1:][list(rows)], feature[:pair + 1] if step == 0 else out[-1:], torch.tensor(rows), cache)
            torch.testing.assert_close(trained[step][pair], out[-1], atol=1e-12, rtol=1e-9)


def by_hand(task, row, third):
    """Losses of each pass as EAGLE's papers write them, summed over the row, from what the passes made."""
    teacher, head, ids = task.teacher, task.head, row.ids.long()
    last, inner = teacher.read(ids)
    known = torch.arange(3, 43) if third else torch.arange(CONFIG.vocab)
    for number, out in enumerate(unroll(head, ids[1:], (inner if third else last)[:-1], task.method.passes)):
        loss = right = 0.0
        for place in range(len(out)):
            truth, word = last[place + number + 1], place + number + 2
            said = teacher.lm_head(truth)
            if word < len(ids) and row.answers[word] and (not third or said.argmax() in known):
                logits = head.lm_head(head.norm(out[place])) if third else teacher.lm_head(out[place])
                loss -= (said[known].softmax(-1) * logits.log_softmax(-1)).sum() * (1 if third else 0.1)
                loss += 0 if third else F.smooth_l1_loss(out[place], truth)
                right += int(known[logits.argmax()] == said.argmax())
        yield loss, right


@both
@torch.enable_grad()
def test_the_loss_is_that_of_the_papers(teacher, third):
    task = make_task(teacher, third, Objective(3, decay=0.8))
    rows, told = make_rows(), task.learn(make_rows(), (0, 0))
    size = sum(len(row.ids) - 1 if third else len(ANSWERED) for row in rows)
    marks = [list(by_hand(task, row, third)) for row in rows]
    loss = sum(0.8 ** i * mark for row in marks for i, (mark, _) in enumerate(row)) / size
    assert told["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert told["agreement"] == sum(row[0][1] for row in marks) / (2 * len(ANSWERED))
    learnt = [p for p in task.head.parameters() if p.requires_grad]
    for got, wanted in zip([p.grad for p in learnt], torch.autograd.grad(loss, learnt)):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
    assert task.head.embed_tokens.weight.grad is None and teacher.lm_head.weight.grad is None


def test_noise_is_small_and_depends_on_the_step_alone(teacher):
    def loss(noise, seed):
        return make_task(teacher, False, Objective(1, noise=noise)).learn(make_rows(), seed)["loss"]

    assert loss(0.1, (0, 4)) == loss(0.1, (0, 4)) != loss(0.1, (0, 5))
    assert loss(0.1, (0, 4)) == pytest.approx(loss(0.0, (0, 4)), rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_a_head_of_any_family_is_taught_with_the_features_of_transformers(name, tmp_path):
    import transformers

    kind, fields = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**fields, "num_hidden_layers": 7})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path / "base")
    teacher, row = Teacher(Checkpoint(tmp_path / "base"), torch.float32, CPU), make_rows()[0]
    with torch.no_grad():
        hidden = model(row.ids.long()[None], output_hidden_states=True).hidden_states
    last, inner = teacher.read(row.ids)
    torch.testing.assert_close(last, hidden[-1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(inner, torch.cat([hidden[i][0] for i in inner_layers(7)], -1), atol=1e-4, rtol=1e-4)
    for third in (False, True):
        head, described = make_head(teacher, third)
        task, folder = (WordTask if third else FeatureTask)(teacher, head, Objective(2)), tmp_path / f"head{third}"
        assert task.learn([row], (0, 0))["loss"] > 0
        folder.mkdir()
        heads.write(head, described, folder, teacher.stored)
        read = fit_head(Checkpoint(folder), teacher.source.config)
        assert isinstance(read, Eagle3Head if third else EagleHead) and read.config.theta == teacher.config.theta
        assert dict(read.config.scaling) == dict(teacher.config.scaling)


@both
def test_an_interrupted_training_ends_with_the_same_bits(base, talks, tmp_path, monkeypatch, third):
    def command(out):
        return ["--data", str(talks), "--template", "vicuna", "--epochs", "2", "--batch", "2", "--save-every", "2",
                "--judged", "1", "--held-out", "0.2", "--length", "300", "--passes", "2", "--threads", "1",
                "--draft-vocab", "30", *["--eagle3"] * third, str(base), str(tmp_path / out)]

    assert train_eagle.main(command("whole")) == 0
    advance = Course.advance

    def interrupted(course):
        if course.step == 5:
            raise KeyboardInterrupt
        advance(course)

    monkeypatch.setattr(Course, "advance", interrupted)
    assert train_eagle.main(command("halves")) == 130
    assert sorted(path.name for path in (tmp_path / "halves").iterdir()) == ["training.pt"]
    monkeypatch.setattr(Course, "advance", advance)
    assert train_eagle.main(command("halves")) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    with refused("is of a training with passes=2 instead of 3"):
        train_eagle.train(train_eagle.parser().parse_args([*command("halves"), "--passes", "3"]))
    split(base, tmp_path / "split", "0+3+4", tmp_path / "whole", progress=False)
    texts = []
    for method in ("ar", "continuous"):
        output = tmp_path / f"{method}.json"
        assert here(f"model_dir={tmp_path / 'split'}", f"pipeline_type={method}", f"output={output}",
                    "max_new_tokens=20", "prompt=what follows c?") == 0
        texts.append(json.loads(output.read_text())["token_ids"])
    assert texts[0] == texts[1]


def test_a_head_that_learnt_is_accepted_more_often(teacher, tmp_path):
    head, config = make_head(teacher, False)
    (tmp_path / "new").mkdir()
    (tmp_path / "taught").mkdir()
    heads.write(head, config, tmp_path / "new", torch.float64)
    prompt = [5, 9, 20, 33]
    text, stream = open_decoder(teacher, tmp_path / "new", 100).decode(Request(prompt, max_new_tokens=40))
    list(stream)
    ids = torch.tensor(prompt + text.token_ids).int()
    task = FeatureTask(teacher, head, Objective(2, word_weight=1.0))
    plan = train_eagle.Hyperparameters("head", 40, 5e-3, matrix_rate=0.02, warm_up=2)
    row = Row(ids, torch.arange(len(ids)) >= len(prompt))
    Course(plan, head, tmp_path / "training.pt").run(lambda step: task.learn([row], (0, step)))
    heads.write(head, config, tmp_path / "taught", torch.float64)
    before, after = (accepted_length(open_decoder(teacher, tmp_path / name, 100), [prompt], frozenset(), 40)
                     for name in ("new", "taught"))
    assert before < after and task.agreement([row], 2)[0] > 0.9


@pytest.mark.parametrize("template", ["vicuna", "llama-2"])
def test_answers_and_their_end_tokens_count_and_nothing_else(base, template):
    text, talk = Text(base), ["what is a?", "a letter.", "and b?", "b, too!"]
    row = make_row(text, talk, template, 4096)
    ids = row.ids.tolist()
    assert [i for i in ids if i in text.end_ids] == [2, 2] and ids[-1] == 2
    assert ids[:len(text.prompt_ids(talk[:3], template))] == text.prompt_ids(talk[:3], template)
    said = text.tokenizer.decode(row.ids[row.answers])
    assert said.replace(" ", "").replace("</s>", "|") == "aletter.|b,too!|"
    short = make_row(text, talk, template, len(ids) - 3)
    assert short.ids.tolist() == ids[:-3] and short.answers.tolist() == row.answers.tolist()[:-3]
    assert make_row(text, talk, template, 5) is None


def test_conversations_are_read_in_every_usual_form(tmp_path):
    share = {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "a"},
                               {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]}
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bench = {"question_id": 1, "turns": ["a", "c"], "reference": ["b", "d"]}
    forms = [share, {"messages": chat}, chat, bench]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, forms)))
    (tmp_path / "list").write_text(json.dumps([share, {"messages": chat}]))
    assert read_conversations(tmp_path / "lines") == [["a", "b"], ["a", "b"], ["a", "b"], ["a", "b", "c", "d"]]
    assert read_conversations(tmp_path / "list") == [["a", "b"], ["a", "b"]]
    (tmp_path / "windows").write_bytes(b"\xef\xbb\xbf" + f"{TALK}\r\n\r\n{TALK}\r\n".encode())
    assert read_conversations(tmp_path / "windows") == [["a\u2028b", "c"]] * 2
    (tmp_path / "windows").write_bytes(b"\xef\xbb\xbf [" + f"{TALK},\r\n{TALK}]\r\n".encode())
    assert read_conversations(tmp_path / "windows") == [["a\u2028b", "c"]] * 2


def test_each_row_is_drawn_once_an_epoch():
    drawn = [draw(5, 0, first, 2) for first in range(0, 20, 2)]
    flat = sum(drawn, [])
    assert all(sorted(flat[i:i + 5]) == list(range(5)) for i in range(0, 20, 5)) and flat[:5] != flat[5:10]


def test_the_draft_vocabulary_is_what_answers_use_most():
    ids, answers = torch.tensor([7, 7, 7, 4, 9, 9, 2]).int(), torch.tensor([0, 0, 0, 1, 1, 1, 1]).bool()
    assert heads.vocabulary([Row(ids, answers)], 2, 10).tolist() == [2, 9]
    assert heads.vocabulary([Row(ids, answers)], 4, 10).tolist() == [0, 2, 4, 9]


@pytest.mark.parametrize(("content", "sentence"), [
    ("", "holds 0 conversations with an answer"),
    ("{broken", "is not JSON"),
    ('{"text": "a"}', "line 1 of"),
    (f"{TALK}\n" * 30 + "{broken", "line 31 of"),
    (f"{TALK}\n{TALK[:-1]}", "line 2 of"),
    (f"[{TALK},\n{TALK},\n{{broken]", "line 3, column 2"),
    (f"{TALK}\n\nnull", "line 3 of"),
    ('{"turns": "abc", "reference": "xyz"}', "line 1 of"),
    ('{"messages": [{"role": "user", "content": ["a"]}]}', "line 1 of"),
    ('{"conversations": [5]}', "line 1 of"),
    ('{"conversations": [{"from": "human", "value": "\\ud800"}]}', "half a character"),
    ("[" * 100_000, "is nested too deeply"),
    ('["\xe9"]', "is not a conversation"),
    ('{"conversations": [{"from": "human", "value": "a"}]}\n' * 3, "holds 0 conversations with an answer"),
])
def test_data_without_conversations_is_refused(tmp_path, content, sentence):
    (tmp_path / "data").write_text(content)
    with refused(sentence):
        read_conversations(tmp_path / "data")


def test_what_cannot_end_well_is_refused_before_it_begins(base, talks, tmp_path, capsys):
    def said(*words, out="new"):
        code = train_eagle.main([str(base), str(tmp_path / out), "--data", str(talks), *words])
        assert code == 2
        return capsys.readouterr().err

    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(b"")
    assert "holds pytorch_model.bin already" in said(out="head")
    assert "--batch 0 makes no sense" in said("--batch", "0")
    for words in (("--epochs", "nan"), ("--epochs", "inf"), ("--limit", "1"), ("--threads", "0"), ("--threads", "-1"),
                  ("--threads", "1000000"), ("--passes", "1000000000"), ("--noise", "nan"), ("--word-weight", "inf"),
                  ("--judged", "-1"), ("--seed", str(1 << 70)), ("--rate", "nan"), ("--save-every", "0")):
        assert f"{words[0]} {words[1]} makes no sense; give" in said(*words)
    assert "--device cuda:99 is not here" in said("--device", "cuda:99")
    (tmp_path / "file").write_text("")
    assert "cannot be written (File exists): choose another folder" in said(out="file")
    assert "choose the --template" in said("--length", "3")
    assert "is no share" in said("--held-out", "1")
    assert "--device nowhere is unknown" in said("--device", "nowhere")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "training.pt").write_bytes(b"PK")
    assert "cannot be read" in said("--threads", "1", out="cut")
    config = json.loads((base / "config.json").read_text())
    small = tmp_path / "small"
    small.mkdir()
    tensors = load_file(base / "model.safetensors")
    (small / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    save_file({name: x for name, x in tensors.items() if ".6." not in name}, small / "model.safetensors")
    assert train_eagle.main([str(small), str(tmp_path / "x"), "--data", str(talks), "--eagle3"]) == 2
    assert "needs a model of 7 layers or more" in capsys.readouterr().err
