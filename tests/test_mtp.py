"""Drafting with a model's own layer for multi-token prediction: MiMo's, read from its checkpoint or from a folder."""
import shutil

import pytest
import torch
from safetensors.torch import load_file

from config.schema.fields import read_config
from model.drafts.eagle import Eagle
from model.drafts.head_files import fit_head, load_head
from model.drafts.heads import MtpHead
from model.weights.checkpoint import Checkpoint
from model.weights.parts import EMBED
from model.weights.unfold import Unfolded
from tests.checkpoints import edited_tensors, refused, split_quietly
from tests.json_files import change_json
from tests.saved import PROMPT, ranks_of, save_tokenizer
from tests.tiny import admit_text

FORM = {"vocab_size": 53, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 80,
        "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3, "rope_theta": 1e4,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
PREFIX = "model.mtp_layers.0."
NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")
IDS = torch.tensor(PROMPT)


class Reference(torch.nn.Module):
    """The layer as defined by MiMo's paper and model card, built from `transformers`' parts of Qwen2."""

    def __init__(self, config):
        from transformers.models.qwen2 import modeling_qwen2 as qwen2

        super().__init__()
        self.turns = qwen2.Qwen2RotaryEmbedding(config)
        self.layer = qwen2.Qwen2DecoderLayer(config, 0)
        self.input_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        for name in NORMS:
            setattr(self, name, qwen2.Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, words, states):
        """Return the outputs for pairs of a state and the embedding of the next token, at the states' positions."""
        count = len(words)
        x = self.input_proj(torch.cat((self.hidden_layernorm(states), self.token_layernorm(words)),
                                      -1))[None]
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        turned = self.turns(x, torch.arange(count)[None])
        made = self.layer(x, attention_mask=mask, position_embeddings=turned)
        return self.final_layernorm(made[0] if isinstance(made, tuple) else made).view(count, -1)

    def named(self):
        """Return its tensors under their names in a checkpoint."""
        return {PREFIX + name.replace("layer.", "", 1) if name.startswith("layer.") else PREFIX + name: x
                for name, x in self.state_dict().items() if "inv_freq" not in name}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny MiMo in a folder, its body in `transformers`, and the reference of its own layer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("mimo")
    torch.manual_seed(1)
    config = Qwen2Config(**FORM)
    config._attn_implementation = "eager"
    body, layer = Qwen2ForCausalLM(config).eval(), Reference(config).eval()
    for parameter in [*body.parameters(), *layer.parameters()]:
        parameter.data = torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)
        parameter.requires_grad = False
    body.save_pretrained(folder / "base")
    with edited_tensors(folder / "base") as tensors:
        tensors.update(layer.named())
    change_json(folder / "base" / "config.json", model_type="mimo", architectures=["MiMoForCausalLM"],
                num_nextn_predict_layers=1)
    save_tokenizer(folder / "base")
    return folder, body, layer


def made(head, body):
    """Return the head's outputs for the pairs of a text, and the pairs: embeddings and the states before them."""
    states = body.model(IDS[None]).last_hidden_state[0]
    cache = head.config.cache(1, 32, head.input_proj.weight)
    out = head(IDS[1:], states[:-1], admit_text(cache, len(IDS) - 1), cache)
    return out, body.model.embed_tokens(IDS[1:]), states[:-1]


def test_the_layer_in_a_checkpoint_computes_what_the_published_one_computes(saved):
    folder, body, layer = saved
    source = Checkpoint(folder / "base")
    embedding = load_file(folder / "base" / "model.safetensors")[EMBED]
    head = load_head(source, read_config(folder / "base"), lambda: embedding, torch.float32, "cpu")
    assert isinstance(head, MtpHead) and head.drifts
    out, words, states = made(head, body)
    torch.testing.assert_close(out, layer(words, states), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(Eagle(head, body.lm_head, 32).logits(out),
                               body.lm_head(layer(words, states)))


def test_the_body_is_a_qwen2_without_that_layer(saved):
    folder, body, _ = saved
    names = Unfolded(folder / "base").names()
    assert set(names) == set(body.state_dict())
    assert not any("mtp" in name for name in names)


@pytest.mark.parametrize("alone", [False, True])
def test_it_drafts_out_of_the_split_without_a_folder_or_out_of_its_own(saved, tmp_path, answer_to, alone):
    folder, body, _ = saved
    head = []
    if alone:
        shutil.copytree(folder / "base", tmp_path / "head")
        with edited_tensors(tmp_path / "head") as tensors:
            for name in [name for name in tensors if not name.startswith(PREFIX)]:
                del tensors[name]
        head = [f"eagle_dir={tmp_path / 'head'}"]
    asked = f"base_dir={folder / 'base'}", "stages=0+2+2", "prompt_ids=5,17,40,3,28,11", "max_new_tokens=20"
    texts = [answer_to(*asked, "ignore_eos=true", *head, *words.split()) for words in (
        "pipeline_type=ar", "draft=eagle", "pipeline_type=streaming draft=eagle+suffix")]
    plain = body.generate(IDS[None, :6], max_new_tokens=20, do_sample=False, eos_token_id=None)

    assert [list(map(int, text.split())) for text in texts] == 3 * [plain[0, 6:].tolist()]


def test_rank_0_holds_the_layer_once_and_stages_hold_none_of_it(saved, tmp_path):
    folder, *_ = saved
    split_quietly(folder / "base", tmp_path / "parts", "0+2+2")
    parts = ranks_of(tmp_path / "parts")
    assert parts[0].eagle and not parts[1].eagle
    assert EMBED in parts[0].weights.names()
    assert all(name.startswith(PREFIX) for name in Checkpoint(parts[0].eagle).names())
    assert not any("mtp" in name for part in parts for name in part.weights.names())


@pytest.mark.parametrize("change, said", [
    (lambda tensors: tensors.update({"model.mtp_layers.1.input_proj.weight": torch.zeros(2)}),
     "has 2 layers for multi-token prediction, but only one is supported"),
    (lambda tensors: tensors.pop(PREFIX + "final_layernorm.weight"), "lacks final_layernorm.weight"),
    (lambda tensors: tensors.update({PREFIX + "input_proj.weight": torch.zeros(2, 2)}), "has shape (2, 2) instead of"),
    (lambda tensors: tensors.update({PREFIX + "more.weight": torch.zeros(2)}), "which its config.json has no place"),
])
def test_a_layer_of_another_form_is_refused(saved, tmp_path, change, said):
    folder, *_ = saved
    shutil.copytree(folder / "base", tmp_path / "base")
    with edited_tensors(tmp_path / "base") as tensors:
        change(tensors)
    with refused(said):
        fit_head(Checkpoint(tmp_path / "base"), read_config(tmp_path / "base"))
