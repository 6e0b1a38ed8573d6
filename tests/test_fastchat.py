"""The worker of FastChat, against FastChat's own controller and server, and against controllers that forget or fail."""
from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import openai
import pytest

from config.cli import parse
from config.serve_config import WorkerConfig
from launch.ask import GENERATE
from launch.console import run as run_command
from launch.run import run
from model.text import conversation_of
from serve import fastchat
from serve.engine import Health
from tests.saved import wait_until
from tests.serving import QUESTION, alive

CONTROLLER = "http://127.0.0.1:1"
HERE = ["processes=false", "threads_per_rank=1"]


def free_ports(count):
    servers = [HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) for _ in range(count)]
    for server in servers:
        server.server_close()
    return [server.server_port for server in servers]


@contextmanager
def module(folder, name, *words):
    """A module of FastChat as a process, which writes its logs into a folder."""
    environment = {**os.environ, "LOGDIR": str(folder), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", f"fastchat.serve.{name}", "--host", "127.0.0.1", *words], cwd=folder,
                          env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def models(controller):
    """What a controller knows, once it answers."""
    return httpx.post(f"{controller}/list_models").json()["models"] if reached(controller) else None


def reached(url):
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """FastChat's controller, its server of OpenAI's protocol, and the worker: the addresses of all three."""
    folder = tmp_path_factory.mktemp("fastchat")
    ports = free_ports(2)
    controller, server = (f"http://127.0.0.1:{port}" for port in ports)
    with module(folder, "controller", "--port", str(ports[0])), \
            module(folder, "openai_api_server", "--port", str(ports[1]), "--controller-address", controller), \
            alive(*fastchat.build([f"controller={controller}", "port=0", *HERE])) as worker:
        assert wait_until(lambda: models(controller) == ["toy"] and reached(server), 120)
        yield controller, server, worker


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """What `run_pipe.sh` answers at temperature 0."""
    output = tmp_path_factory.mktemp("pipe") / "answer.json"
    words = [f"prompt={QUESTION}", "temperature=0", "max_new_tokens=24"]
    assert run(GENERATE, [*HERE, *words, f"output={output}"]) == 0
    return json.loads(output.read_text())["text"]


def test_fastchats_own_server_answers_with_the_text_of_run_pipe(chat, text):  # its streams need an older pydantic
    _, server, _ = chat
    asked = {"model": "toy", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as sdk:
        got = sdk.chat.completions.create(**asked)
        assert got.choices[0].message.content == text and got.usage.completion_tokens == 24
        assert got.choices[0].finish_reason == "length"
        found = sdk.completions.create(model="toy", prompt="Name a dog.", max_tokens=6, temperature=0, logprobs=1)
        assert len(found.choices[0].logprobs.tokens) == 6 == len(found.choices[0].logprobs.token_logprobs)


def test_a_worker_tells_cumulative_texts_with_zero_bytes_between_through_the_controller_too(chat, text):
    controller, _, worker = chat
    conversation = conversation_of("vicuna")
    conversation.append_message(conversation.roles[0], QUESTION)
    conversation.append_message(conversation.roles[1], None)
    asked = {"model": "toy", "prompt": conversation.get_prompt(), "temperature": 0.0, "max_new_tokens": 24,
             "top_k": -1, "top_p": 1.0, "stop": [], "stop_token_ids": None, "presence_penalty": 0.0}
    for address in (worker.url, controller):
        data = httpx.post(f"{address}/worker_generate_stream", json={**asked, "echo": False}, timeout=600).content
        states = [json.loads(part) for part in data.split(b"\0")[:-1]]
        texts = [state["text"] for state in states]
        assert texts[-1] == text
        assert all(text.startswith(one) for one in texts) and len(states) > 3
        assert [state["finish_reason"] for state in states[-2:]] == [None, "length"]
    echoed = worker.client.post("/worker_generate", json={**asked, "echo": True}).json()
    assert echoed["text"] == asked["prompt"] + text and echoed["error_code"] == 0
    count = worker.client.post("/count_token", json={"model": "toy", "prompt": asked["prompt"]}).json()["count"]
    assert echoed["usage"]["prompt_tokens"] == count
    assert worker.client.post("/model_details", json={"model": "toy"}).json() == {"context_length": 2048}
    assert worker.client.post("/worker_get_conv_template").json()["conv"]["name"] == "vicuna_v1.1"
    status = httpx.post(f"{controller}/worker_get_status", timeout=600).json()
    assert status == {"model_names": ["toy"], "speed": 1, "queue_length": 0}


@pytest.mark.parametrize(("fields", "code", "word"), [
    ({"prompt": "fox " * 5000}, 40303, "shorten"),
    ({"prompt": "a", "images": ["x"]}, 40302, "images"),
    ({"prompt": "a", "stop_token_ids": [5]}, 40302, "stop_token_ids"),
    ({"prompt": ["a", "b"]}, 40302, "one prompt"),
    ({"prompt": "a", "presence_penalty": 3.0}, 40302, "presence_penalty"), ({}, 40302, "prompt")])
def test_what_a_worker_cannot_do_is_an_error_in_fastchats_form(chat, fields, code, word):
    worker = chat[2]
    streamed = worker.client.post("/worker_generate_stream", json=fields)
    whole = worker.client.post("/worker_generate", json=fields).json()
    assert json.loads(streamed.content.rstrip(b"\0")) == whole
    assert whole["error_code"] == code and word in whole["text"]


class Forgets(BaseHTTPRequestHandler):
    """A controller that fails once, and forgets its worker at the first beat."""

    def do_POST(self):
        found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append((self.path, found))
        beats = [path for path, _ in self.server.heard if "beat" in path]
        self.send_response(500 if len(self.server.heard) == 1 else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"exist": len(beats) != 1}).encode())

    def log_message(self, *args):
        pass


def test_a_controller_that_fails_is_asked_again_and_one_that_forgets_hears_of_the_worker_again(capfd):
    server = HTTPServer(("127.0.0.1", 0), Forgets)
    server.heard = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    class Idle:
        jobs, health = {1, 2}, Health("loading")

    config = parse([f"controller=http://127.0.0.1:{server.server_port}"], "", kind=WorkerConfig)
    worker = fastchat.Worker(Idle, config, "toy")

    async def beats():
        beating = asyncio.ensure_future(worker.beat("http://here:1", interval=0.01, retry=0.01))
        await asyncio.sleep(0.05)
        assert server.heard == []  # the pipeline is not ready
        Idle.health = Health("ready")
        while len(server.heard) < 6:
            await asyncio.sleep(0.01)
        beating.cancel()

    asyncio.run(beats())
    server.shutdown()
    thread.join()
    server.server_close()
    paths = [path for path, _ in server.heard[:6]]
    assert paths == ["/register_worker"] * 2 + ["/receive_heart_beat", "/register_worker"] + ["/receive_heart_beat"] * 2
    assert server.heard[0][1]["worker_name"] == "http://here:1"
    assert server.heard[2][1]["queue_length"] == 2
    assert server.heard[0][1]["worker_status"] == {"model_names": ["toy"], "speed": 1, "queue_length": 2}
    assert capfd.readouterr().err.count("does not answer") == 1


@pytest.mark.parametrize(("words", "said"), [
    ([], "controller= is not an address of a controller"), (["controller=here"], "controller=here is not an address"),
    ([f"controller={CONTROLLER}", "worker=x"], "worker=x is not an address"),
    ([f"controller={CONTROLLER}", "api_key=x"], "api_key does not exist in FastChat"),
    ([f"controller={CONTROLLER}", "template=own"], "template=own cannot be passed"),
    ([f"controller={CONTROLLER}", "host=10.0.0.1"], "add open=true"),
    ([f"controller={CONTROLLER}", "host=0.0.0.0", "open=true"], "add worker=http://NAME:PORT")])
def test_a_start_that_cannot_work_is_one_sentence(capfd, words, said):
    assert run_command(fastchat.serve, words) == 2
    err = capfd.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1
