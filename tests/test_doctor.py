"""The doctor finds what a machine has and lacks, in one line each, and its exit code says whether that suffices."""
from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
from collections import namedtuple

import pytest
import torch
import transformers  # noqa: F401  # it looks for torch once, when it is imported, so not while a test hides torch
from safetensors.torch import load_file, save_file

from config.presets import TOY
from scripts import doctor
from tests.forked import command


def lines(check):
    return [str(finding) for finding in check()]


def only(check):
    (line,) = lines(check)
    return line


def test_on_a_machine_that_runs_these_tests_all_that_is_needed_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with command(tmp_path, "scripts.doctor") as run:
        assert run.end(120) == 0 and run.stderr == "", run.stdout + run.stderr
    found, _, end = run.stdout.rpartition("\n\n")
    assert end == "Everything that is required is present.\n"
    for line in found.splitlines():
        assert re.match(r"ok: |missing: (bitsandbytes, |this machine has an NVIDIA GPU).*; do ", line)
    for thing in ("Python 3.", "torch ", "torch.distributed with gloo", "a kernel on cpu works",
                  "an all-reduce over 1 process works", "an all-reduce over 2 processes works",
                  "ranks meet at 127.0.0.1 (lo, by GLOO_SOCKET_IFNAME): loopback", "of disk free", "of memory free",
                  "transformers ", "sentencepiece 0.", "fschat"):
        assert f"ok: {thing}" in found or re.search(f"^ok: .*{re.escape(thing)}", found, re.M), thing


@pytest.mark.parametrize("findings, code, end", [
    ([doctor.Finding("a")], 0, "Everything that is required is present."),
    ([doctor.Finding("a", "this"), doctor.Finding("b")], 1, "1 of the required things is missing."),
    ([doctor.Finding("a", "this"), doctor.Finding("b", "that")], 1, "2 of the required things are missing."),
])
def test_the_exit_code_counts_only_what_is_needed(monkeypatch, capsys, findings, code, end):
    monkeypatch.setattr(doctor, "examine", lambda words: iter(findings))
    assert doctor.main([]) == code
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*map(str, findings), "", end]
    assert str(doctor.Finding("b", "this")) == "missing: b; do this"


def test_an_old_python_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 7, 9))
    assert only(doctor.python) == "missing: Python 3.7.9; do use Python 3.10 or newer, or 3.8 on boards with JetPack 5"


@pytest.fixture
def first(monkeypatch, tmp_path):
    """The lines about a first start on a machine that lacks nothing, for a test to take something away."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 5 << 30))
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "_pip", lambda: "23.0.1+dfsg")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    return lambda: lines(doctor.first_start)


def test_what_a_first_start_needs_is_looked_at(first, monkeypatch, tmp_path):
    assert first() == ["ok: pip 23.0.1+dfsg", f"ok: 5.0 GiB of disk free in {tmp_path} for the environment",
                       "ok: 5.0 GiB of disk free in /tmp for downloads"]
    monkeypatch.setattr(doctor, "_pip", lambda: "20.0.2")
    assert first()[0] == "missing: pip 20.0.2; do upgrade it there: python3 -m pip install --upgrade pip"
    monkeypatch.setitem(sys.modules, "ensurepip", None)  # as Debian's Python has none
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    assert "cannot make an environment; do install its venv module (on Debian and Ubuntu: sudo apt" in first()[0]


def test_a_first_start_without_room_is_reported(first, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(3 << 28))
    assert first()[1:] == [
        f"missing: {tmp_path} may not be written by you, so .venv cannot be made there; "
        "do let its owner start once, or clone the project into a folder of your own",
        f"missing: 0.8 GiB of disk free in {tmp_path} for the environment; "
        "do make room: at least 2 GiB, and several more with CUDA's libraries",
        "missing: 0.8 GiB of disk free in /tmp for downloads; "
        "do make room: at least 1 GiB, and several more with CUDA's libraries"]


def test_without_torch_the_rest_is_examined_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = list(map(str, doctor.examine()))
    assert "missing: torch cannot be imported" in found[1] and "NVIDIA's own torch wheel" in found[1]
    assert not any("kernel" in line or "all-reduce" in line for line in found)
    assert any(line.startswith("ok: pip ") for line in found)
    assert any("ranks meet" in line for line in found) and any("transformers" in line for line in found)


def test_a_torch_that_is_too_old_or_without_gloo_is_reported(monkeypatch):
    import torch
    from torch.distributed import distributed_c10d

    monkeypatch.setattr(torch, "__version__", "1.10.2")
    monkeypatch.delattr(distributed_c10d, "ProcessGroupGloo")
    assert lines(doctor.torch_itself) == [
        "missing: torch 1.10.2; do install torch 1.11 or newer",
        "missing: torch 1.10.2 was built without torch.distributed or gloo; do install a wheel that has it, see "
        "docs/jetson.md"]


def test_a_gpu_that_torch_was_not_built_for_is_reported(monkeypatch):
    import torch

    def ones(*shape, device):
        if device != "cpu":
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")
        return torch.full(shape, 1.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", ones)
    assert lines(doctor.kernels) == [
        "ok: a kernel on cpu works",
        "missing: a kernel on cuda:0 fails (CUDA error: no kernel image is available for execution on the device); do "
        "install the torch wheel that was built for this device, or use device=cpu"]


@pytest.mark.parametrize("failure, message", [
    (RuntimeError("connect timed out\nmore"), "2 processes fails (connect timed out); do name a working network"),
    (multiprocessing.TimeoutError(), "2 processes fails (no answer for 60 seconds); do name a working network"),
])
def test_an_all_reduce_that_fails_is_reported_with_its_reason(monkeypatch, failure, message):
    def in_two(store):
        if isinstance(failure, Exception):
            raise failure
        return failure

    monkeypatch.setattr(doctor, "reduce_ones", lambda store, rank, world: 1)
    monkeypatch.setattr(doctor, "_in_two", in_two)
    one, two = lines(doctor.all_reduces)
    assert one == "ok: an all-reduce over 1 process works" and message in two


@pytest.mark.parametrize("named, leads, message", [
    ("eth7", "127.0.1.1", "missing: GLOO_SOCKET_IFNAME is eth7, which has no IPv4 address here; do export "
                          "GLOO_SOCKET_IFNAME=eth0 (there are: lo, eth0)"),
    ("eth0", "127.0.1.1", "ok: ranks meet at 192.168.1.5 (eth0, by GLOO_SOCKET_IFNAME): other machines can reach it"),
    ("lo", "192.168.1.5", "ok: ranks meet at 127.0.0.1 (lo, by GLOO_SOCKET_IFNAME): loopback, this machine only, for "
                          "other machines export GLOO_SOCKET_IFNAME=eth0"),
    ("", "192.168.1.5", "ok: ranks meet at 192.168.1.5 (eth0, by the host's name board): other machines can reach it"),
    ("", "127.0.1.1", "ok: ranks meet at 127.0.1.1 (lo, by the host's name board): loopback, this machine only, for "
                      "other machines export GLOO_SOCKET_IFNAME=eth0"),
    ("", "10.9.9.9", "missing: the host's name board leads to 10.9.9.9, which is no address of this machine; do export "
                     "GLOO_SOCKET_IFNAME=eth0"),
    ("", "", "missing: the host's name board leads to no address; do export GLOO_SOCKET_IFNAME=eth0"),
])
def test_the_interface_is_named_with_its_reason_and_its_reach(monkeypatch, named, leads, message):
    def resolve(host):
        if not leads:
            raise socket.gaierror("Name or service not known")
        return leads

    monkeypatch.setattr(doctor, "_addresses", lambda: {"lo": "127.0.0.1", "eth0": "192.168.1.5"})
    monkeypatch.setattr(socket, "gethostname", lambda: "board")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    assert only(doctor.interface) == message


def test_a_package_that_is_missing_or_broken_is_reported_by_the_name_that_pip_knows(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastchat.conversation", None)
    assert any(line.startswith("missing: fschat cannot be imported (") and "installs requirements.txt" in line
               for line in lines(doctor.packages))


def test_bitsandbytes_is_optional(monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    (found,) = doctor.bitsandbytes()
    assert not found.needed and "which only quantized weights need" in str(found)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A head of the bundled model that guesses from noise, as that of another model does."""
    folder = tmp_path_factory.mktemp("head")
    shutil.copy(TOY / "eagle" / "config.json", folder)
    noise = torch.Generator().manual_seed(0)
    weights = load_file(TOY / "eagle" / "model.safetensors")
    for held in weights.values():
        held.normal_(0, 0.02, generator=noise)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_head_is_judged_by_the_first_tokens_of_a_text(output_of, capsys, stranger, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda words: doctor.head(words))
    good = output_of(doctor.main, ["toy", "threads_per_rank=1"])
    assert re.match(r"ok: the draft head in \S+ foresaw ([4-9]|[123]\d) of the first 32 tokens\n\n", good)
    assert doctor.main(["toy", "threads_per_rank=1", f"eagle_dir={stranger}"]) == 1
    found = capsys.readouterr()
    assert re.match(r"missing: the draft head in \S+ foresaw [0-3] of the first 32 tokens: it was probably trained for "
                    r"another model or another template; do take the head of this model, or add draft=suffix\n\n1 of",
                    found.out)
    assert "foresaw" not in found.err


def test_a_model_that_is_not_there_ends_the_doctor_with_one_sentence(output_of, sentence_of, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda words: doctor.head(words))
    assert "nowhere" in sentence_of(doctor.main, ["model_dir=nowhere"])
    assert "without an EAGLE head" in output_of(doctor.main, ["toy", "draft=suffix"])
