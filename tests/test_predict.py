"""Predictions out of a record: what real models take in virtual time, which file of records fits, what is refused."""
from __future__ import annotations

import json
from itertools import cycle

import pytest

from config.cli import parse
from config.presets import TOY
from eval.dsi import command as simulate
from eval.dsi.keys import COMMAND
from eval.dsi.predict import closed_form, numbers_of, predicted, request_of, speed
from eval.dsi.records import CHAINS, NARROW, Book, Drafter, PredictConfig, Written, book_of, words
from eval.recorded import ASIDE, Recorded
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.virtual import as_virtual
from pipeline.decode import Answer

SHORT = ("sets=gsm8k,qa", "max_new_tokens=20", "dtype=float64")


def config_of(*given):
    return parse(words(given), f"{COMMAND} predict", kind=PredictConfig)


@pytest.fixture(scope="module")
def books():
    found = {}

    def book(config):
        key = config.run.temperature
        if key not in found:
            found[key] = book_of(config)
        return found[key]
    return book


def seconds(answer):
    return answer.prefill_seconds + answer.decode_seconds


def by_models(config, book, method):
    """What target and drafter take for the same answers in virtual time, themselves."""
    run = config.single(method, virtual=True)
    with as_virtual(prepare(run)) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
        answers = [pipeline.decoder.whole(request_of(config, book, one.prompt)) for one in book.answers]
    assert [answer.token_ids for answer in answers] == [one.text for one in book.answers]
    return answers


PLAIN, DRAWN = ("lookahead=5",), ("lookahead=2", "temperature=0.8", "seed=3", "top_k=40")
ELSEWHERE = ("lookahead=3", "profile=lan-1g", "expand_depth=7", "run_pipeinfer=4", "ablate=prune")


@pytest.mark.parametrize("method, given", [
    *zip(CHAINS, cycle([PLAIN, DRAWN])), *((method, ELSEWHERE) for method in CHAINS)])
def test_a_prediction_takes_what_the_models_themselves_take_in_virtual_time(books, method, given):
    config = config_of(*SHORT, *given)
    book = books(config)
    foreseen = predicted(config, book, method)
    expected = by_models(config, book, method)
    assert [one.token_ids for one in foreseen] == [one.text for one in book.answers]
    for mine, theirs in zip(foreseen, expected):
        assert mine.token_ids == theirs.token_ids and seconds(mine) == pytest.approx(seconds(theirs), rel=1e-9)


def test_replicas_of_several_stages_too(books):
    config = config_of(*SHORT, "replicas=2x2", "lookahead=4")
    book = books(config)
    for mine, theirs in zip(predicted(config, book, "dsi"), by_models(config, book, "dsi")):
        assert seconds(mine) == pytest.approx(seconds(theirs), rel=1e-9)


def test_what_the_record_says_and_guesses_below_the_text_and_beside_it():
    known = Recorded(9, [4, 7], [1, 2, 3])
    drafter = Drafter(known, [1, 0, 1], 9)
    path = known.root
    numbers = [path := known.after(path, token) for token in (4, 7, 1, 2)]
    assert numbers == [0, 1, 2, 3]
    wrong = known.after(numbers[2], 5)
    assert wrong == ASIDE == known.after(wrong, 3)
    said, inner = known.said(numbers[1:])
    assert said.shape == (3, 1) and inner.shape == (3, 0)
    assert known.lm_head(said).argmax(-1).tolist() == [1, 2, 3]
    assert [drafter.guess_at(position, token) for position, token in ((1, 7), (2, 1), (3, 2))] == [1, 3, 3]
    assert [drafter.guess_at(position, token) for position, token in ((2, 2), (3, 3))] == [3, 4]  # on a wrong guess


def test_the_record_is_kept_and_read_again_and_another_one_is_refused(tmp_path, capsys):
    path = tmp_path / "record.json"
    given = [*SHORT, f"traces={path}"]
    made = book_of(config_of(*given))
    assert book_of(config_of(*given)) == made
    assert len(made.answers) == 2 and made.vocab == 4096 and made.ends
    assert simulate.main(["predict", *given, "seed=4"]) == 2
    assert "was recorded with seed=0, and seed=4 is asked for" in capsys.readouterr().err
    assert simulate.main(["predict", *given, "max_length=30"]) == 2
    assert "leaves no room for max_new_tokens=20 in a context of 30" in capsys.readouterr().err
    content = json.loads(path.read_text())
    for spoil in ({"answers": []}, {"ends": [-1]}, {"vocab": 0},
                  {"answers": [{**content["answers"][0], "coupled": [1]}]},
                  {"answers": [{**content["answers"][0], "likeliest": [2] * 20}]}):
        path.write_text(json.dumps({**content, **spoil}))
        assert simulate.main(["predict", *given]) == 2
        assert "holds no record of texts: name another traces=" in capsys.readouterr().err


def test_a_coupled_drafter_is_right_elsewhere_than_one_that_takes_the_likeliest_token(books):
    cold, warm = (books(config_of(*SHORT, f"temperature={t}", "seed=3", "top_k=40")) for t in (0, 0.8))
    assert all(one.likeliest == one.coupled for one in cold.answers)
    assert any(one.likeliest != one.coupled for one in warm.answers)


def test_figures_by_hand():
    config = config_of("lookahead=2", "wires=,3", "slowdown=4")
    book = Book([Written([1], [2, 3, 4], [1, 0, 1], [1, 1, 1]), Written([1], [5], [1], [1])], 9, [])
    numbers = numbers_of(config, book)
    assert numbers == (240, 14, 3, 0.75, 4)
    assert closed_form(config, "ar", numbers) == pytest.approx(1e3 / (240 + 3 * 3))
    assert closed_form(config, "serial", numbers) == pytest.approx(1e3 * (1 + .75 + .75 ** 2) / (240 + 9 + 28))
    assert closed_form(config, "pipedec", numbers) == pytest.approx(1e3 / (.25 * (240 + 9) + .75 * 60))
    answers = Answer(1, [1, 2, 3], 0.25, 0.75), Answer(1, [4], 0.5)
    assert speed(answers) == pytest.approx(4 / 1.5)


def test_the_command_predicts_without_measuring(tmp_path, capsys, books):
    output = tmp_path / "out.json"
    given = [*SHORT, "measure=false", "methods=serial,dsi", f"output={output}"]
    assert simulate.main(["predict", *given]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("ar ", "serial ", "dsi "))] == [
        "ar", "serial", "dsi"]
    assert "worst deviation" not in shown
    written = json.loads(output.read_text())
    assert written["predicted"] == "simulated" and written["measured"] is None
    config, figures = config_of(*given), written["tokens_per_second"]
    assert figures["dsi"]["predicted"] == speed(predicted(config, books(config), "dsi"))
    assert figures["dsi"]["measured"] is None


def test_the_command_measures_what_it_predicts(tmp_path, capsys):
    """With a cluster that is fast forward, since only the form is looked at."""
    output = tmp_path / "out.json"
    given = ["sets=gsm8k", "max_new_tokens=6", "methods=serial,dsi", "slowdown=0.1", f"output={output}"]
    assert simulate.main(["predict", *given]) == 0
    shown = capsys.readouterr().out
    written = json.loads(output.read_text())
    assert written["measured"] == "emulated" and written["other_texts"] == {"ar": 0, "serial": 0, "dsi": 0}
    for figures in written["tokens_per_second"].values():
        assert 0 < figures["measured"] < figures["predicted"]
    assert "worst deviation: predicted +" in shown.splitlines()[-1]


@pytest.mark.parametrize(("word", "message"), [
    ("methods=ar,streaming", "streaming drafts no chain"), ("methods=dsi,dsi", "names something twice"),
    ("draft=eagle", "add draft=model"), ("draft_dir=", "there is no drafter"),
    ("lookahead=auto", "give lookahead a number"), ("lookahead=0", "lookahead=0 is not possible"),
    ("subseq_token=0", "give subseq_token a number"), ("profile=none", "profile=jetson-7b"),
    ("time=virtual", "time is of a single run: leave it out"), ("pipeline_type=dsi", "write methods="),
    ("stop=x", "stop is of a single run"), ("tp=2", "tp is of a single run"), ("trace=x", "trace is of a single run"),
    ("ignore_eos=true", "ignore_eos is of a single run: leave it out"),
    ("sets=", "sets is empty"), ("sets=nothing", "there is no data set nothing"), ("width=2", "give width=1"),
    (f"output={TOY}", "choose another output="), (f"traces={TOY}", "choose another traces="),
    ("draft_dir=/nowhere/at/all", "/nowhere/at/all"), ("max_length=9", "in a context of 9")])
def test_what_cannot_be_predicted_is_refused_with_the_fix(word, message, capsys):
    assert simulate.main(["predict", "measure=false", "max_new_tokens=2", word]) == 2
    assert message in capsys.readouterr().err


def test_every_method_drafts_a_chain_of_the_lookahead():
    config = config_of("lookahead=3")
    tree = config.run.tree
    assert (tree.init.width, tree.expand.width, tree.layer.width, tree.coupled.width) == (1, 1, 1, 1)
    assert tree.init.depth == tree.expand.depth == 2 and tree.lookahead == tree.run == 3
    assert tree.init.segment == tree.expand.segment == 3
    assert all(getattr(config.run, key) == float(value) for key, value in NARROW.items())
    assert config_of("lookahead=3", "expand_depth=8").run.tree.expand.depth == 8
