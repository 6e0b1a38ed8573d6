"""Answers that follow a grammar: they are always valid, the same for every method, and no forbidden guess is sent."""
from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import cycle
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import normalizers, pre_tokenizers

from model import grammar
from model.grammar import Grammars, Guide, State
from model.rules import RULES
from model.sample import Penalties, Sampler
from model.text import Text
from pipeline.answers import Request
from pipeline.strategies import STRATEGIES
from tests.checkpoints import refused
from tests.grammars import BYTES, END, GRAMMARS, LETTERS, TOKENIZER, bytes_of, schema, tokenizer, valid
from tests.test_specinfer import SHAPED
from tests.tiny import CONFIG, DEEP, TINY, pipeline, tokens_of

NEW = 120
PROMPT = [5, 17, 40, 3, 28]
SAMPLERS = [Sampler(), Sampler(1.0, seed=4),
            Sampler(0.7, top_k=20, seed=9), Sampler(1.0, top_p=0.9, seed=1)]
ROW = {"type": "object", "properties": {"tune": {"type": "string", "maxLength": 3},
                                        "data": {"enum": ["alf", "alfa"]},
                                        "left": {"type": "integer", "minimum": 0, "maximum": 99}},
       "required": ["tune", "data", "left"], "additionalProperties": False}
KINDS = [schema(Random(seed)) for seed in range(91)]


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


def answered(decoder: Any, guide: Guide, sampler: Sampler = Sampler(), **fields: Any) -> list[int]:
    token_ids: list[int] = decoder.complete(request(guide, sampler, **fields)).token_ids
    return token_ids


def request(guide: Guide, sampler: Sampler = Sampler(), **fields: Any) -> Request:
    return Request(PROMPT, sampler, NEW, grammar=GRAMMARS.of(guide), **fields)


@pytest.mark.parametrize("part, strategy", [*enumerate(STRATEGIES)])
def test_answers_of_all_kinds_of_schemas_are_valid_and_those_of_plain_decoding(part, strategy):
    kinds = KINDS[part::13]
    names = ["twin", "suffix", "eagle+suffix"][part % 3]
    samplers = [SAMPLERS[(part + number) % 4] for number in range(len(kinds))]
    asked = [request(guide(kind), sampler) for kind, sampler in zip(kinds, samplers)]
    with pipeline(TINY, 2, strategy, TINY.mixture(names)) as decoder:
        begun = [decoder.submit(one) for one in asked]
        for _, stream in begun:
            tokens_of(stream)
    for kind, sampler, (answer, _) in zip(kinds, samplers, begun):
        assert valid(kind, answer.token_ids) and answer.finish_reason == "stop"
        assert answer.token_ids == reference(guide(kind), sampler)


GUIDES = [Guide("regex", "[a-e]{5,9}(,[0-9]{1,3}){2}"), Guide("choice", json.dumps(["alfa", "alfabet", "bar"])),
          Guide("grammar", 'start: list\nlist: "[" (list ("," list)?)? "]" | /[0-9]/'),
          Guide("grammar", 'root ::= "a" [0-9]+ "b" | "true"'), Guide.json_schema(ROW)]


@pytest.mark.parametrize("strategy, stages, first", [*zip(STRATEGIES, cycle([1, 3]), cycle([0, 2, 1]))])
def test_every_strategy_writes_one_text_with_expressions_and_grammars(strategy, stages, first):
    with pipeline(TINY, stages, strategy, TINY.twin(0.02)) as decoder:
        for wanted, sampler in [*zip(GUIDES, cycle(SAMPLERS))][first:first + 3]:
            assert answered(decoder, wanted, sampler) == reference(wanted, sampler)


@pytest.mark.parametrize("strategy", ["continuous", "streaming", "serial"])
def test_a_head_with_tokens_of_its_own_changes_nothing(strategy):
    with pipeline(DEEP, 2, strategy, DEEP.eagle3()) as decoder:
        for sampler in SAMPLERS:
            assert answered(decoder, GUIDES[4], sampler) == reference(GUIDES[4], sampler, deep=True)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_judges_drawn_guesses_follows_the_grammar(rule):
    kind = KINDS[3]
    with pipeline(TINY, 2, "serial", TINY.drafters(0.02, 0.1), SHAPED) as decoder:
        for seed in range(4):
            assert valid(kind, answered(decoder, guide(kind), Sampler(1.0, seed=seed, rule=rule)))


def test_penalties_and_stop_texts_stand_beside_a_grammar():
    sampler = Sampler(1.0, seed=4, penalties=Penalties(repetition=1.5))
    texts, comma = [], TOKENIZER.get_vocab()[","]
    for strategy in ("autoregressive", "continuous", "streaming"):
        with pipeline(TINY, 3, strategy, TINY.twin(0.02)) as decoder:
            whole = answered(decoder, GUIDES[0], sampler)
            stopped = answered(decoder, GUIDES[0], sampler, stop=lambda token: token == comma)
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
        tokens_of(stream)
    assert answer.sources["grammar"] > 5


def test_what_is_forced_saves_passes_without_any_draft():
    passes = {}
    for forced in (True, False):
        with pipeline(TINY, 2, "continuous") as decoder:
            answer, stream = decoder.stream(request(GUIDES[4]))
            if not forced:
                stream.tree.law.follower.forced = lambda tree, node: ()
            tokens_of(stream)
        assert answer.token_ids == reference(GUIDES[4], Sampler())
        passes[forced] = answer.misses
    assert passes[True] < 0.7 * passes[False]


@pytest.mark.parametrize("wrong, words", [
    (Guide.json_schema({"type": "string", "minLength": 5, "maxLength": 3}), "the json schema cannot be met"),
    (Guide.json_schema({"type": "nothing"}), "Invalid type: nothing"), (Guide("json_schema", "[]"), "cannot be met"),
    (Guide.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable schema"),
    (Guide("regex", "((("), "the regex cannot be met"), (Guide("grammar", "start: nobody"), 'unknown name: "nobody"'),
    (Guide("grammar", 'start: "a" start'), "it forces a text without an end"),
    (Guide.json_schema({"$ref": "#"}), "no text follows it"),
    (Guide.json_schema({"$ref": "http://127.0.0.1:9/x"}), "the json schema cannot be met")])
def test_what_cannot_be_met_is_refused_with_the_reason(wrong, words):
    with refused(words):
        GRAMMARS.of(wrong)


def test_a_grammar_that_has_no_end_later_fails_there_and_one_without_words_ends_at_once():
    endless = Guide("grammar", 'start: /[b-d]{3}/ loop\nloop: "a" loop')
    for strategy in ("autoregressive", "continuous"):
        with pipeline(TINY, 2, strategy, TINY.twin(0.02)) as decoder:
            with refused("the answer cannot be continued in its grammar (parser error: Too many items"):
                answered(decoder, endless, Sampler(1.0))
            assert answered(decoder, Guide("regex", "")) == [END]


def of_schema(schema: Any) -> tuple[Guide, Guide]:
    """Both ways to ask for values of a schema."""
    return Guide.json_schema(schema), Guide("lark", f"start: %json {json.dumps(schema)}")


# --- limits -----------------------------------------------------------------------------------------------------------

def written(grammars: Grammars, guide: Guide) -> list[int]:
    """The tokens of an answer that takes the first token that may follow, without the end token."""
    state: State | None = State(grammars.of(guide))
    token_ids: list[int] = []
    while state is not None:
        token_ids.append(int(state.mask(grammars._vocab_size).argmax()))
        state = state.after(token_ids[-1])
    return token_ids[:-1]


@pytest.mark.parametrize("strategy", ["autoregressive", "continuous", "streaming"])
def test_a_limit_ends_only_its_own_answer_and_with_an_error(monkeypatch, strategy):
    guide = Guide("regex", "(([a-e]{1,30},){1,30}){1,30}true")
    with pipeline(TINY, 2, strategy, TINY.twin(0.02)) as decoder:
        before = answered(decoder, guide, SAMPLERS[1])
        with monkeypatch.context() as patch:
            patch.setitem(grammar.LIMITS, "max_lexer_states", 40)
            limited = request(guide, SAMPLERS[1])
        answer, stream = decoder.submit(limited)
        with refused("the answer cannot be continued in its grammar (lexer error: too many states: 40 >= 40)"):
            list(stream)
        assert answered(decoder, guide, SAMPLERS[1]) == before

    assert answer.finish_reason == ""
    assert answer.token_ids == before[:len(answer.token_ids)]


def test_two_requests_share_no_compiled_grammar_but_the_check_of_it():
    checks = GRAMMARS._check.cache_info().misses
    first, second = GRAMMARS.of(Guide("regex", "ab*a")), GRAMMARS.of(Guide("regex", "ab*a"))
    assert first.matcher is not second.matcher and GRAMMARS._check.cache_info().misses == checks + 1


@pytest.mark.parametrize("guide, words", [
    (Guide.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10 ** 9, "maxItems": 10 ** 9}),
     "the json schema is too large (compiling it takes more than 128 MB): make it smaller"),
    (Guide("regex", "((a{999}){999}){999}"), "the regex "),
    (Guide("regex", "a" * 300_000), "the regex is too large (300000 characters, and at most 262144 are read)")])
def test_a_grammar_that_takes_too_much_memory_is_refused(guide, words):
    with refused(words):
        GRAMMARS.of(guide)
    assert written(GRAMMARS, Guide("choice", '["alfa"]'))  # others are still compiled


def test_a_grammar_that_takes_too_long_is_refused_and_its_process_ended(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.1)
    many = {f"p{number}": {"type": "integer"} for number in range(8000)}  # needs half a minute
    with refused("the json schema is too large (compiling it takes more than 0.1 s): make it smaller"):
        GRAMMARS.of(Guide.json_schema({"type": "object", "properties": many}))
    assert GRAMMARS._sandboxes.queue[-1]._process is None


# --- texts that are kept ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text", ["x<end>y", "<end>", "  two", "\u00e9\U0001f600", 'a"b\\', "a\nb"])
def test_a_text_is_written_with_ordinary_tokens(text):
    assert written(BYTES, Guide("choice", json.dumps([text]))) == bytes_of(text)


@pytest.mark.parametrize("is_complete", [True, False])
def test_each_end_token_may_follow_a_complete_answer_alone(is_complete):
    matcher = SimpleNamespace(
        is_stopped=lambda: False, is_error=lambda: False, is_accepting=lambda: is_complete,
        compute_ff_tokens=list, compute_bitmask=lambda: bytes([1, 0, 1 << 5, 0]))  # tokens 0 and 21
    state = State(SimpleNamespace(matcher=matcher, end_ids={2, 13, 21}))
    allowed_ids = [token_id for token_id in range(32) if state.allows(token_id)]
    assert allowed_ids == ([0, 2, 13, 21] if is_complete else [0])
    assert state.mask(32).nonzero()[0].tolist() == allowed_ids


def test_a_special_token_of_a_grammar_does_not_end_the_answer():
    with refused("the answer cannot be continued in its grammar (no token may follow)"):
        written(BYTES, Guide("grammar", f'start: "a" <[{END}]> "b"'))


@pytest.mark.parametrize("text", [" lead", "lead", "  lead", "x</s>y", "<s>", ""])
def test_a_tokenizer_that_drops_the_first_space_writes_the_text_with_its_spaces(text):
    toy = Text("toy/llama")
    grammars = Grammars(toy.tokenizer, len(toy.tokenizer), toy.end_ids)
    for guide in (Guide("choice", json.dumps([text])), Guide("regex", re.escape(text))):
        assert toy.decode(written(grammars, guide)) == text
    for guide in of_schema({"const": text}):
        assert json.loads(toy.decode(written(grammars, guide))) == text


def test_a_token_that_a_user_defined_stays_whole():
    larger = tokenizer(LETTERS.values(), [])
    larger.add_tokens(["<call>"])
    grammars = Grammars(larger, len(larger), frozenset({END}))
    assert written(grammars, Guide("choice", '["a<call>b"]')) == [*bytes_of("a"), len(larger) - 1, *bytes_of("b")]


def test_a_tokenizer_that_changes_texts_is_refused():
    lower = tokenizer(LETTERS.values(), [])
    lower.backend_tokenizer.normalizer = normalizers.Strip()
    lower.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with refused("grammars need a tokenizer that keeps each character"):
        Grammars(lower, len(lower), frozenset({END})).of(Guide("regex", "a"))


# --- ranges -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bounds, words", [
    ({"minimum": 2 ** 53 + 1, "maximum": 2 ** 53 + 3}, "minimum 9007199254740993 is not exact"),
    ({"maximum": -2 ** 60}, "is not exact"), ({"minimum": 206.54999999999998}, "is not exact"),
    ({"const": 2 ** 53 + 1}, "const 9007199254740993 is not exact"), ({"enum": [1, [2 ** 60]]}, "is not exact"),
    ({"const": {"a": 123456789.12345679}}, "is not exact"),
    ({"exclusiveMinimum": 8, "maximum": 8.5}, "a range narrower than 1"),
    ({"minimum": -3.5, "exclusiveMaximum": -3.0}, "a range narrower than 1"),
    ({"exclusiveMinimum": 1, "allOf": [{"maximum": 1.25}]}, "a range narrower than 1")])
def test_a_range_that_an_answer_would_break_is_refused(bounds, words):
    number = bounds if {"const", "enum"} & bounds.keys() else {"type": "number", **bounds}
    schema = {"type": "object", "properties": {"a": {"anyOf": [number, {"type": "null"}]}}, "required": ["a"]}
    for guide in of_schema(schema):
        with refused(words):
            GRAMMARS.of(guide)


@pytest.mark.parametrize("bounds", [
    {"minimum": -2 ** 53, "maximum": 2 ** 53}, {"exclusiveMinimum": 0, "maximum": 1}, {"minimum": 0.1, "maximum": 0.2},
    {"exclusiveMinimum": 0.5, "exclusiveMaximum": 0.75}, {"const": {"minimum": 0.1}},
    {"default": 2 ** 60}, {"enum": [2 ** 53, 1e-7, True, None]}])
def test_a_range_that_answers_keep_is_accepted(bounds):
    assert GRAMMARS.of(Guide.json_schema(bounds))


@pytest.mark.parametrize("number", ["1e-400", "-1e-301", "1e99999999", "1e-9999999999999999999", "1" * 5000])
def test_a_number_that_no_float_keeps_is_refused_with_the_numbers_that_are_possible(number):
    schema = f'{{"properties": {{"a": {{"enum": [0, {number}]}}}}}}'
    for guide in (Guide("json_schema", schema), Guide("grammar", f"start: %json {schema}")):
        with pytest.raises(ValueError) as error:
            GRAMMARS.of(guide)
        assert "give 0, or a number from 1e-300" in str(error.value) or len(number) == 5000


NARROW = {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}
CUT = {"type": "string", "pattern": '^"[ab]$'}


@pytest.mark.parametrize("name", ["default", "examples", "enum", "const", "properties", "pattern", "$defs", "a"])
@pytest.mark.parametrize("schema", [NARROW, CUT])
def test_a_schema_is_checked_whatever_the_name_of_its_property_or_definition_is(name, schema):
    for document in ({"type": "object", "properties": {name: schema}}, {"patternProperties": {name: schema}},
                     {"$defs": {name: schema}, "$ref": f"#/$defs/{name}"},
                     {"definitions": {name: {"items": schema}}, "items": {"$ref": f"#/definitions/{name}/items"}}):
        for guide in of_schema(document):
            with refused("cannot be met (the exclusive bound" if schema is NARROW else "cannot be met (a pattern"):
                BYTES.of(guide)


@pytest.mark.parametrize("document", [
    {"$ref": "#/default", "default": NARROW}, {"$ref": "#/$defs/a/enum/0", "$defs": {"a": {"enum": [NARROW]}}},
    {"$ref": "#/examples/1/b", "examples": [0, {"b": NARROW}]}, {"$ref": "#/$defs/a/c%6Fnst", "$defs": {
        "a": {"const": NARROW}}}])
def test_a_value_that_a_reference_uses_as_a_schema_is_checked(document):
    for guide in of_schema(document):
        with refused("cannot be met (the exclusive bound"):
            BYTES.of(guide)


@pytest.mark.parametrize("guide", [
    Guide.json_schema({"const": NARROW}), Guide.json_schema({"properties": {"const": {"enum": [CUT]}}}),
    Guide("choice", json.dumps(["about %json", "b"])), Guide("regex", "%json a"),
    Guide("grammar", 'start: %json {"type": "null", "description": "as %json {"} | %json{"const": 1}')])
def test_what_only_looks_like_a_schema_is_no_schema(guide):
    assert BYTES.of(guide)


# --- patterns ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pattern", [
    '^"[ab]$', '^["][ab]$', r'^\["ab]$', '^[a]"[ab]$',
    r'^[A-Z]:\\[a-z]+$', 'a"b', r"^a\nb?$", "^a\n[ab]$", r"^\x22[ab]$", r"^[\u0022][ab]$"])
def test_a_pattern_that_would_be_cut_is_refused(pattern):
    text = {"type": "string", "pattern": pattern}
    for cut in ({"properties": {"pattern": text}}, {"patternProperties": {pattern: {"type": "null"}}}):
        for guide in of_schema(cut):
            with refused("a pattern would be cut after its quotation mark, backslash or control character"):
                BYTES.of(guide)


@pytest.mark.parametrize("pattern, text", [
    (r'^[^"\\]{2}$', "\na"), (r'^["\\][ab]$', '"a'), (r"^\d\s\w$", "1\t2"), (r"^\/\.[ab]$", "/.b"),
    ("^\u00e9[ab]$", "\u00e9a")])
def test_a_pattern_that_is_kept_is_accepted_whole(pattern, text):
    state = State(BYTES.of(Guide.json_schema({"type": "string", "pattern": pattern})))
    for token_id in bytes_of(json.dumps(text, ensure_ascii=False)):
        assert state.allows(token_id)
        state = state.after(token_id)
    assert state.matcher.is_accepting()
