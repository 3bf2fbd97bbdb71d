"""The tests themselves: they end with pytest, however it ends."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

from harness import GONE, ROOT, wait_until


def processes_with(variable: str) -> list[Path]:
    """Live processes that were started with this variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(path)
        except OSError:
            pass  # it has ended
    return found


def test_a_killed_pytest_leaves_no_process(tmp_path):
    """Neither the starter nor a run, which would not end by itself."""
    mark = f"TBA_MARK={secrets.token_hex(8)}"
    command = [sys.executable, "-m", "pytest", str(ROOT), "-n", "0", "--basetemp", tmp_path / "t"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "-k", "test_one_run_suffers_all_faults"],
            cwd=tmp_path,
            env=os.environ | dict([mark.split("=")]),
            stdout=log,
            stderr=log,
        )
    metrics = lambda: list((tmp_path / "t").glob("**/metrics.jsonl"))
    log = lambda: (tmp_path / "log").read_text()
    wait_until(lambda: metrics() or process.poll() is not None, "a run within a test", log)
    assert process.poll() is None, log()
    assert len(processes_with(mark)) > 5  # pytest, starter, Trainer, fork server, ...
    process.kill()
    process.wait()
    wait_until(lambda: not processes_with(mark), "every process gone", log, GONE)
