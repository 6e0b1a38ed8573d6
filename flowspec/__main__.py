"""The command `flowspec`: it starts one of FlowSpec's programs in its own place, with the words that follow."""
from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from typing import NamedTuple, NoReturn, Sequence

from flowspec.programs import HOME_VARIABLE, ROOT, command_of, environment, home

HELP = ("", "-h", "--help", "help")
COMMAND_VARIABLE = "FLOWSPEC_COMMAND"  # in the environment: what a user typed, for the help of the program


class Program(NamedTuple):
    """What a command starts: a module with its first words, or a shell script."""

    about: str
    words: Sequence[str]


PROGRAMS = {
    "demo": Program("watch five emulated boards write an answer, and guess ahead", ["scripts.generate", "demo"]),
    "run": Program('answer a question: flowspec run "What does a baker do?"', ["scripts.generate"]),
    "chat": Program("talk with a model: flowspec chat, or flowspec chat model=Qwen/Qwen3-4B", ["scripts.generate"]),
    "serve": Program("serve OpenAI's protocol and a chat page on 127.0.0.1:8000", ["scripts.serve"]),
    "worker": Program("compute for the runs of another machine: flowspec worker hosts=hosts.txt", ["run_worker.sh"]),
    "eval": Program("compare the methods: flowspec eval toy questions=2", ["scripts.evaluate", "emulated"]),
    "plan": Program("choose method, split and draft for devices: flowspec plan profile=jetson-7b", ["scripts.plan"]),
    "split": Program("split a model over ranks: flowspec split MODEL_DIR OUT_DIR --stages 4",
                     ["split_and_save_models"]),
    "doctor": Program("check what this machine lacks", ["scripts.doctor"]),
}


def help_text() -> str:
    """Return what `flowspec --help` prints."""
    command_lines = [f"  {name:<8} {program.about}" for name, program in PROGRAMS.items()]
    return "\n".join([
        "usage: flowspec COMMAND [PRESET] [key=value ...]", "",
        "Run one language model over several devices in a pipeline, which guesses ahead to keep them busy.", "",
        "commands:", *command_lines, "",
        "flowspec COMMAND --help shows the keys of a command. In Python: from flowspec import Pipeline",
        f"Models, splits and results are in {home()}; {HOME_VARIABLE}=FOLDER names another folder."])


def become_program(name: str, words: Sequence[str]) -> NoReturn:
    """Become the program of a command."""
    first_word, *own_words = PROGRAMS[name].words
    program_variables = {COMMAND_VARIABLE: f"flowspec {name}", **environment()}
    program_words = command_of(first_word)
    if first_word.endswith(".sh"):
        program_variables["PYTHON"] = sys.executable
        program_words = ["bash", str(ROOT / first_word)]
    os.execvpe(program_words[0], [*program_words, *own_words, *words], program_variables)


def main() -> int:
    """Run the command; return the exit code of a mistake, or of help."""
    name, *words = sys.argv[1:] or [""]
    if name in HELP:
        print(help_text())
        return 0
    if name in PROGRAMS:
        become_program(name, words)

    similar_names = get_close_matches(name, PROGRAMS, n=1)
    advice = f"did you mean {similar_names[0]}?" if similar_names else "a question is answered by flowspec run"
    print(f"flowspec: unknown command {name}: {advice} (commands: {', '.join(PROGRAMS)})", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
