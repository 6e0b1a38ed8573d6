"""DSpark heads: read as published, compared with a plain implementation, and their texts with plain decoding."""
import pytest
import torch

from config.schema.heads import usual_layers
from model.drafts.dspark import DSparkHead, MarkovDraft
from model.drafts.head_files import fit_head, load_head
from model.weights.checkpoint import Checkpoint
from tests.checkpoints import refused, save_checkpoint
from tests.saved import FORM, save_model
from tests.test_dflash import BASE, IDS, grown_tree, plainly, text_features
from tests.tiny import CONFIG, DEEP, weights

BLOCK_SIZE, MASK, RANK = 5, 52, 4


def publish(folder, lacks=(), **changes):
    """Write a head to a folder in the published form, and return its tensors."""
    layer_ids = [layer - 1 for layer in usual_layers(8)]
    config = {**FORM, "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2,
              "num_target_layers": 8, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": False,
              "block_size": BLOCK_SIZE, "mask_token_id": MASK, "target_layer_ids": layer_ids, "num_anchors": 512,
              "enable_confidence_head": True, "confidence_head_with_markov": True,
              "markov_rank": RANK, "markov_head_type": "vanilla", **changes}

    torch.manual_seed(5)
    vocab, hidden = CONFIG.vocab, CONFIG.hidden
    tensors = {
        **weights(DEEP.block().network, seed=6),
        "embed_tokens.weight": torch.randn(vocab, hidden), "lm_head.weight": torch.randn(vocab, hidden),
        "markov_head.markov_w1.weight": torch.randn(vocab, RANK),
        "markov_head.markov_w2.weight": torch.randn(vocab, RANK),
        "confidence_head.proj.weight": torch.randn(1, hidden + RANK), "confidence_head.proj.bias": torch.randn(1)}
    for name in lacks:
        del tensors[name]
    float_tensors = {name: tensor.float() for name, tensor in tensors.items()}
    save_checkpoint(folder, config, float_tensors, "model.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items()}


@pytest.mark.parametrize("lacks", [(), ("embed_tokens.weight", "lm_head.weight")], ids=["whole", "shared"])
def test_a_published_head_guesses_as_its_definition_says(tmp_path, lacks):
    tensors = publish(tmp_path / "head", lacks)
    shared_embedding = torch.randn(CONFIG.vocab, CONFIG.hidden, dtype=torch.float64)
    embedding = tensors.get("embed_tokens.weight", shared_embedding)
    head = load_head(Checkpoint(tmp_path / "head"), BASE, lambda: shared_embedding, torch.float64, "cpu")
    assert isinstance(head, DSparkHead)

    features = text_features()
    draft = MarkovDraft(head, DEEP.lm_head, 64)
    tree = grown_tree(draft, features)
    out = plainly(tensors, embedding, features, [IDS[-1], *[MASK] * (BLOCK_SIZE - 1)], len(IDS) - 1)
    block_logits = DEEP.lm_head(out) if lacks else out @ tensors["lm_head.weight"].T
    torch.testing.assert_close(draft._logits, block_logits, atol=1e-4, rtol=1e-4)

    node, path = tree.tip, []
    for row, token in enumerate((7, 8, 30, 2)):
        node = tree.add(node, token, -1.0)
        path.append(node)
        bias = tensors["markov_head.markov_w1.weight"][token] @ tensors["markov_head.markov_w2.weight"].T
        chances = torch.softmax(block_logits[row + 1] + bias, -1)
        guesses = draft.unrequested(tree, node, 3)
        assert [token for token, _ in guesses] == chances.topk(3).indices.tolist()
        torch.testing.assert_close(torch.tensor([chance for _, chance in guesses]).double(),
                                   chances.topk(3).values, atol=1e-4, rtol=1e-4)
    assert draft.unrequested(tree, tree.add(node, 1, -1.0), 3) is None, "the block has no row for it"


@pytest.mark.parametrize("room, num_rows", [(1, 0), (2, 1), (4, 3), (40, BLOCK_SIZE)])
def test_a_block_ends_where_the_text_may(tmp_path, room, num_rows):
    publish(tmp_path / "head")
    head = load_head(Checkpoint(tmp_path / "head"), BASE, lambda: torch.empty(0), torch.float64, "cpu")
    features = text_features()
    draft = MarkovDraft(head, DEEP.lm_head, 64)
    grown_tree(draft, features, limit=len(IDS) - 1 + room)
    assert len(draft._logits) == num_rows


@pytest.mark.parametrize("changes, sentence", [
    ({"markov_head_type": "gated"}, "says markov_head_type='gated', which is not supported (only 'vanilla')"),
    ({"markov_rank": 0}, "says markov_rank=0, which is not supported (only 1 to 8192)"),
    ({"block_size": 1}, "says block_size=1"),
    ({"target_layer_ids": [-1, 3]}, "(only layers in rising order, from 0 to 6)"),
    ({"markov_rank": 5}, "markov_head.markov_w1.weight"),
    ({"architectures": ["DFlashDraftModel"]}, "which may change what the head computes"),
])
def test_a_head_that_computes_otherwise_is_refused_by_name(tmp_path, changes, sentence):
    publish(tmp_path / "head", **changes)
    with refused(sentence):
        fit_head(Checkpoint(tmp_path / "head"), BASE)


def test_a_published_head_drafts_for_a_split_model(tmp_path, answer_to):
    save_model(tmp_path / "base", DEEP)
    publish(tmp_path / "dspark")
    asked = f"base_dir={tmp_path / 'base'}", f"eagle_dir={tmp_path / 'dspark'}", "stages=0+4+4", "max_new_tokens=16"
    texts = {}
    for method, draft, temperature in (("ar", "none", 0), ("streaming", "dspark+suffix", 0), ("naive", "dspark", 0),
                                       ("ar", "none", 1), ("continuous", "eagle", 1)):
        words = f"pipeline_type={method}", f"draft={draft}", f"temperature={temperature}"
        texts.setdefault(temperature, set()).add(answer_to(*asked, "prompt=what is it?", *words))
    assert [len(same_texts) for same_texts in texts.values()] == [1, 1]
