"""Choose method, split and draft for given devices, by simulation from a record, before any file is split or copied.

Usage: python3 -m scripts.plan [PRESET] [profile=NAME|profile=FILE.json|measure=true] [key=value ...]; --help shows all
keys, docs/planner.md describes the output.
"""
from __future__ import annotations

import sys
from typing import Sequence

from config.cli import DEFAULT_PRESET, parse
from config.console import command
from config.keys import preset_of, raw_values
from config.profiles import write
from eval.plan.advice import advice, table, to_do
from eval.plan.candidates import Candidate, typed
from eval.plan.hosts import only_chosen, write_hosts
from eval.plan.keys import COMMAND, PlanConfig, words
from eval.plan.plan import Plan, plan, write_preset
from launch.auto import with_chosen
from launch.words import with_model

PLAN_KEYS = ("profile", "max_new_tokens", "questions", "hosts")  # keys of the plan that are not passed on to a run


@command
def main(argv: Sequence[str]) -> int:
    argv = with_model(argv)
    config = parse(words(argv), COMMAND, kind=PlanConfig)
    finished_plan = plan(config)
    print("\n".join(report(config, finished_plan)))

    chosen = finished_plan.chosen.candidate
    if config.write_hosts:
        write_hosts(config.write_hosts, config.run.hosts, chosen)
        print(f"hosts: {config.write_hosts} lists the chosen boards, rank 0's first")
    if config.write_cluster:
        write(config.write_cluster, only_chosen(finished_plan.bench.site, chosen))
        print(f"cluster: profile={config.write_cluster} describes the chosen boards")

    if config.preset:
        base_preset = preset_of(argv) or DEFAULT_PRESET
        write_preset(config.preset, base_preset, _run_keys(argv, config, chosen), finished_plan)
        hosts = config.write_hosts or config.run.hosts or "FILE"
        print(f"preset: bash run_pipe.sh {config.preset}, or bash run_jetson.sh {config.preset} hosts={hosts}")

    print(typed(chosen.keys))
    return 0


def _run_keys(argv: Sequence[str], config: PlanConfig, chosen: Candidate) -> dict[str, str]:
    """Return the given keys of a run, the chosen ones, and the profile of a written cluster."""
    cluster_keys = {"profile": config.write_cluster} if config.write_cluster else {}
    omitted_keys = [*PLAN_KEYS, "wires", "slowdown"] if cluster_keys else PLAN_KEYS
    passed_keys = vars(config.run).keys() - omitted_keys
    typed_words = [word for word in argv if word.partition("=")[0] in passed_keys]
    return {**raw_values(with_chosen(typed_words, chosen.keys)), **cluster_keys}


def report(config: PlanConfig, finished_plan: Plan) -> list[str]:
    """Return the lines to print before the chosen keys."""
    bench, chosen = finished_plan.bench, finished_plan.chosen
    answers = bench.record.answers
    num_tokens = sum(len(answer.text) for answer in answers)
    heading = (f"{bench.site.about}: {finished_plan.boards} boards and rank 0's; {len(answers)} texts, {num_tokens} "
               f"tokens, {finished_plan.candidates} candidates, {finished_plan.tried} trials of these and of other "
               "sizes; simulated")
    lines = [heading, "", table(bench, finished_plan.trials[:config.show]), ""]

    for trial in finished_plan.checked:
        lines.append(f"measured here: {trial.speed:>9.3g} tokens/s  {trial.candidate.about}")
    if len(config.chosen_methods) > 1:
        lines.append(f"advice: {advice(finished_plan)}")
    if sum(chosen.candidate.layers) != bench.record.layers:
        lines.append(f"note: stages are counted in the {bench.site.layers} layers of the profile's model; the recorded "
                     f"model has {bench.record.layers}")
    return [*lines, *to_do(config, chosen.candidate)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
