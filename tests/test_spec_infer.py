"""SpecInfer's commands and files: what each flag means here, what is refused, and the texts that come."""
import re
import shlex
from dataclasses import asdict

import pytest

from config.cli import flat, parse
from config.keys import raw_values
from config.presets import ROOT, TOY
from config.run_config import RunConfig
from eval.specinfer.command import main, profile_lines
from eval.specinfer.parse import FLAGS, IGNORED, NAMES, OPTIONS, Parser, SpecInferConfig, flags_of, read
from launch.pipeline import Pipeline
from pipeline.answers import Answer
from tests.checkpoints import refused
from tests.json_files import save_json

LLM = str(TOY / "llama")
SSM = str(TOY / "draft_a")
OTHER = str(TOY / "draft_b")
PROMPTS = ["def add(a, b):", "The baker"]
QUICK = ("link=threads", "dtype=float64")
LINES = re.compile(r"\[Profile\] guid\((\d+)\) llm_decoding_steps\((\d+)\) latency\((\d+\.\d{3})\)"
                   r"(?: ttft\((\d+\.\d{3})\))?\ntoken IDs: ([\d,]+)\n")
# What stands in SpecInfer's documentation and sources, early and late.
KNOWN = """
    ll:gpu ll:fsize ll:zsize llm-weight ssm-weight tokenizer prompt llm-model ssm-model cache-folder output-file
    use-full-precision max-requests-per-batch max-tokens-per-batch max-sequence-length expansion-degree do-sample
    temperature topp offload offload-reserve-space-size 4bit-quantization 8bit-quantization data-parallelism-degree
    tensor-parallelism-degree pipeline-parallelism-degree verbose profiling benchmarking inference-debugging fusion
    spec-sampling sampling-seed max-tree-width max-tree-depth max-tokens-per-ssm-batch max-tokens-per-prefilling-batch
    max-output-length trace enable-streaming-cache baseline-latency-ms ssm-spec-latency-ms llm-verify-latency-ms
    request-per-second spec-infer-old-version greedy-schedule equal-schedule emission-file-path no-special-tokens
    slo-attainment-early-termination""".split()


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.json"
    save_json(path, PROMPTS)
    return str(path)


def keys(*argv, of="spec_infer"):
    return raw_values(read(of, argv).words)


def typed(words):
    """The values of keys by their names, as a person types them."""
    return dict(word.split("=", 1) for word in words.split())


# --- flags ------------------------------------------------------------------------------------------------------------

ROWS = {  # flags, and the keys that they set
    "--max-sequence-length 256": "max_length=256 max_new_tokens=256",
    "--max-length 128": "max_length=128 max_new_tokens=128",
    "--max-length 128 --max-sequence-length 64": "max_length=64 max_new_tokens=64",
    "--max-output-length 7": "max_new_tokens=7",
    "--do-sample": "temperature=1",
    "--temperature 0.3 --do-sample": "temperature=0.3",
    "--do-sample --topp 0.8": "temperature=1 top_p=0.8",
    "--sampling-seed 5": "seed=5",
    "--spec-sampling": "verify=mss",
    "--expansion-degree 4": "expansion=1,1,4,1,1,1,1,1",
    "--expansion-degree -1": "expansion=1,1,1,1,1,1,1,1",
    "--use-full-precision": "dtype=float32",
    "--use-bf16-precision": "dtype=bfloat16",
    "--use-bf16": "dtype=bfloat16",
    "--4bit-quantization": "quant=nf4",
    "--8bit-quantization": "quant=int8",
    "-pipeline-parallelism-degree 3": "stages=3",
    "-tensor-parallelism-degree 2": "tp=2",
    "--max-tokens-per-prefilling-batch 32": "prefill_chunk=32",
    "--max-requests-per-batch 4": "max_requests=4",
    "-prompt asked.json": "question_file=asked.json template=none",
    "-output-file out": "lines=out",
    f"-llm-model {LLM} -ssm-model {SSM}": f"base_dir={LLM} ssm={SSM}",
    f"-llm-weight {LLM} -ssm-weight {SSM}": f"base_dir={LLM} ssm={SSM}",
    f"-ssm-model {SSM} -ssm-model {OTHER}": f"ssm={SSM},{OTHER}",
    f"-cache-folder {TOY} -llm-model llama -ssm-model draft_b": f"models={TOY} base_dir={LLM} ssm={OTHER}",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_flag_sets_its_key_with_one_dash_or_two(row):
    usual_words = "pipeline_type=specinfer max_length=1024 max_new_tokens=1024"
    assert keys(*row.split()) == typed(f"{usual_words} {ROWS[row]}")
    flags = [f"-{word.lstrip('-')}" if word.lstrip("-") in NAMES else word for word in row.split()]
    assert keys(*flags) == keys(*(f"-{flag}" if flag[:1] == "-"
                                  and flag[1:] in NAMES else flag for flag in flags))
    assert keys(*flags) == keys(*row.split())


def test_every_flag_with_a_key_is_among_these():
    tried = {word.lstrip("-") for row in ROWS for word in row.split()}
    assert set(NAMES) - {"config-file"} <= tried
    assert len({*NAMES, *IGNORED}) == len(NAMES) + len(IGNORED)
    assert {*KNOWN, *OPTIONS.values()} <= {*NAMES, *IGNORED}


def test_a_flag_without_a_meaning_is_named_and_ignored():
    words = read("spec_infer", ["--sampling-seed", "5"]).words
    for name in IGNORED:
        for flag in ([f"-{name}"], [f"-{name}", "4"]):
            call = read("spec_infer", [*flag, "--sampling-seed", "5"])
            assert call.ignored == f"ignored, since they have no meaning here: {' '.join(flag)}"
            assert call.words == words


def test_what_counts_only_beside_another_flag_or_in_the_other_program_is_named_too():
    call = read("spec_infer", ["--temperature", "0.3", "--fusion"])
    assert call.ignored == "ignored, since they have no meaning here: --fusion, temperature=0.3 without --do-sample"
    call = read("incr_decoding", ["-ssm-model", SSM, "--expansion-degree", "3"])
    assert call.ignored == f"ignored, since they have no meaning here: -ssm-model {SSM}, --expansion-degree 3"
    assert raw_values(call.words) == typed("pipeline_type=ar max_length=1024 max_new_tokens=1024")


def test_keys_of_a_run_may_stand_beside_the_flags():
    assert keys("max_length=50", "template=vicuna", "-prompt", "a=b.json") == typed(
        "pipeline_type=specinfer max_new_tokens=50 question_file=a=b.json max_length=50 template=vicuna")
    with refused("seed is given twice: leave one of them out"):
        parse(read("spec_infer", ["--sampling-seed", "5", "seed=6"]).words, keys_class=SpecInferConfig)


def test_a_split_model_is_taken_as_it_is(saved):
    assert keys("-llm-model", str(saved / "0+2+2"), of="incr_decoding")["model_dir"] == str(saved / "0+2+2")


def test_the_command_that_is_printed_does_the_same():
    call = read("spec_infer", shlex.split(
        f"-llm-model {LLM} -ssm-model {SSM} -prompt 'my prompts.json' -output-file out --do-sample"))
    command = shlex.split(call.command)
    assert command[:2] == ["bash", "run_pipe.sh"]
    ours = asdict(parse(command[2:]))
    theirs = flat(parse(call.words, keys_class=SpecInferConfig))
    assert theirs.pop("lines") == "out"
    assert ours.pop("output") == str(ROOT / "out.json") != theirs.pop("output")
    assert ours == theirs and ours.keys() == asdict(RunConfig()).keys() - {"output"}


WRONG = {
    "--expansion-degre 3": "unknown flag --expansion-degre: did you mean expansion-degree?",
    "--qwertz": "unknown flag --qwertz: --help shows them all",
    "--expansion-degree many": "--expansion-degree: invalid integer value: 'many': --help shows every flag",
    "-prompt -output-file out": "-prompt/--prompt: expected one argument: --help shows every flag",
    "prompts.json": "prompts.json belongs to no flag: write -FLAG VALUE, or key=value",
    "--4bit-quantization --8bit-quantization": "--8bit-quantization: not allowed with argument -4bit-quantization",
    "-llm-model no/model -ssm-model no/other": "there is no model no/other, and no folder",
    f"-llm-model {LLM}": "has no small model: add -ssm-model DIR, or use scripts/incr_decoding.sh",
    "-prompt prompts.txt": "-prompt prompts.txt is not a .json file: name one that holds a JSON list of texts",
    "-prompt p.json -output-file p.json": "-output-file p.json is the prompt file: choose another -output-file",
    "-config-file nowhere.json": "there is no file nowhere.json",
}


@pytest.mark.parametrize("typed_words", WRONG)
def test_a_wrong_flag_is_reported_with_the_fix(typed_words, error_of):
    with refused(WRONG[typed_words]):
        read("spec_infer", typed_words.split())
    printed = error_of(main, ["spec_infer", *typed_words.split()])
    assert printed.startswith("flowspec: ") and printed.count("\n") == 1 and WRONG[typed_words] in printed


def test_another_program_is_reported(error_of):
    printed = error_of(main, ["specinfer", "-prompt", "p.json"])
    assert "unknown program of SpecInfer specinfer: did you mean spec_infer?" in printed


@pytest.mark.parametrize("content, message", [
    (None, "there is no file"), ("{}", "is not a list: write a list of texts"), ("[]", "has no question"),
    ('["a", 3]', "entry 2 of the list in"), ("[", "is not JSON")])
def test_a_prompt_file_that_is_wrong_is_reported_before_the_start(monkeypatch, error_of, tmp_path, content, message):
    monkeypatch.setattr("launch.run.alone", lambda *_: pytest.fail("it started"))
    path = tmp_path / "asked.json"
    if content is not None:
        path.write_text(content)
    assert message in error_of(main, ["incr_decoding", "-prompt", str(path), *QUICK])


def test_the_help_has_every_flag(capsys):
    assert main(["spec_infer", "--help"]) == 0
    shown = capsys.readouterr().out
    other = Parser("incr_decoding").format_help()
    for flag in FLAGS:
        for name in flag.names.split():
            assert f" --{name}" in shown and (f" --{name}" in other) == (flag.only_program != "spec_infer")
        assert flag.help_text in " ".join(shown.split())
    assert all(name in shown for name in IGNORED)


# --- options of the Python programs -----------------------------------------------------------------------------------

def test_a_file_of_options_counts_as_the_flags_that_mean_the_same(tmp_path):
    path = tmp_path / "config.json"
    save_json(path, {
        "num_gpus": 2, "fusion": True, "offload": False, "pipeline_parallelism_degree": 2, "llm_model": LLM,
        "cache_path": "", "full_precision": True, "prompt": "p.json", "output_file": "", "max_length": 128,
        "ssms": [{"ssm_model": SSM, "cache_path": ""}, {"ssm_model": OTHER}]})
    call = read("spec_infer", ["-config-file", str(path)])
    assert raw_values(call.words) == typed(
        "pipeline_type=specinfer template=none max_length=128 max_new_tokens=128 stages=2 dtype=float32 "
        f"base_dir={LLM} question_file=p.json ssm={SSM},{OTHER}")
    assert call.ignored == "ignored, since they have no meaning here: -ll:gpu 2, -fusion"
    for content, message in (("[]", "is not an object of options"), ('{"llm": 1}', "unknown option llm"),
                             ('{"ssms": ["a"]}', "ssms is not a list of small models")):
        path.write_text(content)
        with refused(message):
            read("spec_infer", ["-config-file", str(path)])


def test_of_two_options_with_one_flag_the_later_counts():
    assert flags_of({"tensor_parallelism_degree": 1, "model_specific_tensor_parallelism_degree": 2}) == [
        "-tensor-parallelism-degree", "2"]


# --- texts ------------------------------------------------------------------------------------------------------------

def test_the_lines_of_an_answer():
    answer = Answer(2, [7, 8], prefill_seconds=0.5, decode_seconds=1.25, accepted_lengths=[1, 1, 1])
    figures = "[Profile] guid(1000000) llm_decoding_steps(3) latency(1750000.000)"
    ids_and_text = "\ntoken IDs: 1,5,7,8\nabc\n"
    assert profile_lines(1000000, answer, [1, 5, 7, 8], "abc", shows_ttft=False) == f"{figures}{ids_and_text}"
    with_ttft = profile_lines(1000000, answer, [1, 5, 7, 8], "abc", shows_ttft=True)
    assert with_ttft == f"{figures} ttft(500000.000){ids_and_text}"


def test_both_programs_write_the_tokens_of_ar_behind_what_the_file_held(tmp_path, prompts, capfd):
    out = tmp_path / "out"
    out.write_text("old\n")
    words = ["-llm-model", LLM, "-prompt", prompts, "-output-file", str(out), "--max-sequence-length", "40",
             "-pipeline-parallelism-degree", "2", "-ll:gpu", "4", *QUICK]
    assert main(["spec_infer", *words, "-ssm-model", SSM, "-ssm-model", OTHER]) == 0
    printed = capfd.readouterr()
    assert "flowspec: ignored, since they have no meaning here: -ll:gpu 4\n" in printed.err
    assert "flowspec: equivalent command of this project: bash run_pipe.sh pipeline_type=specinfer" in printed.err
    assert "All 2 answers" in printed.out and "mean accepted length" in printed.out
    assert main(["incr_decoding", *words]) == 0
    written = out.read_text()
    assert written.startswith("old\n[Profile]")
    guessed, guessed2, plain, plain2 = LINES.findall(written)
    texts = LINES.split(written)[6::6]
    with Pipeline.open("toy", base_dir=LLM, stages=2, pipeline_type="ar", max_length=40, max_new_tokens=40,
                       template="none", link="threads", dtype="float64") as pipeline:
        assert pipeline.text
        for number, prompt in enumerate(PROMPTS):
            ids = pipeline.text.prompt_ids([prompt], "none")
            tokens = [*ids, *pipeline.generate(ids).answer.token_ids]
            for found in ((guessed, guessed2), (plain, plain2)):
                assert found[number][4] == ",".join(map(str, tokens))
            assert texts[number] == texts[number + 2] == f"{pipeline.text.decode(tokens)}\n"
    assert not guessed[3] and float(plain[3]) < float(plain[2])
    assert int(guessed[1]) + int(guessed2[1]) < int(plain[1]) + int(plain2[1]), "small models have guessed"
    assert [int(entry[0]) + 1 for entry in (guessed, plain)] == [int(entry[0]) for entry in (guessed2, plain2)]


def test_a_prompt_that_is_too_long_is_left_out_and_the_others_are_answered(saved, tmp_path, capfd):
    save_json(tmp_path / "asked.json", ["a" * 50, "abc"])
    assert main(["incr_decoding", "-llm-model", str(saved / "0+2+2"), "-prompt", str(tmp_path / "asked.json"),
                 "-output-file", str(tmp_path / "out"), "--max-length", "20", *QUICK]) == 2
    assert ("flowspec: Prompt[0] is skipped: the prompt has 50 tokens and the context only 20: shorten the prompt or "
            "raise max_length\n") in capfd.readouterr().err
    assert len(LINES.findall((tmp_path / "out").read_text())) == 1


def test_without_any_flag_the_bundled_models_answer_a_question_of_their_own(capfd):
    assert main(["spec_infer", "max_new_tokens=8", *QUICK]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("Prompt[0]: Tell me a short story") and "of ssm1" in shown
