"""link=torch: the same texts over process groups of torch.distributed, and a lost rank ends all with its name."""
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cluster.board import find_board
from cluster.torch_wires import torch_wires
from cluster.transport import CONTROL, DATA
from config.failure import PeerLost
from config.methods import METHODS
from config.run_config import RunConfig
from launch.ranks import Member
from model.sample import Sampler
from pipeline.answers import Request
from pipeline.link import Peers
from tests.checkpoints import refused
from tests.forked import CONTEXT
from tests.saved import PROMPT as SHORT_PROMPT
from tests.saved import split_shared
from tests.test_recovery import ASK, PROMPT, opened, reference, struck
from tests.tiny import in_threads

LINK = {"link": "torch", "recover": False}
# specinfer needs small models
RING_METHODS = [name for name, method in METHODS.items() if method.target == "ring" and name != "specinfer"]


def test_every_method_of_a_ring_writes_the_text_of_plain_decoding(saved):
    wanted_texts = [reference(temperature, SHORT_PROMPT)[:12] for temperature in (0.0, 1.0)]
    with opened(saved, **LINK) as pipeline:
        for number, name in enumerate(RING_METHODS):
            decoder = pipeline.decoder_for(replace(pipeline.config, pipeline_type=name))
            temperature = number % 2
            request = Request(SHORT_PROMPT, Sampler(float(temperature), seed=ASK["seed"]), 12)
            assert decoder.complete(request).token_ids == wanted_texts[temperature], (name, temperature)


def test_copies_of_the_model_write_it_too(saved):
    with opened(saved, pipeline_type="dsi", replicas="2", lookahead="6", **LINK) as pipeline:
        assert struck(pipeline.stream(PROMPT, **ASK, temperature=1.0)) == reference(1.0)


def test_ranks_that_share_a_stage_write_it_too(saved, tmp_path):
    split_shared(saved, tmp_path / "shared", "0+2+2")
    with opened(tmp_path, "shared", pipeline_type="continuous", **LINK) as pipeline:
        assert struck(pipeline.stream(PROMPT, **ASK, temperature=1.0)) == reference(1.0)


def test_a_killed_rank_ends_all_with_its_name(saved):
    with opened(saved, **LINK) as pipeline, pytest.raises(PeerLost, match="rank 2 was lost"):
        struck(pipeline.stream(PROMPT, **{**ASK, "max_new_tokens": 200}), 3, (2,))
    assert not dist.is_initialized()


def test_a_rank_that_is_lost_while_groups_are_created_ends_rank_0_with_its_name(monkeypatch):
    heard = threading.Event()
    monkeypatch.setattr("launch.ranks.torch_wires", lambda *_: heard.wait(60))
    placement = SimpleNamespace(world=2, reached=lambda rank: ())
    config = SimpleNamespace(device="cpu")
    member = Member(SimpleNamespace(placement=placement, config=config, recovers=False), 0)
    member.heartbeat = SimpleNamespace(first_loss="rank 1 was lost: it was killed")
    with pytest.raises(PeerLost, match="rank 1 was lost: it was killed"):
        member._torch_wires()
    heard.set()


@pytest.mark.parametrize("keys, sentence", [
    ({}, "link=torch cannot regain a lost rank: add recover=false, or leave link out"),
    ({"recover": "false", "keys": "there"}, "keys=there cannot encrypt what link=torch sends: leave one of the two"),
    ({"recover": "false", "profile": "lan-1g", "time": "virtual"}, "link=torch connects processes"),
])
def test_what_process_groups_cannot_do_is_refused(keys, sentence):
    with refused(sentence):
        RunConfig(link="torch", **keys)


def test_keys_of_a_cluster_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.board.read_keys", lambda folder: "keys")
    monkeypatch.setattr("cluster.board.HOME", tmp_path)
    (tmp_path / "keys").mkdir()
    environment = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "FLOWSPEC_BOARD": "1"}
    with refused("link=torch cannot encrypt, and ", "keys has keys: leave link out"):
        find_board(RunConfig(link="torch", recover="false"), environment)


# --- wires of two ranks -----------------------------------------------------------------------------------------------

def connected(folder, rank):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    return torch_wires(rank, [[Peers(1, [1], [1])], [Peers(0, [0], root_rank=0)]])


def receive_the_second_first(folder):
    wires = connected(folder, 1)
    for wire_kind in (CONTROL, DATA):
        received = torch.zeros(3, dtype=torch.int64)
        wires[wire_kind].recv(received, 0)
        (folder / str(wire_kind)).write_text(str(received.tolist()))
    dist.destroy_process_group()


def test_a_prune_overtakes_what_nobody_has_received_yet(tmp_path):
    receiver = CONTEXT.Process(target=receive_the_second_first, args=[tmp_path])
    receiver.start()
    wires = connected(tmp_path, 0)
    with in_threads(wires[DATA].send, [([torch.tensor([1, 2, 3])], 1)]):
        wires[CONTROL].send([torch.tensor([4, 5, 6])], 1)
    receiver.join()
    dist.destroy_process_group()
    assert [(tmp_path / str(kind)).read_text() for kind in (DATA, CONTROL)] == ["[1, 2, 3]", "[4, 5, 6]"]


def test_a_receive_from_a_lost_rank_raises(tmp_path):
    other = CONTEXT.Process(target=connected, args=[tmp_path, 1])  # which ends at once
    other.start()
    wires = connected(tmp_path, 0)
    other.join()
    with pytest.raises(PeerLost, match="rank 1 was lost"):
        wires[DATA].recv(torch.zeros(3), 1)
    dist.destroy_process_group()
