"""Every family of models computes what `transformers` computes: split, loaded over three stages, in text and in trees.

The checkpoints are tiny and random, and written by `transformers` itself, so that names, config and layout are its own.
"""
import json
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from config.methods import METHODS
from config.run_config import RunConfig
from config.schema.families import FAMILIES
from config.schema.fields import read_config
from launch.build import build_lm_head, build_ring, build_stage
from launch.spec import RankSpec
from model import attention, llama, plain_layers
from model import cache as caches
from model.drafts.draft import NoDraft
from model.drafts.heads import EagleHead
from model.drafts.mixture import Mixture
from model.drafts.suffix import Suffix
from model.llama import Experts, LlamaConfig, Scales, fill
from model.rotary import Rotary
from model.sample import Sampler
from model.weights.parts import Part
from model.weights.unfold import Unfolded
from model.whole import Whole
from pipeline.answers import Request
from pipeline.decode import Decoder, PipelineLimits
from pipeline.strategies import STRATEGIES
from pipeline.trace import OFF
from tests.checkpoints import refused, same, save_checkpoint, split_quietly
from tests.json_files import load_json, save_json
from tests.saved import answer_of
from tests.tiny import (
    TREE,
    Oracle,
    admit_text,
    in_threads,
    random_tensor,
    ring_of_threads,
    tokens_of,
    weights,
    work,
    write,
)

VOCAB, NEW, FAR = 61, 20, 131072
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GATED = {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2, "initializer_range": 0.3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 40}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
        "long_factor": [1.0, 1.3, 2, 3, 7, 60]}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
DELTA = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 12}
MIXED = ["conv", "full_attention", "conv", "conv"]
LOCAL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def gated(kind, **fields):
    """A model with a gated feed-forward: its name in transformers, and the fields of its config."""
    return kind, {**GATED, **fields}


MODELS = {  # name: what transformers calls it, and the fields of its config
    "llama 1 and vicuna": gated("Llama", num_key_value_heads=4),
    "llama 3.1": gated("Llama", rope_theta=500.0, rope_scaling=LLAMA3),
    "llama 3.2, tied": gated("Llama", rope_theta=500.0, rope_scaling=LLAMA3, tie_word_embeddings=True, head_dim=16),
    "vicuna-16k": gated("Llama", rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "mistral": gated("Mistral", num_key_value_heads=1, sliding_window=None, rope_theta=1e6),
    "mistral with a window": gated("Mistral", sliding_window=20),
    "mistral, yarn": gated("Mistral", head_dim=12, sliding_window=None, rope_scaling=YARN),
    "ministral": gated("Ministral", sliding_window=16, head_dim=16, layer_types=LOCAL),
    "qwen2.5": gated("Qwen2", rope_theta=1e6, use_sliding_window=False, sliding_window=32),
    "qwen2.5 with windows": gated("Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "qwen3": gated("Qwen3", head_dim=20, rope_theta=1e6),
    "qwen3, yarn": gated("Qwen3", head_dim=20, rope_scaling={**YARN, "truncate": False, "beta_fast": 16.0}),
    "smollm3": gated("SmolLM3"),
    "smollm3, by list": gated("SmolLM3", no_rope_layers=[1, 0, 1, 1]),
    "phi3": gated("Phi3", sliding_window=30),
    "phi4 mini": gated("Phi3", hidden_size=64, partial_rotary_factor=0.75, tie_word_embeddings=True,
                       original_max_position_embeddings=160, max_position_embeddings=FAR, rope_scaling=LONG),
    "phi4 mini, long": gated("Phi3", hidden_size=64, partial_rotary_factor=0.75, original_max_position_embeddings=40,
                             max_position_embeddings=FAR, rope_scaling=LONG),
    "olmo2": gated("Olmo2"),
    "olmo3": gated("Olmo3", sliding_window=16, rope_scaling=YARN),
    "seed-oss": gated("SeedOss", head_dim=12),
    "ernie 4.5": gated("Ernie4_5", head_dim=16),
    "granite 4": gated("GraniteMoeHybrid", layer_types=["attention"] * 4, num_local_experts=0, num_experts_per_tok=0,
                       shared_intermediate_size=72, position_embedding_type="rope", mamba_n_heads=4,
                       embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.5,
                       attention_multiplier=0.2),
    "granite": gated("Granite", embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.5,
                     attention_multiplier=0.2),
    "glm": gated("Glm", head_dim=12, attention_bias=True),
    "glm4": gated("Glm4", head_dim=12),
    "gemma2": gated("Gemma2", tie_word_embeddings=False, head_dim=12, sliding_window=16, query_pre_attn_scalar=20,
                    attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": gated("Gemma3", tie_word_embeddings=False, head_dim=16, sliding_window=16, query_pre_attn_scalar=20,
                    layer_types=LOCAL, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "mixtral": gated("Mixtral", num_local_experts=5, sliding_window=None),
    "qwen3 moe": gated("Qwen3Moe", **SPARSE, head_dim=12, norm_topk_prob=True),
    "qwen3 moe, weights as they are": gated("Qwen3Moe", **SPARSE, head_dim=12),
    "gpt-oss": gated("GptOss", num_local_experts=6, num_experts_per_tok=2, head_dim=16, sliding_window=16,
                     rope_scaling={**YARN, "truncate": False}),
    "lfm2": gated("Lfm2", hidden_size=64, layer_types=MIXED, block_multiple_of=32),
    "lfm2 with wide convolutions": gated("Lfm2", layer_types=MIXED[::-1], block_auto_adjust_ff_dim=False,
                                         conv_L_cache=5, tie_word_embeddings=False),
    "qwen3 next": gated("Qwen3Next", hidden_size=64, **DELTA, **{**SPARSE, "moe_intermediate_size": 48},
                        shared_expert_intermediate_size=64, norm_topk_prob=True),
    "qwen3 next, one head, more convolutions": gated(
        "Qwen3Next", **{**DELTA, "linear_num_key_heads": 1}, **SPARSE, shared_expert_intermediate_size=24,
        linear_conv_kernel_dim=3, full_attention_interval=2, tie_word_embeddings=True),
    "opt": ("OPT", {**SIZES, "ffn_dim": 96, "init_std": 0.3, "word_embed_proj_dim": 48}),
}
# Of numbers of about 1: transformers adds up a prompt's recurrent states in chunks, in float32. On a processor with
# AVX-512 one row of 70 was off by 0.005.
CHUNK_ERROR = 0.02
PROMPT = [(7 * i * i + 3 * i) % (VOCAB - 3) + 3
          for i in range(70)]  # longer than the context that LLAMA3 began with


def config_class(kind):
    """Gemma 3's text model has a config of its own."""
    import transformers

    return getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))


pytestmark = pytest.mark.usefixtures("small_blocks")


def random_model(kind, fields):
    import transformers

    torch.manual_seed(1)
    config = config_class(kind)(**fields)
    config._attn_implementation = "eager"  # the only one with soft caps
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms of ones and biases of zeros would not show that they are used
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


class Saved:
    """A family's model of `transformers`, in memory and in a folder, with its split."""

    def __init__(self, name, folder):
        self.number = list(MODELS).index(name)
        self.model = random_model(*MODELS[name])
        self.base, self.parts = folder / "base", folder / "split"
        self.model.save_pretrained(self.base)
        split_quietly(self.base, self.parts, "0+1+1+2")
        self.sizes = LlamaConfig.read(Part(self.parts / "stage_0").config)

    @property
    def tensors(self):
        return load_file(self.base / "model.safetensors")

    def save_tensors(self, tensors):
        """Put others in the place of the model's tensors."""
        save_file(tensors, self.base / "model.safetensors")

    def split_again(self, folder):
        """The tensors of each rank in a split of the model as it is now, and of the first split."""
        for path in split_quietly(self.base, folder, "0+1+1+2"):
            yield (load_file(stage / "model.safetensors") for stage in (path, self.parts / path.name))

    @cached_property
    @torch.no_grad()
    def text(self):
        """Return the text of `transformers` after PROMPT."""
        ids = torch.tensor([PROMPT])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
                                  pad_token_id=0)
        return out[0, len(PROMPT):].tolist()

    @torch.no_grad()
    def hidden(self, ids):
        body = getattr(self.model.model, "decoder", self.model.model)
        return body(torch.tensor([ids])).last_hidden_state[0]

    def stages(self):
        config = RunConfig(model_dir=str(self.parts), dtype="float32", device="cpu", threads_per_rank=1, max_length=150)
        return config, [build_stage(RankSpec(config, Part(self.parts / f"stage_{rank}")), OFF)
                        for rank in (1, 2, 3)]

    @contextmanager
    def decoder(self, strategy, draft):
        """Run a decoder over three threads, each with the slice of its own folder."""
        links = ring_of_threads(4)
        config, stages = self.stages()
        spec = RankSpec(config, Part(self.parts / "stage_0"))
        ring = build_ring(spec, build_lm_head(spec), links[:1], OFF)
        with in_threads(work, zip(stages, links[1:])):
            yield Decoder(ring, draft, STRATEGIES[strategy], TREE, PipelineLimits(150, 2))
            ring.stop()


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    return Saved(request.param, tmp_path_factory.mktemp("family"))


def test_greedy_text_over_three_stages_is_that_of_generate(saved):
    text = saved.text
    assert len(set(text)) > 3, "a text that hardly changes proves little"
    with saved.decoder(METHODS["ar"].strategy, NoDraft()) as decoder:
        assert write(decoder, PROMPT, NEW) == text


def test_greedy_text_is_the_same_with_guesses_in_trees(saved):
    text = saved.text
    strategy = ["serial", "continuous"][saved.number % 2]
    with saved.decoder(strategy, Oracle([*PROMPT, *text], VOCAB)) as decoder:
        assert write(decoder, PROMPT, NEW) == text


def test_requests_side_by_side_write_what_each_writes_alone_where_windows_drop_text(tmp_path):
    saved, prompts = Saved("gemma3", tmp_path), [PROMPT, PROMPT[9:60]]
    with saved.decoder("autoregressive", NoDraft()) as decoder:
        alone = [write(decoder, prompt, 12) for prompt in prompts]
    assert alone[0] == saved.text[:12]
    with saved.decoder("streaming", Mixture([], Suffix())) as decoder:
        asked = [decoder.submit(Request(prompt, Sampler(), 12)) for prompt in prompts]
        assert [tokens_of(stream) for _, stream in asked] == alone


@pytest.fixture
def as_transformers_adds(monkeypatch):
    """Sum in float32 as the reference does, since last bits matter in a random model far into a text."""
    for module in (attention, caches, llama, plain_layers):
        monkeypatch.setattr(module, "for_sums", lambda x: x)


@pytest.mark.usefixtures("as_transformers_adds")
def test_hidden_states_of_text_in_chunks_and_of_branches_are_those_of_transformers(saved):
    _, stages = saved.stages()
    ids = [*PROMPT, 5, 6, 7, 8]
    nodes = list(range(len(PROMPT) + 4))
    pos = [*nodes[:-4], 70, 70, 71, 71]
    parents = [0, *nodes[:69], 69, 69, 70, 71]  # two branches of two nodes each, their rows mixed
    outs = []
    for begin, end, text in ((0, 33, 33), (33, 34, 1),
                             (34, 70, 36), (70, 74, 0)):
        x = torch.tensor(ids[begin:end])
        for stage in stages:
            stage.cache(0).admit(nodes[begin:end], parents[begin:end], text)
            x = stage.part(x, torch.tensor(pos[begin:end]), stage.cache(0))
        outs.append(x)
    got = torch.cat(outs)
    tolerance = CHUNK_ERROR if saved.sizes.delta.key_heads else 1e-4
    for rows, text in (([*range(70)], PROMPT), ([70, 72], [*PROMPT, 5, 7]), ([71, 73], [*PROMPT, 6, 8])):
        torch.testing.assert_close(got[rows], saved.hidden(text)[-len(rows):], atol=tolerance, rtol=1e-4)
    dropped = {slots.window for stage in stages for slots in stage.cache(0).slots if slots.first}

    assert dropped == {window for window in saved.sizes.windows if window}


@torch.no_grad()
def test_the_logits_of_a_whole_model_are_those_of_transformers(saved):
    longest = 150 if saved.sizes.family.rotary else None
    whole = Whole(Unfolded(saved.base), torch.float32, "cpu", context=longest)
    got = whole.logits(PROMPT, whole.cache(len(PROMPT)), len(PROMPT))
    want = saved.model(torch.tensor([PROMPT])).logits[0]
    tolerance = CHUNK_ERROR if saved.sizes.delta.key_heads else 1e-3
    torch.testing.assert_close(got, want, atol=tolerance, rtol=1e-3)


def test_the_parts_hold_every_tensor_once_and_a_tied_head_twice(saved):
    whole = Unfolded(saved.base).names()
    parts = [load_file(saved.parts / f"stage_{rank}" / "model.safetensors") for rank in range(4)]
    tied = saved.model.config.tie_word_embeddings
    assert sum(map(len, parts)) == len(whole) + tied and saved.sizes.tied == tied
    assert set(parts[0]) == {"lm_head.weight"}
    assert ("model.embed_positions.weight" in parts[1]) == (not saved.sizes.family.rotary)
    assert torch.equal(parts[0]["lm_head.weight"], parts[1]["model.embed_tokens.weight"]) == tied
    assert all(name.startswith(("model.norm.", "model.layers.2.", "model.layers.3.")) for name in parts[3])


# Drafts


def generated(tmp_path, *words):
    return answer_of(tmp_path, "prompt_ids=" + ",".join(map(str, PROMPT)), f"max_new_tokens={NEW}", "ignore_eos=true",
                     "dtype=float32", "threads_per_rank=1", "max_length=150", *words)


def test_a_qwen2_is_drafted_for_by_its_head_that_has_biases_too(tmp_path):
    saved = Saved("qwen2.5", tmp_path)
    head = EagleHead(sizes_of("qwen2.5"), bias=True)
    float_tensors = {name: x.float() for name, x in weights(head, seed=3).items()}
    save_checkpoint(tmp_path / "head", config_of("qwen2.5", num_hidden_layers=1), float_tensors, "model.safetensors")
    split_quietly(saved.base, tmp_path / "with_head", "auto:3", tmp_path / "head")
    assert generated(tmp_path, f"model_dir={tmp_path / 'with_head'}")["token_ids"] == saved.text


@pytest.mark.parametrize("name", ["opt", "qwen3", "llama 3.2, tied"])
def test_a_small_model_of_any_family_drafts(tmp_path, name):
    saved = Saved(name, tmp_path)
    # without thrift, which would decode plainly where drafting takes longer than the tiny target
    words = f"model_dir={saved.parts}", "draft=model", f"draft_dir={saved.base}", "ablate=thrift"
    got = generated(tmp_path, *words)
    assert got["token_ids"] == saved.text
    assert got["tokens_per_miss"] > 2, "it drafts for itself, so it is right"


# What this transformers does not have


def as_qwen3_5(folder):
    """The tensors of a Qwen3-Next as Qwen3.5 is published: the text's part of a multimodal model, with separate
    products of a delta net, and all experts in one tensor."""
    source = Unfolded(folder)
    fused = {"mtp.fc.weight": torch.ones(2, 2), "model.visual.merger.weight": torch.ones(2)}
    for name in source.names():
        new_name = name.replace("model.", "model.language_model.", 1).replace(".router.", ".gate.")
        prefix, _, expert = new_name.partition(".experts.")
        if not expert:
            fused[new_name] = source.read(name)
        elif not expert.endswith("up_proj.weight"):
            is_gate = expert.endswith("gate_proj.weight")
            parts = [source.read(name)] + [source.read(name.replace("gate_proj", "up_proj"))] * is_gate
            fused_name = f"{prefix}.experts.{'gate_up_proj' if is_gate else 'down_proj'}"
            fused.setdefault(fused_name, []).append(torch.cat(parts))
    return {name: torch.stack(x) if isinstance(x, list) else x for name, x in fused.items()}


@pytest.mark.parametrize("has_experts", [False, True])
@torch.no_grad()
def test_a_qwen3_5_is_a_qwen3_next_with_other_names(tmp_path, monkeypatch, has_experts):
    class_name, fields = MODELS["qwen3 next"]
    dense_layers = [] if has_experts else [0, 1, 2, 3]
    monkeypatch.setitem(MODELS, "qwen3 next", (class_name, {**fields, "mlp_only_layers": dense_layers}))
    model = random_model(*MODELS["qwen3 next"])
    model.save_pretrained(tmp_path)
    config = load_json(tmp_path / "config.json")
    model_type = "qwen3_5_moe_text" if has_experts else "qwen3_5_text"
    text_config = {**config, "model_type": model_type, "architectures": None, "rope_scaling": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}}
    save_json(tmp_path / "config.json", {**text_config, "mlp_only_layers": [], "decoder_sparse_step": 1})
    save_file(as_qwen3_5(tmp_path), tmp_path / "model.safetensors")
    whole_config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text_config}
    save_json(tmp_path / "config.json", whole_config)

    whole = Whole(Unfolded(tmp_path), torch.float32, "cpu")
    got = whole.logits(PROMPT, whole.cache(len(PROMPT)), len(PROMPT))
    torch.testing.assert_close(got, model(torch.tensor([PROMPT])).logits[0], atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("renorms", [False, True])
def test_experts_that_are_chosen_by_sigmoids_and_a_bias_are_those_of_numpy(renorms):
    family = replace(FAMILIES["lfm2_moe"], head_norms=False)
    sizes = LlamaConfig(hidden=16, layers=1, heads=2, kv_heads=2, head_dim=8, intermediate=8, vocab=9, context=9,
                        eps=1e-6, theta=1e4, family=family, scales=Scales(experts=1.5))
    experts = Experts(replace(sizes, experts=7, chosen=3, renorms_experts=renorms))
    fill(experts, {name: random_tensor(2, *p.shape) for name, p in experts.named_parameters()}, torch.float64, "cpu")
    x_TD = random_tensor(3, 5, 16)
    weight_TC, expert_TC = experts.route(x_TD)
    for row, x in enumerate(x_TD.numpy()):
        weights = 1 / (1 + np.exp(-experts.router.weight.numpy() @ x))
        best = np.argsort(-(weights + experts.expert_bias.numpy()))[:3]
        wanted = 1.5 * weights[best] / (weights[best].sum() + 1e-6 if renorms else 1)
        assert expert_TC[row].tolist() == best.tolist()
        np.testing.assert_allclose(weight_TC[row], wanted, rtol=1e-12)


# What config.json says


def config_of(name, **changes):
    kind, fields = MODELS[name]
    written = json.loads(config_class(kind)(**fields).to_json_string())
    return {**written, **changes}


def sizes_of(name, **changes):
    """What is read of a config with some changes."""
    return LlamaConfig.read(config_of(name, **changes))


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
    torch.testing.assert_close(Rotary(sizes.turns).frequency(), want, rtol=1e-6, atol=0)
    head = EagleHead(sizes, bias=True)
    torch.testing.assert_close(head.rotary.frequency(), want, rtol=1e-6, atol=0)  # a head may be scaled too


@pytest.mark.usefixtures("as_transformers_adds")
@pytest.mark.parametrize("name", ["mistral, yarn", "qwen3, yarn", "gpt-oss", "phi4 mini, long"])
@torch.no_grad()
def test_what_is_128_thousand_tokens_into_a_text_is_computed_as_by_transformers(name, tmp_path):
    saved = Saved(name, tmp_path)
    whole = Whole(Unfolded(saved.base), torch.float32, "cpu", context=FAR)
    slots = whole.cache(70)
    admit_text(slots, 70)
    pos_T = torch.arange(FAR - 70, FAR)
    got = whole.body(torch.tensor(PROMPT), pos_T, slots)
    want = saved.model.model(torch.tensor([PROMPT]), position_ids=pos_T[None])
    torch.testing.assert_close(got, want.last_hidden_state[0], atol=1e-4, rtol=1e-4)
    there = torch.tensor([0, 1, 39, 40, 4095, 65536, FAR - 1])
    cos, sin = saved.model.model.rotary_emb(torch.zeros(1), there[None])
    half = len(whole.body.rotary.frequency())  # the signs of the other one are ours
    for mine, theirs in zip(whole.body.rotary.at(there, torch.zeros(1)), (cos, sin)):
        torch.testing.assert_close(mine[:, 0, -half:], theirs[0, :, -half:], atol=1e-6, rtol=0)


def test_longrope_turns_texts_by_the_longest_that_there_may_be():
    sizes = sizes_of("phi4 mini")
    short, long = (Rotary(sizes.within(length).turns).frequency() for length in (160, 161))
    assert torch.equal(Rotary(sizes.turns).frequency(), short) and sizes.context == 160
    assert not torch.equal(short, long) and sizes.within(10 ** 6).context == FAR


def test_the_windows_of_layers_are_read_from_either_kind_of_config():
    old = {"layer_types": None}  # as transformers before 4.53 wrote them

    def windows(name, **changes):
        return sizes_of(name, **changes).windows

    assert windows("mistral") == () and windows("mistral", sliding_window=100) == (100,) * 4
    assert windows("qwen2.5", use_sliding_window=False, sliding_window=32) == ()
    assert windows("qwen2.5 with windows") == windows("qwen2.5 with windows", **old) == (0, 0, 16, 16)
    assert windows("gemma2") == windows("gemma2", **old) == (16, 0, 16, 0)
    assert windows("gemma3", **old) == (16, 16, 16, 16)
    assert windows("gemma3", **old, num_hidden_layers=6)[4:] == (16, 0)
    assert windows("gemma3", **old, sliding_window_pattern=2) == (16, 0, 16, 0)


# An omitted one changes results without an error.
SILENT = """use_sliding_window sliding_window max_window_layers rope_theta rope_scaling attention_bias no_rope_layers
    no_rope_layer_interval query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping attention_multiplier
    residual_multiplier logits_scaling norm_topk_prob rope_local_base_freq original_max_position_embeddings
    tie_word_embeddings head_dim""".split()


@pytest.mark.parametrize("name", MODELS)
def test_an_omitted_field_has_the_value_that_transformers_gives_it(name):
    kind, fields = MODELS[name]
    given = {**fields, "layer_types": None, "num_key_value_heads": fields["num_attention_heads"]}
    for field in SILENT:
        reduced = {key: value for key, value in given.items() if key != field}
        theirs = config_class(kind)(**reduced).to_dict()
        ours = {key: value for key, value in theirs.items() if key in reduced or key == "model_type"
                or key not in (*SILENT, "layer_types")}
        ours.pop("rope_parameters", None)
        read, expected = LlamaConfig.read(ours), LlamaConfig.read(theirs)
        assert read == expected, field


def test_a_field_that_is_null_is_not_omitted():
    assert sizes_of("mistral", sliding_window=None).windows == ()
    bare = sizes_of("gemma2", attn_logit_softcapping=None, sliding_window=None)
    assert bare.scales.score_cap == 0 and bare.windows == ()


def test_a_smollm3_has_windows_in_layers_without_rotary_positions():
    flags = {"use_sliding_window": True, "sliding_window": 16}
    theirs = config_class("SmolLM3")(**GATED, **flags)
    assert theirs.layer_types == ["full_attention"] * 3 + ["sliding_attention"]
    assert sizes_of("smollm3", layer_types=None, **flags).windows == (0, 0, 0, 16)


def test_a_smollm3_with_a_list_of_layers_needs_no_flag_for_their_windows():
    listed = sizes_of("smollm3", layer_types=LOCAL, use_sliding_window=False, sliding_window=16)
    assert listed.windows == (16, 0, 16, 0)
    assert sizes_of("qwen2.5", layer_types=LOCAL, use_sliding_window=False, sliding_window=16).windows == ()


def test_rope_parameters_replace_the_default_scaling_of_a_gpt_oss_as_a_whole():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
    config = {name: value for name, value in config_of("gpt-oss").items() if name != "rope_scaling"}
    read = LlamaConfig.read({**config, "rope_parameters": {**scaling, "rope_theta": 77.0}})
    assert read.scaling == {name: scaling[name] for name in ("factor", "original_max_position_embeddings")}
    assert read.theta == 77.0 and "truncate" in LlamaConfig.read(config).scaling


def test_the_length_outside_of_rope_scaling_is_that_of_longrope():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "longrope", "short_factor": [1.5] * 6, "long_factor": [2.0] * 6, "factor": 4.0}
    theirs = config_class("Llama")(**GATED, rope_scaling=scaling, original_max_position_embeddings=40)
    _, loudness = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu")
    inside = {**scaling, "original_max_position_embeddings": 80}
    sizes = sizes_of("llama 3.1", rope_theta=10000.0, rope_scaling=None, rope_parameters=inside,
                     original_max_position_embeddings=40)
    assert Rotary(sizes.turns).attention_factor() == pytest.approx(loudness) and sizes.context == 40


def test_longrope_without_a_training_length_is_as_loud_as_its_factor_says():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.5] * 6, "long_factor": [2.0] * 6}
    theirs = config_class("Llama")(**GATED, rope_scaling=scaling)
    waves, loudness = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu")
    turns = sizes_of("llama 3.1", rope_theta=10000.0, rope_scaling=scaling).turns
    assert Rotary(turns).attention_factor() == pytest.approx(loudness) and loudness > 1
    assert torch.allclose(Rotary(turns).frequency(), waves)


def test_a_new_head_of_a_qwen2_has_biases():
    for config, bias in ((config_of("qwen2.5"), True), (config_of("llama 3.1"), False),
                         (config_of("llama 3.1", qkv_bias=True), False)):
        names = {name for name, _ in EagleHead(LlamaConfig.read(config), bias=True).named_parameters()}
        assert ("layers.0.self_attn.q_proj.bias" in names) == bias and "layers.0.self_attn.o_proj.bias" not in names


OLD = {"rope_parameters": None}  # where transformers 5 says it
REFUSED = {
    "a Gemma that looks ahead": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "a dimension left over": ("glm4", {"partial_rotary_factor": 0.6, **OLD}, "head_dim=12, but rotary positions"),
    "too few waves": (
        "phi4 mini", {"rope_scaling": {**LONG, "short_factor": [1.0]}, **OLD}, "1 numbers in short_factor, but"),
    "layers without a kind": ("gemma2", {"layer_types": LOCAL[:3]}, "3 entries in layer_types, but num_hidden_layers"),
    "layers without a word": ("smollm3", {"no_rope_layers": [1, 0]}, "2 entries in no_rope_layers, but"),
    "another gate": ("gemma3", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
    "a mixture of experts": ("mistral", {"model_type": "qwen2_moe"}, "model_type='qwen2_moe'"),
    "more experts than there are": ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9, but num_local_expe"),
    "layers without experts": ("qwen3 moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
    "experts in every other layer": ("qwen3 moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    "biases of a LLaMA": ("llama 3.1", {"attention_bias": True}, "attention_bias=True"),
    "biases of its feed-forward": ("llama 3.1", {"mlp_bias": True}, "mlp_bias=True"),
    "partial rotary positions": ("llama 3.1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "the same as transformers 5 writes it": (
        "llama 3.1", {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5"),
    "kinds of rotary positions that differ": (
        "llama 3.1", {"rope_scaling": {**LLAMA3, "type": "linear"}}, "type in rope_scaling='linear'"),
    "scaled positions of layers with windows": (
        "gemma3", {"rope_scaling": None, "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
        "rope_type of sliding_attention='linear'"),
    "waves inside rope_scaling that are others outside": (
        "llama 3.1", {"rope_scaling": {**LLAMA3, "rope_theta": 7.0}}, "rope_theta in rope_scaling=7.0"),
    "a trained length that is another outside": (
        "mistral, yarn", {"original_max_position_embeddings": 80},
        "original_max_position_embeddings in rope_scaling=40"),
    "longrope with a trained length that only transformers 5 reads": (
        "llama 3.1", {"rope_scaling": {**LONG, "original_max_position_embeddings": 40}},
        "original_max_position_embeddings in rope_scaling=40"),
    "a factor of longrope that contradicts the lengths": (
        "llama 3.1", {"rope_scaling": {**LONG, "factor": 3.0}, "original_max_position_embeddings": 40},
        "factor in rope_scaling=3.0"),
    "longrope without any length": (
        "llama 3.1", {"rope_scaling": LONG, "max_position_embeddings": None}, "does not give max_position_embeddings"),
    "a window of no token": ("mistral", {"sliding_window": 0}, "sliding_window=0, with which no token"),
    "a fused projection of OPT-350m": ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim=16, but hidden"),
    "a GPT-OSS without biases": ("gpt-oss", {"attention_bias": False}, "attention_bias=False"),
    "no rotation": ("glm", {"partial_rotary_factor": 0}, "partial_rotary_factor=0, which should be a number"),
    "dynamic rotary positions": ("llama 3.1", {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
                                 "rope_scaling='dynamic'"),
    "the order of OPT-350m": ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    "an OPT without biases": ("opt", {"enable_bias": False}, "enable_bias=False"),
    "no size": ("opt", {"ffn_dim": None}, "does not give intermediate_size"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_config_that_is_not_supported_is_refused_by_name(why):
    name, change, sentence = REFUSED[why]
    sizes_of(name)
    with refused(sentence):
        sizes_of(name, **change)


OUT_OF_RANGE = {
    "no_rope_layers=[2]": {"no_rope_layers": [2]},
    "attn_logit_softcapping=-5.0, which should be a number from 1e-06": {"attn_logit_softcapping": -5.0},
    "query_pre_attn_scalar=0": {"query_pre_attn_scalar": 0},
    "logits_scaling=0, which": {"logits_scaling": 0},
    "rope_local_base_freq=0.5": {"rope_local_base_freq": 0.5},
    "beta_fast=0, which should be": {"rope_scaling": {**YARN, "beta_fast": 0}},
    "truncate='no'": {"rope_scaling": {**YARN, "truncate": "no"}},
    "short_factor=[0.0]": {"rope_scaling": {**LONG, "short_factor": [0.0]}},
    "full_attention=5": {"rope_parameters": {"full_attention": 5}},
    "hidden_size=[48], which should be a whole number": {"text_config": {"hidden_size": [48]}},
}


@pytest.mark.parametrize("sentence", OUT_OF_RANGE)
def test_a_field_out_of_range_is_refused_where_the_file_is_read(tmp_path, sentence):
    config = {**config_of("gemma3"), **OUT_OF_RANGE[sentence]}
    save_json(tmp_path / "config.json", config)
    with refused(sentence):
        read_config(tmp_path)


def test_weights_of_four_bits_of_gpt_oss_are_unfolded_as_by_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    saved = Saved("gpt-oss", tmp_path)
    tensors, wanted = saved.tensors, {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 16, 8  # groups of 16 codes: the tiny sizes are no multiples of 32
        tensors[f"{name}_blocks"] = torch.randint(256, shape, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 130, shape[:3], dtype=torch.uint8)
        wanted[name] = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    saved.save_tensors(tensors)
    source = Unfolded(saved.base)
    for name, whole in wanted.items():
        for expert in range(6):
            before, _, product = name.rpartition(".")
            parts = ["down_proj"] if product == "down_proj" else ["gate_proj", "up_proj"]
            for first, part in enumerate(parts):
                got = source.read(f"{before}.{expert}.{part}.weight")
                assert got.shape == source.form(f"{before}.{expert}.{part}.weight").shape
                assert torch.equal(got, whole[expert].T[first::len(parts)])
                assert got.dtype == torch.bfloat16


def test_only_chosen_experts_are_computed_and_each_row_as_if_alone(tmp_path):
    saved = Saved("mixtral", tmp_path)
    layer = Whole(Unfolded(saved.base), torch.float64, "cpu").body.layers["0"].mlp
    called = []
    for number, expert in enumerate(layer.experts):
        expert.register_forward_hook(
            lambda module, inputs, out, number=number: called.append((number, len(inputs[0]))))
    x = torch.randn(3, 48, dtype=torch.float64)
    whole, rows = layer(x), list(called)
    numbers = [number for number, _ in rows]
    assert sum(count for _, count in rows) == 6 and numbers == sorted(set(numbers))
    called.clear()
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(alone, whole, rtol=1e-12, atol=1e-12)

    assert len(called) == 6


def test_the_text_of_a_model_that_also_sees_is_split_alone(tmp_path):
    saved = Saved("mistral, yarn", tmp_path)
    config = {**load_json(saved.base / "config.json"), "architectures": None}
    save_json(saved.base / "config.json", {"architectures": ["Mistral3ForConditionalGeneration"],
                                           "model_type": "mistral3", "vision_config": {}, "text_config": config})
    seeing = {"vision_tower.patch.weight": torch.zeros(3), "multi_modal_projector.norm.weight": torch.zeros(3)}
    saved.save_tensors({**seeing, **{f"language_model.{name}": x for name, x in saved.tensors.items()}})
    for tensors, original_tensors in saved.split_again(tmp_path / "other"):
        assert same(tensors, original_tensors)


def test_the_split_refuses_it_too_and_writes_nothing(tmp_path):
    saved = Saved("llama 3.1", tmp_path)
    config = load_json(saved.base / "config.json")
    for change, sentence in (
            ({"attention_bias": True}, f"{saved.base}: config.json says attention_bias=True"),
            ({"architectures": ["GemmaForCausalLM"]}, "holds a GemmaForCausalLM, which is not supported"),
            ({"model_type": "qwen3"}, "says architectures=['LlamaForCausalLM'] and model_type='qwen3'"),
            ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "lacks model.layers.0.self_attn.q_norm"),
            ({"intermediate_size": 64}, "has shape (80, 48) instead of (64, 48)")):
        save_json(saved.base / "config.json", {**config, **change})
        with refused(sentence):
            split_quietly(saved.base, tmp_path / "other", "2")

    assert not (tmp_path / "other").exists()


def test_opt_is_split_under_the_names_of_its_older_files_too(tmp_path):
    saved = Saved("opt", tmp_path)
    tensors = {name[len("model."):]: x for name, x in saved.tensors.items()}
    assert all(name.startswith("decoder.") for name in tensors)
    more = {"decoder.version": torch.zeros(1), "lm_head.weight": tensors["decoder.embed_tokens.weight"].clone()}
    saved.save_tensors({**tensors, **more})
    for new_tensors, original_tensors in saved.split_again(tmp_path / "other"):
        assert new_tensors.keys() == original_tensors.keys()


def test_every_family_is_tried():
    elsewhere = {"MiMoForCausalLM", "Lfm2MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
                 "MiniMaxM2ForCausalLM"}  # not in 4.57
    known = {f.architecture for f in FAMILIES.values()} - elsewhere
    assert {MODELS[name][0] + "ForCausalLM" for name in MODELS} == known
