"""A run is what it started with: its code, its plug-in, its models (promise 14)."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from harness import ROOT, Run, arguments, judges_of, run_tba, steps_of
from safetensors.torch import load_file, save_file

import tba
from tba import read_lines

PLUGIN = '''"""Rewards of 0.25; notes the process of each call."""
import os
from pathlib import Path
import numpy as np
import helper
import tba

def rewards(task, examples, responses, ended):
    (Path(__file__).parent / "pids").open("a").write(f"{os.getpid()}\\n")
    return np.full(len(responses), helper.VALUE)

tba.GSM8K.rewards = rewards
'''


@pytest.fixture
def run(gsm8k, tmp_path):
    """A run of a copy of tba.py with a plug-in that imports a module of its own.

    The copy has another name, and is started by a link of a third one, as by `python -P`. The
    plug-in is called tba.py.
    """
    (tmp_path / "store").mkdir()
    shutil.copy(ROOT / "tba.py", tmp_path / "store" / "blob")
    (tmp_path / "train.py").symlink_to(tmp_path / "store" / "blob")
    (tmp_path / "tba.py").write_text(PLUGIN)
    (tmp_path / "helper.py").write_text("VALUE = 0.25\n")
    out = tmp_path / "run"
    flags = {"steps": 100_000, "eval_every": 0, "eval_samples": 8, "plugin": tmp_path / "tba.py"}
    args = arguments(gsm8k, out, model=tmp_path / "model", **flags)
    shutil.copytree(gsm8k / "model", tmp_path / "model")
    environment = {"PYTHONSAFEPATH": "1"}
    return Run(out, args, hooks=False, environment=environment, program=tmp_path / "train.py")


def overwrite_weights(folder):
    """Other weights of the same shapes."""
    path = folder / "model.safetensors"
    weights = {name: 1.1 * tensor for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def kill_searcher(folder):
    """Kill the Searcher that scored last; returns the number of processes that have scored."""
    pids = (folder / "pids").read_text().split()
    os.kill(int(pids[-1]), signal.SIGKILL)
    return len(set(pids))


def test_searchers_run_the_code_that_the_run_started_with(run, tmp_path):
    """tba.py is edited while it imports libraries, the plug-in before a Searcher is restarted."""
    program = tmp_path / "store" / "blob"
    source = program.read_bytes()
    maps = Path(f"/proc/{run.process.pid}/maps")
    run.until(lambda: "/numpy" in maps.read_text(), "the first import")
    program.write_text("raise SystemExit('edited')\n")
    run.reaches(2)
    (tmp_path / "tba.py").write_text("import tba\ntba.GSM8K.rewards = None\n")
    before = kill_searcher(tmp_path)
    scored = lambda: len(set((tmp_path / "pids").read_text().split())) > before
    run.until(scored, "a new process that scores")
    run.reaches(steps_of(run.out) + 30)
    run.process.send_signal(signal.SIGINT)
    text = run.ends(130)
    assert run.failed() == [0] and "edited" not in text
    assert {m["reward"] for m in read_lines(run.out / "metrics.jsonl")} == {0.25}
    assert (run.out / "code" / "0" / "tba.py").read_bytes() == source
    assert (run.out / "code" / "0" / "plugin_tba.py").read_text() == PLUGIN


def test_a_plugin_may_have_the_name_of_a_library(gsm8k, tmp_path):
    plugin = tmp_path / "wave.py"
    plugin.write_text(
        '''"""Rewards of 1, from the standard library's module of this file's name."""
import numpy as np
import tba

def rewards(task, examples, responses, ended):
    import wave
    assert not task.model_files  # what only checkpoints need stays with the Trainer
    return np.full(len(responses), wave.WAVE_FORMAT_PCM)

tba.GSM8K.rewards = rewards
'''
    )
    flags = {"plugin": plugin, "steps": 1, "eval_samples": 4, "eval_every": 0}
    run_tba(arguments(gsm8k, tmp_path / "run", **flags), interpreter=True)
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0]["reward"] == 1


def test_models_whose_files_change_end_the_run_and_its_resumption_in_one_line(run, tmp_path):
    run.reaches(2)
    shutil.copytree(tmp_path / "model", tmp_path / "kept")
    overwrite_weights(tmp_path / "model")
    kill_searcher(tmp_path)
    text = run.ends(1)
    (line,) = [line for line in text.splitlines() if "--model" in line]
    assert line.startswith("tba.py: error: Searcher 0: --model") and "Traceback" not in text
    steps = steps_of(run.out)
    assert (run.out / f"checkpoint-{steps}").exists()
    resume = ["--resume", str(run.out), "--steps", str(steps + 2)]
    _, err = run_tba(resume, code=2)
    assert err.splitlines()[-1].startswith("tba.py: error: --model")
    run_tba([*resume, "--model", str(tmp_path / "kept")])  # the same files elsewhere
    assert steps_of(run.out) == steps + 2


def test_a_model_whose_files_are_gone_ends_the_run_with_a_checkpoint(run, tmp_path):
    run.reaches(2)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    kill_searcher(tmp_path)
    text = run.ends(1)
    (line,) = [line for line in text.splitlines() if "error:" in line]
    assert "--model" in line and "Traceback" not in text
    (saved,) = run.out.glob("checkpoint-*")
    assert (saved / "tokenizer.json").exists()


def test_a_judge_that_changed_is_noticed_and_other_files_may(tldr, tmp_path):
    folder = tmp_path / "tldr"
    shutil.copytree(tldr, folder)
    out = tmp_path / "run"
    flags = judges_of(folder) | {"steps": 1, "eval_samples": 4, "eval_every": 0}
    run_tba(arguments(folder, out, **flags))
    (folder / "reward" / "README.md").write_text("A reward model.")
    (folder / "model" / "trainer_state.json").write_text("{}")
    run_tba(["--resume", str(out), "--steps", "2"])
    overwrite_weights(folder / "reward")
    _, err = run_tba(["--resume", str(out), "--steps", "3"], code=2)
    assert err.splitlines()[-1].startswith("tba.py: error: --reward_model")
    assert json.loads((out / "config.json").read_text())["config"]["steps"] == 2


def test_a_plugins_flag_may_name_a_model_behind_an_api(gsm8k, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plugin = tmp_path / "judge.py"
    plugin.write_text(
        '''"""GSM8K with a judge that is not loaded here."""
from dataclasses import dataclass
import tba

@dataclass
class JudgeFlags:
    """Flags of the judge."""

    judge_model: str = tba.flag("gpt-4o", "Name of the judge.")

tba.FLAGS.append(JudgeFlags)
'''
    )
    out = tmp_path / "run"
    flags = {"plugin": plugin, "steps": 1, "eval_samples": 4, "eval_every": 0}
    run_tba(arguments(gsm8k, out, **flags), interpreter=True)
    _, err = run_tba(["--resume", str(out), "--judge_model", "gpt-5"], code=2, interpreter=True)
    assert err.splitlines()[-1].startswith("tba.py: error: --judge_model gpt-5: ")


def test_a_large_file_is_sampled_throughout(tmp_path):
    """A checksum reads little of it, and changes with any part that a fine-tuning would change."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(5_000_000))
    first = tba.model_checksum(str(tmp_path))
    for start in range(0, 5_000_000, 500_000):
        changed = bytearray(5_000_000)
        changed[start : start + 50_000] = b"1" * 50_000
        path.write_bytes(changed)
        assert tba.model_checksum(str(tmp_path)) != first
    path.write_bytes(bytes(5_000_000))
    assert tba.model_checksum(str(tmp_path)) == first
