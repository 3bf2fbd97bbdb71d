"""Starts runs of tba.py as forks of one interpreter that has already imported everything.

    python tests/starter.py FILE_DESCRIPTOR     # of a listening socket; runs until stdin closes

Then it kills whatever the tests have started and left behind: if pytest is killed, nothing remains.

`python tba.py` spends about nine seconds on imports. A fork executes the same tba.py as `__main__`
in a new session: only the imports are shared.

A client connects and sends arguments, environment, working directory and two files for the run's
output. It receives the run's pid, and its wait status once the run has ended.
"""

import ast
import contextlib
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "tba.py"
INT = struct.Struct("i")
# imported by functions of tba.py and of its libraries
LATE_IMPORTS = (
    "accelerate.utils.fsdp_utils datasets matplotlib.backends.backend_agg matplotlib.figure "
    "torch._dynamo transformers.models.llama.modeling_llama"
).split()


def serve(listener: socket.socket) -> None:
    """Fork a run for each connection; imports begin with the first one."""
    # Python 3.12 warns of jemalloc's thread, the only other one
    warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
    code = None
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if code is None:
            code = compile_and_import()
        if os.fork() == 0:
            start_run(connection, code)
        connection.close()


def compile_and_import() -> types.CodeType:
    """tba.py's code; every module that it imports is imported, and there is still one thread.

    OpenBLAS starts threads when numpy is imported, which forks would lack, so it gets only one.
    Forked runs differ from a user's in this alone: numpy multiplies matrices on one core. OpenMP
    starts its threads at their first use, in the run; tba.py sets their number.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    tree = ast.parse(PROGRAM.read_text(), str(PROGRAM))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), str(PROGRAM), "exec"), {})
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    threads = [name for name in threads if name != "jemalloc_bg_thd"]  # it survives a fork
    assert len(threads) == 1, f"forks would lack the threads {threads}"
    return compile(tree, str(PROGRAM), "exec")


def start_run(connection: socket.socket, code: types.CodeType) -> NoReturn:
    """In a fork: fork the run, and report its pid and its exit status."""
    request, files, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    arguments, environment, folder = json.loads(request)
    pid = os.fork()
    if pid == 0:
        try:
            become_run(arguments, environment, folder, files, code)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    for file in files:
        os.close(file)
    try:
        connection.sendall(INT.pack(pid))
        _, status = os.waitpid(pid, 0)
        connection.sendall(INT.pack(status))
    finally:
        os._exit(0)


def become_run(
    arguments: list[str], environment: dict[str, str], folder: str, files: list[int],
    code: types.CodeType,
) -> None:  # fmt: skip
    """Execute tba.py as a new interpreter with these arguments and files would."""
    os.setsid()
    restore_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for name in ("huggingface_hub.constants", "datasets.config"):  # they read HF_HOME and others
        importlib.reload(sys.modules[name])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for i, file in enumerate((nothing, *files)):
        os.dup2(file, i)
    os.closerange(3, 1 << 16)
    tempfile.tempdir = None  # the environment may name another one
    multiprocessing.current_process().authkey = os.urandom(32)
    sys.argv = [str(PROGRAM), *arguments]
    sys.path[0] = str(ROOT)
    main = types.ModuleType("__main__")  # in place of this one, also for multiprocessing
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    main.__file__ = str(PROGRAM)
    exec(code, main.__dict__)


def restore_signals() -> None:
    """Undo inherited SIG_IGNs: of `nohup`, and of a background job in a script."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def kill_all_tests(session: str) -> None:
    """Kill all other processes that were started with this session's TBA_TESTS."""
    mark = f"TBA_TESTS={session}".encode()
    left = True
    while left:
        left = False
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if pid != os.getpid() and mark in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
                    left = True
        time.sleep(0.05)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    kill_all_tests(os.environ["TBA_TESTS"])
