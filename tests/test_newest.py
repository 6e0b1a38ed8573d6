"""Families that the project's `transformers` does not have, or has otherwise: a newer one computed the references."""
import pytest
import torch

from config.methods import METHODS
from launch.build import build_lm_head, build_ring
from launch.spec import RankSpec
from model.drafts.mixture import Mixture
from model.drafts.suffix import Suffix
from model.sample import Sampler
from model.weights.parts import Part
from model.weights.unfold import Unfolded
from model.whole import Whole
from pipeline.decode import Decoder, PipelineLimits
from pipeline.strategies import STRATEGIES
from pipeline.trace import OFF
from tests.checkpoints import save_checkpoint, split_quietly
from tests.json_files import load_json
from tests.newest import DATA, MODELS, NUM_MODELS, TOLERANCE, tensors_of
from tests.test_families import Saved
from tests.tiny import TREE, Oracle, in_threads, ring_of_threads, work, write

pytestmark = pytest.mark.usefixtures("small_blocks")
EXPERTS_APART = {name for name in MODELS if name.startswith("minimax")}


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
