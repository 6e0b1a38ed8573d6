"""A strategy of ten lines and one row of the table run everywhere: by command, evaluation, plan and server."""
from __future__ import annotations

import subprocess
import sys

import pytest

from config.presets import ROOT

ADDED = """
import sys
from config.methods import METHODS, Method
METHODS["twice"] = Method("twice", "ring", "eagle", "a tree sent whole, and the rest of it at once")
from model.tree import verify
from pipeline.strategies import STRATEGIES

def twice(tree, target, draft, cfg):
    while True:
        while (yield from draft.grow(tree, cfg.init)):
            pass
        while segment := tree.cut(cfg.init.segment, cfg.chunk):
            target.send(segment)
        while target.in_flight:
            yield from target.wait()
        yield verify(tree)
        target.prune()

STRATEGIES["twice"] = twice
"""
COMMAND = """
from launch.ask import COMMAND
from launch.run import run
sys.exit(run(COMMAND, ["pipeline_type=twice", "processes=false", "max_new_tokens=12", "draft=suffix"]))
"""
EVALUATION = """
from eval.command import main
sys.exit(main(["emulated", "methods=ar,twice", "sets=qa", "question_end=1", "temperatures=0,1", "max_new_tokens=8",
               "draft=suffix", "baseline_draft=", f"results={sys.argv[1]}/results"]))
"""
PLAN = """
from eval.plan.command import main
sys.exit(main(["profile=jetson-7b", "boards=2", "methods=twice", "drafts=suffix", "question_end=1",
               "max_new_tokens=8"]))
"""
SERVER = """
import threading, time
from scripts.serve import build
engine, _ = build(["pipeline_type=twice", "processes=false", "draft=suffix"])
thread = threading.Thread(target=engine.run, daemon=True)
thread.start()
while engine.health.status == "loading":
    time.sleep(0.05)
answer = engine.call(lambda pipeline: pipeline.generate("What does a baker do?", max_new_tokens=8)).result()
print(answer.answer.new_tokens, "tokens")
engine.stop()
thread.join()
"""


@pytest.mark.parametrize(("program", "shown"), [(COMMAND, "target passes"), (EVALUATION, "twice"), (PLAN, "twice"),
                                                (SERVER, "8 tokens")], ids=["command", "evaluation", "plan", "server"])
def test_a_strategy_needs_its_function_and_one_row(program, shown, tmp_path):
    ran = subprocess.run([sys.executable, "-c", ADDED + program, tmp_path], cwd=ROOT, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    assert shown in ran.stdout + ran.stderr
    for table in tmp_path.glob("results/report.md"):
        assert "twice" in table.read_text()
