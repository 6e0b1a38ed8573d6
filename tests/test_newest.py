"""Families that the project's `transformers` does not have, or has otherwise: a newer one computed the references."""
import re

import pytest
import torch

from model.weights.unfold import Unfolded
from model.whole import Whole
from tests.checkpoints import save_checkpoint
from tests.json_files import load_json
from tests.newest import DATA, MODELS, NUM_MODELS, TOLERANCE, TOLERANCES, tensors_of

pytestmark = pytest.mark.usefixtures("small_blocks")


def drawn_tensors(reference, stored):
    """The tensors of a model's checkpoint, drawn again."""
    return {name: torch.from_numpy(x) for name, x in tensors_of(reference, stored["seed"]).items()}


@torch.no_grad()
def assert_computes(stored, folder, tolerance):
    """The whole model gives each token of a text the reference's probability, and writes the same text."""
    whole = Whole(Unfolded(folder), torch.float32, "cpu", context=150)
    ids = stored["prompt"] + stored["text"]
    logits = whole.logits(ids, whole.cache(len(ids)), len(ids))[:-1].double()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, torch.tensor(stored["logprobs"]).double(), atol=tolerance, rtol=0)
    assert logits[len(stored["prompt"]) - 1:].argmax(-1).tolist() == stored["text"]


@pytest.mark.parametrize("name", MODELS)
def test_each_token_is_as_probable_as_in_the_newest_transformers(name, tmp_path):
    reference = load_json(DATA / f"{name}.json")
    assert len(reference["models"]) == NUM_MODELS
    for stored in reference["models"]:
        folder = save_checkpoint(tmp_path / str(stored["seed"]), reference["config"], drawn_tensors(reference, stored),
                                 "model.safetensors")
        assert_computes(stored, folder, TOLERANCES.get(name, TOLERANCE))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_a_model_that_also_sees_is_as_probable(name, tmp_path):
    reference = load_json(DATA / f"{name}.json")
    stored, text_names = reference["models"][0], re.compile(r"^model\.")
    tensors = {text_names.sub("model.language_model.", key): x for key, x in drawn_tensors(reference, stored).items()}
    tensors.update({"model.visual.patch_embed.proj.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(3)})
    config = {"model_type": name, "architectures": [reference["config"]["architectures"][0].replace(
        "ForCausalLM", "ForConditionalGeneration")], "vision_config": {}, "text_config": reference["config"]}
    folder = save_checkpoint(tmp_path / "seeing", config, tensors, "model.safetensors")
    assert_computes(stored, folder, TOLERANCES[name])
