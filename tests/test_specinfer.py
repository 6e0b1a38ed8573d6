"""SpecInfer: trees of small models, merged and verified whole; from drafters in memory to whole commands."""
import shutil
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from config.run_config import RunConfig
from config.trees import expanded
from launch.build import build_lm_head
from launch.drafts import build_draft
from launch.memory import need
from launch.spec import RankSpec
from model.rules import RULES
from model.sample import Sampler
from model.weights.parts import Part
from pipeline.answers import Request
from tests.checkpoints import edited_tensors
from tests.forked import ranks
from tests.json_files import change_json, edited_json, load_json
from tests.saved import ASK, FORM, NEW, PROMPT, here, reference, save_tokenizer, split_shared, token_ids
from tests.tiny import CONFIG, DEEP, SPECULATIVE, TINY, TREE, pipeline, tokens_of, write

SHAPED = replace(TREE, init=TREE.init.shaped(expanded("1,3,1,1")),
                 expand=TREE.expand.shaped(expanded("2,1")))


def two_drafters(stages, strategy="serial"):
    return pipeline(TINY, stages, strategy, TINY.drafters(0.02, 0.03), SHAPED)


# --- in memory --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("strategy, stages, temperature", [
    (strategy, *setting) for strategy, setting in zip(SPECULATIVE,
                                                      cycle([(4, 1.0), (1, 0.0)]))])
def test_every_strategy_writes_the_reference_text_with_several_drafters(strategy, stages, temperature):
    with two_drafters(stages, strategy) as decoder:
        assert write(decoder, PROMPT, 16, Sampler(temperature, seed=4)) == reference(temperature)[:16]


@pytest.mark.parametrize("rule, stages", [*zip(RULES, (1, 4, 2), strict=True)])
def test_at_temperature_0_every_rule_writes_the_reference_text(rule, stages):
    with two_drafters(stages) as decoder:
        answer, stream = decoder.stream(Request(PROMPT, Sampler(rule=rule), NEW))
        assert tokens_of(stream) == reference(0.0)
    assert answer.mean_accepted_length > 1.5 and set(answer.sources) == {"ssm1", "ssm2"}


@pytest.mark.parametrize("rule", RULES)
def test_a_text_depends_on_its_seed_and_not_on_the_stages_or_on_who_asked_before(rule):
    texts = set()
    for stages in (1, 3):
        with two_drafters(stages) as decoder:
            first, other, again = (tuple(write(decoder, PROMPT, 12, Sampler(1.0, seed=seed, rule=rule)))
                                   for seed in (4, 5, 4))
        assert other != first
        texts |= {first, again}
    assert len(texts) == 1


@pytest.mark.parametrize("rule", ["mss", "eagle1"])
def test_two_equal_drafters_of_the_target_itself_are_always_right(rule):
    with pipeline(TINY, 2, "serial", TINY.drafters(0.0, 0.0), SHAPED) as decoder:
        answer, stream = decoder.stream(Request(PROMPT, Sampler(1.0, seed=4, rule=rule), 21))
        assert len(tokens_of(stream)) == 21
    assert answer.mean_accepted_length == 5, "four guesses and the target's own token in each pass"


def test_the_heads_of_eagle_1_and_3_may_draw_too():
    for draft in (DEEP.eagle(), DEEP.eagle3()):
        for rule in ("mss", "eagle1"):
            with pipeline(DEEP, 2, "serial", draft, SHAPED) as decoder:
                assert len(write(decoder, PROMPT, 9, Sampler(1.0, seed=4, rule=rule))) == 9


# --- whole commands ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def saved(saved, tmp_path_factory):
    """Splits over members of a group, and a small OPT."""
    folder = tmp_path_factory.mktemp("specinfer")
    for name in ("saved", "near", "far"):
        folder.joinpath(name).symlink_to(saved if name == "saved" else saved / name)
    for name, stages in (("tp2", ""), ("2x2", "0+2+2")):
        split_shared(saved, folder / name, stages)
    save_opt(folder / "opt")
    return folder


def save_opt(folder):
    """A random OPT of the same vocabulary."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(vocab_size=CONFIG.vocab, hidden_size=16, ffn_dim=24, num_hidden_layers=2,
                             num_attention_heads=2, max_position_embeddings=256, word_embed_proj_dim=16,
                             bos_token_id=1, eos_token_id=2)).save_pretrained(folder)


def two_models(saved):
    return f"ssm={saved / 'near'},{saved / 'far'}"


def outcome(folder, *words):
    """What a command of specinfer writes into its output."""
    code = here("pipeline_type=specinfer", f"output={folder / 'out.json'}", *ASK, *words)
    return load_json(folder / "out.json") if code == 0 else code


@pytest.mark.parametrize("form, temperature", [
    ("saved/0+4", "0"), ("saved/0+2+2", "1"), ("saved/0+1+1+1+1", "0"),
    ("tp2", "0"), ("2x2", "1")])
def test_specinfer_writes_the_reference_text_over_one_rank_stages_and_groups(saved, tmp_path, form, temperature):
    got = outcome(tmp_path, f"model_dir={saved / form}", two_models(saved), f"temperature={temperature}")
    assert got["token_ids"] == reference(float(temperature)) and got["mean_accepted_length"] > 1


@pytest.mark.parametrize("rule", ["mss", "eagle1"])
def test_a_split_changes_no_text_of_any_rule(saved, tmp_path, rule):
    texts = [outcome(tmp_path, f"model_dir={saved / form}", two_models(saved), "temperature=1",
                  f"verify={rule}", "expansion=2,2")["token_ids"] for form in ("saved/0+4", "saved/0+1+1+2", "2x2")]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == NEW


def test_a_small_opt_drafts_for_a_llama(saved, tmp_path):
    words = [f"model_dir={saved / 'saved/0+2+2'}", f"ssm={saved / 'opt'}", "temperature=1"]
    assert outcome(tmp_path, *words, "max_length=256")["token_ids"] == reference(1.0)
    assert outcome(tmp_path, *words, "max_length=300") == 2


def test_the_folder_draft_beside_the_split_needs_no_name(saved, tmp_path):
    shutil.copytree(saved / "saved/0+2+2", tmp_path / "split")
    assert outcome(tmp_path, f"model_dir={tmp_path / 'split'}") == 2
    shutil.copytree(saved / "near", tmp_path / "split/stage_0/draft")
    assert outcome(tmp_path, f"model_dir={tmp_path / 'split'}")["token_ids"] == reference(0.0)


def test_processes_write_what_threads_write_and_the_table_counts_by_drafter(saved, tmp_path):
    words = [f"model_dir={saved / '2x2'}", two_models(saved), "temperature=1", "dtype=float64",
             "pipeline_type=specinfer", f"output={tmp_path / 'out.json'}", "threads_per_rank=1"]
    with ranks(tmp_path / "ranks", [*words, *ASK], 5) as run:
        assert run.codes(120) == [0] * 5, run.text(0)
        assert token_ids(tmp_path / "out.json") == reference(1.0)
        assert " of ssm1, " in run.text(0, 1) and " of ssm2" in run.text(0, 1)


@pytest.mark.parametrize("words", [(), ("ssm=toy/draft_a,toy/draft_b",), ("ssm=toy/draft_b", "verify=mss")])
def test_the_bundled_model_has_bundled_drafters(tmp_path, capsys, words):
    texts = []
    for method in (["pipeline_type=ar"], ["pipeline_type=specinfer", *words]):
        assert here(*method, "prompt=What does a baker do?", "max_new_tokens=24",
                    f"output={tmp_path / 'out.json'}") == 0
        texts.append(load_json(tmp_path / "out.json")["text"])
    assert texts[0] == texts[1] and "guesses in the text" in capsys.readouterr().out


def test_the_need_of_rank_0_counts_every_drafter(saved):
    config = RunConfig(pipeline_type="specinfer", dtype="float32", ssm=f"{saved / 'near'},{saved / 'opt'}",
                       max_length=200)
    spec = RankSpec(config, Part(saved / "saved/0+2+2/stage_0"))
    lm_head = build_lm_head(spec)
    networks = build_draft(spec, lm_head).networks
    assert [(network.source, network.number) for network in networks] == [("ssm1", 0), ("ssm2", 1)]
    modules = [lm_head, *(part for network in networks for part in (network.network, network.lm_head))]
    held = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    assert need(spec).weights == held
    assert need(spec).cache >= sum(network.cache.bytes for network in networks) > 0


# --- what does not fit ------------------------------------------------------------------------------------------------

def rename(folder):
    """Another token in the place of `a`."""
    with edited_json(folder / "tokenizer.json") as content:
        content["model"]["vocab"]["A"] = content["model"]["vocab"].pop("a")


def widen(folder):
    with edited_tensors(folder) as tensors:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat((tensors[name], tensors[name][:1]))
    change_json(folder / "config.json", vocab_size=54)


SPOILED = {
    "tokenizer.json calls token 3 'A', but the model's tokenizer.json calls it 'a': take a small model": rename,
    "cannot be read (": lambda f: change_json(f / "tokenizer.json", model={"vocab": 7}),
    "has vocab_size 54, but the model has 53: take one with the same tokenizer": lambda f: (
        widen(f), (f / "tokenizer.json").unlink()),
    "says model_type='gpt2', which is not supported": lambda f: change_json(
        f / "config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2"),
    "config.json": lambda f: (f / "config.json").unlink(),
    "there is no folder": shutil.rmtree,
}


@pytest.mark.parametrize("sentence", SPOILED)
def test_a_drafter_that_does_not_fit_is_refused_by_name(saved, tmp_path, error_of, sentence):
    shutil.copytree(saved / "near", tmp_path / "other")
    SPOILED[sentence](tmp_path / "other")
    words = f"model_dir={saved / 'saved/0+2+2'}", f"ssm={saved / 'near'},{tmp_path / 'other'}"
    said = error_of(outcome, tmp_path, *words)
    assert sentence in said and str(tmp_path / "other") in said and len(said.splitlines()) == 1


def test_a_tokenizer_with_more_tokens_behind_the_model_s_is_the_same_one(saved, tmp_path):
    shutil.copytree(saved / "near", tmp_path / "other")
    change_json(tmp_path / "other" / "config.json", eos_token_id=9)  # a base model may have another one
    save_tokenizer(tmp_path / "other", more=1)
    assert FORM["eos_token_id"] == 2
    got = outcome(tmp_path, f"model_dir={saved / 'saved/0+2+2'}", f"ssm={tmp_path / 'other'}")
    assert got["token_ids"] == reference(0.0)
