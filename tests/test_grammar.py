"""Answers that follow a grammar: they are always valid, the same for every method, and no forbidden guess is sent."""
from __future__ import annotations

import json
from functools import lru_cache
from itertools import cycle
from random import Random
from typing import Any

import pytest
import torch

from model.grammar import Guide
from model.rules import RULES
from model.sample import Penalties, Sampler
from pipeline.decode import Request
from pipeline.strategies import STRATEGIES
from tests.checkpoints import refused
from tests.grammars import END, GRAMMARS, TOKENIZER, schema, valid
from tests.test_specinfer import SHAPED
from tests.tiny import CONFIG, DEEP, TINY, pipeline

NEW = 120
PROMPT = [5, 17, 40, 3, 28]
SAMPLERS = [Sampler(), Sampler(1.0, seed=4),
            Sampler(0.7, top_k=20, seed=9), Sampler(1.0, top_p=0.9, seed=1)]
ROW = {"type": "object", "properties": {"tune": {"type": "string", "maxLength": 3},
                                        "data": {"enum": ["alf", "alfa"]},
                                        "left": {"type": "integer", "minimum": 0, "maximum": 99}},
       "required": ["tune", "data", "left"], "additionalProperties": False}
KINDS = [schema(Random(seed)) for seed in range(121)]


def guide(kind: Any) -> Guide:
    return Guide.json_schema(kind[0])


@lru_cache(maxsize=None)
def reference(guide: Guide, sampler: Sampler, deep: bool = False) -> list[int]:
    """Decode token by token; at each token the grammar reads the whole path again."""
    tiny, tokens = DEEP if deep else TINY, list(PROMPT)
    while tokens[-1] != END and len(tokens) < len(PROMPT) + NEW:
        matcher = GRAMMARS.of(guide).matcher.deep_copy()
        assert matcher.consume_tokens(tokens[len(PROMPT):])
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = torch.tensor([bool(bits >> token & 1) for token in range(CONFIG.vocab)])
        row = tiny.logits(tokens)[-1].masked_fill(~allowed, -torch.inf)
        tokens += sampler(row[None], [len(tokens)])
    return tokens[len(PROMPT):]


def request(guide: Guide, sampler: Sampler = Sampler(), **fields: Any) -> Request:
    return Request(PROMPT, sampler, NEW, grammar=GRAMMARS.of(guide), **fields)


@pytest.mark.parametrize("part, strategy", [*enumerate(STRATEGIES)])
def test_answers_of_all_kinds_of_schemas_are_valid_and_those_of_plain_decoding(part, strategy):
    kinds = KINDS[part::11]
    names = [["twin"], ["suffix"], ["eagle", "suffix"]][part % 3]
    samplers = [SAMPLERS[(part + number) % 4] for number in range(len(kinds))]
    asked = [request(guide(kind), sampler) for kind, sampler in zip(kinds, samplers)]
    with pipeline(TINY, 2, strategy, TINY.mixture(*names)) as decoder:
        begun = [decoder.submit(one) for one in asked]
        for _, stream in begun:
            for _ in stream:
                pass
    for kind, sampler, (answer, _) in zip(kinds, samplers, begun):
        assert valid(kind, answer.token_ids) and answer.finish_reason == "stop"
        assert answer.token_ids == reference(guide(kind), sampler)


GUIDES = [Guide("regex", "[a-e]{5,9}(,[0-9]{1,3}){2}"), Guide("choice", json.dumps(["alfa", "alfabet", "bar"])),
          Guide("grammar", 'start: list\nlist: "[" (list ("," list)?)? "]" | /[0-9]/'),
          Guide("grammar", 'root ::= "a" [0-9]+ "b" | "true"'), Guide.json_schema(ROW)]


@pytest.mark.parametrize("strategy, stages", [*zip(STRATEGIES, cycle([1, 3]))])
def test_every_strategy_writes_one_text_with_expressions_and_grammars(strategy, stages):
    with pipeline(TINY, stages, strategy, TINY.twin(0.02)) as decoder:
        for wanted, sampler in zip(GUIDES, cycle(SAMPLERS)):
            assert decoder.complete(request(wanted, sampler)).token_ids == reference(wanted, sampler)


@pytest.mark.parametrize("strategy", ["continuous", "streaming", "serial"])
def test_a_head_with_tokens_of_its_own_changes_nothing(strategy):
    with pipeline(DEEP, 2, strategy, DEEP.eagle3()) as decoder:
        for sampler in SAMPLERS:
            assert decoder.complete(request(GUIDES[4], sampler)).token_ids == reference(GUIDES[4], sampler, deep=True)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_judges_drawn_guesses_follows_the_grammar(rule):
    kind = KINDS[3]
    with pipeline(TINY, 2, "serial", TINY.drafters(0.02, 0.1), SHAPED) as decoder:
        for seed in range(4):
            assert valid(kind, decoder.complete(request(guide(kind),
                                                        Sampler(1.0, seed=seed, rule=rule))).token_ids)


def test_penalties_and_stop_texts_stand_beside_a_grammar():
    sampler = Sampler(1.0, seed=4, penalties=Penalties(repetition=1.5))
    texts, comma = [], TOKENIZER.get_vocab()[","]
    for strategy in ("autoregressive", "continuous", "streaming"):
        with pipeline(TINY, 3, strategy, TINY.twin(0.02)) as decoder:
            whole = decoder.complete(request(GUIDES[0], sampler)).token_ids
            stopped = decoder.complete(request(GUIDES[0], sampler, stop=lambda token: token == comma)).token_ids
        texts.append((whole, stopped))
        assert stopped == whole[:whole.index(comma) + 1]
    assert len({str(text) for text in texts}) == 1


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "autoregressive"])
def test_no_guess_that_the_grammar_forbids_is_sent_and_those_that_it_forces_become_text(strategy):
    with pipeline(TINY, 2, strategy, TINY.twin(0.02)) as decoder:
        answer, stream = decoder.submit(request(GUIDES[4]))
        tree, follower = stream.tree, stream.tree.law.follower
        cut = tree.cut

        def watched(*sizes: Any) -> list[int]:
            nodes = cut(*sizes)
            for node in nodes:
                known = tree.nodes[node]
                if node in tree.live:
                    assert follower.allows(tree, known.parent, known.token)
            return nodes

        tree.cut = watched
        for _ in stream:
            pass
    assert answer.sources["grammar"] > 5


def test_what_is_forced_saves_passes_without_any_draft():
    passes = {}
    for forced in (True, False):
        with pipeline(TINY, 2, "continuous") as decoder:
            answer, stream = decoder.stream(request(GUIDES[4]))
            if not forced:
                stream.tree.law.follower.forced = lambda tree, node: ()
            for _ in stream:
                pass
        assert answer.token_ids == reference(GUIDES[4], Sampler())
        passes[forced] = answer.target_passes
    assert passes[True] < 0.7 * passes[False]


@pytest.mark.parametrize(("wrong", "words"), [
    (Guide.json_schema({"type": "string", "minLength": 5, "maxLength": 3}), "the json schema cannot be met"),
    (Guide.json_schema({"type": "nothing"}), "Invalid type: nothing"), (Guide("json_schema", "[]"), "cannot be met"),
    (Guide.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable schema"),
    (Guide("regex", "((("), "the regex cannot be met"), (Guide("grammar", "start: nobody"), 'unknown name: "nobody"'),
    (Guide("grammar", 'start: "a" start'), "it forces a text without an end"),
    (Guide.json_schema({"$ref": "#"}), "no text follows it"), (Guide("regex", "((a{999}){999}){999}"), "too long"),
    (Guide.json_schema({"$ref": "http://127.0.0.1:9/x"}), "the json schema cannot be met")])
def test_what_cannot_be_met_is_refused_with_the_reason(wrong, words):
    with refused(words):
        GRAMMARS.of(wrong)


def test_a_grammar_that_has_no_end_later_ends_the_answer_there_and_one_without_words_at_once():
    endless = Guide("grammar", 'start: /[b-d]{3}/ loop\nloop: "a" loop')
    texts = []
    for strategy in ("autoregressive", "continuous"):
        with pipeline(TINY, 2, strategy, TINY.twin(0.02)) as decoder:
            texts.append(decoder.complete(request(endless, Sampler(1.0))))
            assert decoder.complete(request(Guide("regex", ""))).token_ids == [END]
    assert texts[0].token_ids == texts[1].token_ids
    assert [one.finish_reason for one in texts] == ["stop", "stop"]


def test_a_compiled_grammar_is_kept_and_the_oldest_forgotten():
    first = GRAMMARS.of(GUIDES[0])
    assert GRAMMARS.of(GUIDES[0]) is first
    for number in range(40):
        GRAMMARS.of(Guide("regex", f"a{{{number}}}"))
    assert GRAMMARS.of(GUIDES[0]) is not first and GRAMMARS._of.cache_info().currsize == 32
