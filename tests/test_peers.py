"""Peers that have no business in a run: the Manager, its sockets and the weight group's ports."""

import contextlib
import multiprocessing as mp
import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing import AuthenticationError, connection

import psutil
import pytest
from conftest import ROOT, arguments, read_lines
from harness import HOOKS, Run, processes_of, steps_of, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tba

KEY = secrets.token_bytes(32)


class Canary:
    """Unpickled, it leaves a trace."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """A Manager as a run starts it, on TCP; (address, canary's path)."""
    ours, theirs = mp.Pipe()
    tba.RunManager.HANDSHAKE = 2
    arguments = ("127.0.0.1", 0), KEY, theirs
    process = mp.get_context("fork").Process(target=tba.serve_manager, args=arguments)
    process.start()
    yield ours.recv(), str(tmp_path_factory.mktemp("canary") / "sang")
    process.kill()
    process.join()


def framed(content: bytes) -> bytes:
    return struct.pack("!i", len(content)) + content


def talk(address, *messages: bytes, patience: float = 10) -> bytes:
    """Send raw bytes to a port; returns what it answered before it hung up."""
    answer = b""
    with socket.create_connection(address, timeout=patience) as peer, contextlib.suppress(OSError):
        for message in messages:
            peer.sendall(message)
        peer.shutdown(socket.SHUT_WR)
        while block := peer.recv(4096):
            answer += block
    return answer


def works(address) -> None:
    """The Manager serves who has the key."""
    client = tba.RunManager(address, KEY)
    client.connect()
    board = client.Blackboard()
    board.set("key", b"value")
    assert board.get(["key", "other"]) == [b"value", None] and board.add("n", 2) == 2


def attacks(canary: str) -> dict[str, list[bytes]]:
    load = pickle.dumps(Canary(canary))
    call = pickle.dumps((None, "create", ("Queue", Canary(canary)), {}))
    answer = framed(b"\0" * 16)
    return {
        "a pickle at once": [load],
        "a framed pickle": [framed(load)],
        "a pickle for the digest": [framed(load), framed(load), framed(load)],
        "a wrong digest, then a call": [answer, framed(b"#CHALLENGE#" + b"x" * 20), framed(call)],
        "a welcome of its own": [framed(b"#WELCOME#"), framed(call)],
        "our own challenge back": [framed(b"#CHALLENGE#" + b"y" * 20), framed(call)],
        "a huge length": [struct.pack("!i", 2**31 - 1) + load],
        "a long length": [struct.pack("!iQ", -1, 2**62) + load],
        "a negative length": [struct.pack("!i", -7) + load],
        "HTTP": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
        "nothing": [],
    }


@pytest.mark.parametrize("attack", attacks(""))
def test_no_key_no_unpickling(attack, manager):
    address, canary = manager
    answer = talk(address, *attacks(canary)[attack])
    assert not os.path.exists(canary)
    assert answer.count(b"#CHALLENGE#") <= 1 and b"#WELCOME#" not in answer
    works(address)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    parts=st.lists(st.binary(max_size=200) | st.just(b"\x80\x04."), max_size=5), frame=st.booleans()
)
def test_fuzz(parts, frame, manager):
    address, canary = manager
    mark = pickle.dumps(Canary(canary))
    messages = [framed(part) if frame else part for part in [*parts, mark, *parts]]
    talk(address, *messages)
    assert not os.path.exists(canary)


def test_after_the_fuzz_it_works_and_the_canary_would_have_sung(manager):
    address, canary = manager
    works(address)
    with pytest.raises(AuthenticationError):
        tba.RunManager(address, secrets.token_bytes(32)).connect()
    with connection.Client(address, authkey=KEY) as peer:  # who has the key is unpickled
        peer.send((None, "dummy", (Canary(canary),), {}))
        wait_until(lambda: os.path.exists(canary), 5, "the canary")
    os.rmdir(canary)


def test_silent_peers_are_dropped_and_keep_nobody_out(manager):
    address, _ = manager
    silent = [socket.create_connection(address, timeout=10) for _ in range(100)]
    start = time.monotonic()
    works(address)
    assert time.monotonic() - start < 2
    for peer in silent:
        peer.recv(64)  # the challenge
    time.sleep(tba.RunManager.HANDSHAKE)
    for peer in silent:
        while peer.recv(4096):  # until it hangs up
            pass
        peer.close()


def test_calls_to_a_manager_that_hangs_fail(tmp_path, monkeypatch):
    ours, theirs = mp.Pipe()
    monkeypatch.setattr(tba.RunManager, "PATIENCE", 2)
    process = mp.get_context("fork").Process(
        target=tba.serve_manager, args=(f"\0tba-test-{os.getpid()}", KEY, theirs)
    )
    process.start()
    client = tba.RunManager(ours.recv(), KEY)
    client.connect()
    inbox = client.Queue()
    inbox.put("before")
    os.kill(process.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(BlockingIOError):
        inbox.get()
    with pytest.raises(BlockingIOError):
        client.connect()
    assert 3 < time.monotonic() - start < 8
    process.kill()
    process.join()


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses on which a process listens."""
    found = psutil.Process(pid).net_connections("inet")
    return [tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN]


def test_a_run_listens_on_loopback_only_and_its_key_is_nowhere(gsm8k, tmp_path):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, num_searchers=2, steps=100_000, eval_every=0))
    run.reaches(5)
    sent_weights = lambda: {s for s, version, _ in run.noted("weights") if version > 0}
    run.until(lambda: sent_weights() == {0, 1}, 60, "both Searchers in the weight group")
    everyone = processes_of(run.process.pid)
    addresses = [address for pid in everyone for address in listening(pid)]
    assert addresses and all(host == "127.0.0.1" for host, _ in addresses)  # the weight group's
    for pid in everyone:  # garbage to each port, over and over, changes nothing
        for address in listening(pid):
            for garbage in (b"", b"\0" * 8, secrets.token_bytes(64), b"GET / HTTP/1.1\r\n\r\n"):
                talk(address, garbage, patience=0.5)
    run.reaches(steps_of(out) + 20)
    metrics = read_lines(out / "metrics.jsonl")
    assert metrics[-1]["version"] > metrics[4]["version"] and metrics[-1]["searchers_alive"] == 2
    run.process.send_signal(signal.SIGINT)
    assert "warning" not in run.ends(130)


@pytest.mark.slow
def test_remote_searchers_join_with_the_key_and_no_one_without(gsm8k, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, key = f"127.0.0.1:{port}", secrets.token_hex(32)
    flags = {"steps": 100_000, "num_searchers": 1, "eval_every": 0, "searcher_timeout": 15,
             "bind": address, "remote_searchers": 1}  # fmt: skip
    monkeypatch.setenv("TBA_AUTHKEY", key)
    run = Run(out, arguments(gsm8k, out, **flags))
    run.reaches(3)

    def join(secret: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "tba.py"), "--join", address,
             "--task_file", str(HOOKS)],
            env={**os.environ, "TBA_AUTHKEY": secret},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    stranger = join(secrets.token_hex(32))
    _, err = stranger.communicate(timeout=60)
    assert stranger.returncode == 1 and err.count("\n") == 1 and "rejected" in err
    for messages in attacks(str(tmp_path / "sang")).values():
        talk(("127.0.0.1", port), *messages)
    assert not (tmp_path / "sang").exists()

    friend = join(key)
    run.says("Searcher 1 joined from")
    wait_until(lambda: " 1 " in stored(run), 60, "its data")
    surplus = join(key)
    _, err = surplus.communicate(timeout=60)
    assert surplus.returncode == 1 and "no seat is free" in err
    friend.send_signal(signal.SIGSTOP)  # found out by its silence
    run.says("its seat is free for another")
    friend.send_signal(signal.SIGCONT)
    assert friend.wait(60) == 0  # it learns that it is not wanted any more
    friend = join(key)
    run.says("joined from", times=2)
    before = stored(run).count("1 ")
    wait_until(lambda: stored(run).count("1 ") > before, 60, "its successor's data")
    friend.send_signal(signal.SIGTERM)
    run.says("Searcher 1 ended with exit code 143", 10)  # it says so: no silence to be waited out
    assert friend.wait(60) == 0
    friend = join(key)
    run.says("joined from", times=3)
    run.process.send_signal(signal.SIGINT)
    text = run.ends(130)
    _, err = friend.communicate(timeout=60)
    assert friend.returncode in (0, 1) and "Traceback" not in err
    assert key not in text
    for path in out.rglob("*.json*"):
        assert key not in path.read_text()


def stored(run: Run) -> str:
    """Which Searchers' groups are in the buffer."""
    return "".join(f" {line.split()[0]} " for line in (run.faults / "stored").open())
