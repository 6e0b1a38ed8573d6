"""The page of a GPU's owner, on a CPU: each check writes its section, and a planted difference is reported."""
from __future__ import annotations

import pytest
import torch

from eval.bench import gpu
from eval.bench.gpu import GpuOptions
from scripts import doctor

SMALL = GpuOptions("cpu", num_tokens=6, hidden=64, intermediate=128, repeats=1)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(gpu, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(gpu, "NUMBER_TYPES", ("float32",))
    monkeypatch.setattr(gpu, "QUANTIZED_FORMS", (("float32", "int8"), ("float16", "unknown")))
    monkeypatch.setattr(gpu, "STAGE_ROWS", (1, 4))


def test_the_page_has_every_section_and_says_that_a_cpu_is_no_gpu(tmp_path, capsys):
    page = tmp_path / "page.md"
    words = ["gpu", "--device", "cpu", "--tokens", "6", "--hidden", "64", "--intermediate", "128", "--repeats", "1"]
    assert doctor.main([*words, "-o", str(page)]) == 0

    text = page.read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(gpu.CHECKS)
    assert "no GPU" in text and "failed" not in text
    num_methods = len(gpu.RING_METHODS)
    assert f"| float32 | 1 | 3 | {num_methods} of {num_methods} |  |" in text
    assert text.count("the text of `ar`,") == 2
    assert "| float16, unknown | " in text, "a form that does not run is a row"


def test_a_text_that_differs_is_named_with_its_first_other_token():
    texts = {"ar": [1, 2, 3], "serial": [1, 2, 3], "naive": [1, 9, 3], "pruned": [1, 2]}
    assert gpu.compared(texts, [1, 2, 3]) == ("2 of 4", "naive 1, pruned 2")


def test_a_row_that_differs_beside_others_is_reported(monkeypatch):
    class Planted:
        def outputs(self, rows):
            rows_TD = torch.ones(rows, 4)
            rows_TD[0, 0] += 1e-3 * (rows in (2, 3))
            return rows_TD

    monkeypatch.setattr(gpu, "timed_layer", lambda options, number_type: Planted())
    assert list(gpu.row_bits(SMALL))[-1] == "| float32 | 2–3 | 5.0e-04 |"


def test_a_layer_of_another_type_has_the_same_weights_text_and_rows():
    plain, *others = (gpu.timed_layer(SMALL, *types).outputs(1).float()
                      for types in (("float32",), ("float32", "int8"), ("bfloat16",)))
    for other in others:
        assert float((other - plain).norm() / plain.norm()) < 0.3


def test_a_check_that_fails_is_a_sentence_and_the_others_go_on(monkeypatch):
    def broken(options):
        raise RuntimeError("out of order")
        yield

    broken.__doc__ = "What it does."
    monkeypatch.setattr(gpu, "CHECKS", {"First": broken, "Second": gpu.way_over_the_cpu})
    lines = list(gpu.page(SMALL))
    assert "**It failed**: RuntimeError: out of order" in lines
    assert "## Second" in "\n".join(lines) and "| 64 |" in "\n".join(lines)


def test_numbers_that_follow_one_another_are_a_range():
    assert gpu.as_ranges([2, 3, 4, 7, 9, 10]) == "2–4, 7, 9–10"
