"""The accuracy of a draft: the mean accepted length on the bundled questions of each task."""
from __future__ import annotations

import statistics

from config.keys import with_defaults
from config.presets import TOY_PRESET
from config.questions import bundled, read
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from launch.run import Command, run

TREE_KEYS = {"init_total_token": "59", "init_depth": "5", "width": "10", "min_probability": "0"}  # of EAGLE-2's paper


def acceptance(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench acceptance`; return its exit code."""
    default_keys = {"pipeline_type": "serial", "max_new_tokens": "128", **TREE_KEYS}
    all_words = with_defaults(argv, default_keys, TOY_PRESET)
    return run(Command("scripts.bench acceptance", answer_tasks), all_words)


def answer_tasks(pipeline: Pipeline) -> None:
    """Answer, on rank 0, every bundled question of every task, and print the mean accepted length of each task."""
    if pipeline.config.max_new_tokens < 2:
        raise ValueError("max_new_tokens=1 leaves nothing to be guessed: give 2 or more")

    task_means = []
    for path in sorted(bundled(pipeline.spec.part.folder).glob("*.jsonl")):
        questions = ProgressBar(read(path, *pipeline.config.question_range), desc=path.stem, leave=False)
        answers = [pipeline.generate(question.turns[0]).answer for question in questions]

        num_tokens = sum(answer.new_tokens for answer in answers)
        mean_length = statistics.mean(length for answer in answers for length in answer.accepted_lengths)
        task_means.append(mean_length)
        print(f"  {path.stem:<12}{mean_length:6.2f}   {len(answers)} answers, {num_tokens} tokens", flush=True)

    print(f"  {'mean':<12}{statistics.mean(task_means):6.2f}")
