"""Every kind of draft gets its inputs, guesses as expected, and is refused if it does not match the model."""
import shutil
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.drafts import DRAFTS
from config.run_config import Growth
from config.schema.heads import read_dialect, usual_layers
from launch import drafts
from model.drafts.eagle import Eagle
from model.drafts.head_files import fit_head, load_head
from model.drafts.heads import Eagle3Head
from model.drafts.network import at_once
from model.llama import LlamaConfig
from model.sample import Sampler, not_finite
from model.tree import TokenTree
from model.weights.checkpoint import Checkpoint
from model.weights.parts import EMBED, HEAD, Part
from pipeline.answers import Request
from pipeline.messages import Segment
from tests.checkpoints import refused, save_checkpoint, split_quietly
from tests.json_files import save_json
from tests.saved import FORM, PROMPT, save_model
from tests.tiny import CONFIG, DEEP, HandmadeDraft, admit_text, pipeline, tokens_of, weights, write

NEW = 18
SPECULATIVE = "serial naive pruned continuous pipedec".split()
VOCAB = 40  # of the EAGLE-3 heads here


class Watcher(HandmadeDraft):
    """A draft that never guesses, and checks the features that arrive."""

    inner = True

    def __init__(self, head):
        self.head, self.seen = head, {}

    def grow(self, tree, growth, *worth_drafting):
        yield from ()
        self.seen.update({node.pos: node.hidden
                          for node in tree.nodes.values() if node.hidden is not None})
        return False


# Messages


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_inner_features_are_the_inputs_of_three_layers_wherever_these_lie(stages):
    draft = Watcher(DEEP.eagle3().network)
    with pipeline(DEEP, stages, "pruned", draft) as decoder:
        text = PROMPT + write(decoder, PROMPT, 8)
    want = dict.fromkeys(usual_layers(8))
    cache = DEEP.new_cache(len(text))
    DEEP.whole(torch.tensor(text), admit_text(cache, len(text)), cache, want)
    assert list(want) == [2, 4, 5]
    assert sorted(draft.seen) == list(range(len(text) - 2))
    got = torch.stack([draft.seen[i] for i in range(len(text) - 2)])
    torch.testing.assert_close(got,
                               torch.cat(list(want.values()), -1)[:-2])


@pytest.mark.parametrize("kind, wide", [("eagle", False), ("twin", False), ("eagle3", True)])
def test_segments_carry_inner_features_only_for_a_head_that_needs_them(kind, wide):
    sent = []

    def watch(link):
        send = link.send

        def spy(msg):
            if isinstance(msg, Segment) and msg.nodes:
                sent.append(msg.inner)
            send(msg)
        link.send = spy
        return link

    with pipeline(DEEP, 2, "continuous", getattr(DEEP, kind)(), wrap=watch) as decoder:
        write(decoder, PROMPT, 8)
    assert {x is not None for x in sent} == {wide}
    if wide:
        assert {x.shape[1] for x in sent} == {0, CONFIG.hidden, 3 * CONFIG.hidden}


# Guesses


@pytest.mark.parametrize("strategy, stages", [*zip(SPECULATIVE, cycle([3, 1]))])
def test_a_model_that_drafts_for_itself_is_always_right(strategy, stages):
    with pipeline(DEEP, stages, strategy, DEEP.twin()) as decoder:
        answer, stream = decoder.stream(Request(PROMPT, max_new_tokens=NEW))
        assert tokens_of(stream) == DEEP.text(PROMPT, NEW, Sampler())
    # How far continuous guesses ahead depends on the speed of its target, so this is not tested here.
    assert strategy == "continuous" or answer.misses <= 6, "some guesses were wrong"


def test_a_small_model_waits_until_the_prompt_is_sent_and_then_does_not_wait_for_answers():
    draft, tree = DEEP.twin(), TokenTree(PROMPT, max_tokens=64)
    growth = Growth(20, 4, 4)
    assert not at_once(draft.grow(tree, growth))
    tree.cut()
    assert at_once(draft.grow(tree, growth)) and tree.live


def test_a_head_with_fewer_tokens_guesses_in_the_vocabulary_of_the_target():
    draft = DEEP.eagle3(VOCAB)
    own = draft.network.logits(torch.randn(3, CONFIG.hidden, dtype=torch.float64))
    draft.lm_head = lambda out: own
    gain, token = draft.guess(own, VOCAB)
    assert sorted(token[0].tolist()) == [i for i in range(CONFIG.vocab)
                                         if i % 2 or i >= 2 * (CONFIG.vocab - VOCAB)]
    best = own[0].argmax()
    assert token[0, 0] == best + draft.network.shift[best]
    torch.testing.assert_close(gain.exp().sum(-1),
                               torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "twin"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_draft_whose_logits_are_not_finite_is_reported_and_the_pipeline_lives_on(kind, bad):
    draft = getattr(DEEP, kind)()
    draft.network.embed_tokens.weight.data[PROMPT[-1]] = bad
    with pipeline(DEEP, 2, "continuous", draft) as decoder:
        with refused("the draft's logits are not finite (NaN or infinity); its weights are damaged or were trained"):
            write(decoder, PROMPT, 8)
        draft.lm_head = lambda out: torch.zeros(len(out), CONFIG.vocab, dtype=out.dtype)
        assert write(decoder, PROMPT, 8) == DEEP.text(PROMPT, 8, Sampler())


def test_a_draft_in_float16_is_refused_with_the_type_to_take():
    with refused("the draft's logits are not finite (NaN or infinity); float16 ends at 65504"):
        raise not_finite("draft", torch.float16, "")


# Files


def save_eagle3(folder, vocab=VOCAB, change=lambda tensors: None, name="pytorch_model.bin", **config):
    """Write an EAGLE-3 head for the tiny model; `change` changes its tensors, `config` its config."""
    head = DEEP.eagle3(vocab).network
    tensors = {name: x for name, x in weights(head, seed=4).items() if name != "embed_tokens.weight"}
    if vocab < CONFIG.vocab:
        t2d = torch.zeros(CONFIG.vocab, dtype=torch.bool)
        t2d[torch.arange(vocab) + head.shift] = True
        tensors.update(d2t=head.shift, t2d=t2d)
    change(tensors)
    form = {**FORM, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": vocab}
    return Checkpoint(save_checkpoint(folder, {**form, **config}, tensors, name))


BASE = {**FORM, "num_hidden_layers": 8}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("vocab", [VOCAB, CONFIG.vocab])
def test_a_head_of_eagle_3_is_read_from_either_kind_of_file_and_takes_the_type_of_the_model(tmp_path, vocab, name):
    source = save_eagle3(tmp_path / "head", vocab, name=name)
    embedding = torch.randn(CONFIG.vocab, CONFIG.hidden)
    head = load_head(source, BASE, lambda: embedding, torch.float16, "cpu")
    assert isinstance(head, Eagle3Head)
    assert {p.dtype for name, p in head.named_parameters() if name != "embed_tokens.weight"} == {torch.float16}
    assert head.like.dtype == torch.float16
    assert torch.equal(head.embed_tokens.weight, embedding), "the model's embedding keeps its form"
    assert torch.equal(head.embed_tokens(torch.arange(CONFIG.vocab)), embedding.half())
    assert (head.shift is None) == (vocab == CONFIG.vocab)
    draft = Eagle(head, head.logits, capacity=16)
    tree = TokenTree([1, 2], max_tokens=9)
    tree.nodes[tree.trunk[0]].hidden = torch.ones(3 * CONFIG.hidden).half()

    assert draft.cache.slots[0].tensors[0].dtype == torch.float16
    if hasattr(torch.nn.functional, "scaled_dot_product_attention"):  # older ones have no half precision on the CPU
        assert at_once(draft.grow(tree, Growth(4, 2, 2))) and tree.live


def swap(tensors):
    down, up = "midlayer.mlp.down_proj.weight", "midlayer.mlp.up_proj.weight"
    tensors[down], tensors[up] = tensors[up], tensors[down]


BROKEN = {
    "lacks midlayer.hidden_norm.weight": {"change": lambda t: t.pop("midlayer.hidden_norm.weight")},
    "lacks d2t": {"change": lambda t: t.pop("d2t")},
    "d2t in": {"change": lambda t: (t.pop("t2d"), t["d2t"].copy_(-torch.arange(VOCAB)))},
    "one that the model does not have": {"change": lambda t: (t.pop("t2d"), t["d2t"].add_(CONFIG.vocab))},
    "holds fc.bias": {"change": lambda t: t.update({"fc.bias": torch.zeros(CONFIG.hidden)})},
    "midlayer.mlp.up_proj.weight in": {"change": swap},
    "contradict each other": {"change": lambda t: t["t2d"].logical_not_()},
    "should be whole numbers": {"change": lambda t: t.update(t2d=t["t2d"].to(torch.bfloat16))},
    "has hidden_size 16, but the model has 32": {"hidden_size": 16},
    "has vocab_size 54, but the model has 53": {"vocab_size": 54},
    "lm_head.weight in": {"draft_vocab_size": 39},
    "reads the inputs of layers [2, 4, 10], but the model has 8": {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}},
    "holds '\\x1b[2J' in an unsupported form": {"change": lambda t: t.update({"\x1b[2J": torch.zeros(1)})},
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_head_of_eagle_3_that_does_not_fit_is_refused_by_name(tmp_path, sentence):
    with refused(sentence):
        fit_head(save_eagle3(tmp_path / "head", **BROKEN[sentence]), BASE)


def test_of_the_two_tables_of_tokens_one_is_enough_and_a_whole_vocabulary_needs_none(tmp_path):
    both, alone = (fit_head(save_eagle3(tmp_path / str(number), change=change), BASE).shift for number, change in
                   enumerate((lambda t: None, lambda t: t.pop("t2d"))))
    assert torch.equal(both, alone)
    zeros = {"d2t": torch.zeros(CONFIG.vocab).long(), "t2d": torch.zeros(CONFIG.vocab, dtype=torch.bool)}
    assert not fit_head(save_eagle3(tmp_path / "whole", CONFIG.vocab, lambda t: t.update(zeros)), BASE).shift.any()


def test_a_head_of_eagle_3_needs_seven_layers(tmp_path):
    source = save_eagle3(tmp_path / "head")
    fit_head(source, {**BASE, "num_hidden_layers": 7})
    with refused("needs a model of 7 layers or more, but the model has 6; take an EAGLE-1 or EAGLE-2 head"):
        fit_head(source, {**BASE, "num_hidden_layers": 6})


def test_a_head_of_another_width_needs_an_embedding_of_its_own(tmp_path):
    sizes = LlamaConfig.read({**FORM, "hidden_size": 16, "num_hidden_layers": 1})
    config = {"hidden_size": 16, "target_hidden_size": 32, "change": lambda t: t.update(
        weights(Eagle3Head(sizes, 32, VOCAB, read_dialect({}, 8)), seed=1))}
    assert fit_head(save_eagle3(tmp_path / "whole", **config), BASE).fc.in_features == 96
    with refused("lacks embed_tokens.weight"):
        fit_head(save_eagle3(tmp_path / "bare", **{**config, "change": lambda t: (
            config["change"](t), t.pop("embed_tokens.weight"))}), BASE)


def save_eagle(folder, bias=True, change=lambda tensors: None):
    tensors = {name: x for name, x in weights(DEEP.eagle().network, seed=3).items()
               if bias or name != "fc.bias"}
    change(tensors)
    return Checkpoint(save_checkpoint(folder, {**FORM, "num_hidden_layers": 1}, tensors))


def test_an_older_head_has_the_bias_that_its_file_holds_and_no_other_name_may_differ(tmp_path):
    assert fit_head(save_eagle(tmp_path / "with"), BASE).fc.bias is not None
    assert fit_head(save_eagle(tmp_path / "without", bias=False), BASE).fc.bias is None
    sizes = {"q": 32, "k": 16, "v": 16}
    qkv = {f"layers.0.self_attn.{name}_proj.bias": torch.zeros(size) for name, size in sizes.items()}
    of_qwen = fit_head(save_eagle(tmp_path / "qwen", change=lambda t: t.update(qkv)), BASE)
    assert of_qwen.layers[0].self_attn.v_proj.bias is not None
    with refused("lacks embed_tokens.weight"):
        fit_head(save_eagle(tmp_path / "bare", change=lambda t: t.pop("embed_tokens.weight")), BASE)
    with refused("lacks layers.0.self_attn.q_proj.weight"):
        fit_head(save_eagle(tmp_path / "other", change=lambda t: t.update(
            {"layers.0.self_attn.query.weight": t.pop("layers.0.self_attn.q_proj.weight")})), BASE)


# From the folders to the text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 8 layers, heads for it, a smaller one with the same vocabulary, and the split with EAGLE-3."""
    folder = tmp_path_factory.mktemp("drafts")
    save_model(folder / "small")
    tensors = {f"model.{name}": x for name, x in DEEP.tensors.items()}
    for name, more, config in (("base", {"lm_head.weight": DEEP.lm_head.weight.detach()}, {}),
                               ("tied", {}, {"tie_word_embeddings": True})):
        shutil.copytree(folder / "small", folder / name)
        save_file({**tensors, **more}, folder / name / "model.safetensors")
        save_json(folder / name / "config.json", {**BASE, **config})
    save_eagle3(folder / "eagle3")
    for name in ("base", "tied"):
        split_quietly(folder / name, folder / f"{name}-split", "0+3+2+3", folder / "eagle3")
    return folder


@pytest.fixture
def text(answer_to):
    """What is written over a split of a folder."""
    asked = ("prompt_ids=5,17,40,3,28,11,9", "max_new_tokens=20", "ignore_eos=true")
    return lambda folder, *words, model="base-split": answer_to(f"model_dir={folder / model}", *asked, *words)


def test_rank_0_has_the_embedding_that_a_head_of_eagle_3_borrows_and_no_other_rank_has_more(folder):
    base, tied = Part(folder / "base-split" / "stage_0"), Part(folder / "tied-split" / "stage_0")
    assert set(base.weights.names()) == {HEAD, EMBED}
    assert set(tied.weights.names()) == {HEAD}
    whole = load_file(folder / "base" / "model.safetensors")
    assert torch.equal(base.weights.read(EMBED), whole[EMBED])


def test_every_source_with_a_network_has_a_builder():
    sources = {source for name in DRAFTS for source in name.split("+")}
    assert sources - {"suffix", "none"} == set(drafts.DRAFTS)


def test_the_text_is_the_same_who_drafts(folder, text):
    plain = text(folder, "pipeline_type=ar")
    assert len(plain.split()) == 20
    for words in (["draft=eagle"], ["draft=none"], ["draft=model", f"draft_dir={folder / 'small'}"],
                  ["draft=eagle", "pipeline_type=pipedec"], ["draft=model", f"draft_dir={folder / 'base'}"]):
        assert text(folder, *words) == plain


def test_a_tied_model_lends_its_lm_head_as_embedding(folder, text):
    assert text(folder, model="tied-split") == text(folder, "pipeline_type=ar", model="tied-split")


def test_a_draft_model_in_the_folder_of_rank_0_needs_no_name(folder, text, tmp_path):
    shutil.copytree(folder / "base-split", tmp_path / "base-split")
    with pytest.raises(AssertionError, match="there is no folder .*draft: give draft_dir=FOLDER"):
        text(tmp_path, "draft=model")
    shutil.copytree(folder / "small", tmp_path / "base-split" / "stage_0" / "draft")
    assert text(tmp_path, "draft=model") == text(folder, "pipeline_type=ar")
