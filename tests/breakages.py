"""Deliberate errors in tba.py, one at a time: does the default run of the tests notice them?

    python tests/breakages.py [--section 8] [--only WORD] [--jobs 2] [--errors tests/breakages.txt]

breakages.txt has lines "SECTION TEST_FILE ...", each followed by errors, one per line:

    FUNCTION :: TEXT => OTHER TEXT

The text occurs once in the function (or class); \\n stands for a new line. Each error is made in a
copy of the project, where the section's test files run until the first failure. Prints which errors
were caught, after how many seconds and by which test, and the share of each section. An error that
hangs the tests counts as missed. pytest does not collect this file.
"""

import argparse
import ast
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 300  # seconds until the tests of a section count as hanging
MARKS = "not gpu and not vllm and not slow and not nightly and not cluster"


class Breakage(NamedTuple):
    """An error, and the test files that should notice it."""

    section: str
    files: list[str]
    function: str
    text: str
    other: str


def read(path: Path) -> list[Breakage]:
    """The errors of a file."""
    errors = []
    section, files = "", []
    for line in path.read_text().splitlines():
        function, is_error, change = line.partition(" :: ")
        if is_error:
            text, _, other = change.replace("\\n", "\n").partition(" =>")
            errors.append(Breakage(section, files, function, text, other.removeprefix(" ")))
        elif line:
            section, *files = line.split()
    return errors


parse = lru_cache(ast.parse)


def broken(source: str, error: Breakage) -> str:
    """The source of tba.py with an error. Raises ValueError unless its text occurs once."""
    node = parse(source)
    for name in error.function.split("."):
        (node,) = (child for child in node.body if getattr(child, "name", "") == name)
    lines = source.splitlines(keepends=True)
    start, end = node.lineno - 1, node.end_lineno
    body = "".join(lines[start:end])
    if body.count(error.text) != 1:
        raise ValueError(f"{error} occurs {body.count(error.text)} times")
    return "".join([*lines[:start], body.replace(error.text, error.other), *lines[end:]])


def run_tests(copy: Path, files: list[str]) -> tuple[int, float, str]:
    """Run a copy's test files in a fork; returns the exit code, seconds, and the failed test."""
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.chdir(copy)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        paths = [f"tests/{name}.py" for name in files]
        options = ["-o", "addopts=", "-m", MARKS, "-x", "-q", "-p", "no:cacheprovider"]
        code = 3
        try:
            code = int(pytest.main([*options, *paths]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > start + PATIENCE:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    said = (copy / "output.txt").read_text().splitlines()
    failed = [line.split("::")[1].split(" - ")[0] for line in said if line.startswith("FAILED")]
    return os.waitstatus_to_exitcode(ended[1]), time.monotonic() - start, "".join(failed)


def check_all(errors: list[Breakage], jobs: int) -> dict[str, list[bool]]:
    """Make the errors; returns whether each was caught, by section."""
    source = (ROOT / "tba.py").read_text()
    sources = [broken(source, error) for error in errors]
    caught = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder, str(job), "tba") for job in range(jobs)]
        for copy in copies:
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))

        def check(error: Breakage, text: str) -> None:
            copy = copies.pop()
            (copy / "tba.py").write_text(text)
            code, seconds, said = run_tests(copy, error.files)
            copies.append(copy)
            caught[error.section].append(code in (1, 2))
            mark = "caught" if code in (1, 2) else "MISSED"
            change = f"{error.function} :: {error.text!r:.45} => {error.other!r:.45}"
            print(f"{mark} {seconds:5.1f} s  {error.section}  {change}  {said}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(check, errors, sources))
    return caught


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", default="", help="only errors of this section")
    parser.add_argument("--only", default="", help="only errors with this word")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--errors", type=Path, default=ROOT / "tests" / "breakages.txt")
    options = parser.parse_args()
    errors = [
        error
        for error in read(options.errors)
        if options.section in ("", error.section) and options.only in " ".join(error[2:])
    ]
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ["OMP_NUM_THREADS"] = "1"
    import starter

    starter.compile_and_import()  # which the forks share
    caught = check_all(errors, options.jobs)
    for section, found in caught.items():
        print(f"section {section}: {sum(found)} of {len(found)}")
    found = [one for part in caught.values() for one in part]
    print(f"{sum(found)} of {len(found)} errors were caught: {sum(found) / len(found):.0%}")


if __name__ == "__main__":
    main()
