"""The command scripts.simulate offline: a text by every algorithm, exactly and drawn."""
from __future__ import annotations

from eval.dsi import cost_model as rounds
from eval.dsi.command import main
from eval.dsi.cost_model import mean_cost

NAMES = ["non-SI", "SI", "DSI"]


def rows(shown):
    """The cells of each algorithm: exact mean, per token, speed-up, then mean, sd and iterations of the texts."""
    return {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.split(" ")[0] in NAMES}


def test_the_table_has_the_exact_mean_of_every_algorithm(output_of):
    words = ["offline", "c=0.2", "a=0.8", "k=3", "S=60", "num_repeats=400"]
    shown = output_of(main, words)
    found = rows(shown)
    assert list(found) == NAMES and shown.startswith("Simulated: ")
    setting = (1.0, 0.2, 3)
    wanted = {"SI": rounds.si(*setting), "DSI": rounds.dsi(*setting)}
    for name, decoding in wanted.items():
        exact = mean_cost(decoding, 0.8, 60).item()
        assert found[name][0] == f"{exact:.6g}"
        standard_error = float(found[name][4]) / 400 ** 0.5
        assert abs(float(found[name][3]) - exact) < 4 * standard_error
    assert found["non-SI"] == ["60", "1", "1.000", "60", "0", "60"]
    original = rows(output_of(main, [*words, "accounting=original"]))
    assert original["SI"] == found["SI"]
    assert float(original["DSI"][0]) > float(found["DSI"][0])
    assert rows(output_of(main, words)) == found, "the same seed draws the same"


def test_the_original_accounting_draws_what_the_published_simulator_draws(output_of):
    """Its sanity run, of 5 texts of 1000 tokens with seed 42, gives about 322 for SI and 219 for DSI."""
    found = rows(output_of(main, ["offline", "accounting=original", "num_repeats=5"]))
    assert (found["SI"][3], found["SI"][-1]) == ("322.24", "215")
    assert (found["DSI"][3], found["DSI"][-1]) == ("219.18", "247.2")
    for acceptance, cost in (("0", "40"), ("1", "4.9")):
        shown = output_of(main, ["offline", "accounting=original", "num_repeats=2", "S=40", f"a={acceptance}"])
        assert rows(shown)["DSI"][3] == cost
