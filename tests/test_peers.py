"""Peers that have no business in a run, and Searchers that join it from elsewhere."""

import contextlib
import multiprocessing as mp
import os
import pickle
import random
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing import AuthenticationError, connection

import pytest
from conftest import ROOT, arguments
from harness import GONE, PATIENCE, Run, processes_of, searcher_pids, wait_until

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
    manager = tba.RunManager(("127.0.0.1", 0), KEY, ctx=mp.get_context("fork"))
    manager.start()
    yield manager.address, str(tmp_path_factory.mktemp("canary") / "sang")
    manager.shutdown()


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
    shared, messages = client.dict(), client.Queue()
    shared["weights-1", "key"] = b"value"
    messages.put(("ready", 0, 0))
    assert shared["weights-1", "key"] == b"value" and messages.get() == ("ready", 0, 0)


def attacks(canary: str) -> dict[str, list[bytes]]:
    load = pickle.dumps(Canary(canary))
    call = pickle.dumps((None, "create", ("Queue", Canary(canary)), {}))
    return {
        "a pickle at once": [load],
        "pickles in frames": [framed(load), framed(load), framed(load)],
        "a wrong digest, then a call": [framed(b"\0" * 16), framed(call)],
        "a welcome of its own": [framed(b"#WELCOME#"), framed(call)],
        "a challenge of its own": [framed(b"#CHALLENGE#" + b"y" * 20), framed(call)],
        "a huge length": [struct.pack("!i", 2**31 - 1) + load],
        "HTTP": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
        "nothing": [],
    }


def test_without_the_key_nothing_is_unpickled_and_with_it_the_manager_works(manager):
    address, canary = manager
    for messages in attacks(canary).values():
        assert b"#WELCOME#" not in talk(address, *messages)
    rng, mark = random.Random(0), framed(pickle.dumps(Canary(canary)))
    for _ in range(200):  # anything at all, with a pickle in its midst
        parts = [rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(4))]
        parts = [framed(part) if rng.random() < 0.5 else part for part in parts]
        talk(address, *parts, mark, *parts)
    assert not os.path.exists(canary)
    silent = [socket.create_connection(address, timeout=PATIENCE) for _ in range(20)]
    start = time.monotonic()
    works(address)  # those who say nothing keep nobody out
    assert time.monotonic() - start < 10
    for peer in silent:
        peer.close()
    with pytest.raises(AuthenticationError):
        tba.RunManager(address, secrets.token_bytes(32)).connect()
    with connection.Client(address, authkey=KEY) as peer:  # who has the key is unpickled
        peer.send((None, "dummy", (Canary(canary),), {}))
        wait_until(lambda: os.path.exists(canary), "the canary")


@pytest.mark.slow
def test_remote_searchers_join_with_the_key_and_no_one_without(gsm8k, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, key = f"127.0.0.1:{port}", secrets.token_hex(32)
    flags = {"steps": 100_000, "num_searchers": 1, "eval_every": 0, "searcher_timeout": 10,
             "bind": address, "remote_searchers": 1, "sync_every": 50}  # fmt: skip
    monkeypatch.setenv("TBA_AUTHKEY", key)
    run = Run(out, arguments(gsm8k, out, **flags))
    run.reaches(3)

    def join(secret: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "tba.py"), "--join", address],
            env={**os.environ, "TBA_AUTHKEY": secret},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def refused(process: subprocess.Popen, words: str) -> None:
        said = "".join(process.communicate(timeout=PATIENCE))
        assert process.returncode and said.count("\n") == 1, said
        assert said.startswith("tba.py: error: --join") and words in said

    stranger = join(secrets.token_hex(32))
    friend = join(key)
    refused(stranger, "digest")
    for messages in attacks(str(tmp_path / "sang")).values():
        talk(("127.0.0.1", port), *messages)
    assert not (tmp_path / "sang").exists()
    run.says("Searcher 1 joined from")
    by_remote = lambda: sum(searcher == 1 for searcher, _ in run.noted("stored"))
    run.until(lambda: by_remote() >= 3, "its groups")
    refused(join(key), "every place of --remote_searchers is taken")

    for pid in processes_of(friend.pid):  # found out by its silence, and accepted again
        os.kill(pid, signal.SIGSTOP)
    run.says("Searcher 1 was silent for 10 s (--searcher_timeout)")
    run.says("its place is free")
    before = by_remote()
    for pid in processes_of(friend.pid):
        os.kill(pid, signal.SIGCONT)
    run.says("Searcher 1 joined from", times=2)
    run.until(lambda: by_remote() > before + 3, "groups of its successor")

    run.until(lambda: searcher_pids(friend.pid), "its Searcher")
    joined = run.text().count("Searcher 1 joined from")
    os.kill(searcher_pids(friend.pid)[-1], signal.SIGKILL)  # restarted by who joined
    run.says("Searcher 1 joined from", times=joined + 1)
    before = by_remote()
    run.until(lambda: by_remote() > before + 3, "groups after a restart")

    run.process.send_signal(signal.SIGINT)
    text = run.ends(130)
    said, err = friend.communicate(timeout=PATIENCE)
    assert friend.returncode == 0 and "the run has ended" in said + err and "Traceback" not in err
    wait_until(lambda: not processes_of(friend.pid), "no process of its left", seconds=GONE)
    assert key not in text
    for path in out.rglob("*.json*"):
        assert key not in path.read_text()
    stored = run.noted("stored")
    assert len(stored) == len(set(stored))
    # but for what another machine sent after the last look at the queue: made again on --resume
    last = max(number for searcher, number in stored if searcher == 1)
    lost = set(run.noted("sent")) - set(stored)
    assert all(searcher == 1 and number > last for searcher, number in lost)
