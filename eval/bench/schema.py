"""What a schema costs and saves: tokens/s of answers with and without one, and with one whose forced tokens nobody
guesses, by method, in virtual time.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence
from unittest import mock

from tqdm import tqdm

from config.keys import over
from config.presets import SMOLLM2
from eval.bench import decoders_of, request, speed
from launch.pipeline import Pipeline
from model.drafts.forced import ForcedDraft
from model.grammar import Guide
from pipeline.decode import Decoder, Request

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
    """The command `python -m scripts.bench schema`; its exit code."""
    words = over(argv, {"max_new_tokens": "160", "profile": "jetson-7b", "time": "virtual"}, SMOLLM2)
    preset, *options = words
    keys = dict(word.split("=", 1) for word in options)
    with Pipeline.open(preset, **keys) as pipeline:
        decoders = decoders_of(pipeline, METHODS)
        plain = [request(pipeline, question) for question in ASKED]
        guided = [replace(one, grammar=pipeline.grammar(Guide.json_schema(wanted)))
                  for one, wanted in zip(plain, ASKED.values())]
        print("  tokens/s       without    schema   schema, nothing forced is guessed")
        for method, decoder in tqdm(decoders.items(), unit="method", leave=False):
            speeds = [_speed(pipeline, decoder, plain), _speed(pipeline, decoder, guided)]
            with mock.patch.object(ForcedDraft, "_force", return_value=False):
                speeds.append(_speed(pipeline, decoder, guided))
            tqdm.write(f"  {method:<13}" + "".join(f"{one:10.2f}" for one in speeds))
    return 0


def _speed(pipeline: Pipeline, decoder: Decoder, asked: Sequence[Request]) -> float:
    pipeline.unlearn(same=True)
    return speed([decoder.whole(one) for one in asked])
