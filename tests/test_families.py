"""Every family of models computes what `transformers` computes: split, loaded over three stages, in text and in trees.

The checkpoints are tiny and random, and written by `transformers` itself, so that names, config and layout are its own.
"""
from __future__ import annotations

import json
import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.methods import METHODS
from config.run_config import RunConfig
from config.schema.families import FAMILIES
from launch.build import build_lm_head, build_ring, build_stage
from launch.run import run
from launch.spec import RankSpec
from launch.split.write import split
from model.drafts.draft import NoDraft
from model.drafts.eagle import EagleHead
from model.llama import LlamaConfig, Rotary
from model.weights.parts import Part
from pipeline.decode import Decoder, Limits
from pipeline.strategies import STRATEGIES
from pipeline.trace import OFF
from pipeline.transport import LocalLink
from scripts import generate
from tests.checkpoints import refused
from tests.tiny import TREE, Oracle, weights, work, write

VOCAB, NEW = 61, 24
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GATED = {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2, "initializer_range": 0.3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 40}
MODELS = {  # name: what transformers calls it, and the fields of its config
    "llama 1 and vicuna": ("Llama", {**GATED, "num_key_value_heads": 4}),
    "llama 3.1": ("Llama", {**GATED, "rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "llama 3.2, tied": ("Llama", {**GATED, "rope_theta": 500.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True,
                                  "head_dim": 16}),
    "vicuna-16k": ("Llama", {**GATED, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", {**GATED, "sliding_window": None, "rope_theta": 1e6}),
    "mistral with a window": ("Mistral", {**GATED, "sliding_window": 128, "max_position_embeddings": 512}),
    "qwen2.5": ("Qwen2", {**GATED, "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 32}),
    "qwen2.5, tied": ("Qwen2", {**GATED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**GATED, "head_dim": 20, "rope_theta": 1e6}),
    "qwen3, tied": ("Qwen3", {**GATED, "head_dim": 8, "tie_word_embeddings": True}),
    "opt": ("OPT", {**SIZES, "ffn_dim": 96, "init_std": 0.3, "word_embed_proj_dim": 48}),
}
PROMPT = [(7 * i * i + 3 * i) % (VOCAB - 3) + 3 for i in range(70)]  # longer than the context that LLAMA3 began with


class Saved:
    """A family's model as `transformers` has it, in memory and in a folder, with its split."""

    def __init__(self, name, folder):
        import transformers

        kind, fields = MODELS[name]
        torch.manual_seed(1)
        config = getattr(transformers, f"{kind}Config")(**fields)
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for parameter in self.model.parameters():  # norms of ones and biases of zeros would not show that they are used
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        self.base, self.parts = folder / "base", folder / "split"
        self.model.save_pretrained(self.base)
        split(self.base, self.parts, "0+1+1+2", progress=False)
        self.sizes = LlamaConfig.read(Part(self.parts / "stage_0").config)

    @torch.no_grad()
    def text(self, new=NEW):
        ids = torch.tensor([PROMPT])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new,
                                  pad_token_id=0)
        return out[0, len(PROMPT):].tolist()

    @torch.no_grad()
    def hidden(self, ids):
        body = getattr(self.model.model, "decoder", self.model.model)
        return body(torch.tensor([ids])).last_hidden_state[0]

    def stages(self):
        config = RunConfig(model_dir=str(self.parts), dtype="float32", device="cpu", threads_per_rank=1, max_length=150)
        return config, [build_stage(RankSpec(config, Part(self.parts / f"stage_{rank}")), OFF) for rank in (1, 2, 3)]

    @contextmanager
    def decoder(self, strategy, draft):
        """Over three threads, each with the slice of its own folder."""
        links = LocalLink.ring([OFF] * 4)
        config, stages = self.stages()
        threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in zip(stages, links[1:])]
        for thread in threads:
            thread.start()
        spec = RankSpec(config, Part(self.parts / "stage_0"))
        ring = build_ring(spec, build_lm_head(spec), links[:1], OFF)
        yield Decoder(ring, draft, STRATEGIES[strategy], TREE, Limits(150))
        ring.stop()
        for thread in threads:
            thread.join(timeout=10)


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    return Saved(request.param, tmp_path_factory.mktemp("family"))


def test_greedy_text_over_three_stages_is_that_of_generate(saved):
    text = saved.text()
    assert len(set(text)) > 3, "a text that hardly changes proves little"
    with saved.decoder(METHODS["ar"].strategy, NoDraft()) as decoder:
        assert write(decoder, PROMPT, NEW) == text


@pytest.mark.parametrize("strategy", ["serial", "continuous"])
def test_greedy_text_is_the_same_with_guesses_in_trees(saved, strategy):
    text = saved.text()
    with saved.decoder(strategy, Oracle([*PROMPT, *text], VOCAB)) as decoder:
        assert write(decoder, PROMPT, NEW) == text


def test_hidden_states_of_text_in_chunks_and_of_branches_are_those_of_transformers(saved):
    _, stages = saved.stages()
    ids, nodes = [*PROMPT, 5, 6, 7, 8], list(range(len(PROMPT) + 4))
    pos = [*nodes[:-4], 70, 70, 71, 71]
    parents = [0, *nodes[:69], 69, 69, 70, 71]  # two branches of two nodes each, their rows mixed
    outs = []
    for begin, end, text in ((0, 33, 33), (33, 34, 1), (34, 70, 36), (70, 74, 0)):
        x = torch.tensor(ids[begin:end])
        for stage in stages:
            stage.cache(0).admit(nodes[begin:end], parents[begin:end], text)
            x = stage.part(x, torch.tensor(pos[begin:end]), stage.cache(0))
        outs.append(x)
    got = torch.cat(outs)
    torch.testing.assert_close(got[:70], saved.hidden(PROMPT), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[[70, 72]], saved.hidden([*PROMPT, 5, 7])[-2:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[[71, 73]], saved.hidden([*PROMPT, 6, 8])[-2:], atol=1e-4, rtol=1e-4)


def test_the_parts_hold_every_tensor_once_and_a_tied_head_twice(saved):
    whole, parts = load_file(saved.base / "model.safetensors"), [
        load_file(saved.parts / f"stage_{rank}" / "model.safetensors") for rank in range(4)]
    tied = saved.model.config.tie_word_embeddings
    assert sum(map(len, parts)) == len(whole) + tied and saved.sizes.tied == tied
    assert set(parts[0]) == {"lm_head.weight"}
    assert ("model.embed_positions.weight" in parts[1]) == (not saved.sizes.family.rotary)
    assert torch.equal(parts[0]["lm_head.weight"], parts[1]["model.embed_tokens.weight"]) == tied
    assert all(name.startswith(("model.norm.", "model.layers.2.", "model.layers.3.")) for name in parts[3])


# Drafts


def generated(tmp_path, *words):
    asked = ("prompt_ids=" + ",".join(map(str, PROMPT)), f"max_new_tokens={NEW}", "ignore_eos=true", "dtype=float32",
             "processes=false", "threads_per_rank=1", "max_length=150", f"output={tmp_path / 'out.json'}")
    assert run(generate.GENERATE, [*asked, *words]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_a_qwen2_is_drafted_for_by_its_head_that_has_biases_too(tmp_path):
    saved, head = Saved("qwen2.5", tmp_path), EagleHead(LlamaConfig.read(config_of("qwen2.5")), bias=True)
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(config_of("qwen2.5", num_hidden_layers=1)))
    save_file({name: x.float() for name, x in weights(head, seed=3).items()}, tmp_path / "head" / "model.safetensors")
    split(saved.base, tmp_path / "with_head", "auto:3", tmp_path / "head", progress=False)
    assert generated(tmp_path, f"model_dir={tmp_path / 'with_head'}")["token_ids"] == saved.text()


@pytest.mark.parametrize("name", ["opt", "qwen3", "llama 3.2, tied"])
def test_a_small_model_of_any_family_drafts(tmp_path, name):
    saved = Saved(name, tmp_path)
    # without thrift, which would decode plainly where drafting takes longer than the tiny target
    words = f"model_dir={saved.parts}", "draft=model", f"draft_dir={saved.base}", "ablate=thrift"
    got = generated(tmp_path, *words)
    assert got["token_ids"] == saved.text()
    assert got["mean_accepted_length"] > 2, "it drafts for itself, so it is right"


# What config.json says


def config_of(name, **changes):
    import transformers

    kind, fields = MODELS[name]
    written = json.loads(getattr(transformers, f"{kind}Config")(**fields).to_json_string())
    return {**written, **changes}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rotary_settings_are_read_as_transformers_4_and_as_transformers_5_write_them(scaling):
    plain = {**GATED, "model_type": "llama", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    four = LlamaConfig.read({**plain, "rope_theta": 500.0, "rope_scaling": scaling})
    five = {"rope_type": "default", **(scaling or {}), "rope_theta": 500.0}
    assert LlamaConfig.read({**plain, "rope_parameters": five}) == four
    assert LlamaConfig.read({**plain, "rope_theta": 500.0, "rope_scaling": scaling, "rope_parameters": five}) == four
    if scaling and "low_freq_factor" not in scaling:
        old = {"type": "linear", "factor": 4.0}  # as transformers before 4.43 wrote it
        assert LlamaConfig.read({**plain, "rope_theta": 500.0, "rope_scaling": old}) == four


def test_the_waves_of_llama_3_1_are_lowered_as_by_transformers():
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    real = {**LLAMA3, "original_max_position_embeddings": 8192}
    theirs = transformers.LlamaConfig(**{**GATED, "hidden_size": 512, "max_position_embeddings": 131072},
                                      rope_theta=500000.0, rope_scaling=real)
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    sizes = LlamaConfig.read(json.loads(theirs.to_json_string()))
    torch.testing.assert_close(Rotary(sizes).frequency(), want, rtol=1e-6, atol=0)
    head = EagleHead(sizes, bias=True)
    torch.testing.assert_close(head.rotary.frequency(), want, rtol=1e-6, atol=0)  # a head may be scaled too


def test_a_sliding_window_bounds_the_context_where_it_is_used():
    assert LlamaConfig.read(config_of("mistral")).context == 160
    assert LlamaConfig.read(config_of("mistral", sliding_window=100)).context == 100
    assert LlamaConfig.read(config_of("mistral", sliding_window=4096)).context == 160
    assert LlamaConfig.read(config_of("qwen2.5", use_sliding_window=False, sliding_window=32)).context == 160
    assert LlamaConfig.read(config_of("qwen2.5", use_sliding_window=True, sliding_window=32)).context == 32


def test_the_head_of_a_qwen2_has_biases_where_its_config_or_its_family_says_so():
    for config, bias in ((config_of("qwen2.5"), True), (config_of("llama 3.1"), False),
                         (config_of("llama 3.1", qkv_bias=True), True)):
        names = {name for name, _ in EagleHead(LlamaConfig.read(config), bias=True).named_parameters()}
        assert ("layers.0.self_attn.q_proj.bias" in names) == bias and "layers.0.self_attn.o_proj.bias" not in names


REFUSED = {
    "a Gemma": ("mistral", {"model_type": "gemma2"}, "model_type='gemma2'"),
    "a mixture of experts": ("mistral", {"model_type": "mixtral"}, "model_type='mixtral'"),
    "another mixture": ("qwen3", {"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
    "biases of a LLaMA": ("llama 3.1", {"attention_bias": True}, "attention_bias=True"),
    "biases of a Qwen3": ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    "biases of its feed-forward": ("llama 3.1", {"mlp_bias": True}, "mlp_bias=True"),
    "another activation": ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "partial rotary positions": ("llama 3.1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "the same as transformers 5 writes it": (
        "llama 3.1", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    "dynamic rotary positions": ("opt", {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
                                 "rope_scaling='dynamic'"),
    "yarn": ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling='yarn'"),
    "a factor that is missing": ("mistral", {"rope_parameters": {"rope_type": "linear"}}, "does not give factor"),
    "quantized weights": ("qwen2.5", {"quantization_config": {"quant_method": "awq"}}, "quantization_config="),
    "the order of OPT-350m": ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    "its projection": ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim=32"),
    "an early OPT": ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True"),
    "an OPT without biases": ("opt", {"enable_bias": False}, "enable_bias=False"),
    "Galactica": ("opt", {"activation_function": "gelu"}, "activation_function='gelu'"),
    "no size": ("opt", {"ffn_dim": None}, "does not give intermediate_size"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_config_that_is_not_supported_is_refused_by_name(why):
    name, change, sentence = REFUSED[why]
    LlamaConfig.read(config_of(name))
    with refused(sentence):
        LlamaConfig.read(config_of(name, **change))


def test_the_split_refuses_it_too_and_writes_nothing(tmp_path):
    saved = Saved("llama 3.1", tmp_path)
    config = json.loads((saved.base / "config.json").read_text())
    for change, sentence in (
            ({"attention_bias": True}, f"{saved.base}: config.json says attention_bias=True"),
            ({"architectures": ["GemmaForCausalLM"]}, "holds a GemmaForCausalLM, which is not supported"),
            ({"model_type": "qwen3"}, "says architectures=['LlamaForCausalLM'] and model_type='qwen3'"),
            ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "lacks model.layers.0.self_attn.q_norm"),
            ({"intermediate_size": 64}, "has shape (80, 48) instead of (64, 48)")):
        (saved.base / "config.json").write_text(json.dumps({**config, **change}))
        with refused(sentence):
            split(saved.base, tmp_path / "other", "2", progress=False)
    assert not (tmp_path / "other").exists()


def test_opt_is_split_under_the_names_of_its_older_files_too(tmp_path):
    saved = Saved("opt", tmp_path)
    tensors = {name[len("model."):]: x for name, x in load_file(saved.base / "model.safetensors").items()}
    assert all(name.startswith("decoder.") for name in tensors)
    more = {"decoder.version": torch.zeros(1), "lm_head.weight": tensors["decoder.embed_tokens.weight"].clone()}
    save_file({**tensors, **more}, saved.base / "model.safetensors")
    for folder in split(saved.base, tmp_path / "other", "0+1+1+2", progress=False):
        other = load_file(saved.parts / folder.name / "model.safetensors")
        assert load_file(folder / "model.safetensors").keys() == other.keys()


def test_every_family_is_tried():
    assert {MODELS[name][0] + "ForCausalLM" for name in MODELS} == {f.architecture for f in FAMILIES.values()}
