"""A run is what it started with: its code, its plug-in, its models (promise 14)."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from harness import (
    ROOT,
    Run,
    arguments,
    endless,
    judges_of,
    run_tba,
    steps_of,
    weights_of,
    without_searchers,
)
from safetensors.torch import save_file

import tba
from tba import read_lines

PLUGIN = '''"""Rewards of 0.25; notes the process of each call."""
import os
from pathlib import Path
import wave
import numpy as np
import helper
import tba

def rewards(task, examples, responses, ended):
    assert wave.WAVE_FORMAT_PCM and not task.model_files  # only checkpoints need those
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
    (tmp_path / "wave.py").write_text("")  # does not hide the library's module
    out = tmp_path / "run"
    args = endless(gsm8k, out, model=tmp_path / "model", plugin=tmp_path / "tba.py")
    shutil.copytree(gsm8k / "model", tmp_path / "model")
    environment = {"PYTHONSAFEPATH": "1"}
    return Run(out, args, hooks=False, environment=environment, program=tmp_path / "train.py")


def overwrite_weights(folder):
    """Other weights of the same shapes."""
    weights = {name: 1.1 * tensor for name, tensor in weights_of(folder).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def kill_searcher(folder):
    """Kill the Searcher that scored last; returns the number of processes that have scored."""
    pids = (folder / "pids").read_text().split()
    os.kill(int(pids[-1]), signal.SIGKILL)
    return len(set(pids))


@pytest.mark.slow
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
    run.reaches(steps_of(run.out) + 8)
    run.process.send_signal(signal.SIGINT)
    text = run.ends(130)
    assert run.failed() == [0] and "edited" not in text
    assert {m["reward"] for m in read_lines(run.out / "metrics.jsonl")} == {0.25}
    assert (run.out / "code" / "0" / "tba.py").read_bytes() == source
    assert (run.out / "code" / "0" / "plugin_tba.py").read_text() == PLUGIN


@pytest.mark.slow
@pytest.mark.parametrize("change", ["overwritten", "gone"])
def test_models_whose_files_change_end_the_run_and_its_resumption_in_one_line(
    run, tmp_path, change
):
    run.reaches(2)
    shutil.copytree(tmp_path / "model", tmp_path / "kept")
    if change == "gone":
        shutil.rmtree(tmp_path / "model")
    else:
        overwrite_weights(tmp_path / "model")
    kill_searcher(tmp_path)
    text = run.ends(1)
    (line,) = [line for line in text.splitlines() if "--model" in line]
    assert line.startswith("tba.py: error: Searcher 0: --model") and "Traceback" not in text
    steps = steps_of(run.out)
    assert (run.out / f"checkpoint-{steps}" / "tokenizer.json").exists()
    resume = ["--resume", str(run.out), "--steps", str(steps + 2)]
    run_tba(resume, code=2)
    run_tba([*resume, "--model", str(tmp_path / "kept")])  # the same files elsewhere


def test_a_judge_that_changed_is_noticed_and_other_files_may(tldr, tmp_path, capsys, monkeypatch):
    """A model of a plug-in's flag may be behind an API: another name is another model."""

    @dataclasses.dataclass
    class JudgeFlags:
        judge_model: str = tba.flag("gpt-4o", "Name of the judge.")

    without_searchers(monkeypatch)
    monkeypatch.setattr(tba, "FLAGS", [*tba.FLAGS, JudgeFlags])
    folder, out = shutil.copytree(tldr, tmp_path / "tldr"), tmp_path / "run"
    flags = judges_of(folder) | {"steps": 1, "eval_samples": 4, "eval_every": 0}
    assert tba.main(arguments(folder, out, **flags)) == 0
    (folder / "reward" / "README.md").write_text("A reward model.")
    (folder / "model" / "trainer_state.json").write_text("{}")
    assert tba.main(["--resume", str(out), "--steps", "2"]) == 0
    resume = ["--resume", str(out), "--steps", "3"]
    other = shutil.copytree(folder / "reward", tmp_path / "other")
    for changed, *flags in (
        (other, "--judge_model", "gpt-5"),
        (other, "--reward_model", str(other)),
        (folder / "reward",),
    ):
        overwrite_weights(changed)
        blamed = " ".join(flags) or "--reward_model"
        with pytest.raises(SystemExit, match="2"):
            tba.main([*resume, *flags])
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"tba.py: error: {blamed}")
    assert json.loads((out / "config.json").read_text())["config"]["steps"] == 2


POOL = """
import multiprocessing
import tba

def score(pair):
    return len(pair[1]) % 3

class Pooled(tba.GSM8K):
    def rewards(self, examples, responses, ended):
        for _ in range(POOLS):  # the end of a pool is the difficult part
            with multiprocessing.get_context(METHOD).Pool(2) as pool:
                scores = pool.map(score, zip(examples, responses))
        return scores

tba.TASKS["pooled"] = Pooled
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "pools"), [(None, 4), ("spawn", 1)])
def test_a_reward_may_use_a_pool_of_processes(gsm8k, tmp_path, method, pools):
    """Those that are spawned are new processes, in which the plug-in has to be imported."""
    plugin = POOL.replace("METHOD", repr(method)).replace("POOLS", str(pools))
    (tmp_path / "mine.py").write_text(plugin)
    out = tmp_path / "run"
    flags = {"task": "pooled", "plugin": tmp_path / "mine.py", "steps": pools, "eval_every": 0}
    run_tba(arguments(gsm8k, out, eval_samples=8, **flags))
    rows = read_lines(out / "completions.jsonl")
    assert len(read_lines(out / "metrics.jsonl")) == pools
    assert rows and all(row["reward"] == len(row["response"]) % 3 for row in rows)
