"""Families that the project's `transformers` does not have, or has otherwise: a newer one computed the references."""
import pytest
import torch

from model.weights.unfold import Unfolded
from model.whole import Whole
from tests.checkpoints import save_checkpoint
from tests.json_files import load_json
from tests.newest import DATA, MODELS, NUM_MODELS, TOLERANCE, tensors_of

pytestmark = pytest.mark.usefixtures("small_blocks")


def saved_model(reference, seed, folder, config=None, prefix=""):
    """Write a model's checkpoint, its tensors drawn again."""
    tensors = {prefix + name: torch.from_numpy(x) for name, x in tensors_of(reference, seed).items()}
    return save_checkpoint(folder, config or reference["config"], tensors, "model.safetensors")


@torch.no_grad()
def assert_computes(reference, stored, folder):
    """The whole model gives each token of a text the reference's probability, and writes the same text."""
    whole = Whole(Unfolded(folder), torch.float32, "cpu", context=150)
    ids = stored["prompt"] + stored["text"]
    logits = whole.logits(ids, whole.cache(len(ids)), len(ids))[:-1].double()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, torch.tensor(stored["logprobs"]).double(), atol=TOLERANCE, rtol=0)
    assert logits[len(stored["prompt"]) - 1:].argmax(-1).tolist() == stored["text"]


@pytest.mark.parametrize("name", MODELS)
def test_each_token_is_as_probable_as_in_the_newest_transformers(name, tmp_path):
    reference = load_json(DATA / f"{name}.json")
    assert len(reference["models"]) == NUM_MODELS
    for stored in reference["models"]:
        folder = saved_model(reference, stored["seed"], tmp_path / str(stored["seed"]))
        assert_computes(reference, stored, folder)
