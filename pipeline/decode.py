"""The decoder turns requests into streams of settled tokens; several requests share one ring in turn.

It knows nothing about text, since prompts and answers are token ids, nor about how guesses are made. A request advances
by the steps of its strategy, and waits when the strategy yields `WAIT` or a draft's `Reading`. An abandoned request is
removed from every stage, unless its text is kept for reuse. A request may begin with a text that the stages still hold:
texts of ended requests stay in unused caches, and the least recently used one is evicted first.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Callable, Iterator, NamedTuple, Sequence

from config.failure import PeerLost
from config.trees import TreeConfig
from model.drafts.draft import Draft, Passes, Read, Reading
from model.drafts.forced import ForcedDraft
from model.drafts.network import at_once, read_all
from model.tree import TokenTree
from pipeline.answers import Answer, Request
from pipeline.messages import Reset
from pipeline.request_draft import RequestDraft
from pipeline.requests import TRIES, RequestTarget, Ring
from pipeline.strategies import Progress, Strategy
from pipeline.target_options import TargetOptions

MIN_SHARED_TOKENS = 16  # for which a text is reused


class Decoding:
    """A running request: it advances the strategy and fills the answer."""

    def __init__(self, request: Request, tree: TokenTree) -> None:
        self.request, self.tree = request, tree
        self.answer = Answer(prompt_tokens=len(request.prompt))
        self.unread: deque[list[int]] = deque()  # settled tokens that the stream has not returned yet
        self.ended = False
        self.error: BaseException | None = None  # raised when the answer is read
        self.reading: Reading | None = None  # present while the request waits for a network
        self._begin_time: float | None = None  # of the first step
        self._segments_before_loss = 0
        self._prefill_verifications = 0

    def restart(self) -> None:
        """Reset the request after a loss: the stages are empty, so prompt and answer so far become unsent text."""
        self._steps.close()
        self._segments_before_loss += self.target.segments
        self.reading = None

        num_prompt_tokens = self.answer.prompt_tokens
        self.tree = self.tree.again(num_prompt_tokens, num_prompt_tokens + self.answer.new_tokens, self.request.law)

    def start(self, target: RequestTarget, draft: Draft, steps: Progress) -> None:
        """Start the request, or start it again after a loss."""
        self.target, self.draft, self._steps = target, draft, steps
        draft.begin(self.request.sampler)

    def advance(self, read: Read | None = None) -> bool:
        """Advance until the request waits or settles tokens; return whether it settled tokens or ended."""
        self.reading = None
        if self._begin_time is None:
            self._begin_time = self.target.ring.clock.now()
        if self.answer.finish_reason:  # the last tokens settled in an earlier step
            self.ended = True
            return True

        try:
            step = self._steps.send(read)
            if isinstance(step, list):
                self._settle(step)
        except PeerLost:
            raise
        except Exception as error:  # ends this request alone
            self.ended, self.error = True, error
            return True

        self.reading = step if isinstance(step, Reading) else None
        return isinstance(step, list)

    def _settle(self, tokens: list[int]) -> None:
        """Add settled tokens to the answer, up to the answer's end."""
        assert tokens and self._begin_time is not None, "a strategy settled no token"
        answer, tree, target = self.answer, self.tree, self.target
        tree.release(self.draft.consumed)
        new_tokens, answer.finish_reason = self._until_end(tokens)

        # times and verifications
        seconds = target.ring.clock.now() - self._begin_time
        if not answer.token_ids:
            answer.prefill_seconds, answer.reused_tokens = seconds, target.reused
            self._prefill_verifications = tree.num_verifications
        else:
            num_verifications = tree.num_verifications - self._prefill_verifications
            num_empty = num_verifications - len(answer.accepted_lengths) - 1
            answer.accepted_lengths += [*[0] * num_empty, len(new_tokens)]
        round_seconds = seconds - answer.seconds if answer.token_ids else 0.0
        answer.decode_seconds = seconds - answer.prefill_seconds

        # facts about each token, from the node before it and from its own
        self._note_logprobs(len(tokens), len(new_tokens))
        for node in tree.trunk[-len(tokens) - 1:-1][:len(new_tokens)]:
            answer.divergence += tree.nodes[node].divergence
        for node in tree.trunk[-len(tokens):]:
            proposals = tree.nodes[node].proposals
            answer.sources.update(proposals.keys())
            is_plain = not proposals and not target.guesses
            answer.plain_tokens += is_plain
            answer.plain_seconds += round_seconds / len(tokens) * is_plain

        # totals so far
        answer.misses = max(tree.num_misses, 0)
        answer.segments = self._segments_before_loss + target.segments
        answer.trial_tokens = target.trial_tokens

        answer.token_ids += new_tokens
        self.unread.append(new_tokens)

    def _until_end(self, tokens: list[int]) -> tuple[list[int], str]:
        """Return the tokens up to the end of the answer, and the finish reason if the answer ends there."""
        request, max_tokens = self.request, self.tree.max_tokens
        num_tokens_left = max_tokens - self.answer.prompt_tokens - self.answer.new_tokens
        end_ids = request.grammar.end_ids if request.grammar else request.end

        for num_tokens, token in enumerate(tokens[:num_tokens_left], 1):
            if token in end_ids or request.stop(token):
                return tokens[:num_tokens], "stop"
        if len(tokens) < num_tokens_left:
            return tokens, ""

        requested_tokens = len(request.prompt) + request.max_new_tokens
        return tokens[:num_tokens_left], "length" if max_tokens == requested_tokens else "context"

    def _note_logprobs(self, num_settled: int, num_new: int) -> None:
        """Copy log-probabilities from the tree: of the first `num_new` settled tokens, and of the prompt."""
        answer, tree = self.answer, self.tree
        if self.request.likeliest is None:
            return

        if not answer.token_ids:
            prompt_logprobs = [tree.nodes[node].logprob for node in tree.trunk[:answer.prompt_tokens - 1]]
            answer.prompt_logprobs += [logprob for logprob in prompt_logprobs if logprob]

        nodes_before = tree.trunk[-num_settled - 1:-1]
        answer.logprobs += [tree.nodes[node].logprob for node in nodes_before[:num_new]]


class TokenStream:
    """The stream of a request's settled tokens; closing it ends the request.

    The request starts with `begin`, or at the first read. If the stream `waits`, reading advances all requests until
    tokens settle; otherwise the stream yields empty lists while there are no new tokens.
    """

    def __init__(self, decoding: Decoding, decoder: Decoder, waits: bool) -> None:
        self._decoding, self._decoder, self._waits = decoding, decoder, waits
        self._is_begun = self._is_closed = False

    @property
    def tree(self) -> TokenTree:
        return self._decoding.tree

    @property
    def ready(self) -> bool:
        """Whether the next tokens, or the end of the stream, can be read without advancing any request."""
        return bool(self._decoding.unread) or self._decoding.ended

    @property
    def segments_under_way(self) -> list[tuple[frozenset[int], float]]:
        """The nodes of each segment in flight, the oldest first, with the share of its way that it has probably gone.

        Segments of several requests that travel together count as one.
        """
        ring = self._decoder.ring
        return ring.pacing.first_stage.whereabouts(ring.clock.now())

    def begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._decoder.add(self._decoding)

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> list[int]:
        decoding = self._decoding
        try:
            if self._is_closed:
                raise StopIteration

            self.begin()
            while not decoding.unread:
                if decoding.ended:
                    raise decoding.error or StopIteration
                if not self._waits:
                    return []
                self._decoder.turn()

        except BaseException:
            self.close()
            raise
        return decoding.unread.popleft()

    def close(self) -> None:
        was_open = self._is_begun and not self._is_closed
        self._is_closed = True  # before `remove`, which may raise PeerLost
        if was_open:
            self._decoder.remove(self._decoding)

    __del__ = close


@dataclass
class Prefix:
    """The beginning of a request's text that every stage holds, and that `draft` has read."""

    request: int  # number of the request
    nodes: Sequence[int]
    tokens: Sequence[int]
    draft: Draft
    ended: bool  # whether the request has ended: then its caches are reused, else copied

    def num_shared(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens need not be read again; below 0 if not even the first one is common.

        The last common token is read again: its logits are needed, and its feature was released.
        """
        common_tokens = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens))
        num_common = sum(1 for _ in common_tokens)
        return min(num_common - 1, len(self.nodes), self.draft.num_keepable_tokens)


class PipelineLimits(NamedTuple):
    """The size of a pipeline."""

    max_length: int  # tokens of prompt and answer together
    max_running: int = 1  # requests
    reuses_texts: bool = False  # whether a request begins with tokens that it shares with another's text


class Decoder:
    """The requests that share a ring, each with a strategy and a twin of `draft`; `passes` runs the networks.

    At most `limits.max_running` requests run at the same time; the one with the highest priority starts first. Reading
    the stream of one request advances all of them.
    """

    def __init__(self, ring: Ring, draft: Draft, strategy: Strategy, cfg: TreeConfig, limits: PipelineLimits,
                 passes: Passes = read_all) -> None:
        self.ring, self.draft, self.passes = ring, draft, passes
        self.strategy, self.cfg = strategy, cfg
        self.max_length, self.max_running, self.reuses_texts = limits
        self.running: list[Decoding] = []  # the oldest first
        self.waiting: list[Decoding] = []
        self._prefixes: list[Prefix] = []  # texts of ended requests, the least recently used first
        self._spare_drafts = [draft]
        self._num_reconnections = ring.num_reconnections  # in which the running requests started
        self._recent_losses = 0  # since a token settled

    def stream(self, request: Request, waits: bool = True) -> tuple[Answer, TokenStream]:
        """Return the answer, and the stream of settled tokens that fills it; the request starts at the first read.

        Raises ValueError for a prompt that leaves no room for an answer in the context.
        """
        num_prompt_tokens = len(request.prompt)
        if num_prompt_tokens >= self.max_length:
            raise ValueError(f"the prompt has {num_prompt_tokens} tokens and the context only {self.max_length}: "
                             "shorten the prompt or raise max_length")

        max_tokens = min(self.max_length, num_prompt_tokens + request.max_new_tokens)
        tree = TokenTree(request.prompt, max_tokens, self.ring.ids, self.cfg.best_first, request.law)
        decoding = Decoding(request, tree)
        return decoding.answer, TokenStream(decoding, self, waits)

    def submit(self, request: Request, waits: bool = True) -> tuple[Answer, TokenStream]:
        """Do as `stream`, but start the request at once, or as soon as fewer than `max_running` run."""
        answer, settled = self.stream(request, waits)
        settled.begin()
        return answer, settled

    def complete(self, request: Request) -> Answer:
        """Return the finished answer of a request."""
        answer, stream = self.stream(request)
        for _ in stream:
            pass
        return answer

    # --- requests in turn ---------------------------------------------------------------------------------------------

    def add(self, decoding: Decoding) -> None:
        """Start a request as soon as fewer than `max_running` run. Raises RuntimeError if the pipeline is closed."""
        self._check_open()
        self.waiting.append(decoding)
        self._admit()

    def remove(self, decoding: Decoding) -> None:
        """End a request in any state. After the last request, wait until the stages have forgotten all."""
        decoding.ended = True
        if self.ring.stopped:  # the stages have ended, and nothing comes back
            return

        if decoding in self.waiting:
            self.waiting.remove(decoding)
        if decoding in self.running:
            self._end(decoding)
        while not self.running and not self.waiting and self.ring.closing:
            self._with_recovery(self.ring.listen)

    def turn(self, until: float | None = None) -> None:
        """Advance the requests, or wait until one can advance, at most until `until` on the ring's clock.

        Returned segments are verified first. Then all requests may send, in common messages, and networks read for all
        of them in one pass. Raises RuntimeError if the pipeline is closed.
        """
        self._check_open()
        with self.ring.meter:
            self._with_recovery(partial(self._turn, until))

    def _check_open(self) -> None:
        if self.ring.stopped:
            raise RuntimeError("the pipeline is closed, so this answer cannot continue: read answers inside its with")

    def _with_recovery(self, step: Callable[[], None]) -> None:
        """Run a step. After a loss reconnect all ranks and restart the requests, or raise PeerLost."""
        try:
            step()
        except PeerLost as loss:
            self._recent_losses += 1
            if self._recent_losses > TRIES:
                raise
            self.ring.recover(loss)
            self._begin_again()

    def _begin_again(self) -> None:
        """Restart all running requests, since the stages are empty."""
        self._num_reconnections = self.ring.num_reconnections
        for prefix in self._prefixes:
            self._return_draft(prefix.draft)
        self._prefixes = []

        interrupted, self.running = self.running, []
        for decoding in interrupted:
            self._return_draft(decoding.draft)
            decoding.restart()
            self._start(decoding)

    def _turn(self, until: float | None) -> None:
        self._admit()
        if self._advance([decoding for decoding in self._not_reading() if decoding.target.ready()]):
            return

        has_progress = self._advance(self._not_reading())
        self.ring.depart()

        reading = [decoding for decoding in self.running if decoding.reading is not None]
        if reading:
            self._read(reading)
        elif not has_progress and (self.running or until is not None):
            self.ring.listen(until)

    def _not_reading(self) -> list[Decoding]:
        """Return the requests that do not wait for a network."""
        return [decoding for decoding in self.running if decoding.reading is None]

    def _admit(self) -> None:
        if self._num_reconnections != self.ring.num_reconnections:
            self._begin_again()
        while self.waiting and len(self.running) < self.max_running:
            decoding = max(self.waiting, key=lambda decoding: decoding.request.priority)  # the oldest of these
            self.waiting.remove(decoding)
            self._start(decoding)

    def _start(self, decoding: Decoding) -> None:
        """Start a request, after the tokens that it shares with a text in the stages."""
        request, cfg = decoding.request, self.cfg
        options = TargetOptions(
            self.draft.inner, cfg.prunes, cfg.thrifty, cfg.costs, cfg.stream.segment, request.priority,
            request.logprobs)
        target = self.ring.open(decoding.tree, request.sampler, options)

        prefix, num_shared = None, 0
        if self.reuses_texts and not request.echo:
            prefix, num_shared = self._longest_prefix(decoding.tree.tokens)
        draft = self._draft_after(prefix, num_shared)
        if prefix:
            target.begin_behind(prefix.request, prefix.nodes, num_shared)

        guessing_draft = ForcedDraft(draft) if request.grammar and cfg.forced else draft
        steps = self.strategy(decoding.tree, target, RequestDraft(guessing_draft, target), cfg)
        decoding.start(target, draft, steps)
        self.running.append(decoding)

    def _draft_after(self, prefix: Prefix | None, num_shared: int) -> Draft:
        """Return a draft that has read the shared tokens: that of an ended request, or a copy of a running one's."""
        if prefix and prefix.ended:
            self._prefixes.remove(prefix)
            prefix.draft.keep(num_shared)
            return prefix.draft

        if self._prefixes and len(self.running) + len(self._prefixes) >= self.max_running:
            self._evict()
        draft = self._spare_drafts.pop() if self._spare_drafts else self.draft.another()
        if prefix:
            draft.copy(prefix.draft, num_shared)
        return draft

    def _advance(self, decodings: Sequence[Decoding]) -> bool:
        """Advance these requests; return whether one settled tokens or ended."""
        return self._note_progress([decoding.advance() for decoding in decodings])

    def _note_progress(self, has_progress: Sequence[bool]) -> bool:
        """End finished requests; return whether one settled tokens or ended: then earlier losses do not count."""
        if any(has_progress):
            self._recent_losses = 0
        self._end_finished()
        return any(has_progress)

    def _read(self, reading: Sequence[Decoding]) -> None:
        """Run the networks for these requests, and advance them."""
        begin = self.ring.clock.now()
        readings = [decoding.reading for decoding in reading if decoding.reading is not None]
        outputs = self.passes(readings)
        seconds = self.ring.clock.now() - begin

        num_guesses = sum(reading.num_logit_rows for reading in readings)
        self.ring.pacing.gate.add_pass(num_guesses, seconds)
        self._note_progress([decoding.advance(output) for decoding, output in zip(reading, outputs)])

    def _end_finished(self) -> None:
        for decoding in [decoding for decoding in self.running if decoding.ended]:
            self._end(decoding)

    def _end(self, decoding: Decoding) -> None:
        """End a request. Another one may start at once, since its messages follow this one's Reset on the ring."""
        self.running.remove(decoding)
        nodes = decoding.target.end(keep=self.reuses_texts)
        if not nodes:
            self._return_draft(decoding.draft)
            return

        tokens = decoding.tree.tokens[:len(nodes)]
        if decoding.reading is None:  # a draft that rested has not read all of the text
            at_once(decoding.draft.catch_up(decoding.tree), self.passes)
        decoding.draft.keep(min(len(nodes), decoding.draft.num_keepable_tokens))
        prefix = Prefix(decoding.target.request, nodes, tokens, decoding.draft, ended=True)
        self._prefixes.append(prefix)

    # --- texts that the stages hold -----------------------------------------------------------------------------------

    def _longest_prefix(self, tokens: Sequence[int]) -> tuple[Prefix | None, int]:
        """Return the text that shares most tokens with this one, and their number; (None, 0) if they are too few."""
        all_prefixes = [*self._running_prefixes(), *self._prefixes]
        longest = max(all_prefixes, key=lambda prefix: prefix.num_shared(tokens), default=None)
        num_shared = longest.num_shared(tokens) if longest else 0
        return (longest, num_shared) if num_shared >= MIN_SHARED_TOKENS else (None, 0)

    def _running_prefixes(self) -> Iterator[Prefix]:
        """Yield the prompts of running requests, unless the cache of their draft waits for its network."""
        for decoding in self.running:
            prompt_nodes = decoding.target.held_prompt
            if prompt_nodes and decoding.reading is None:
                tokens = decoding.tree.tokens[:len(prompt_nodes)]
                yield Prefix(decoding.target.request, prompt_nodes, tokens, decoding.draft, ended=False)

    def forget(self) -> None:
        """Remove the texts of ended requests from all stages."""
        while self._prefixes:
            self._evict()

    def _evict(self) -> None:
        """Remove the least recently used text from all stages."""
        oldest = self._prefixes.pop(0)
        self.ring.link.send(Reset(oldest.request))
        self._return_draft(oldest.draft)

    def _return_draft(self, draft: Draft) -> None:
        draft.reset()
        self._spare_drafts.append(draft)
