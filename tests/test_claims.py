"""What this project claims of its methods, as ratios in virtual time: the same on every machine and every day."""
from __future__ import annotations

import pytest

from config.presets import TOY
from eval.bench import QUESTIONS, decoders_of, request_for, speed
from launch.pipeline import Pipeline

PAPER = {"min_probability": 0, "expand_depth": 6, "ablate": ""}  # the trees of the paper
METHODS = ("ar", "serial", "naive", "pruned", "continuous", "streaming")


def speeds(profile: str, methods: tuple[str, ...], **options) -> dict[str, float]:
    """Tokens/s of each method over a question."""
    found = {}
    with Pipeline.open("toy", time="virtual", profile=profile, max_new_tokens=32, **PAPER, **options) as pipeline:
        for method, decoder in decoders_of(pipeline, methods).items():
            found[method] = speed([decoder.complete(request_for(pipeline, question)) for question in QUESTIONS[:1]])
    return found


@pytest.mark.parametrize("profile", ["jetson-7b", "jetson-13b", "server"])
def test_streaming_is_the_fastest_and_speculation_pays(profile):
    deep = speeds(profile, METHODS, draft="eagle+suffix")
    [paper] = speeds(profile, ("naive",),
                     draft="eagle", eagle_dir=str(TOY / "eagle")).values()
    print(profile, {name: round(speed / paper, 2) for name, speed in deep.items()})
    others = [speed for method, speed in deep.items() if method != "streaming"]
    assert deep["streaming"] > max(others)
    assert deep["streaming"] > 1.8 * paper
    assert min(others) == deep["ar"]
