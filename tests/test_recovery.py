"""A rank that dies or hangs comes back, and every answer goes on with the text that it would have had."""
import json
import os
import signal
import socket
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from cluster import processes
from cluster.folder import Folder
from cluster.heartbeat import END_COUNT, LOSS_KEY, Heartbeat
from cluster.memberships import COMPLETE, NEWEST, POLL_SECONDS, FollowedMemberships, Meeting
from cluster.sockets import GREETING, MARK, Connections, FolderDoor, shut_down
from cluster.transport import CONTROL, DATA, SocketWire
from config.failure import PeerLost, broken_connection
from config.methods import METHODS, SHARINGS
from eval.bench import places
from eval.bench.accidents import accidents, cells, pauses
from launch.pipeline import Pipeline
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.link import Peers
from pipeline.messages import Reset
from pipeline.requests import Ring
from pipeline.trace import rank_files, read
from tests import forked
from tests.checkpoints import refused
from tests.saved import PROMPT as SHORT_PROMPT
from tests.saved import answer_of, token_ids, wait_until
from tests.serving import live
from tests.tiny import TINY, in_threads, judge

PROMPT = SHORT_PROMPT * 4
NEW = 40
ASK = {"max_new_tokens": NEW, "seed": 4, "ignore_eos": True}
FAST = {"init_total_token": 20, "width": 4, "init_depth": 4, "expand_total_token": 16, "prefill_chunk": 4,
        "threads_per_rank": 1, "max_length": 300, "dtype": "float64", "prompt_ids": "5"}
OTHERS = [(MARK, 6, DATA, 0), (MARK, 8, DATA, 0),
          (b"elsewise", 7, DATA, 0),
          (MARK, 7, DATA, 2), (MARK, 7, 5, 0),
          (b"\x80" * 40,), (b"",)]  # greetings that door 7 of rank 1 does not let in
PIPELINES = [method for method in METHODS if method not in SHARINGS]
COPIES = {"pipeline_type": "dsi", "replicas": "2", "lookahead": "2"}


def opened(saved, split="0+2+2", **options):
    """A pipeline with this program as rank 0, and the others in processes."""
    return Pipeline.open(model_dir=str(saved / split), **{**FAST, **options})


def reference(temperature, prompt=PROMPT):
    return TINY.text(prompt, NEW, Sampler(temperature, seed=4))


def strike(rank, number=signal.SIGKILL):
    """Send a signal to a rank that this process has started."""
    ranks, = processes.started
    ranks.send_signal(rank, number)


def struck(generation, after=0, *accidents):
    """The tokens of an answer of which ranks are struck when it has so many pieces."""
    for count, _ in enumerate(generation, 1):
        if count == after:
            for accident in accidents:
                strike(*accident)
    return generation.answer.token_ids


class DeadLink:
    """A link of rank 0 to stages of which two do not reach each other."""

    def send(self, msg):
        pass

    def recv(self):
        raise PeerLost("rank 2 was lost: its connection broke")


def test_stages_that_connect_again_and_do_not_reach_each_other_end_the_recovery():
    ring, losses = Ring(DeadLink(), TINY.lm_head, 3), []
    ring.reconnect = losses.append
    with pytest.raises(PeerLost, match="rank 2 was lost: its connection broke"):
        ring.recover(PeerLost("rank 1 was lost"))
    assert [str(loss) for loss in losses] == ["rank 1 was lost"] + 4 * ["rank 2 was lost: its connection broke"]


# --- every method -----------------------------------------------------------------------------------------------------

def losses_of(ring):
    """A list of losses to come: each of them takes the place of the next message that returns to a ring of threads.

    The stages forget the requests, as stages that were started again.
    """
    losses, receive = [], ring.link.recv

    def receive_or_lose():
        message = receive()
        if losses:
            raise losses.pop()
        return message

    def reconnect(loss):
        for request in ring._open:
            ring.link.send(Reset(request))

    ring.link.recv, ring.reconnect = receive_or_lose, reconnect
    return losses


@pytest.mark.parametrize("method", [method for method in PIPELINES if method != "dsi"])
def test_a_loss_in_the_prompt_and_in_mid_answer_changes_no_text(saved, method):
    short, more = {**ASK, "max_new_tokens": 16}, {"ssm": str(saved / "base")} if method == "specinfer" else {}
    with opened(saved, link="threads", pipeline_type=method, **more) as pipeline:
        losses = losses_of(pipeline.ring)
        answer = pipeline.submit(SHORT_PROMPT, **short, temperature=0.0)
        losses.append(PeerLost("rank 2 was lost"))
        assert struck(answer) == reference(0.0, SHORT_PROMPT)[:16]
        answer = pipeline.submit(SHORT_PROMPT, **short, temperature=1.0)
        for _ in range(3):
            next(answer)
        losses.append(PeerLost("rank 1 was lost"))
        assert [*answer] and answer.answer.token_ids == reference(1.0, SHORT_PROMPT)[:16]
        assert pipeline.ring.num_reconnections == 2 and not losses


@pytest.mark.parametrize("options", [{"pipeline_type": "continuous"}, COPIES], ids=["continuous", "dsi"])
def test_a_rank_that_is_killed_in_the_prompt_and_in_mid_answer_changes_no_text(saved, options):
    with opened(saved, **options) as pipeline:
        answer = pipeline.submit(PROMPT, **ASK, temperature=0.0)
        strike(2)
        assert struck(answer) == reference(0.0)
        assert struck(pipeline.submit(PROMPT, **ASK, temperature=1.0), 3, (1,)) == reference(1.0)
        assert pipeline.ring.num_reconnections >= 2


def test_counts_go_on_behind_an_accident(saved):
    with opened(saved, pipeline_type="ar") as pipeline:
        answer = pipeline.stream(PROMPT, **ASK, logprobs=1)
        assert struck(answer, 9, (1,)) == reference(0.0)
        assert answer.answer.misses == len(answer.answer.accepted_lengths) == NEW - 1
        assert answer.answer.prompt_tokens == len(PROMPT)
        assert len(answer.answer.logprobs) == NEW and answer.accepted == 0


def test_what_the_path_decides_of_a_law_counts_the_answer_before_an_accident(saved):
    options = {**ASK, "temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    with opened(saved) as pipeline:
        whole = pipeline.generate(PROMPT, **options).answer.token_ids
        assert whole != reference(1.0)
        assert struck(pipeline.stream(PROMPT, **options), 9, (2,)) == whole


# --- several requests, several accidents ------------------------------------------------------------------------------

def test_several_answers_go_on_together_and_texts_that_were_kept_are_forgotten(saved):
    prompts = [PROMPT, [*PROMPT[:30], 44], [9, 8, 7]]
    prompts.append([*PROMPT[:40], 3, 3])
    with opened(saved, max_requests=3, reuse=True, pipeline_type="streaming") as pipeline:
        before = pipeline.generate(prompts[1], **ASK, temperature=1.0)
        assert before.answer.token_ids == reference(1.0, prompts[1])
        answers = [pipeline.submit(prompt, **ASK, temperature=1.0) for prompt in prompts]
        assert struck(answers[0], 4, (1,), (2,)) == reference(1.0)
        assert struck(answers[2], 2, (2,)) == reference(1.0, prompts[2])
        for answer, prompt in zip(answers, prompts):
            assert struck(answer, 0) == reference(1.0, prompt)
        after = pipeline.generate(prompts[3], **ASK)
        assert after.answer.token_ids == reference(0.0, prompts[3])


def test_a_conversation_goes_on_after_a_rank_has_died_between_two_turns(saved):
    text, reused = [*PROMPT], []
    with opened(saved, max_requests=2, reuse=True, draft="suffix") as pipeline:
        for victim in (None, None, 1, None):
            if victim:
                strike(victim)
            answer = pipeline.generate(text, **ASK).answer
            assert answer.token_ids == reference(0.0, text)
            reused.append(answer.reused_tokens)
            text += [*answer.token_ids, 33]
    kept = len(PROMPT) + NEW

    assert reused[0] == reused[2] == 0, "what a rank held that is lost is read again"
    assert kept - 8 <= reused[1] < kept and 3 * kept - 120 < reused[3]


def test_an_answer_that_is_given_up_during_an_accident_holds_nobody_up(saved):
    with opened(saved) as pipeline:
        answer = pipeline.stream(PROMPT, **ASK)
        next(iter(answer))
        strike(1)
        answer.close()
        assert pipeline.generate(PROMPT, **ASK).answer.token_ids == reference(0.0)


def test_a_rank_that_hangs_is_ended_and_started_again(saved, capfd):
    with opened(saved, timeout=2.0) as pipeline:
        answer = pipeline.stream(PROMPT, **ASK, temperature=1.0)
        assert struck(answer, 3, (2, signal.SIGSTOP)) == reference(1.0)
    assert "rank 2 was lost: it has been silent for 2 seconds; all ranks are connected again" in capfd.readouterr().err


def test_the_trace_of_a_rank_that_was_started_again_has_both_parts(saved, tmp_path):
    (tmp_path / "rank_1_7.jsonl").write_text("of an earlier run")
    with opened(saved, trace=str(tmp_path)) as pipeline:
        assert struck(pipeline.stream(PROMPT, **ASK), 9, (1,)) == reference(0.0)
    files = rank_files(tmp_path)
    assert [path.name for path in files] == ["rank_0.jsonl", "rank_1.jsonl", "rank_1_1.jsonl", "rank_2.jsonl"]
    parts = [len(path.read_text().splitlines()) for path in files[1:3]]
    spans = [span for span in read(tmp_path) if span["rank"] == 1]
    assert min(parts) > 0 and len(spans) >= sum(parts) - 1, "the last line before the accident may be half written"


def test_a_wire_that_is_cut_in_the_middle_of_a_message_changes_no_text(saved, monkeypatch):
    send, sent = SocketWire.send, []

    def cut(wire, tensors, peer):
        if set(wire.outgoing) == {1}:  # data: without a prune the answer may end before its loss is noticed
            sent.append(len(tensors))
        if set(wire.outgoing) != {1} or len(sent) != 7:
            return send(wire, tensors, peer)
        *whole_tensors, last_tensor = tensors
        send(wire, whole_tensors, peer)
        way = wire.outgoing[peer]
        way.sendall(memoryview(last_tensor.view(torch.uint8).numpy())[:last_tensor.nbytes // 2])
        shut_down(way)
        raise broken_connection(peer)

    with opened(saved) as pipeline:
        monkeypatch.setattr(SocketWire, "send", cut)
        assert struck(pipeline.stream(PROMPT, **ASK)) == reference(0.0)
        assert len(sent) > 7 and pipeline.ring.num_reconnections >= 1


def test_nothing_is_left_of_accidents(saved):
    with opened(saved) as pipeline:
        def held():
            return len(os.listdir("/proc/self/fd"))

        def accident():
            assert struck(pipeline.stream(PROMPT, **ASK), 3, (1,)) == reference(0.0)

        accident()
        most = held()
        for _ in range(2):
            accident()
            assert wait_until(lambda: held() <= most, 60)


# --- rank 0 is silent -------------------------------------------------------------------------------------------------

@contextmanager
def coming(folder, patience):
    """Rank 1 on its way to a membership: its heartbeat, and in a list how the way ended."""
    heartbeat, ended = Heartbeat(Folder(folder), 1, 2, timeout=0.5), []
    meeting = Meeting(Folder(folder), open_door=partial(FolderDoor, folder))
    memberships = FollowedMemberships(meeting, 1, heartbeat, [], patience)

    def join():
        try:
            ended.append(memberships.join() and memberships.number)
        except PeerLost as loss:
            ended.append(str(loss))

    heartbeat.start(lambda loss: None)
    with in_threads(join, [()]):
        yield heartbeat, ended
    heartbeat.stop()


def test_a_rank_waits_for_a_rank_0_that_has_been_silent_for_longer_than_the_timeout(tmp_path):
    store = Folder(str(tmp_path))
    with coming(str(tmp_path), 600.0) as (heartbeat, ended):
        assert wait_until(lambda: heartbeat.silent_peers() == [0], 60)
        time.sleep(5 * POLL_SECONDS)
        assert ended == []
        store.add(NEWEST, 1)
        store.set(COMPLETE, "1")
    assert ended == [1]


@pytest.mark.parametrize("patience, silent", [(0.0, "0.5"), (1.0, "1")])
def test_a_rank_0_that_stays_silent_ends_the_waiting(tmp_path, patience, silent):
    with coming(str(tmp_path), patience) as (_, ended):
        pass
    assert ended == [f"rank 0 was lost: it has been silent for {silent} seconds"]


def test_a_rank_0_that_has_ended_is_not_waited_for(tmp_path):
    Folder(str(tmp_path)).add("heartbeat/0", END_COUNT)
    with coming(str(tmp_path), 600.0) as (_, ended):
        pass
    assert ended == ["rank 0 has ended"]


def test_who_has_not_listened_finds_nobody_silent(tmp_path):
    heartbeat = Heartbeat(Folder(str(tmp_path)), 0, 2, timeout=0.1)
    heartbeat.start(lambda loss: None)
    heartbeat.stop()
    time.sleep(0.2)
    assert heartbeat.silent_peers() == []


# --- commands and servers ---------------------------------------------------------------------------------------------

@contextmanager
def writing(saved, tmp_path, new, *more):
    """A command while it writes so many tokens, whose ranks a test strikes: its text is what it writes alone."""
    words = ["prompt_ids=5,17,40", "ignore_eos=true", "max_length=30000", f"max_new_tokens={new}", "temperature=1",
             "threads_per_rank=1", "dtype=float64"]
    alone = answer_of(tmp_path, *words, f"model_dir={saved / '0+4'}", "pipeline_type=ar")["token_ids"]
    words += [f"model_dir={saved / '0+2+2'}", *more, f"output={tmp_path / 'struck.json'}"]
    with forked.command(tmp_path, "scripts.generate", *words) as run:
        yield run
        assert run.end(180) == 0, run.stderr
    assert token_ids(tmp_path / "struck.json") == alone and len(alone) == new
    assert "Traceback" not in run.stderr


def test_a_command_whose_ranks_are_killed_twice_writes_its_text(saved, tmp_path):
    with writing(saved, tmp_path, 300) as run:
        for lost in (1, 2):
            printed = len(run.stdout)
            assert wait_until(lambda printed=printed: len(run.stdout) > printed + 20, 90), run.stderr
            os.kill(run.ranks()[lost], signal.SIGKILL)
    assert run.stderr.count("all ranks are connected again, and answers continue") == 2


def test_a_command_whose_rank_0_is_stopped_for_longer_than_the_others_wait_writes_its_text(saved, tmp_path):
    with writing(saved, tmp_path, 300, "timeout=4") as run:
        assert wait_until(lambda: len(run.stdout) > 50, 90), run.stderr
        folder = Folder(str(run.folder()))
        os.kill(run.ranks()[0], signal.SIGSTOP)
        membership = folder.add(COMPLETE, 0)  # later ones need rank 0
        assert wait_until(lambda: folder.look(f"{LOSS_KEY}/{membership}"), 60), "the others have noticed it"
        os.kill(run.ranks()[0], signal.SIGCONT)
    assert "; all ranks are connected again, and answers continue" in run.stderr


def test_a_stream_over_http_pauses_and_goes_on(saved):
    with live(f"model_dir={saved / '0+2+2'}", "template=none", "dtype=float64", "max_length=400") as server:
        asked = {"prompt": "hello", "max_tokens": 150, "stream": True, "ignore_eos": True, "temperature": 1, "seed": 2}
        texts, health = [], []

        def watched(pipeline):
            reconnect = pipeline.ring.reconnect
            pipeline.ring.reconnect = lambda loss: (health.append((*server.engine.health, server.engine.is_alive)),
                                                    reconnect(loss))

        server.engine.call(watched).result(60)
        for accident in (False, True):
            with server.client.stream("POST", "/v1/completions", json=asked) as response:
                events = []
                for line in filter(None, response.iter_lines()):
                    events.append(line)
                    if accident and len(events) == 9:
                        strike(1)
            assert events.pop() == "data: [DONE]" and len(events) > 20
            pieces = [json.loads(event[6:])["choices"][0] for event in events]
            texts.append("".join(piece["text"] for piece in pieces))
        assert texts[0] == texts[1] and texts[0]
        assert server.engine.health.status == "ready"
        [(status, reason, is_alive)] = health
        assert (status, is_alive) == ("recovering", True) and reason.startswith("rank 1 was lost: ")


# --- what does not come back ------------------------------------------------------------------------------------------

def test_a_rank_that_does_not_come_back_in_time_ends_all_with_its_name(saved):
    with opened(saved, recover=1.0) as pipeline:
        [ranks] = processes.started
        os.kill(ranks._server.pid, signal.SIGSTOP)  # which would start it again
        try:
            with pytest.raises(PeerLost, match="rank 2 was lost: .*; rank 2 did not come back within recover="):
                struck(pipeline.stream(PROMPT, **ASK), 3, (2,))
        finally:
            os.kill(ranks._server.pid, signal.SIGCONT)


def test_without_recovery_all_end_as_before(saved):
    with opened(saved, recover=False) as pipeline, pytest.raises(PeerLost, match="rank 2 was lost"):
        struck(pipeline.stream(PROMPT, **{**ASK, "max_new_tokens": 200}), 3, (2,))


def test_losses_without_an_end_are_given_up(saved):
    with opened(saved, link="threads") as pipeline:
        pipeline.ring.recover = lambda loss: None

        def lose():
            raise PeerLost("rank 1 was lost")

        with pytest.raises(PeerLost):
            for _ in range(6):
                pipeline.decoder._with_recovery(lose)
        assert pipeline.decoder._recent_losses == 6


# --- memberships do not mix -------------------------------------------------------------------------------------------

def greeted(folder, door, *greeting):
    """A connection to a door that begins with this greeting."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / door.name))
        connection.sendall(greeting[0] if len(greeting) == 1 else GREETING.pack(*greeting))


def test_a_connection_of_another_membership_or_kind_or_of_a_stranger_is_not_let_in(tmp_path):
    with FolderDoor(str(tmp_path), 7) as door:
        made = Connections(1, [Peers(0, [2], root_rank=0)])
        assert made.missing == {(DATA, 0), (CONTROL, 0)}
        assert made.outgoing == {(DATA, 2)}
        for junk in OTHERS:
            greeted(tmp_path, door, *junk)
            made.accept(door)
        assert len(made.missing) == 2
        for _ in range(2):  # the first one has the place
            greeted(tmp_path, door, MARK, 7, DATA, 0)
        made.accept(door)
        made.accept(door)
        assert made.missing == {(CONTROL, 0)}
        made.cut()
        made.close()

    assert list(tmp_path.iterdir()) == []


def test_a_tree_begins_again_with_the_answer_so_far_and_its_counts():
    tree = TokenTree([5, 6, 7], 20)
    tree.cut()
    guess = tree.add(tree.tip, 8, -1.0)
    tree.cut()
    assert judge(tree, 8) == [8] and tree.tip == guess
    assert judge(tree, 9) == [9]
    tree.cut()
    assert (tree.num_misses, tree.accepted_positions, tree.num_sent_guesses) == (1, [3], 1)
    again = tree.again(3, 5)
    assert again.tokens == [5, 6, 7, 8, 9] and not again.live
    assert len(again.unsent_text) == 5
    again.cut()
    assert (again.num_misses, again.accepted_positions, again.num_sent_guesses) == (1, [3], 1)
    shorter = tree.again(3, 3)

    assert shorter.tokens == [5, 6, 7] and shorter.accepted_positions == []
    assert min(shorter.trunk) > max(tree.trunk)


# --- the measurement of it --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("place", ["processes", "loopback"])
def test_the_bench_of_accidents_counts_what_was_lost_or_changed(saved, tmp_path, capsys, monkeypatch, place):
    monkeypatch.setattr(places, "run", lambda *words: False)  # no disk of its own and no keys, so ranks are killed only
    monkeypatch.setattr(places, "KINDS", ("kill",))
    monkeypatch.setattr(places.subprocess, "Popen", forked.board)
    words = [f"model_dir={saved / '0+2+2'}", "stages=0+2+2", "template=none", "max_new_tokens=24", "timeout=60",
             f"places={place}", "pipeline_type=pruned", "accidents=1", f"csv={tmp_path / 'all.csv'}"]
    assert accidents(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[:5] == "all 1 4 0 0".split()
    rows = [line.split(",") for line in (tmp_path / "all.csv").read_text().splitlines()]
    assert [row[1:5] for row in rows[1:]] == [[place, "pruned", "4", "kill"]]


@pytest.mark.parametrize("wrong", ["accidents=x", "accidents=0", "places=moon"])
def test_accidents_that_cannot_be_had_are_refused(wrong):
    with refused(wrong.partition("=")[0]):
        accidents([wrong])


def test_pauses_are_the_gaps_in_which_accidents_lie():
    settled = [0.0, 1.0, 5.0, 5.5, 9.0]
    assert pauses([1.5, 5.2], settled) == [4.0, 3.5]
    assert pauses([4.9, 4.95, 9.5], settled) == [4.0, 4.0, None]


def test_a_text_that_differs_or_is_lost_is_counted():
    row = {"place": "boards", "method": "ar", "kind": "kill", "rank": 1, "pause": 2.0}
    rows = [{**row, "round": 0, "at_once": 4, "lost": 4, "changed": 0},
            {**row, "round": 1, "at_once": 1, "lost": 0, "changed": 1},
            {**row, "round": 1, "at_once": 1, "lost": 0, "changed": 1, "pause": None}]
    assert cells(rows) == "3 5 4 1 2.0 2.0".split()
