"""Connections of HTTP: who sends nothing is closed, who sends at once is answered, and a body has one end."""
import asyncio
import errno
import socket
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from config.serve_config import ServeConfig
from serve import connections, running
from serve.app import Server
from serve.auth import Framing
from serve.connections import LoopErrorHandler, connection_limits
from serve.engine import Engine, Health, ServerLimits
from serve.running import Listener
from serve.start_line import PipelineFacts, reachable_url, start_lines
from tests.serving import read_all

REQUEST = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Answering:
    """An application whose answers at /held wait for `going`."""

    def __init__(self):
        self.begun, self.going = threading.Event(), threading.Event()
        self.complains = None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        self.complains = asyncio.get_running_loop().get_exception_handler()
        if scope["path"] == "/held":
            self.begun.set()
            await asyncio.to_thread(self.going.wait)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def listening(app):
    """The port at which an application is served, and `connect`, whose sockets are closed in the end."""
    ports = []
    up = threading.Event()
    listener = Listener(app, ServeConfig.of(port=0),
                        lambda url: (ports.append(int(url.rsplit(":", 1)[1])),
                                     up.set()),
                        lambda: None)
    thread = threading.Thread(target=listener.run)
    thread.start()
    with ExitStack() as opened:
        opened.callback(thread.join)
        opened.callback(lambda: setattr(listener, "should_exit", True))
        assert up.wait(60)

        def connect(data=b"", address="127.0.0.1"):
            connection = socket.create_connection(("127.0.0.1", ports[0]), timeout=60, source_address=(address, 0))
            opened.enter_context(connection).sendall(data)
            return connection

        yield connect


def answers(connection):
    """How many answers a connection brings before it is closed."""
    return read_all(connection).count(b"HTTP/1.1 200")


def is_closed(connection):
    """Whether the server has closed a connection without a word; waits for a word or the end."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def app():
    held = Answering()
    yield held
    held.going.set()


def test_who_sends_nothing_or_half_a_head_is_closed_and_a_long_answer_is_not(app, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    with listening(app) as connect:
        held = connect(REQUEST % b"held")
        assert app.begun.wait(60)
        for data in (b"", b"GET / HT", REQUEST[:-2] % b""):
            assert is_closed(connect(data))
        half_behind = connect(REQUEST % b"")
        assert half_behind.recv(1) == b"H"
        half_behind.sendall(b"GET /")
        assert answers(half_behind) == 0
        app.going.set()
        assert answers(held) == 1


def test_of_too_many_the_one_whose_client_is_silent_the_longest_is_closed(app, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 600)
    monkeypatch.setattr(running, "connection_limits", lambda config: (4, 16))
    with listening(app) as connect:
        held = connect(REQUEST % b"held")
        assert app.begun.wait(60)
        silent, next_silent = connect(), connect()  # one more than half of the room, from one address
        assert is_closed(silent)
        elsewhere = [connect(address="127.0.0.2"), connect(REQUEST % b"", address="127.0.0.2")]
        assert elsewhere[1].recv(1) == b"H"
        late = connect(REQUEST % b"", address="127.0.0.3")  # one more than the room
        assert is_closed(next_silent)
        assert late.recv(1) == b"H"
        app.going.set()
        assert held.recv(1) == b"H"


def test_the_room_for_connections_is_a_part_of_the_files_that_may_be_open(monkeypatch):
    allowed = {"now": (256, 1200)}
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: allowed["now"])
    monkeypatch.setattr(connections.resource, "setrlimit", lambda which, both: allowed.update(now=both))
    assert connection_limits(ServeConfig.of()) == (400, 100)
    assert allowed["now"] == (1200, 1200)
    allowed["now"] = (256, 1 << 20)
    assert connection_limits(ServeConfig.of(queue=1000)) == (512 + 2 * 1004, 2048)


def test_that_files_run_short_is_one_line_and_other_errors_are_reported_as_ever(app, capsys):
    others = []

    class Loop:
        default_exception_handler = staticmethod(others.append)

    complains = LoopErrorHandler()
    for _ in range(3):
        complains(Loop, {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")})
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "no more files can be opened" in said and others == []
    complains(Loop, {"message": "something else"})
    assert others == [{"message": "something else"}]
    with listening(app) as connect:
        assert connect(REQUEST % b"").recv(1) == b"H"
    assert isinstance(app.complains, LoopErrorHandler)


def test_what_is_no_http_behind_an_answer_ends_the_connection_without_a_traceback(app, caplog):
    with listening(app) as connect:
        connection = connect(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert connection.recv(1) == b"H"
        connection.sendall(b"no number\r\n")
        assert b"HTTP/1.1" not in read_all(connection)
        assert connect(b"no HTTP\r\n\r\n").recv(12) == b"HTTP/1.1 400"
    assert caplog.records == []


# --- what a request may say -------------------------------------------------------------------------------------------

TWO_ENDS = [(b"host", b"localhost"), (b"content-length", b"5"), (b"transfer-encoding", b"chunked")]


def response(app, method="GET", path="/v1/models", headers=((b"host", b"localhost"),)):
    """The status and the headers of what an application answers."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": list(headers)}
    asyncio.run(app(scope, None, send))
    return sent[0]["status"], dict(sent[0]["headers"])


def test_a_request_whose_body_has_two_ends_is_refused_and_nothing_behind_it_is_read(app):
    two = b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with listening(Framing(app)) as connect:
        connection = connect(two + REQUEST % b"")
        said = read_all(connection)
    assert said.count(b"HTTP/1.1") == 1 and said.startswith(b"HTTP/1.1 400") and b'"code": "framing"' in said


def test_the_server_refuses_it_before_anything_else_answers():
    asked = [(b"origin", b"http://a.example"), (b"access-control-request-method", b"GET")]
    status, headers = response(Server(None, ServeConfig.of(cors="*"), "toy").app, "OPTIONS", headers=TWO_ENDS + asked)
    assert (status, headers[b"connection"]) == (400, b"close")


@pytest.mark.parametrize("status, ready, alive, retry", [
    ("loading", 503, 200, b"5"), ("restarting", 503, 200, b"5"), ("recovering", 503, 200, b"5"),
    ("silent", 503, 200, b"5"), ("hung for good", 503, 503, b"5"), ("lost", 503, 503, None),
    ("stopped", 503, 200, None), ("ready", 200, 200, None)])
def test_readiness_health_and_models_agree_and_liveness_fails_only_where_a_restart_helps(status, ready, alive, retry):
    engine = Engine(lambda: None, ServerLimits(1, 1, 1))
    engine.state, engine._ring_timeout = Health("ready"), float("inf")
    if status == "recovering":
        engine._ring = SimpleNamespace(loss="rank 2 was lost: its connection broke")
    elif status in ("silent", "hung for good"):
        engine._ring_timeout, engine._recover_seconds = 0, float("inf") if status == "silent" else 0
    else:
        engine.state = Health(status)
    server = Server(engine, ServeConfig.of(api_key="k"), "toy")
    key = ((b"host", b"localhost"), (b"x-api-key", b"k"))
    for path in ("/health", "/readyz", "/v1/models", "/v1/models/toy"):
        code, headers = response(server.app, path=path, headers=key)
        assert (code, headers.get(b"retry-after")) == (ready, retry)

    assert response(server.app, path="/livez")[0] == alive  # without a key


def test_the_root_of_the_api_leads_to_the_page():
    server = Server(None, ServeConfig.of(api_key="k"), "toy")
    for path in ("/v1", "/v1/"):
        code, headers = response(server.app, path=path)
        assert (code, headers[b"location"]) == (307, b"/")


# --- the lines of a start ---------------------------------------------------------------------------------------------

FACTS = PipelineFacts("streaming", "eagle+suffix", 4, "0+7+7+8+8", "emulated", "jetson-7b")


def test_the_start_names_page_api_model_stages_method_and_end():
    assert start_lines("http://192.168.1.7:8000", "smollm2", FACTS).splitlines() == [
        "flowspec: ready",
        "  page    http://192.168.1.7:8000",
        "  API     http://192.168.1.7:8000/v1",
        "  model   smollm2, 4 stages, layers 0+7+7+8+8",
        "  method  streaming, guesses from eagle+suffix   times emulated as jetson-7b",
        "  end     Ctrl-C"]
    plain = start_lines("http://[::1]:8000", "toy", PipelineFacts("ar", "none", 1, "8", "real", ""))
    assert "http://[::1]:8000   this machine only; for others add host=0.0.0.0 api_key=SECRET" in plain
    assert "  model   toy, 1 stage, layers 8\n  method  ar\n" in plain


@pytest.mark.parametrize("host, way, url", [
    ("127.0.0.1", "10.0.0.9", "http://127.0.0.1:8000"), ("0.0.0.0", "10.0.0.9", "http://10.0.0.9:8000"),
    ("::", "10.0.0.9", "http://10.0.0.9:8000"), ("0.0.0.0", "", f"http://{socket.gethostname()}:8000"),
    ("fd00::7", "", "http://[fd00::7]:8000")])
def test_the_address_of_the_page_is_one_that_another_device_can_open(monkeypatch, host, way, url):
    monkeypatch.setattr("serve.start_line.way_to", lambda address: way)
    assert reachable_url(host, 8000) == url


def test_a_start_is_announced_once_whichever_comes_first(capsys):
    engine = Engine(lambda: None, ServerLimits(1, 1, 1))
    server = Server(engine, ServeConfig.of(), "toy")
    server.announce()
    server.listens("http://127.0.0.1:8000")
    assert not capsys.readouterr().out
    engine.facts = FACTS
    server.announce()
    server.announce()  # after a restart
    assert capsys.readouterr().out.count("/v1") == 1
