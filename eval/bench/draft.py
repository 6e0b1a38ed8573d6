"""How often a draft is right along the target's greedy text, by the depth of its own guesses; and one of its trees."""
from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from config.cli import FOLDERS, ComparedDrafts, parts, starting
from config.files import check_output
from config.keys import listed, over, raw_values
from config.presets import TOY_PRESET
from config.questions import load
from eval.keys import AsksSets
from eval.self_feeding import read_text, unrolled
from launch.pipeline import Pipeline
from launch.run import Command, run
from model.drafts.mixture import Mixture
from model.drafts.network import TreeDraft, at_once
from model.tree import TokenTree
from pipeline.decode import Decoder

DEFAULTS = {"pipeline_type": "serial", "max_new_tokens": "96", "question_end": "2"}
FORMS = (".png", ".svg")  # of pictures
LEAD = 40  # letters of the text that a picture shows
DEPTHS = (0, 1, 2, 4, 8, 16, 32)  # own guesses behind which the next token is guessed
BEST = (1, 3, 10)  # so many of the likeliest guesses count as one try
Words = Callable[[int], str]  # the text of a token


@dataclass(frozen=True)
class DraftConfig(ComparedDrafts, AsksSets):
    """What the command takes beside the keys of a run."""

    # What is measured
    picture: str = ""  # file (.png or .svg) for a picture of one tree of the first draft; empty: none


def draft(argv: list[str]) -> int:
    """The command `python -m scripts.bench draft`; its exit code."""
    asked = over(argv, DEFAULTS, TOY_PRESET)
    raw = raw_values(asked)
    if "drafts" in raw and "draft" not in raw:
        asked.append(f"draft={starting(listed(raw['drafts']))}")
    return run(Command("scripts.bench draft", measure, DraftConfig), asked)


def measure(pipeline: Pipeline, own: DraftConfig) -> None:
    """On rank 0: let the target write greedily, and count what each draft foresees of it."""
    _check(own)
    decoders = {name: _decoder(pipeline, name, own) for name in own.asked_drafts}
    prompts = _prompts(pipeline, own)
    writer = pipeline.decoder_for(replace(own.run, pipeline_type="ar"))
    found = dict.fromkeys(decoders, torch.tensor(0))
    with tqdm(total=len(prompts) * len(decoders),
              unit="text", file=sys.stderr) as bar:
        for prompt in prompts:
            text = [*prompt, *_greedy(writer, prompt, pipeline)]
            for name, decoder in decoders.items():
                bar.set_description(name)
                assert isinstance(decoder.draft, Mixture), f"a {type(decoder.draft).__name__} has no networks"
                [network] = decoder.draft.networks
                if not isinstance(network, TreeDraft) or not network.by_level:
                    raise ValueError(f"the draft {name} does not read a text token by token: take another")
                tree = read_text(decoder, text)
                found[name] = found[name] + hits(network, tree, len(prompt))
                bar.update()
    print(table(found))
    if own.picture:
        name, decoder = next(iter(decoders.items()))
        middle = (len(prompt) + len(text)) // 2
        _show(pipeline, name, decoder, text[:middle], own.picture)


def _check(config: DraftConfig) -> None:
    """Raise ValueError for what the measurement cannot do."""
    if config.run.cluster or config.run.trace:
        raise ValueError("the draft is looked at by itself: leave profile and trace out")
    if config.run.prompt_ids or config.run.temperature:
        raise ValueError("the target writes greedily, and answers questions: leave temperature and prompt_ids out")
    if config.picture:
        if Path(config.picture).suffix not in FORMS:
            raise ValueError(f"picture={config.picture} is no picture: name a file that ends in {' or '.join(FORMS)}")
        check_output(config.picture, "choose another picture=")


def _decoder(pipeline: Pipeline, name: str, own: DraftConfig) -> Decoder:
    """A decoder with this draft. Raises ValueError for one that does not read a text token by token."""
    if name.partition(":")[0] not in FOLDERS:
        raise ValueError(f"the draft {name} has no guesses of its own to read on: name eagle, model, or both")
    return pipeline.decoder_for(own.with_draft(name), parts(name).head)


def _prompts(pipeline: Pipeline, own: DraftConfig) -> list[list[int]]:
    """The first turns of all questions, as token ids."""
    config = pipeline.config
    asked = [question for name in own.chosen_sets
             for question in load(own.folder, name, config.question_begin, config.question_end)]
    return [pipeline.prompt_ids(question.turns[0], config.template) for question in asked]


def _greedy(decoder: Decoder, prompt: list[int], pipeline: Pipeline) -> list[int]:
    """What the target writes, at most as long as there is room for one token more."""
    room = max(1, decoder.max_length - len(prompt) - 1)
    request = pipeline.request(prompt, pipeline.config, "")
    limit = min(request.max_new_tokens, room)
    return decoder.whole(replace(request, max_new_tokens=limit)).token_ids


def hits(draft: TreeDraft, tree: TokenTree, prompt: int) -> Tensor:
    """Tries of a draft on the text of a tree, behind its first `prompt` tokens, and its hits: `[depths, 1 + best]`.

    From each token of the text on the draft reads the tokens that follow, as if it had guessed them: with the features
    that it made itself. At each of DEPTHS its BEST likeliest guesses are compared with the token that comes then.
    """
    found, tokens = torch.zeros(len(DEPTHS), 1 + len(BEST), dtype=torch.long), tree.tokens
    for depth, places, out_TD in unrolled(draft, tree, prompt, max(DEPTHS)):
        if depth in DEPTHS:
            following = torch.tensor([tokens[place + 1] for place in places], device=out_TD.device)
            _, guess_TW = draft.guess(draft.logits(out_TD), max(BEST))
            right_TW = guess_TW == following[:, None]
            right = [int(right_TW[:, :best].sum()) for best in BEST]
            found[DEPTHS.index(depth)] += torch.tensor([len(following), *right])
    return found


def table(found: dict[str, Tensor]) -> str:
    """Per cent of the tries that hit, a block for each draft."""
    depths = "".join(f"{depth:>8}" for depth in DEPTHS)
    lines = ["per cent of the tokens that are among the draft's best guesses, by how many of its own it has read", "",
             f"{'own guesses read':<32}{depths}"]
    for name, own in found.items():
        tries, *right = own.T
        for best, count in zip(BEST, right):
            rates = (100 * count / tries).tolist()
            cells = "".join(f"{rate:8.1f}" if rate == rate else f"{'-':>8}" for rate in rates)
            lines.append(f"{f'{name}, best {best}':<32}{cells}")
        cells = "".join(f"{count:>8}" for count in tries.tolist())
        lines.append(f"{f'{name}, tries':<32}{cells}")
    return "\n".join(lines)


def _show(pipeline: Pipeline, name: str, decoder: Decoder, text: Sequence[int], picture: str) -> None:
    """Print the tree that a draft grows behind a text, and draw it."""
    assert pipeline.text
    tree = read_text(decoder, text)
    text_of, tip = pipeline.text.decode, tree.nodes[tree.tip].token

    def words(token: int) -> str:
        """The text of a token that does not begin one."""
        return text_of([tip, token])[len(text_of([tip])):]

    ending = repr(text_of(tree.tokens)[-LEAD:])
    while at_once(decoder.draft.grow(tree, pipeline.config.tree.init)):  # type: ignore[attr-defined]
        pass
    decoder.draft.reset()
    print(f"\na tree of {name}: {len(tree.live)} guesses, with the probabilities of their paths, behind {ending}\n")
    print(text_art(tree, words))
    draw(tree, words, f"A tree of {name} behind {ending}", picture)
    print(f"\ndrawn: {picture}")


# --- a token tree as a picture: indented branches in the terminal, or a drawing in a file -----------------------------

class Leaf(NamedTuple):
    """A node as it is drawn: where, below which other one, and what is written at it."""

    node: int
    parent: int
    depth: int
    probability: float
    token: int


def ordered(tree: TokenTree) -> Iterator[Leaf]:
    """The tip and all guesses below it, each behind its parent, the likelier branch first."""
    waiting, certain = [(tree.tip, 0)], tree.nodes[tree.tip].score
    while waiting:
        number, depth = waiting.pop()
        node = tree.nodes[number]
        yield Leaf(number, node.parent, depth, math.exp(node.score - certain), node.token)
        below = sorted(node.children.values(), key=lambda child: tree.nodes[child].score)
        waiting += [(child, depth + 1) for child in below]


def text_art(tree: TokenTree, words: Words) -> str:
    """The tree as lines: indented by depth, with probability, token id and token."""
    lines = []
    for leaf in ordered(tree):
        written = f"{leaf.probability:6.3f}  {leaf.token:>6}  {words(leaf.token)!r}"
        lines.append(f"{'|  ' * max(leaf.depth - 1, 0)}{'+- ' if leaf.depth else ''}{written}")
    return "\n".join(lines)


def draw(tree: TokenTree, words: Words, title: str, path: str) -> None:
    """Draw the tree into a file. Raises ValueError if it cannot be written."""
    from eval.plots import drawn

    leaves = list(ordered(tree))
    deepest = max(leaf.depth for leaf in leaves)
    places = {leaf.node: (leaf.depth, row) for row, leaf in enumerate(leaves)}
    with drawn(path, (1.9 * deepest + 3, 0.19 * len(leaves) + 0.8)) as axes:
        for leaf in leaves:
            x, y = places[leaf.node]
            above, start = places.get(leaf.parent, (x, y))
            axes.plot([above, above, x], [start, y, y],
                      color="black", linewidth=0.4 + 2 * leaf.probability)
            label = f" {leaf.probability:.2f} {words(leaf.token)!r} {leaf.token}"
            axes.text(x, y, label, fontsize=7, va="center", parse_math=False,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})
        axes.invert_yaxis()
        axes.set_xlim(-0.1, deepest + 1)
        axes.axis("off")
        axes.set_title(title, loc="left", parse_math=False)
