"""Clients that leave, over real sockets: their requests end and their blocks return."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.fake_client import FakeEngineClient
from tests.server.support import QUESTION, eventually, socket_server

CHAT = "/v1/chat/completions"


@pytest.fixture
def client() -> FakeEngineClient:
    return FakeEngineClient([["word "] * 1000], delay=0.002)


@pytest.fixture(autouse=True)
def nothing_logged_as_a_fault(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client that leaves is no fault of the server."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []


@pytest.fixture
def port(client: FakeEngineClient) -> Iterator[int]:
    with socket_server(client) as port:
        yield port


def send_request(port: int, body: dict[str, object], path: str = CHAT) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def reset(connection: socket.socket) -> None:
    """Close with RST, as a killed process or a lost network does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_events(connection: socket.socket, count: int) -> None:
    received = b""
    while received.count(b"data: ") < count:
        piece = connection.recv(4096)
        assert piece
        received += piece


def wait_for_submission(client: FakeEngineClient, count: int) -> None:
    eventually(lambda: len(client.submitted) == count)


def assert_well(port: int, client: FakeEngineClient) -> None:
    """Nothing is left behind, and an ordinary request is answered."""
    eventually(lambda: client.running == {})
    assert client.free_blocks == client.info.num_kv_blocks
    body = {"messages": QUESTION, "max_tokens": 3}
    response = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body)
    assert response.json()["choices"][0]["message"]["content"] == "word word word "


@pytest.mark.parametrize("leave", [reset, socket.socket.close], ids=["reset", "close"])
def test_streams_dropped_after_two_chunks_are_aborted(
    client: FakeEngineClient, port: int, leave: Callable[[socket.socket], None]
) -> None:
    for _ in range(20):
        connection = send_request(port, {"messages": QUESTION, "stream": True})
        read_events(connection, 2)
        leave(connection)
    eventually(lambda: len(client.aborted) == 20)
    assert_well(port, client)


@pytest.mark.parametrize("leave", [reset, socket.socket.close], ids=["reset", "close"])
def test_unstreamed_requests_of_clients_that_left_are_aborted(
    client: FakeEngineClient, port: int, leave: Callable[[socket.socket], None]
) -> None:
    for count in range(1, 21):
        connection = send_request(port, {"messages": QUESTION})
        wait_for_submission(client, count)
        leave(connection)
    eventually(lambda: len(client.aborted) == 20)
    assert client.generated < 20 * 1000
    assert_well(port, client)


@pytest.mark.parametrize("stream", [True, False])
def test_requests_that_wait_for_their_first_token_are_aborted(
    client: FakeEngineClient, port: int, stream: bool
) -> None:
    client.delay = 60
    for count in range(1, 6):
        connection = send_request(port, {"messages": QUESTION, "stream": stream})
        wait_for_submission(client, count)
        reset(connection)
    eventually(lambda: len(client.aborted) == 5)
    client.delay = 0
    assert_well(port, client)


@pytest.mark.parametrize("stream", [True, False])
def test_all_requests_of_a_dropped_batch_are_aborted(client: FakeEngineClient, port: int, stream: bool) -> None:
    body = {"prompt": ["a", "b", "c"], "stream": stream, "max_tokens": -1}
    connection = send_request(port, body, "/v1/completions")
    eventually(lambda: len(client.running) == 3)
    reset(connection)
    eventually(lambda: len(client.aborted) == 3)
    assert_well(port, client)


@pytest.mark.parametrize("stream", [True, False])
def test_all_answers_of_a_dropped_request_are_aborted(client: FakeEngineClient, port: int, stream: bool) -> None:
    """Public bug vllm#14326: the children of n kept generating."""
    connection = send_request(port, {"messages": QUESTION, "stream": stream, "n": 4, "ignore_eos": True})
    eventually(lambda: len(client.running) == 4)
    if stream:
        read_events(connection, 1)
    reset(connection)
    eventually(lambda: len(client.aborted) == 4)
    assert_well(port, client)


def test_headers_and_role_come_before_the_first_token(client: FakeEngineClient, port: int) -> None:
    client.delay = 60
    connection = send_request(port, {"messages": QUESTION, "stream": True})
    read_events(connection, 1)
    reset(connection)
    eventually(lambda: len(client.aborted) == 1)


def test_a_reader_that_stalls_holds_up_nobody(client: FakeEngineClient, port: int) -> None:
    client.answers = [["x" * 100_000] * 1000]
    client.delay = 0
    stalled = send_request(port, {"messages": QUESTION, "stream": True})
    read_events(stalled, 1)
    response = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json={"messages": QUESTION, "max_tokens": 1})
    assert response.status_code == 200
    assert len(client.running) == 1
    reset(stalled)
    eventually(lambda: client.running == {})


def test_the_connection_serves_the_next_request_after_a_stream(client: FakeEngineClient, port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for stream in [True, False, True]:
            response = http.post(CHAT, json={"messages": QUESTION, "max_tokens": 3, "stream": stream})
            assert response.status_code == 200
            assert "connection" not in response.headers


@pytest.mark.parametrize("raw", [b"\x16\x03\x01garbage\r\n\r\n", b"GET\r\n\r\n", b"POST /v1/models HTTP/9.9\r\n\r\n"])
def test_bytes_that_are_no_http_harm_nobody(client: FakeEngineClient, port: int, raw: bytes) -> None:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(raw)
    connection.recv(4096)
    connection.close()
    assert_well(port, client)


def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(client: FakeEngineClient, port: int) -> None:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    connection.sendall(head.encode())
    reset(connection)
    assert_well(port, client)
    assert len(client.submitted) == 1


def test_a_too_large_body_is_told_before_the_connection_ends() -> None:
    client = FakeEngineClient()
    with socket_server(client, max_body_bytes=4096) as port, httpx.Client() as http:
        url = f"http://127.0.0.1:{port}{CHAT}"
        contents: list[bytes | Iterator[bytes]] = [b"x" * (4 << 20), iter([b"x" * 4096] * 1024)]
        for content in contents:
            response = http.post(url, content=content, headers={"content-type": "application/json"})
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert http.post(url, json={"messages": QUESTION}).status_code == 200


@pytest.mark.parametrize("leave", [reset, socket.socket.close])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_pipelined_and_left_is_noticed(
    port: int, client: FakeEngineClient, stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    connection = send_request(port, {"messages": QUESTION, "stream": stream})
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
    eventually(lambda: len(client.running) == 1)
    leave(connection)
    eventually(lambda: not client.running)
    assert client.aborted


def test_a_client_that_pipelines_gets_the_first_answer_and_a_closed_connection(port: int) -> None:
    with send_request(port, {"messages": QUESTION, "max_tokens": 3}) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nnot json!")
        received = b""
        while piece := connection.recv(4096):
            received += piece
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"word word word" in received
