"""The forms of keys that are texts with numbers in them, each with its description."""
from __future__ import annotations

from config.trees import MAX_GUESSES
from config.values import COUNT, POSITIVE_NUMBER, Range, TextForm

TOKEN_ID = r"\s*[0-9]{1,18}\s*"
TOKEN_IDS = TextForm(f"{TOKEN_ID}(,{TOKEN_ID})*,?\\s*", "token ids with commas between, as 1,306,626")

TOKEN_BIAS = TOKEN_ID + r":\s*-?[0-9]{1,9}(?:\.[0-9]{1,9})?\s*"
LOGIT_BIAS = TextForm(
    f"{TOKEN_BIAS}(?:,{TOKEN_BIAS})*", "token ids and the bias of each one's logit, as 306:-100,626:2.5")

GIGABYTES = r"(?!0+(?:\.0*)?(?![0-9.]))[0-9]{1,6}(?:\.[0-9]{1,6})?"  # of a board's memory, above 0
MEMORY_SIZES = f"{GIGABYTES}(?:,{GIGABYTES})+"
STAGES = TextForm(
    r"0(\+0*[1-9][0-9]{0,17})+|[1-9][0-9]{0,17}|auto(:[1-9][0-9]{0,17})?|auto:" + MEMORY_SIZES,
    "the layers of every rank, as 0+2+2+2+2, where rank 0 has none and the others at least one; or the number of "
    "stages; or auto:4, 4 stages with equal bytes; or auto:8,8,16, stages for boards with this much memory in GB")

TENSOR_SHARES = TextForm(
    r"([0-9]{1,18})|\s*[0-9]*\.?[0-9]+(?:\s*,\s*[0-9]*\.?[0-9]+)+\s*",
    "0 for the number of the split, a number of ranks from 1 to 1024, or a speed for each rank of a stage, as 2,1,1,1",
    [Range(0, 1024)])

REPLICAS = TextForm(
    "([0-9]{1,4})(?:x([1-9][0-9]{0,3}))?",
    "0 to fill four ranks, a number of copies from 1 to 1024, or copies and stages of each, as 2x2",
    [Range(0, 1024), Range(0, 1024)])

QUESTION_RANGE = TextForm(
    "([0-9]{1,18})|([0-9]{1,18})?:([0-9]{1,18})?",
    "a number of questions, as 5, or the first one, counted from 0, and the one before which to stop, as 30:50 or 30:",
    [Range(1, COUNT), Range(0, COUNT), Range(1, COUNT)])

ACCEPTED_PER_LEVEL = Range(0.000001, 1)
POLICY = TextForm(
    f"auto|eagle2|static|expansion|opt(?::({POSITIVE_NUMBER}))?",
    "auto, eagle2, static, expansion or opt, or opt:X, where X is the number of accepted guesses that a level must "
    f"bring, {ACCEPTED_PER_LEVEL.advice}",
    [ACCEPTED_PER_LEVEL])

CHAIN_LENGTH = Range(1, MAX_GUESSES)
LOOKAHEAD = TextForm("auto|([0-9]{1,9})", f"auto or {CHAIN_LENGTH.advice}", [CHAIN_LENGTH])

DEVICE = TextForm("auto|cpu|cuda(:[0-9]{1,9})?", "auto, cpu, cuda or cuda:N")
MASTER = TextForm(
    "[^:]*(?::([0-9]{1,5}))?", "HOST:PORT, with a port from 1 to 65535, or only HOST or :PORT", [Range(1, 65535)])

CODES = TextForm("([0-9]{2}-[0-9]{6}(,[0-9]{2}-[0-9]{6})*)?", "codes as boards show them, with commas, as 47-318205")

WAITING_SECONDS = Range(1, 2_592_000)  # for a rank, which sends two heartbeats a second
RECOVER = TextForm(
    f"(?i:true|false)|({POSITIVE_NUMBER})",
    f"false to end all, or seconds: {WAITING_SECONDS.advice}",
    [WAITING_SECONDS])

WIRES = TextForm(
    f"({POSITIVE_NUMBER})?(?:,({POSITIVE_NUMBER})?)?",
    "Mbit/s from 0.001 to 1000000, a comma, and milliseconds from 0 to 60000, or one of the two, as 125 or ,2",
    [Range(0.001, 1_000_000), Range(0, 60_000)])
