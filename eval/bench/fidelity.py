"""How close the logits of a GGUF file's model come to those of float32 arithmetic on the same weights.

transformers computes the latter, and reads the file by the library `gguf`, so no part of the judgement is ours.

Shapes: T positions, V vocabulary.
"""
from __future__ import annotations

import tempfile
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from config.dialect import OptionParser
from config.questions import BUNDLED_FOLDER, load
from eval.bench import transformers_model, whole_number
from eval.bench.shapes import add_shapes, of_shapes
from launch.progress import ProgressBar
from launch.split.gguf import unpack
from model.weights.unfold import Unfolded
from model.whole import WholeModel, open_whole

SETS = ("mt_bench", "humaneval", "gsm8k", "qa", "sum", "alpaca")  # whose questions are the text
PIECE_TOKENS = 250  # at most, of each piece of the text, which is read alone


def fidelity(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench fidelity`."""
    parser = OptionParser(prog="python3 -m scripts.bench fidelity")
    add_shapes(parser)
    parser.add_argument("--positions", type=whole_number, default=2000, metavar="N", help="tokens that are read (2000)")
    args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
        gguf_path = of_shapes(args, Path(folder))
        model_dir = unpack(gguf_path, Path(folder) / "model")
        own_model = open_whole(Unfolded(model_dir), torch.float32, torch.device("cpu"))
        token_ids = bundled_text(model_dir, args.positions)
        judge = transformers_model(gguf_path)

        comparisons = []
        size = min(PIECE_TOKENS, own_model.config.context)
        for begin in ProgressBar(range(0, len(token_ids), size), desc="texts", leave=False):
            piece = token_ids[begin:begin + size]
            exact_logits_TV = judge(torch.tensor([piece])).logits[0]
            comparisons.append(compared(logits_of(own_model, piece), exact_logits_TV))

    is_same_T, divergence_T = (torch.cat(column) for column in zip(*comparisons))
    print(f"{gguf_path.name}, {len(token_ids)} positions: {100 * is_same_T.double().mean():.2f} % keep the likeliest "
          f"token of float32, mean KL divergence from float32 {divergence_T.mean():.2e} nats, largest "
          f"{divergence_T.max():.2e}")
    return 0


def bundled_text(model_dir: Path, num_tokens: int) -> list[int]:
    """Return the first tokens of the bundled questions. Raises ValueError if they have fewer."""
    from transformers import AutoTokenizer

    questions = chain.from_iterable(load(BUNDLED_FOLDER, name) for name in SETS)
    text = "\n\n".join(chain.from_iterable(question.turns for question in questions))
    token_ids: list[int] = AutoTokenizer.from_pretrained(model_dir)(text, add_special_tokens=False).input_ids
    if num_tokens > len(token_ids):
        raise ValueError(f"the bundled questions have {len(token_ids)} tokens: give --positions at most that")
    return token_ids[:num_tokens]


@torch.no_grad()
def logits_of(model: WholeModel, token_ids: list[int]) -> Tensor:
    """Return our logits `[T, V]` after each token of a text."""
    cache, positions = model.cache(len(token_ids)), range(len(token_ids))
    cache.admit(positions, range(-1, len(token_ids) - 1), len(token_ids))
    logits_TV: Tensor = model.lm_head(model.body(torch.tensor(token_ids), torch.tensor(positions), cache))
    return logits_TV


def compared(logits_TV: Tensor, exact_logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether the likeliest token is the exact one, and the KL divergence from the exact law: both `[T]`."""
    is_same_T = logits_TV.argmax(-1) == exact_logits_TV.argmax(-1)
    log_law_TV, exact_log_law_TV = (x.double().log_softmax(-1) for x in (logits_TV, exact_logits_TV))
    divergence_T = (exact_log_law_TV.exp() * (exact_log_law_TV - log_law_TV)).sum(-1)
    return is_same_T, divergence_T
