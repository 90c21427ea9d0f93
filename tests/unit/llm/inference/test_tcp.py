"""Workers on other machines reach the manager over TCP, and strangers do not."""

import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from envfleet.errors import InferenceError
from envfleet.llm import SharedLLMInferenceManager
from envfleet.llm.inference import socket_server
from envfleet.llm.inference.client import InferenceClient, frame
from envfleet.llm.inference.scripted import ScriptedEngine
from envfleet.llm.inference.tcp import HELLO_BYTES, NONCE_BYTES, PROOF_BYTES, TcpAddress
from tests.unit.llm.inference.stage import PATIENCE_S, ask, managed

ROOT = Path(__file__).parents[4]
HERE = "127.0.0.1"


def address_of(client: InferenceClient) -> TcpAddress:
    found = client.__reduce__()[1][0]
    assert isinstance(found, TcpAddress)
    return found


def stranger_at(address: TcpAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), PATIENCE_S)


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    found = b""
    with connection:
        connection.settimeout(PATIENCE_S)
        try:
            while data := connection.recv(1 << 16):
                found += data
        except ConnectionResetError:
            pass
    return found


def test_a_worker_asks_and_hands_over_by_tcp():
    code = (
        "import pickle, sys; sys.path.insert(0, '.');"
        "from tests.unit.llm.inference.stage import ask;"
        "client = pickle.loads(bytes.fromhex(sys.stdin.readline()));"
        "print(client.send('turn', client.generate(ask()).text))"
    )
    with managed(ScriptedEngine()) as llm, llm.client(HERE) as client:
        llm.on_message("turn", lambda text: text[::-1])
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            input=pickle.dumps(client).hex(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            cwd=ROOT,
            check=False,
        )
        assert done.stdout.strip() == llm.generate(ask()).text[::-1], done.stderr
        payload = bytes(range(256)) * 40_000
        assert client.send("turn", payload) == payload[::-1]
        assert address_of(llm.client(HERE)) == address_of(client)  # one socket for all
        assert "token" not in repr(address_of(client))


READ = threading.Event()


def note_that_it_was_read():
    READ.set()


class Bomb:
    """Pickles as a call that is noticed."""

    def __reduce__(self):
        return note_that_it_was_read, ()


@pytest.mark.parametrize("is_long", [False, True])
def test_nothing_is_read_of_a_stranger_without_the_token(is_long):
    with managed(ScriptedEngine()) as llm, llm.client(HERE) as client:
        message = frame(0, ("turn", Bomb()))
        with stranger_at(address_of(client)) as stranger:
            stranger.sendall(message if is_long else bytes(HELLO_BYTES) + message)
            stranger.shutdown(socket.SHUT_WR)
            assert len(all_of(stranger)) == NONCE_BYTES
        assert client.generate(ask()).text
        assert not READ.is_set()


def test_a_client_with_another_token_is_refused():
    with managed(ScriptedEngine()) as llm, llm.client(HERE) as client:
        address = address_of(client)
        with (
            InferenceClient(TcpAddress(address.host, address.port, b"guessed")) as other,
            pytest.raises(InferenceError, match="cannot be reached"),
        ):
            other.generate(ask())
        assert client.generate(ask()).text


def test_a_client_tells_nothing_to_a_manager_that_is_not_its_own():
    heard: list[bytes] = []
    with socket.create_server((HERE, 0)) as impostor:
        impostor.settimeout(PATIENCE_S)

        def pretend():
            connection, _ = impostor.accept()
            connection.sendall(bytes(NONCE_BYTES + PROOF_BYTES))
            heard.append(all_of(connection))

        thread = threading.Thread(target=pretend)
        thread.start()
        address = TcpAddress(HERE, impostor.getsockname()[1], b"right")
        with (
            InferenceClient(address) as client,
            pytest.raises(InferenceError, match="not the manager that this client is of"),
        ):
            client.send("turn", "a secret")
        thread.join(PATIENCE_S)
    assert len(heard[0]) == HELLO_BYTES


def test_a_stranger_that_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(socket_server, "HANDSHAKE_S", 0.05)
    with managed(ScriptedEngine()) as llm, llm.client(HERE) as client:
        assert len(all_of(stranger_at(address_of(client)))) == NONCE_BYTES


def test_an_address_of_another_machine_is_refused_in_one_sentence():
    with (
        SharedLLMInferenceManager(ScriptedEngine()) as llm,
        pytest.raises(InferenceError, match=r"cannot listen at 192\.0\.2\.1"),
    ):
        llm.client("192.0.2.1")


def test_nothing_listens_before_a_client_of_another_machine_is_asked_for():
    with SharedLLMInferenceManager(ScriptedEngine()) as llm:
        assert [one.sockets[0].family for one in llm._running.server._servers] == [socket.AF_UNIX]
