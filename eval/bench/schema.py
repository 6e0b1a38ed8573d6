"""The cost and gain of a schema: tokens/s of answers with and without one, and without guesses of its forced tokens,
by method, in virtual time.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

from tqdm import tqdm

from config.keys import raw_values, with_defaults
from config.presets import SMOLLM2
from eval.bench import decoders_of, request, speed
from eval.tables import in_columns
from launch.pipeline import Pipeline
from model.grammar import Guide
from pipeline.decode import Answer, Decoder, Request

METHODS = ("ar", "naive", "continuous", "streaming")
TEXT = {"type": "string", "maxLength": 24}
LEVEL = {"enum": ["beginner", "intermediate", "advanced"]}


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


ASKED = {  # a question -> the schema of its answer
    "Describe a baker as JSON.": _object(
        name=TEXT, occupation=TEXT, years_of_experience={"type": "integer", "minimum": 0, "maximum": 60},
        skills={"type": "array", "items": _object(skill=TEXT, level=LEVEL), "minItems": 2, "maxItems": 3}),
    "Write a weather report for Paris as JSON.": _object(
        location=_object(city=TEXT, country=TEXT), temperature_celsius={"type": "number"},
        conditions={"enum": ["sunny", "cloudy", "rainy", "snowy"]}, is_dangerous={"type": "boolean"}),
    "Name three animals that swim, as JSON.": _object(
        animals={"type": "array", "items": _object(name=TEXT, is_mammal={"type": "boolean"}), "minItems": 3,
                 "maxItems": 3})}


def schema(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench schema`; return its exit code, 1 if a text depends on the method."""
    usual = {"max_new_tokens": "160", "profile": "jetson-7b", "time": "virtual"}
    preset, *options = with_defaults(argv, usual, SMOLLM2)
    with Pipeline.open(preset, **raw_values(options)) as pipeline:
        plain = [request(pipeline, question) for question in ASKED]
        guided = [replace(one, grammar=pipeline.grammar(Guide.json_schema(wanted)))
                  for one, wanted in zip(plain, ASKED.values())]
        usual_ones = decoders_of(pipeline, METHODS)
        ablated = ",".join((*pipeline.config.ablated, "forced"))
        unforced = decoders_of(pipeline, METHODS, ablate=ablated)
        rows, texts = [], []
        for method in tqdm(METHODS, unit="method", leave=False):
            jobs = (usual_ones[method], plain), (usual_ones[method], guided), (unforced[method], guided)
            answered = [_answers(pipeline, *job) for job in jobs]
            rows.append((method, *(f"{speed(answers):.2f}" for answers in answered)))
            texts.append([[one.token_ids for one in answers] for answers in answered])
    print(in_columns(("tokens/s", "without", "schema", "schema, ablate=forced"), rows, 0))
    without, forced, alike = texts[0]
    print(f"\ntokens of the answers: {sum(map(len, without))} without, {sum(map(len, forced))} with a schema")
    same = all(found == texts[0] for found in texts) and forced == alike
    print(f"the texts are {'the same' if same else 'NOT the same'} for all methods")
    return int(not same)


def _answers(pipeline: Pipeline, decoder: Decoder, asked: Sequence[Request]) -> list[Answer]:
    pipeline.reset_measurements(same=True)
    return [decoder.complete(one) for one in asked]
