"""The comparison with what people would take instead: everyone reads the same file, and missing ones are named."""
from __future__ import annotations

import socket
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from config.failure import guarded
from config.profiles import PROFILES
from eval.bench import Cost, peers, rpc
from eval.bench.peers import table, write_random
from eval.bench.rpc import LOCALHOST, wire
from launch.split.gguf import unpack
from model.weights.parts import read_sizes
from model.weights.unfold import Unfolded
from tests.test_gguf import TOKENS, write


def test_ratios_are_over_the_first_by_the_clock_and_by_the_processor():
    short, long = peers.PROMPT_LENGTHS
    jobs = [(short, peers.NUM_TOKENS), (short, 1), (long, 1)]

    def costs(factor):
        decoded = 0.5 + factor * (peers.NUM_TOKENS - 1)
        return [Cost(decoded, 2 * decoded - 0.5), Cost(0.5, 0.5), Cost(2 * factor, factor)]

    took = {(name, *job): [cost, Cost(99, 99)]
            for name, factor in (("first", 0.25), ("second", 0.5))
            for job, cost in zip(jobs, costs(factor))}
    first, second = table(took)
    assert first == ["first", "4.0 (1.00)", "500.0 (1.00)", "500.0 (1.00)",
                     "500.0 (1.00)", "500.0 (1.00)", "250.0 (1.00)"]
    assert second == ["second", "2.0 (0.50)", "500.0 (1.00)", "1000.0 (0.50)",
                      "1000.0 (0.50)", "500.0 (1.00)", "500.0 (0.50)"]


def test_without_llama_cpp_the_others_are_compared_and_the_way_to_get_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "FORMS", (("float32", "none", "none"),))
    monkeypatch.setattr(peers, "PROMPT_LENGTHS", (4, 8))
    monkeypatch.setattr(peers, "NUM_TOKENS", 3)
    path = write(tmp_path / "model.gguf")
    assert peers.peers([str(path), "--threads", "1", "--repeats", "1"]) == 0
    said = capsys.readouterr()
    assert "llama.cpp is not installed, and is left out: type pip install xllamacpp" in said.err
    names = [line.strip().split("  ")[0] for line in said.out.splitlines()]
    assert names[-2:] == ["transformers, float32", "ours, float32"]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no file .*: give the path of a GGUF file"):
        peers.peers([str(tmp_path / "none.gguf")])


def test_random_weights_have_the_asked_shapes_and_the_tokenizer_of_the_file(tmp_path, monkeypatch):
    sizes = {"embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 2,
             "attention.head_count_kv": 2, "rope.dimension_count": 32, "attention.key_length": 32}
    monkeypatch.setattr(peers, "SIZES_7B", sizes)
    made = tmp_path / "random.gguf"
    write_random(write(tmp_path / "model.gguf"), made, 3)
    found = read_sizes(Unfolded(unpack(made, tmp_path / "whole", progress=False)))
    assert (found.hidden, found.intermediate, found.layers, found.heads, found.kv_heads) == (64, 96, 3, 2, 2)
    assert found.vocab == len(TOKENS) and found.tied


def test_over_processes_llama_bench_is_given_all_servers_and_a_missing_one_is_said(tmp_path, monkeypatch, capsys):
    args = Namespace(over=2, repeats=1, binaries=str(tmp_path), wires=None, file=Path("m.gguf"))
    speeds = {"pipeline_type=ar": 2.0, "pipeline_type=streaming": 6.0}
    monkeypatch.setattr(rpc, "ours", lambda words, written: speeds[words[-1]])
    rpc.compare(args, tmp_path / "m.gguf", tmp_path)
    said = capsys.readouterr()
    assert "llama-bench or ggml-rpc-server is missing" in said.err and "RPC" not in said.out
    asked = tmp_path / "asked"
    for name, line in (("rpc-server", "exec sleep 60"),
                       ("llama-bench", f'echo "$@" > {asked}; echo \'[{{"avg_ts": 4.0}}]\'')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    rpc.compare(args, tmp_path / "m.gguf", tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[-2:] for row in rows] == [["4.0", "1.00"],
                                          ["2.0", "0.50"], ["6.0", "1.50"]]
    places = asked.read_text().split("-rpc ")[1].split()[0].split(",")
    assert len(set(places)) == 2 and all(place.startswith("127.0.0.1:") for place in places)


def test_wires_of_a_cluster_carry_all_bytes_both_ways_and_not_sooner_than_their_latency_and_rate_allow():
    cluster, sent = replace(PROFILES["jetson-7b"], latency=30.0, mbps=400), bytes(range(256)) * 4096
    with socket.create_server((LOCALHOST, 0)) as door, wire(door.getsockname()[1], cluster) as port:
        start = time.monotonic()
        with socket.create_connection((LOCALHOST, port)) as here, door.accept()[0] as there:
            writer = guarded("writer", lambda: (here.sendall(sent), here.shutdown(socket.SHUT_WR)), fail)
            assert whole(there) == sent
            assert time.monotonic() - start >= 0.030 + len(sent) * 8 / 400e6
            start = time.monotonic()
            there.sendall(b"answer")
            there.shutdown(socket.SHUT_WR)
            assert whole(here) == b"answer"
            assert time.monotonic() - start >= 0.030
            writer.join()


def whole(connection):
    """All that comes until the other end has ended."""
    with connection.makefile("rb") as read:
        return read.read()


def fail(thread, error):
    raise AssertionError(thread) from error


def test_wires_without_processes_are_refused(capsys):
    with pytest.raises(SystemExit):
        peers.peers(["m.gguf", "--wires", "wifi"])
    assert "add --over N" in capsys.readouterr().err
