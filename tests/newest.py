"""Tiny models of families that only a newer `transformers` has: it computes here what tests compare with.

`scripts/check_newest.sh` runs this file with that version; tests of the project only read the files in `tests/data`,
and draw the same weights.
"""
from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import numpy as np

DATA = Path(__file__).parent / "data"
NUM_MODELS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 5, 40, 30
LEAST_GAP = 0.01  # between the two largest logits of each token of a text, so that last bits do not matter
TOLERANCE = 1e-4  # of a log-probability: both sum in float32, in other orders
# the random weights of these models enlarge the last bits: of 69 tokens one differs by 1e-3, theirs in float32 from
# theirs in float64 by as much
TOLERANCES = {"qwen3_next": 4e-3, "qwen3_5": 4e-3, "qwen3_5_moe": 4e-3}
SIZES = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DELTA = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 12}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SHARED = {**SPARSE, "shared_expert_intermediate_size": 40}
CONVOLUTIONS = ["conv", "full_attention", "conv", "conv"]
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # file: what transformers calls it, fields of its config
    "lfm2": ("Lfm2", {"intermediate_size": 96, "layer_types": CONVOLUTIONS, "block_multiple_of": 8}),
    "lfm2_moe": ("Lfm2Moe", {"intermediate_size": 64, "layer_types": CONVOLUTIONS, "num_dense_layers": 1,
                             "routed_scaling_factor": 1.5, **SPARSE}),
    "lfm2_moe_untied": ("Lfm2Moe", {
        "intermediate_size": 64, "layer_types": CONVOLUTIONS[::-1], "num_dense_layers": 0, "norm_topk_prob": False,
        "conv_L_cache": 4, "tie_word_embeddings": False, **SPARSE}),
    "qwen3_next": ("Qwen3Next", {"intermediate_size": 64, **DELTA, **SHARED}),
    "qwen3_5": ("Qwen3_5", {"intermediate_size": 64, **DELTA}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **SHARED, "partial_rotary_factor": 0.5}),
    "minimax_m2": ("MiniMaxM2", {"intermediate_size": 40, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 6,
                                 "num_experts_per_tok": 3}),
}


def drawn(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """Return the tensor of this name of a model: uniform numbers, the same bits on every machine."""
    generator = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    uniform = 2 * generator.random_sample(tuple(shape)) - 1
    is_vector = len(shape) == 1
    if is_vector and "norm" in name:
        return (1 + 0.5 * uniform).astype(np.float32)
    if is_vector or "embed" in name or "conv" in name and len(shape) == 3:  # biases, decays, convolutions
        return uniform.astype(np.float32)
    return (uniform * 3 / shape[-1] ** 0.5).astype(np.float32)


def tensors_of(reference: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return the tensors of a model by the names of its checkpoint."""
    return {name: drawn(name, shape, seed) for name, shape in reference["shapes"].items()}


def prompt_of(seed: int) -> list[int]:
    """Return a prompt without much repetition."""
    return [int(token) for token in np.random.RandomState(seed).permutation(SIZES["vocab_size"])[:NUM_PROMPT_TOKENS]]


class Theirs:
    """A family in `transformers`: its config, and the names and shapes of the tensors in its checkpoints."""

    def __init__(self, class_name: str, fields: Mapping[str, Any]) -> None:
        import transformers
        from safetensors.torch import load_file

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()

        text_name = f"{class_name}TextConfig"
        config_class = getattr(transformers, text_name, None) or getattr(transformers, f"{class_name}Config")
        self.model_class = getattr(transformers, f"{class_name}ForCausalLM")
        with tempfile.TemporaryDirectory() as folder:
            self.model_class(config_class(**{**SIZES, **fields})).save_pretrained(folder)
            self.config = json.loads((Path(folder) / "config.json").read_text())
            self.shapes = {name: list(x.shape) for name, x in load_file(f"{folder}/model.safetensors").items()}

    def loaded(self, seed: int) -> Any:
        """Return the model with drawn weights, read from a checkpoint."""
        import torch
        from safetensors.numpy import save_file

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            save_file(tensors_of({"shapes": self.shapes}, seed), f"{folder}/model.safetensors", {"format": "pt"})
            model, report = self.model_class.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        wrong_names = {problem: names for problem, names in report.items() if names}
        assert not wrong_names, wrong_names
        return model.eval()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield models whose greedy texts no rounding changes, with the log-probability of each token after the
        first."""
        for seed in range(1000):
            prompt, model = prompt_of(seed), self.loaded(seed)
            text, logprobs, gap = _continued(model, prompt)
            if gap > LEAST_GAP and len(set(text)) > NUM_NEW_TOKENS // 3:
                yield {"seed": seed, "prompt": prompt, "text": text, "logprobs": logprobs}


def _continued(model: Any, prompt: list[int]) -> tuple[list[int], list[float], float]:
    """Return the greedy text, the log-probability of each token after the first, and the least gap of the text."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW_TOKENS,
                             pad_token_id=0)
        logits = model(out, use_cache=False).logits[0, :-1].double()

    largest, second = logits[len(prompt) - 1:].topk(2).values.T
    logprobs = logits.log_softmax(-1).gather(1, out[0, 1:, None])[:, 0]
    gap = float((largest - second).min())
    if logits[len(prompt) - 1:].argmax(-1).tolist() != out[0, len(prompt):].tolist():
        gap = 0.0  # the text depends on whether a cache is used
    return out[0, len(prompt):].tolist(), [round(x, 5) for x in logprobs.tolist()], gap


def reference_of(class_name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file in `tests/data` holds."""
    theirs = Theirs(class_name, fields)
    answers = theirs.answers()
    return {"config": theirs.config, "shapes": theirs.shapes, "models": [next(answers) for _ in range(NUM_MODELS)]}


def problem_of(name: str) -> str:
    """Return how a file in `tests/data` differs from what this version of `transformers` computes; empty if not."""
    reference = json.loads((DATA / f"{name}.json").read_text())
    theirs = Theirs(*MODELS[name])
    if theirs.shapes != reference["shapes"]:
        return "other tensors"
    for stored in reference["models"]:
        text, logprobs, _ = _continued(theirs.loaded(stored["seed"]), stored["prompt"])
        if text != stored["text"]:
            return f"another text of seed {stored['seed']}"
        if np.abs(np.subtract(logprobs, stored["logprobs"])).max() > TOLERANCES.get(name, TOLERANCE):
            return f"other log-probabilities of seed {stored['seed']}"
    return ""


def main(writes: bool) -> int:
    """Compare the files in `tests/data`, or write them, and say the result for each."""
    num_problems = 0
    for name, model in MODELS.items():
        if writes:
            lines = json.dumps(reference_of(*model), indent=0, separators=(",", ":"))
            (DATA / f"{name}.json").write_text(lines + "\n")
        problem = problem_of(name)
        num_problems += bool(problem)
        print(f"  {name:<16}", problem or f"the same {NUM_MODELS} texts and log-probabilities", flush=True)
    return min(num_problems, 1)


if __name__ == "__main__":
    sys.exit(main("write=true" in sys.argv[1:]))
