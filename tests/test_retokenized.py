"""A small model with other tokens than the target: its text is guessed in the target's tokens."""
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from config.run_config import Growth
from launch.drafts import _within
from model.drafts.mixture import Mixture
from model.drafts.network import at_once
from model.drafts.retokenized import Retokenized, encoded_after
from model.sample import Sampler
from model.text import decoded
from model.tree import TokenTree
from model.weights.parts import EMBED, HEAD
from pipeline.answers import Request
from tests.checkpoints import edited_tensors
from tests.json_files import change_json, edited_json, load_json
from tests.saved import PROMPT, here, save_model
from tests.test_mixture import anywhere, grown
from tests.tiny import CONFIG, TINY, pipeline

WORDS = "the baker bakes brown bread in the bakery, and the bread is good; Bäcker backen Brötchen für Möwen 🥐🥐 "


def of_bytes(merges):
    """Return a tokenizer of bytes with this many merges, trained on WORDS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SHORT, LONG = of_bytes(4), of_bytes(60)


# Text in other tokens


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_text_behind_tokens_prints_itself_behind_them(cut):
    ids = LONG(WORDS)["input_ids"]
    tail = ids[:cut]
    text = decoded(LONG, ids)[len(decoded(LONG, ids[:cut])):]
    assert encoded_after(LONG, tail, text) == ids[cut:]


def test_a_word_that_was_begun_in_other_tokens_goes_on_where_it_is():
    tail = SHORT("the ba")["input_ids"]
    in_long = [LONG.get_vocab()[name] for name in SHORT.convert_ids_to_tokens(tail) if name in LONG.get_vocab()]
    assert decoded(LONG, in_long) == "the ba"
    ids = encoded_after(LONG, in_long, "ker bakes")
    assert decoded(LONG, [*in_long, *ids]) == "the baker bakes"
    assert len(LONG("the baker")["input_ids"]) < len(in_long)


class Lowered:
    """Return a tokenizer of single lower-case letters."""

    def decode(self, ids, **_):
        return "".join(map(chr, ids)).lower()

    def __call__(self, text, **_):
        return {"input_ids": [ord(sign) for sign in text]}


def test_nothing_is_guessed_where_the_tokens_would_print_something_else():
    assert encoded_after(Lowered(), [97], "b") == [98]
    assert encoded_after(Lowered(), [97], "B") == []


class Writer:
    """A small model that writes a text, token by token."""

    def __init__(self, ids, prompt):
        self.ids, self.prompt, self.passes = ids, prompt, 0
        self.cache, self.num_keepable_tokens = SimpleNamespace(room=99, capacity=999), 999
        self.kept = []

    def expand(self, tree, nodes, width):
        yield from ()
        self.passes += 1
        at = tree.nodes[nodes[0]].pos + 1
        return [[(self.ids[at], 0.5)] if at < len(self.ids) else []]

    def keep(self, length):
        self.kept.append(length)

    def begin(self, sampler):
        pass

    def reset(self):
        self.kept = []


def drafting(own, target, prompt=9):
    """Return a draft that writes WORDS in tokens of its own, and a tree of the first words in the target's tokens."""
    small = Writer(own(WORDS)["input_ids"], prompt)
    draft = Retokenized(small, SimpleNamespace(tokenizer=own), SimpleNamespace(tokenizer=target), 999)
    tree = TokenTree(target(WORDS[:prompt])["input_ids"], 900)
    tree.unsent_text.clear()
    return draft, tree


def chain(tree):
    """Return the nodes of the branch that was guessed last."""
    found, node = [], tree.tip
    while tree.nodes[node].children:
        *_, node = tree.nodes[node].children.values()
        found.append(node)
    return found


@pytest.mark.parametrize("own, target", [(SHORT, LONG), (LONG, SHORT), (LONG, LONG)])
@pytest.mark.parametrize("prompt", [len("the"), len("the baker"), len("the baker bakes brown bread in")])
def test_a_drafted_text_is_a_chain_in_the_tokens_of_the_target(own, target, prompt):
    draft, tree = drafting(own, target, prompt)
    grown(Mixture([draft]), tree, anywhere(40))
    nodes = chain(tree)
    guessed = decoded(target, [tree.nodes[node].token for node in nodes])
    assert len(nodes) >= 4 and WORDS[prompt:].startswith(guessed)
    scores = [tree.nodes[node].score for node in nodes]
    assert scores == sorted(scores, reverse=True) and scores[-1] < 0


def test_the_last_token_waits_for_what_follows_it_and_so_does_half_a_character():
    draft, tree = drafting(SHORT, LONG, WORDS.index(" Bäcker"))
    ids = LONG(WORDS)["input_ids"]
    mixture, seen = Mixture([draft]), []
    growth = anywhere(40)
    for _ in range(12):
        assert at_once(mixture.grow(tree, growth))
        seen.append([tree.nodes[node].token for node in chain(tree)])
    rest = ids[len(tree.trunk):]

    assert seen[0] == []
    assert seen[-1] == rest[:len(seen[-1])]
    assert len(seen[-1]) == 2
    assert all("\ufffd" not in decoded(LONG, tokens) for tokens in seen)


def test_a_text_that_ends_in_half_a_character_is_not_gone_on_with():
    draft, tree = drafting(LONG, SHORT)
    for token in SHORT("🥐")["input_ids"][:2]:
        tree.settle(token)
    grown(Mixture([draft]), tree, anywhere(40))
    assert not tree.live and not draft.small.passes


def test_after_a_hit_the_chain_goes_on_and_after_a_miss_it_begins_again():
    draft, tree = drafting(SHORT, LONG)
    mixture, growth = Mixture([draft]), Growth(40, 4, 3, anywhere=True)
    grown(mixture, tree, growth)
    first = chain(tree)
    assert first
    tree.settle(tree.nodes[first[0]].token)
    grown(mixture, tree, growth)
    assert draft.small.kept == [0] and chain(tree)[:len(first) - 1] == first[1:], "the chain was begun again"
    tree.settle(LONG("!")["input_ids"][0])
    tree.unsent_text.clear()
    grown(mixture, tree, growth)
    both = len(SHORT("the baker")["input_ids"])

    assert draft.small.kept[1:] == [both], "what both texts have in common was read again"


# With models


@pytest.mark.parametrize("temperature, least", [(0.0, 2.0), (1.0, 1.0)])
def test_a_model_that_says_the_same_in_other_tokens_is_often_right(temperature, least):
    sampler = Sampler(temperature, seed=4)
    with pipeline(TINY, 2, "serial", Mixture([TINY.other(0.0)])) as decoder:
        answer = decoder.complete(Request(PROMPT, sampler, 40))
    assert answer.token_ids == TINY.text(PROMPT, 40, sampler)
    assert answer.mean_accepted_length > least and answer.sources.get("model", 0) >= (temperature == 0)


def resized(folder, size):
    """The tiny model with this many tokens, in a folder of its own."""
    save_model(folder)
    with edited_tensors(folder) as tensors:
        for name in (EMBED, HEAD):
            tensors[name] = tensors[name][[min(token, CONFIG.vocab - 1) for token in range(size)]].contiguous()
    change_json(folder / "config.json", vocab_size=size)
    return folder


def other_tokens(folder):
    """The tiny model with another name of a token, in a folder of its own."""
    save_model(folder)
    with edited_json(folder / "tokenizer.json") as content:
        content["model"]["vocab"]["A"] = content["model"]["vocab"].pop("a")
    return folder


@pytest.mark.parametrize("size", [50, 54])
def test_a_model_with_the_same_tokens_and_other_padding_guesses_them_itself(tmp_path, monkeypatch, capsys, size):
    """As Qwen2.5's models of several sizes have it; 51 and 52 are padding here."""
    monkeypatch.setattr("launch.prepare.HOME", tmp_path)
    save_model(tmp_path / "base")
    small, output = resized(tmp_path / "small", size), tmp_path / "answer.json"
    question = f"base_dir={tmp_path / 'base'}", "stages=1", "prompt_ids=5,52,17,51", "max_new_tokens=24"
    words = *question, f"output={output}"
    assert here(*words, "pipeline_type=ar") == 0
    plain = load_json(output)["token_ids"]
    for draft in (f"draft=model:{small}", f"ssm={small}"):
        assert here(*words, "pipeline_type=serial", "draft=ssm" if draft.startswith("ssm") else "seed=0", draft) == 0
        assert load_json(output)["token_ids"] == plain
    printed = capsys.readouterr().err
    assert "decoded" not in printed and printed.count("base-0+4 is split, once; now its ranks load it") == 1


def test_of_tokens_that_only_one_model_has_none_is_read_or_guessed():
    def draft_with(vocab):
        lm_head = SimpleNamespace(network=lambda token_T, *_: token_T, lm_head=lambda out_TD: torch.ones(1, vocab))
        return _within(53, lm_head, vocab)

    tokens = torch.tensor([3, 49, 50, 52])
    assert draft_with(50).network(tokens, None, None).tolist() == [3, 49, 49, 49]
    assert draft_with(54).network(tokens, None, None).tolist() == tokens.tolist()
    assert [draft_with(vocab).lm_head(None).shape[-1] for vocab in (50, 53, 54)] == [50, 53, 53]


def test_another_vocabulary_is_noticed_said_in_one_line_and_changes_no_text(tmp_path, capsys, error_of):
    save_model(tmp_path / "base")
    small = other_tokens(tmp_path / "small")
    asked = f"base_dir={tmp_path / 'base'}", "stages=0+2+2", "prompt=what is it?", "max_new_tokens=24"
    assert here(*asked, "pipeline_type=ar") == 0
    plain = capsys.readouterr().out.splitlines()[0]
    for words in (["pipeline_type=serial"], ["temperature=0", "pipeline_type=streaming"]):
        assert here(*asked, "draft=model", f"draft_dir={small}", *words) == 0
        shown = capsys.readouterr()
        assert shown.out.splitlines()[0] == plain
        [line] = [line for line in shown.err.splitlines() if "calls token 3 'A', but the model's" in line]
        assert line.endswith("that model's guesses are decoded, and encoded again in the tokens of the target")

    assert "made for the same tokenizer" in error_of(here, *asked, "draft=ssm", f"ssm={small}")


@pytest.mark.parametrize("policy", ["static", "opt", "expansion"])
def test_a_chain_of_another_tokenizer_grows_no_tree_level_by_level(tmp_path, error_of, policy):
    save_model(tmp_path / "base")
    small = other_tokens(tmp_path / "small")
    words = f"base_dir={tmp_path / 'base'}", "stages=1", "prompt=what is it?", f"draft=model:{small}"
    printed = error_of(here, *words, "pipeline_type=serial", f"policy={policy}")
    assert f"policy={policy} grows trees level by level" in printed
