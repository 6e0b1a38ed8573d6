"""Training of heads: it reads what decoding reads, its losses are EAGLE's, and an interruption changes nothing."""
from __future__ import annotations

import json
import math
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from config.old_names import OLD_OPTIONS
from config.presets import ROOT
from config.schema.block_heads import BlockForm
from config.schema.heads import usual_layers
from launch.split.write import split
from model.drafts.dflash import BlockDraft, DFlashHead
from model.drafts.eagle import Eagle
from model.drafts.head_files import fit_head
from model.drafts.heads import Eagle3Head, EagleHead
from model.drafts.network import at_once
from model.text import Text
from model.tree import TokenTree
from model.weights.checkpoint import Checkpoint
from model.weights.unfold import Unfolded
from pipeline.answers import Request
from tests.checkpoints import refused
from tests.json_files import change_json, load_json, load_json_lines, save_json, save_json_lines
from tests.saved import here, save_model, token_ids
from tests.test_families import MODELS, config_class
from tests.tiny import CONFIG, Tiny
from toy.corpus import dialogues as corpus
from toy.recipe.teach import dialogue_rows
from train import own
from train.course import WHOLE, BatchShare, Course, rate_at
from train.data import TokenRow, draw, make_row, read_conversations
from train.eagle import command as train_eagle
from train.eagle import heads
from train.eagle.block import BlockTask, block_part
from train.eagle.judge import evaluate, open_decoder
from train.eagle.loss import Objective, Task, WordTask, own_part, part_at
from train.eagle.options import parser
from train.eagle.teacher import Teacher
from train.eagle.unroll import unroll

CPU = torch.device("cpu")
TALK = json.dumps({"conversations": [{"from": "human", "value": "a\u2028b"},
                                     {"from": "gpt", "value": "c"}]},
                  ensure_ascii=False)
both = pytest.mark.parametrize("third", [False, True], ids=["eagle", "eagle3"])
DEPTHS = ["0", "1", "2", "4", "8", "16", "32"]
ANSWERED = [10, 11, 12, 13, 17, 18, 19, 20, 23]  # a row's tokens that are an answer's


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model with seven layers, in float64, and a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("training") / "base"
    save_model(folder, Tiny(7))
    change_json(folder / "config.json", max_position_embeddings=512)
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
    save_json_lines(path, ({"conversations": [{"from": who, "value": what} for who, what in talk]} for talk in said))
    return path


class Trainings:
    """Heads that the command trains for the base on the talks, each in a folder with a name of its own."""

    def __init__(self, base, talks, folder):
        self.base, self.talks, self.folder = base, talks, folder

    def words(self, name, *options):
        return [str(self.base), str(self.folder / name), "--data", str(self.talks), "--template", "vicuna",
                "--threads", "1", "--judged", "0", *options]

    def run(self, name, *options, exit_code=0):
        assert train_eagle.main(self.words(name, *options)) == exit_code

    def start(self, name, *options):
        """As `run`, but an error is raised."""
        train_eagle.train(parser().parse_args(self.words(name, *options)))

    def content(self, name, file_name="config.json"):
        return load_json(self.folder / name / file_name)

    def tensors(self, name):
        return load_file(self.folder / name / "model.safetensors")

    def check_text(self):
        """The pipeline writes with the head `whole` what it writes without."""
        split(self.base, self.folder / "split", "0+3+4", self.folder / "whole", progress=False)
        outputs = [self.folder / f"{method}.json" for method in ("ar", "continuous")]
        for output in outputs:
            assert here(f"model_dir={self.folder / 'split'}", f"pipeline_type={output.stem}", f"output={output}",
                        "draft=eagle", "max_new_tokens=20", "prompt=what follows c?") == 0
        ar, continuous = map(token_ids, outputs)
        assert ar == continuous


@pytest.fixture
def trainings(base, talks, tmp_path, monkeypatch):
    monkeypatch.setattr(train_eagle, "NEW_TOKENS", 40)
    return Trainings(base, talks, tmp_path)


def make_head(teacher, third, vocab=40):
    own = torch.arange(3, 3 + vocab) if third else None
    config = heads.describe(teacher, vocab if third else None)
    return heads.new_head(teacher, config, own, seed=1), config


def make_task(teacher, third, method):
    return (WordTask if third else Task)(teacher, make_head(teacher, third)[0], method)


def learnt_parameters(task):
    return [parameter for parameter in task.head.parameters() if parameter.requires_grad]


def num_targets(task, rows):
    """The number of words over which the loss of these rows is a mean."""
    return sum(len(row.ids) - 1 if isinstance(task, WordTask) else len(ANSWERED) for row in rows)


def make_rows():
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in (27, 40):
        answers = torch.zeros(length, dtype=torch.bool)
        answers[ANSWERED] = True
        rows.append(TokenRow(torch.randint(3, CONFIG.vocab,
                                           (length,), generator=generator).int(),
                             answers))
    return rows


@both
def test_the_shares_of_processes_add_up_to_the_batch(teacher, third):
    task, rows = make_task(teacher, third, Objective(2, starts=3, noise=0.1)), make_rows()

    def gradients(*shares):
        task.head.zero_grad()
        losses = [task.learn(rows, (0, 7), share)["loss"] for share in shares]
        return [p.grad.clone() / len(shares) for p in learnt_parameters(task)], sum(losses) / len(losses)

    whole_gradients, whole_loss = gradients(WHOLE)
    mean_gradients, mean_loss = gradients(BatchShare(0, 2), BatchShare(1, 2))
    assert mean_loss == pytest.approx(whole_loss)
    torch.testing.assert_close(mean_gradients, whole_gradients)


@both
@pytest.mark.parametrize("starts",
                         [None, [0, 3, 4, 7]], ids=["all", "some"])
def test_every_pass_reads_what_the_draft_would_read_there(teacher, third, starts):
    head, _ = make_head(teacher, third)
    ids = make_rows()[0].ids.long()[:12]
    last, inner, _ = teacher.read(ids)
    feature = (inner if third else last)[:-1]
    chosen = torch.tensor(list(range(11)) if starts is None else starts)
    first, *later = unroll(head, ids[1:], feature, 4, chosen)
    pairs = starts or list(range(len(ids) - 4))
    trained = [first[pairs], *(out[:len(pairs)] for out in later)]
    for row, pair in enumerate(pairs):  # the text up to this pair, then three guesses, each with what was made before
        cache, nodes, out = CONFIG.cache(1, 64, teacher.embedding), count(), None
        for step in range(4):
            rows = range(pair + 1) if step == 0 else [pair + step]
            new = [next(nodes) for _ in rows]
            cache.admit(new, [max(node - 1, 0) for node in new], len(new))
            out = head(ids[1:][list(rows)], feature[:pair + 1]
                       if step == 0 else out[-1:], torch.tensor(rows), cache)
            torch.testing.assert_close(trained[step][row], out[-1], atol=1e-12, rtol=1e-9)
    assert [len(out) for out in later] == [sum(pair + step < 11
                                               for pair in starts or range(11))
                                           for step in (1, 2, 3)]


def by_hand(task, row, third, likeliest=64, starts=None):
    """Losses of each pass as EAGLE's papers write them, summed over the row, from what the passes made."""
    teacher = task.teacher
    head = task.head
    ids = row.ids.long()
    method = task.method
    last, inner, _ = teacher.read(ids)
    known = torch.arange(3, 43) if third else torch.arange(CONFIG.vocab)
    chosen = torch.arange(len(ids) - 1) if starts is None else starts
    for number, out in enumerate(unroll(head, ids[1:],
                                        (inner if third else last)[:-1], method.passes, chosen)):
        loss = right = 0.0
        for i in range(len(out)):
            place = i if starts is None or not number else int(starts[i])
            truth, word = last[place + number + 1], place + number + 2
            said = teacher.lm_head(truth)
            if word < len(ids) and row.answers[word] and (not third or said.argmax() in known):
                logits = head.lm_head(head.norm(out[i])) if third else teacher.lm_head(out[i])
                top = said[known].topk(min(likeliest, len(known))).indices
                chances, guessed = said[known][top].softmax(-1), logits.log_softmax(-1)[top]
                words = (chances * guessed).sum()
                if third and method.reads_own_outputs:
                    words = words / 2 + torch.minimum(chances, guessed.exp()).sum().log()
                loss -= words * (1 if third else method.word_weight)
                loss += 0 if third else F.smooth_l1_loss(out[i], truth)
                right += int(known[logits.argmax()] == said.argmax())
        yield loss, right


@both
@torch.enable_grad()
def test_the_loss_is_that_of_the_papers(teacher, third):
    task = make_task(teacher, third, Objective(3, decay=0.8))
    rows, found = make_rows(), task.learn(make_rows(), (0, 0))
    marks = [list(by_hand(task, row, third)) for row in rows]
    loss = sum(0.8 ** i * mark for row in marks for i, (mark, _) in enumerate(row)) / num_targets(task, rows)
    assert found["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert found["agreement"] == sum(row[0][1] for row in marks) / (2 * len(ANSWERED))
    learnt = learnt_parameters(task)
    expected_gradients = torch.autograd.grad(loss, learnt)
    torch.testing.assert_close([parameter.grad for parameter in learnt], [*expected_gradients], atol=1e-6, rtol=1e-4)
    assert task.head.embed_tokens.weight.grad is None and teacher.lm_head.product.weight.grad is None


@both
@torch.enable_grad()
def test_later_passes_start_at_a_few_places_which_stand_for_all(teacher, third):
    task = make_task(teacher, third, own_part(1, passes=3, starts=2))
    rows = make_rows()
    found = task.learn(rows, (0, 7))
    loss = 0.0
    for number, row in enumerate(rows):
        starts = task.starts(row, (0, 7, number))
        assert len(starts) == 2 and set(starts.tolist()) < {8, 9, 10, 15, 16, 17}  # the next two words are an answer's
        first, *later = (mark for mark, _ in by_hand(task, row, third, starts=starts))
        loss += 3 * first + sum(later) * 6 / 2
    assert found["loss"] == pytest.approx(float(loss.detach()) / num_targets(task, rows), abs=1e-6)
    assert task.learn(rows, (0, 7)) == found != task.learn(rows, (0, 8))
    task.method = Objective(3, starts=100, likeliest=2, word_weight=1.0)  # more than there are, so that all are drawn
    marks = [mark for mark, _ in by_hand(task, rows[0], third,
                                         likeliest=2, starts=task.starts(rows[0], (1,)))]
    found = task.learn(rows[:1], (0, 7))["loss"]
    assert found == pytest.approx(float(sum(marks).detach()) / task.size(rows[0]),
                                  abs=1e-6)


def test_a_guess_that_is_never_accepted_has_a_finite_loss(teacher):
    task = make_task(teacher, True, own_part(1))
    loss = task.word_loss(torch.tensor([[-200.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    assert float(loss) == pytest.approx(200 / 2 - math.log(1e-4))


@both
def test_agreement_is_counted_by_the_guesses_that_the_head_stands_on(teacher, third):
    task, row = make_task(teacher, third, Objective(1)), make_rows()[1]
    starts = torch.tensor([8, 9, 10, 15, 16, 17])
    task.method = Objective(4)
    right = [right for _, right in by_hand(task, row, third, starts=starts)]
    asked = [len(ANSWERED), 6, 4, 2]  # two runs of four words
    assert task.agreement([row], [0, 1, 3]) == [right[i] / asked[i]
                                                for i in (0, 1, 3)]


def make_block_task(teacher, starts=100):
    config = heads.describe_block(teacher, BlockForm(teacher.inner, 4, 50), 2)
    return BlockTask(teacher, heads.new_head(teacher, config, None, seed=1), block_part(4, starts, 1))


def drafted(task, ids, feature, tip):
    """Logits `[places, V]` of the block that a draft reads whose text ends in the token `tip`."""
    tree = TokenTree(ids[:tip + 1].tolist(), 99)
    draft = BlockDraft(task.head, task.teacher.lm_head, 99)
    tree.unsent_text.clear()
    for node, one in zip(tree.trunk[:-1], feature):
        tree.nodes[node].hidden = one
    at_once(draft.expand(tree, [tree.tip], 3))
    return draft._logits


def test_a_block_reads_and_learns_what_the_draft_would_read_there(teacher):
    task, row = make_block_task(teacher), make_rows()[0]
    ids = row.ids.long()
    last, feature, _ = teacher.read(ids)
    starts = task.starts(row, (0,))
    assert starts.tolist() == [8, 9, 10, 15, 16, 17]
    made = list(task.passes(ids, feature, starts))
    loss, right = 0.0, [[] for _ in range(3)]
    for number, start in enumerate(starts.tolist()):
        logits = drafted(task, ids, feature, start + 1)
        for place, (_, logits_AV) in enumerate(made):
            torch.testing.assert_close(logits_AV[number], logits[place], atol=1e-6, rtol=1e-6)
            word = start + 2 + place
            if word < len(ids) and row.answers[word]:  # weights fall by place, to 1/e after half a block
                said = teacher.lm_head(last[word - 1])
                loss -= math.exp(-(place + 1) / 2) * (said.softmax(-1) * logits[place].log_softmax(-1)).sum()
                right[place].append(bool(logits[place].argmax() == said.argmax()))
    assert task.learn([row], (0,))["loss"] == pytest.approx(float(loss.detach()) / len(ANSWERED), abs=1e-6)
    assert task.agreement([row], [0, 2]) == [sum(right[place]) / len(right[place])
                                             for place in (0, 2)]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learnt_parameters(task))
    assert task.head.embed_tokens.weight.grad is None


def test_a_block_at_the_end_of_the_context_learns(teacher):
    task, row = make_block_task(teacher), make_rows()[0]
    answers = torch.ones(512, dtype=torch.bool)
    assert task.learn([TokenRow(row.ids[:8].repeat(64), answers)],
                      (0,))["loss"] > 0


def test_a_head_of_blocks_is_written_as_it_is_published_and_drafts(trainings):
    options = ["--block", "4", "--epochs", "1", "--starts", "2", "--judged", "1"]
    trainings.run("whole", *options)
    written = trainings.content("whole")
    assert written["dflash_config"]["target_layer_ids"] == [layer - 1 for layer in usual_layers(7)]
    assert written["architectures"] == ["DFlashDraftModel"] and "unrolled_passes" not in written
    head = fit_head(Checkpoint(trainings.folder / "whole"), Checkpoint(trainings.base).config)
    assert isinstance(head, DFlashHead) and head.form.size == 4 and len(head.layers) == 2
    record = trainings.content("whole", "training.json")
    assert record["steps"] == 2 and list(record["held_out_agreement"]) == ["0", "1", "2"]
    trainings.check_text()
    with refused("--block trains a new DFlash head"):
        trainings.start("whole", *options, "--eagle3")


def test_the_rate_falls_in_each_part():
    plan = train_eagle.Hyperparameters("head", steps=12, rate=1.0, warm_up=2, own_steps=4)
    assert [rate_at(step, plan) for step in range(12)] == [0.5,
                                                           1, 1, 1, 1, 0.75, 0.5, 0.25, 0.25, 0.5, 0.5, 0.25]
    assert [part_at(step, [own_part(2), own_part(1)]) for step in range(3)] == [0, 0, 1]


def test_noise_is_small_and_depends_on_the_step_alone(teacher):
    def loss(noise, seed):
        return make_task(teacher, False, Objective(1, noise=noise)).learn(make_rows(), seed)["loss"]

    assert loss(0.1, (0, 4)) == loss(0.1, (0, 4)) != loss(0.1, (0, 5))
    assert loss(0.1, (0, 4)) == pytest.approx(loss(0.0, (0, 4)),
                                              rel=0.05)


@pytest.mark.parametrize("name", ["llama 3.1", "phi4 mini, long", "gemma3", "smollm3, by list", "gpt-oss", "opt"])
def test_a_head_of_any_family_is_taught_with_the_features_of_transformers(name, tmp_path):
    import transformers

    kind, fields = MODELS[name]
    torch.manual_seed(1)
    more = {key: (value * 2)[:7]
            for key, value in fields.items() if key in ("layer_types", "no_rope_layers")}
    config = config_class(kind)(**{**fields, **more, "num_hidden_layers": 7})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path / "base")
    teacher = Teacher(Unfolded(tmp_path / "base"), torch.float32, CPU)
    row = make_rows()[0]
    with torch.no_grad():
        hidden = model(row.ids.long()[None], output_hidden_states=True).hidden_states
    last, inner, _ = teacher.read(row.ids)
    torch.testing.assert_close(last, hidden[-1][0], atol=5e-4, rtol=1e-4)
    wanted = torch.cat([hidden[i][0] for i in usual_layers(7)], -1)
    torch.testing.assert_close(inner, wanted, atol=5e-4, rtol=1e-4)
    for third in (False, True):
        head, described = make_head(teacher, third)
        task, folder = (WordTask if third else Task)(teacher, head, Objective(2)), tmp_path / f"head{third}"
        assert task.learn([row], (0, 0))["loss"] > 0
        folder.mkdir()
        heads.write(head, described, folder, teacher.stored)
        read = fit_head(Checkpoint(folder), teacher.source.config)
        assert isinstance(read, Eagle3Head if third else EagleHead) and read.config.theta == teacher.config.theta
        usual = teacher.config.rope != "longrope"
        assert dict(read.config.scaling) == (dict(teacher.config.scaling) if usual else {})


@pytest.mark.parametrize("course, halts, steps", [
    ("--authors", [5], 8), ("--authors --accumulate 2", [3], 4), ("", [11], 14), ("--eagle3", [5, 11], 14)],
    ids=["eagle authors", "accumulated", "eagle", "eagle3"])
def test_an_interrupted_training_ends_with_the_same_bits(trainings, monkeypatch, course, halts, steps):
    options = ["--epochs", "2", "--batch", "2", "--save-every", "2", "--judged", "1", "--length", "400",
               "--passes", "2", "--draft-vocab", "30", *course.split()]
    trainings.run("whole", *options)
    advance = Course.advance

    def interrupted(course):
        if course.step in halts:
            raise KeyboardInterrupt
        advance(course)

    monkeypatch.setattr(Course, "advance", interrupted)
    while halts:
        trainings.run("halves", *options, exit_code=130)
        left = sorted(path.name.partition("-")[0] for path in (trainings.folder / "halves").iterdir())
        assert left == ["lessons", "training.pt"]
        halts = halts[1:]
    trainings.run("halves", *options)
    for name in ("model.safetensors", "config.json"):
        whole, halves = ((trainings.folder / out / name).read_bytes() for out in ("whole", "halves"))
        assert whole == halves
    record = trainings.content("whole", "training.json")
    assert record["steps"] == steps and list(record["held_out_agreement"]) == DEPTHS
    assert trainings.content("whole")["unrolled_passes"] == 2
    with refused("belongs to a training with passes=2 instead of 3"):
        trainings.start("halves", *options, "--passes", "3")
    if "--authors" not in course:  # which changes nothing about how a head drafts
        trainings.check_text()


@pytest.mark.parametrize("dialect", [name for name in heads.DIALECTS if name != "eagle3"])
def test_a_dialect_is_written_as_it_is_published_and_read_again(trainings, dialect):
    trainings.run("whole", "--epochs", "0.3", "--own-epochs", "0.3", "--passes", "2", "--draft-vocab", "30",
                  "--dialect", dialect)
    written, names = trainings.content("whole"), trainings.tensors("whole").keys()
    first = "midlayer." if dialect == "eagle3.1" else "layers.0."
    assert f"{first}hidden_norm.weight" in names
    assert ("fc_norm.2.weight" in names) == (dialect == "eagle3.1")
    assert ("input_norm.weight" in names) == ("transformer_layer_config" in written) == (dialect == "speculators")
    trainings.check_text()
    trainings.run("mended", "--from", str(trainings.folder / "whole"), "--own-epochs", "0.3")
    assert trainings.content("mended") == {**written, "unrolled_passes": 8}
    assert trainings.tensors("mended").keys() == names


@both
def test_a_given_head_is_mended_by_the_second_part_alone(teacher, trainings, tmp_path, third):
    head, config = make_head(teacher, third)
    for name in ("given", "wide"):
        (tmp_path / name).mkdir()
    heads.write(head, {**config, "bos_token_id": 7}, tmp_path / "given", torch.float16, borrows_embedding=False)
    options = ["--from", str(tmp_path / "given"), "--batch", "2", "--own-epochs", "1", "--epochs", "9",
               *["--eagle3"] * third]
    trainings.run("mended", *options)
    trainings.run("same", *options, "--rate", "1e-30")
    given, mended, same = map(trainings.tensors, ("given", "mended", "same"))
    for name, x in given.items():
        frozen = name in ("embed_tokens.weight", "d2t", "t2d")
        assert x.dtype == mended[name].dtype and torch.equal(x, same[name])
        assert torch.equal(x, mended[name]) == frozen
    assert trainings.content("mended", "training.json")["steps"] == 4
    assert trainings.content("mended") == {**config, "bos_token_id": 7, "unrolled_passes": 8}
    drafts = [Eagle(fit_head(Checkpoint(tmp_path / name), teacher.source.config).to_empty(device="cpu"),
                    None, 9)
              for name in ("given", "mended")]
    assert [draft.drifts for draft in drafts] == [not third, False]
    heads.write(head, {**config, "hidden_size": 64}, tmp_path / "wide", torch.float16)
    with refused("has hidden_size 64, but the model has 32"):
        trainings.start("new", *options, "--from", str(tmp_path / "wide"))


def test_a_head_that_learnt_is_accepted_more_often(teacher, tmp_path):
    head, config = make_head(teacher, False)
    (tmp_path / "new").mkdir()
    (tmp_path / "taught").mkdir()
    heads.write(head, config, tmp_path / "new", torch.float64)
    prompt = [5, 9, 20, 33]
    text, stream = open_decoder(teacher, tmp_path / "new", 100).stream(Request(prompt, max_new_tokens=40))
    list(stream)
    ids = torch.tensor(prompt + text.token_ids).int()
    task = Task(teacher, head, Objective(2, word_weight=1.0))
    plan = train_eagle.Hyperparameters("head", 40, 5e-3, matrix_rate=0.02, warm_up=2)
    row = TokenRow(ids, torch.arange(len(ids)) >= len(prompt))
    Course(plan, head, tmp_path / "training.pt").run(lambda step: task.learn([row], (0, step)))
    heads.write(head, config, tmp_path / "taught", torch.float64)
    before, after = (evaluate(open_decoder(teacher, tmp_path / name, 100), [prompt], frozenset(), 40)
                     for name in ("new", "taught"))
    assert before[1] < after[1]
    assert task.agreement([row], [0])[0] > 0.9
    for found, _ in (before, after):
        assert [torch.equal(one.ids, ids) and torch.equal(one.answers, row.answers)
                for one in found] == [True]


@pytest.mark.parametrize("template", ["vicuna", "llama-2"])
def test_answers_and_their_end_tokens_count_and_nothing_else(base, template):
    text, talk = Text(base), ["what is a?", "a letter.", "and b?", "b, too!"]
    row = make_row(text, talk, template, 4096)
    ids = row.ids.tolist()
    assert [i for i in ids if i in text.end_ids] == [2, 2]
    assert ids[-1] == 2
    assert ids[:len(text.prompt_ids(talk[:3], template))] == text.prompt_ids(talk[:3], template)
    said = text.tokenizer.decode(row.ids[row.answers])
    assert said.replace(" ", "").replace("</s>", "|") == "aletter.|b,too!|"
    short = make_row(text, talk, template, len(ids) - 3)
    assert short.ids.tolist() == ids[:-3]
    assert short.answers.tolist() == row.answers.tolist()[:-3]
    assert make_row(text, talk, template, 5) is None


def test_conversations_are_read_in_every_usual_form(tmp_path):
    share = {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "a"},
                               {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]}
    chat = [{"role": "system", "content": "s"},
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bench = {"question_id": 1, "turns": ["a", "c"], "reference": ["b", "d"]}
    forms = [share, {"messages": chat}, chat, bench]
    save_json_lines(tmp_path / "lines", forms)
    save_json(tmp_path / "list", [share, {"messages": chat}])
    assert read_conversations(tmp_path / "lines") == [["a", "b"], ["a", "b"],
                                                      ["a", "b"], ["a", "b", "c", "d"]]
    assert read_conversations(tmp_path / "list") == [["a", "b"], ["a", "b"]]
    (tmp_path / "windows").write_bytes(b"\xef\xbb\xbf" + f"{TALK}\r\n\r\n{TALK}\r\n".encode())
    assert read_conversations(tmp_path / "windows") == [["a\u2028b", "c"]] * 2
    (tmp_path / "windows").write_bytes(b"\xef\xbb\xbf [" + f"{TALK},\r\n{TALK}]\r\n".encode())
    assert read_conversations(tmp_path / "windows") == [["a\u2028b", "c"]] * 2


def test_each_row_is_drawn_once_an_epoch():
    drawn = [draw(5, 0, first, 2) for first in range(0, 20, 2)]
    flat = sum(drawn, [])
    assert all(sorted(flat[i:i + 5]) == list(range(5))
               for i in range(0, 20, 5))
    assert flat[:5] != flat[5:10]


def test_the_bundled_head_is_taught_no_bundled_question(tmp_path):
    talks = [["Name a colour."], ["Red."]], [["Say a word."], ["Fox."]]
    save_json_lines(tmp_path / "dialogues.jsonl", talks)
    bundled = corpus.bundled_questions(tmp_path)
    corpus.write_questions(tmp_path / "data", tmp_path)
    assert bundled == [entry["turns"][0] for task in corpus.TASKS
                       for entry in load_json_lines(tmp_path / "data" / f"{task}.jsonl")]
    assert len(bundled) == 120
    with (tmp_path / "dialogues.jsonl").open("a") as file:
        file.write(json.dumps([[f"Please answer in a few sentences. {bundled[-1]}"], ["No."]]) + "\n")
    text = Text(ROOT / "toy" / "llama")
    said = [text.decode(row.ids[row.answers].tolist()).strip()
            for row in dialogue_rows(tmp_path, text.folder, 3)]
    assert said == ["Red.", "Fox."]


@pytest.fixture(scope="module")
def small_batches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "BATCH_SIZE", 4)
        patch.setattr(own, "MAX_ANSWER", 8)
        yield


def own_talks(out, count=5, template="vicuna"):
    args = parser().parse_args([str(ROOT / "toy" / "llama"),
                                str(out), "--own", str(count), "--template", template])
    return own.make_own(args, torch.float32, CPU).read_text()


def test_a_model_makes_the_same_conversations_after_an_interruption(tmp_path, monkeypatch, small_batches):
    whole = own_talks(tmp_path / "whole")
    assert len(set(whole.splitlines())) == len(whole.splitlines()) == 5
    assert len(read_conversations(tmp_path / "whole" / "own.jsonl")) == 5
    batch, made = own.Talker.talks, []

    def halting(talker, number):
        made.append(number)
        if made == [0, 1]:
            raise KeyboardInterrupt
        return batch(talker, number)

    monkeypatch.setattr(own.Talker, "talks", halting)
    with pytest.raises(KeyboardInterrupt):
        own_talks(tmp_path / "halves")
    assert own_talks(tmp_path / "halves") == whole
    assert made[:3] == [0, 1, 1]
    assert sorted(set(made[2:])) == made[2:]
    count = len(made)
    assert own_talks(tmp_path / "halves", 4).splitlines() == whole.splitlines()[:4]
    assert len(made) == count


def test_a_second_question_follows_an_answer_that_ended(tmp_path, monkeypatch, small_batches):
    numbers_of_prompts = []

    def all_ended(talker, prompts, *more):
        numbers_of_prompts.append(len(prompts))
        return [(f"Word {number}?", number > 0) for number, _ in enumerate(prompts)]

    monkeypatch.setattr(own.Talker, "_written", all_ended)
    lines = own_talks(tmp_path, count=3).splitlines()
    turns = [[message["content"] for message in json.loads(line)["messages"]] for line in lines]
    beginnings = own.BEGINNINGS[1:4]  # the first question of a batch did not end, and the first of three answers
    assert turns == [[f"{beginnings[0]}Word 1?", "Word 0?"],
                     [f"{beginnings[1]}Word 2?", "Word 1?"],
                     [f"{beginnings[2]}Word 3?", "Word 2?", "Word 1?", "Word 0?"]]
    assert numbers_of_prompts == [4, 3, 2, 1]


def test_a_model_without_a_chat_template_is_not_asked_for_conversations(tmp_path):
    with refused("has no chat template, which --own requires; name the model's with --template"):
        own_talks(tmp_path, template="auto")


def test_a_head_is_taught_what_the_model_said_itself_and_its_features_are_kept(tmp_path, small_batches, monkeypatch):
    read, count = Teacher._read, []
    monkeypatch.setattr(Teacher, "_read", lambda teacher, ids: count.append(1) or read(teacher, ids))
    said = str(tmp_path / "kept" / "own.jsonl")
    for name, more in (("kept", ["--own", "8", "--keep-features"]), ("read", ["--data", said])):
        count.clear()
        assert train_eagle.main([str(ROOT / "toy" / "llama"),
                                 str(tmp_path / name), "--epochs", "2", "--passes", "2",
                                 "--own-epochs", "1", "--template", "vicuna", "--judged", "0", "--threads", "1",
                                 "--dtype", "float32", *more]) == 0
        assert len(count) == (7 if name == "kept" else 4 * 4 + 2 * 4)
    kept, again = (tmp_path / name / "model.safetensors" for name in ("kept", "read"))
    assert kept.read_bytes() == again.read_bytes() and not (tmp_path / "kept" / "features").exists()


def test_the_draft_vocabulary_is_what_answers_use_most():
    ids = torch.tensor([7, 7, 7, 4, 9, 9, 2]).int()
    answers = torch.tensor([0, 0, 0, 1, 1, 1, 1]).bool()
    assert heads.vocabulary([TokenRow(ids, answers)], 2, 10).tolist() == [2, 9]
    assert heads.vocabulary([TokenRow(ids, answers)], 4, 10).tolist() == [0, 2, 4, 9]


@pytest.mark.parametrize("content, sentence", [
    ('{"text": "a"}', "line 1 of"),
    (f"{TALK}\n" * 30 + "{broken", "line 31 of"),
    (f"{TALK}\n{TALK[:-1]}", "line 2 of"),
    (f"[{TALK},\n{TALK},\n{{broken]", "line 3, column 2"),
    ('{"messages": [{"role": "user", "content": ["a"]}]}', "line 1 of"),
    ('{"conversations": [{"from": "human", "value": "\\ud800"}]}', "half a character"),
    ("[" * 100_000, "is nested too deeply"),
    ('["\xe9"]', "is not a conversation"),
    ('{"conversations": [{"from": "human", "value": "a"}]}\n' * 3, "holds 0 conversations with an answer"),
])
def test_data_without_conversations_is_refused(tmp_path, content, sentence):
    (tmp_path / "data").write_text(content)
    with refused(sentence):
        read_conversations(tmp_path / "data")


def test_a_start_says_template_and_arithmetic_and_takes_what_is_faster_here(base, tmp_path, monkeypatch, capsys):
    options = [str(base), str(tmp_path), "--data", "x", "--template", "own", "--device", "cpu"]
    monkeypatch.setattr(train_eagle, "CPU_INFO", tmp_path / "cpuinfo")

    def chosen(*more):
        train_eagle.open_teacher(parser().parse_args([*options, *more]))
        return capsys.readouterr().out

    assert chosen() == f"{base}: template own, float32 on cpu\n"
    for words, name in [("AuthenticAMD flags : fpu avx512_bf16", "bfloat16"),
                        ("GenuineIntel flags : fpu avx512_bf16", "float32"),
                        ("GenuineIntel flags : fpu avx512_bf16 amx_bf16", "bfloat16")]:
        (tmp_path / "cpuinfo").write_text(words)
        assert chosen() == f"{base}: template own, {name} on cpu\n"
    assert chosen("--dtype", "float32") == f"{base}: template own, float32 on cpu\n"


def test_an_option_of_an_earlier_version_is_answered_with_what_to_do(error_of):
    for word in OLD_OPTIONS:
        printed = error_of(train_eagle.main, ["base", "out", "--data", "x", word, "4"])
        assert f"error: unknown option {word}: {OLD_OPTIONS[word]}\n" in printed


def test_what_cannot_end_well_is_refused_before_it_begins(base, talks, tmp_path, error_of):
    def errors_of(*words, out="new", model=base):
        return error_of(train_eagle.main, [str(model), str(tmp_path / out), "--data", str(talks), *words])

    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(b"")
    assert "already holds pytorch_model.bin" in errors_of(out="head")
    assert "--batch 0 is out of range" in errors_of("--batch", "0")
    for words in (("--epochs", "nan"), ("--threads", "1000000"), ("--judged", "-1"),
                  ("--seed", str(1 << 70))):
        assert f"{words[0]} {words[1]} is out of range; give" in errors_of(*words)
    assert "--device cuda:99 does not exist here" in errors_of("--device", "cuda:99")
    (tmp_path / "file").write_text("")
    assert "cannot be written (File exists): choose another folder" in errors_of(out="file")
    assert "choose the --template" in errors_of("--length", "3")
    assert "--passes 1 has no pass over the head's own outputs" in errors_of("--passes", "1")
    assert "--from trains only the second part" in errors_of("--from", "head", "--authors")
    assert "nowhere" in errors_of("--from", "nowhere") and "fc.weight" in errors_of("--from", str(base))
    for words in (("--own-epochs", "1"), ("--passes", "2"), ("--noise", "0"), ("--word-weight", "1")):
        assert f"{words[0]} applies to EAGLE heads only" in errors_of("--block", "8", *words)
    assert "--device nowhere is unknown" in errors_of("--device", "nowhere")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "training.pt").write_bytes(b"PK")
    assert "cannot be read" in errors_of("--threads", "1", out="cut")

    save_model(tmp_path / "small", Tiny(6))
    assert "needs a model of at least 7 layers" in errors_of("--eagle3", model=tmp_path / "small")
