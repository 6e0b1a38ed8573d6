"""Tiny random LLaMAs, drafts for them and pipelines of threads over both: what the tests decode with."""
from __future__ import annotations

import string
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from cluster.transport import Inbox, LocalLink
from config.failure import PeerLost
from config.methods import METHODS
from config.run_config import Growth, TreeConfig
from config.schema.block_heads import BlockForm
from config.schema.families import CONVOLUTION, DELTA_NET
from config.schema.heads import read_dialect, usual_layers
from model.cache import TreeCache
from model.drafts.dflash import BlockDraft, DFlashHead
from model.drafts.draft import Draft, NoDraft, Steps
from model.drafts.eagle import Eagle
from model.drafts.heads import Eagle3Head, EagleHead
from model.drafts.mixture import MIN_PROBABILITY, PRIOR_SHARPNESS, Mixture
from model.drafts.network import ModelDraft, Network
from model.drafts.retokenized import Retokenized
from model.drafts.suffix import Suffix
from model.llama import LlamaConfig, Slice, fill
from model.recurrent import DeltaSizes
from model.sample import Sampler
from model.tree import TokenTree, verify
from pipeline.answers import Request
from pipeline.decode import Decoder, PipelineLimits
from pipeline.link import Peers
from pipeline.requests import Ring
from pipeline.stage import Stage, run_stage
from pipeline.strategies import STRATEGIES

CONFIG = LlamaConfig(hidden=32, layers=4, heads=4,
                     kv_heads=2, head_dim=8, intermediate=48, vocab=53, context=256,
                     eps=1e-6, theta=10000.0)
TREE = TreeConfig(init=Growth(20, 4, 4, 4),
                  expand=Growth(16, 4, 4, None), idle=Growth(6, 1, 4),
                  layer=Growth(25, 1000, 5, 5),
                  stream=Growth(24, 12, 4, 4, anywhere=True), chunk=5)
CAPACITY = 2048  # every guess of a request, for when all prunes are lost
SIGNS = (string.ascii_letters + string.digits)[:CONFIG.vocab]
PLACES = 8  # for requests that are under way at once
SPECULATIVE = list(dict.fromkeys(method.strategy for method in METHODS.values()
                                 if method.target == "ring" and method.draft != "none"))


def weights(module: torch.nn.Module, seed: int, scale: float = 0.25) -> dict[str, Tensor]:
    """Random weights for a module that was built without memory; norms are ones, and states decay at several speeds."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.ones(p.shape, dtype=torch.float64) if p.dim() == 1 else
               torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
               for name, p in module.named_parameters()}
    for name, x in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = torch.linspace(-6, 0, len(x), dtype=torch.float64)
        if x.dim() == 3:
            tensors[name] = x / scale
    return tensors


def letters(order: Sequence[int]) -> Any:
    """A tokenizer of single letters, in this order; it has one for each token of a tiny model."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {SIGNS[sign]: token for token, sign in enumerate(order)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=SIGNS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer))


class Tiny:
    """The model whole, the weights of its slices, and drafts that agree with it now and then."""

    drops = True  # whether its stages drop what no later row reads

    def __init__(self, layers: int = CONFIG.layers, **changes: Any) -> None:
        self.config = replace(CONFIG, layers=layers, **changes)
        self.whole = Slice(self.config, 0, layers)
        self.tensors = weights(self.whole, seed=1)
        fill(self.whole, self.tensors, torch.float64, "cpu")
        generator = torch.Generator().manual_seed(2)
        self.lm_head = torch.nn.Linear(CONFIG.hidden, CONFIG.vocab, bias=False, dtype=torch.float64)
        self.lm_head.weight = torch.nn.Parameter(
            torch.randn(CONFIG.vocab, CONFIG.hidden, generator=generator, dtype=torch.float64) * 0.4, False)
        self._texts: dict[tuple[tuple[int, ...], Sampler], list[int]] = {}

    def slice(self, first: int, last: int) -> Slice:
        part = Slice(self.config, first, last)
        fill(part, {name: self.tensors[name] for name, _ in part.named_parameters()},
             torch.float64, "cpu")
        return part

    def eagle(self) -> Eagle:
        head = EagleHead(CONFIG, bias=True)
        fill(head, weights(head, seed=3), torch.float64, "cpu")
        return Eagle(head, self.lm_head, CAPACITY)

    def eagle3(self, vocab: int = 40) -> Eagle:
        """A head of EAGLE-3, whose tokens are every one but the first `CONFIG.vocab` - `vocab` of even number."""
        sizes = replace(CONFIG, layers=1)
        head = Eagle3Head(sizes, CONFIG.hidden, vocab, read_dialect({}, self.config.layers))
        fill(head, weights(head, seed=4), torch.float64, "cpu")
        absent = {2 * i for i in range(CONFIG.vocab - vocab)}
        head.shift = torch.tensor([i for i in range(CONFIG.vocab) if i not in absent]) - torch.arange(vocab)
        return Eagle(head, head.logits, CAPACITY)

    def block(self) -> BlockDraft:
        """A head of DFlash, for blocks of six tokens."""
        sizes = replace(CONFIG, layers=2, family=replace(CONFIG.family, head_norms=True))
        head = DFlashHead(sizes, BlockForm(usual_layers(self.config.layers), 6, CONFIG.vocab - 1))
        fill(head, weights(head, seed=6), torch.float64, "cpu")
        return BlockDraft(head, self.lm_head, CAPACITY)

    def twin(self, noise: float = 0.0) -> ModelDraft:
        """A model as draft: this one itself, its weights a little off."""
        model = Slice(self.config, 0, self.config.layers)
        off = weights(self.whole, seed=5, scale=noise)
        fill(model, {name: x + off[name] if x.dim() > 1 else x
                     for name, x in self.tensors.items()}, torch.float64,
             "cpu")
        return ModelDraft(model, self.lm_head, self.new_cache(CAPACITY))

    def other(self, noise: float = 0.02) -> Retokenized:
        """A model with the same letters under other numbers, as draft."""
        order = [*range(CONFIG.vocab)][::-1]
        twin = self.twin(noise)
        model = twin.network
        assert isinstance(model, Slice), "the twin is a slice of all layers"
        model.embed_tokens.weight.data = model.embed_tokens.weight.data[order]
        small = ModelDraft(model, lambda out: self.lm_head(out)[:, order], twin.cache)
        return Retokenized(small, letters(order), letters(range(CONFIG.vocab)), CONFIG.context)

    def drafters(self, *noises: float) -> Mixture:
        """Several models as one draft, each of them off in its own way."""
        networks = [self.twin(noise) for noise in noises]
        for number, network in enumerate(networks):
            network.source, network.number = f"ssm{number + 1}", number
        return Mixture(networks)

    def mixture(self, names: str) -> Mixture:
        """A draft out of sources with `+` between them: those above, `drifting` (a head that drifts) and `suffix`."""
        makers: dict[str, Callable[[], Network]] = {
            "eagle": self.eagle, "eagle3": self.eagle3, "block": self.block, "drifting": self.eagle,
            "twin": partial(self.twin, 0.02),
            "other": self.other}
        networks, sources = [], names.split("+")
        for name in sources:
            if name != "suffix":
                network = makers[name]()
                network.drifts = name == "drifting"
                networks.append(network)
        return Mixture(networks, Suffix() if "suffix" in sources else None)

    def new_cache(self, capacity: int = 64, layers: int | None = None, first: int = 0,
                  windows: Sequence[int] = ()) -> TreeCache:
        """An empty cache for so many layers from `first` on, or for all."""
        return self.config.cache(layers or self.config.layers, capacity, self.lm_head.weight, windows, first=first)

    def logits(self, tokens: list[int]) -> Tensor:
        """The reference: all tokens at once through the whole model, `[T, V]`."""
        cache = self.new_cache(len(tokens))
        positions = admit_text(cache, len(tokens))
        return self.lm_head(self.whole(torch.tensor(tokens), positions, cache))

    def text(self, prompt: list[int], new: int, sampler: Sampler) -> list[int]:
        """The reference text: token by token, without any cache. It is computed once."""
        tokens = self._texts.setdefault((tuple(prompt), sampler), list(prompt))
        while len(tokens) < len(prompt) + new:
            tokens += sampler(self.logits(tokens)[-1:], [len(tokens)])
        return tokens[len(prompt):len(prompt) + new]


TINY, DEEP = Tiny(), Tiny(layers=8)
RECURRENT = Tiny(recurrent=(DELTA_NET, CONVOLUTION, "", DELTA_NET), num_taps=3, windows=(3, 3, 0, 3),
                 delta=DeltaSizes(key_heads=2, value_heads=8, key_dim=8, value_dim=16))


class HandmadeDraft:
    """What a draft has beside `grow`, for one that keeps nothing between requests."""

    inner = False
    consumed = 0

    def begin(self, sampler: Sampler) -> None:
        pass

    def offer_sure(self, tree: Any, growth: Growth) -> bool:
        return False

    def refresh(self) -> None:
        pass

    def reset(self) -> None:
        self.refresh()


class Oracle(HandmadeDraft):
    """A draft that knows the text and guesses it, with some wrong guesses beside it: long accepted paths."""

    def __init__(self, tokens: list[int], vocab: int = CONFIG.vocab) -> None:
        self.tokens, self.vocab = tokens, vocab
        self.refresh()

    def another(self) -> Oracle:
        return Oracle(self.tokens, self.vocab)

    def grow(self, tree: Any, growth: Growth, *worth_drafting: Any) -> Steps[bool]:
        yield from ()
        frontier = [node for node in self._frontier if node in tree.live] or [tree.tip]
        node = tree.nodes[frontier[0]]
        deep = node.pos + 1
        if len(tree.live) >= growth.nodes or deep >= min(tree.max_tokens,
                                                         tree.nodes[tree.tip].pos + growth.depth + 2):
            return False
        right = self.tokens[deep] if deep < len(self.tokens) and deep % 7 else (node.token + 1) % self.vocab
        self._frontier = [tree.add(frontier[0],
                                   (right + rank) % self.vocab, node.score - 0.1 * (rank + 1))
                          for rank in range(growth.width)]
        return True

    def refresh(self) -> None:
        self._frontier: list[int] = []


def ring_of_threads(world: int) -> list[LocalLink]:
    """The links of ranks that are threads."""
    inboxes = [Inbox() for _ in range(world)]
    others = [[peer for peer in range(world) if peer != rank] for rank in range(world)]
    roots = [None, *[0] * (world - 1)]
    peers = [Peers(None, [(rank + 1) % world], others[rank], roots[rank]) for rank in range(world)]
    return [LocalLink(rank, inboxes, peers[rank]) for rank in range(world)]


def work(stage: Stage, link: Any) -> None:
    """Serve; a stage that fails ends the test instead of letting it wait."""
    try:
        run_stage(stage, link)
    except BaseException as error:
        link.fail(PeerLost(f"a stage failed: {error!r}"))
        raise


def stages_of(tiny: Tiny, stages: int) -> list[Stage]:
    """The model in so many stages."""
    layers = tiny.config.layers
    bounds = [layers * i // stages for i in range(stages + 1)]
    windows = tiny.config.windows if tiny.drops else ()
    return [Stage(tiny.slice(a, b),
                  partial(tiny.new_cache, CAPACITY, b - a, a, windows[a:b]), num_requests=PLACES,
                  inner_layers=[i for i in usual_layers(layers) if a <= i < b])
            for a, b in zip(bounds, bounds[1:])]


@contextmanager
def in_threads(target: Callable[..., None], calls: Iterable[Sequence[Any]]) -> Iterator[None]:
    """Threads that call `target` with each of these arguments; all of them have to end when the block does."""
    threads = [threading.Thread(target=target, args=arguments, daemon=True) for arguments in calls]
    for thread in threads:
        thread.start()
    yield

    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread did not end"


@contextmanager
def pipeline(tiny: Tiny, stages: int, strategy: str, draft: Draft | None = None, cfg: TreeConfig = TREE,
             wrap: Callable[[Any], Any] = lambda link: link) -> Iterator[Decoder]:
    """A decoder over `stages` threads; `wrap` may spoil the links. Ends all threads and checks that none failed."""
    links = [wrap(link) for link in ring_of_threads(stages + 1)]
    workers = stages_of(tiny, stages)
    ring = Ring(links[0], tiny.lm_head, depth=stages + 1)
    decoder = Decoder(ring, draft or NoDraft(), STRATEGIES[strategy], cfg, PipelineLimits(200, PLACES))
    decoder.stages = workers  # type: ignore[attr-defined]
    with in_threads(work, zip(workers, links[1:])):
        yield decoder
        ring.stop()


def holds_caches(decoder: Any) -> bool:
    """Whether some stage keeps a cache of a request."""
    return any(stage.caches for stage in decoder.stages)


def random_tensor(seed: int, *shape: int) -> Tensor:
    """Numbers of the normal distribution, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def add_anywhere(tree: TokenTree, chance: Random, vocab: int) -> None:
    """A random guess, less likely than what it stands behind."""
    parent = chance.choice([tree.tip, *sorted(tree.live)])
    tree.add(parent, chance.randrange(vocab), tree.nodes[parent].score - chance.random())


def judge(tree: TokenTree, target_token: int) -> list[int]:
    """Let the target say what follows the tip; the tokens that are settled then."""
    tree.nodes[tree.tip].target_token = target_token
    return verify(tree)


def digits(text: str) -> list[int]:
    """Token ids below ten, written without commas."""
    return [int(digit) for digit in text]


def admit_text(cache: Any, length: int) -> Tensor:
    """Give the tokens of a text slots in a cache; their positions."""
    nodes = list(range(length))
    cache.admit(nodes, [0, *nodes[:-1]], text=length)
    return torch.tensor(nodes)


def tokens_of(stream: Iterable[list[int]]) -> list[int]:
    """All tokens of an answer, as they came."""
    return [token for tokens in stream for token in tokens]


def give_up(decoder: Decoder, request: Request, num_pieces: int) -> None:
    """Begin an answer, and close it after so many pieces."""
    _, stream = decoder.stream(request)
    for _ in range(num_pieces):
        next(stream)
    stream.close()


def write(decoder: Decoder, prompt: list[int], new: int, sampler: Sampler = Sampler()) -> list[int]:
    answer, stream = decoder.stream(Request(prompt, sampler, new))
    tokens_of(stream)
    return answer.token_ids


def sharpened(logits_V: Tensor, width: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens with their log-probabilities, as a mixture of one source has them at first."""
    likeliest = torch.softmax(logits_V, -1).topk(width)
    other = (1 - likeliest.values.sum(0, keepdim=True)).clamp(min=MIN_PROBABILITY)
    scores = torch.cat([likeliest.values, other]).log().mul(PRIOR_SHARPNESS).log_softmax(-1)
    return list(zip(likeliest.indices.tolist(), scores.tolist()))
