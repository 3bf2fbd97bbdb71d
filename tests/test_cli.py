"""The command line: mistakes end in one line that names the flag, with exit code 2."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from harness import Run, arguments, judges_of, run_tba

import tba


def refused(args, capsys):
    """The one line that this process says of a command line, which it refuses."""
    with pytest.raises(SystemExit) as ended:
        tba.main([str(arg) for arg in args])
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.split("\n") if "error:" in line]
    assert len(lines) == 1
    return lines[0]


MISTAKES = [
    {"task": "chess"}, {"objective": "ppo"}, {"engine": "llamacpp"}, {"replay_rule": "oldest"},
    {"model": "/nowhere/model"}, {"dataset": "/nowhere/data"}, {"dataset": "missing.jsonl"},
    {"eval_dataset": "missing.csv"}, {"plugin": "missing.py"}, {"resume": "/nowhere/run"},
    {"steps": -1}, {"prompts_per_step": 0}, {"trained_per_prompt": 1}, {"learning_rate": 0},
    {"recent_probability": 1.5}, {"temperature": "nan"}, {"seed": 2**32}, {"beta": "0"},
    {"beta": "1@5"}, {"beta": "1@0,x@3"}, {"tau": "-1"}, {"dtype": "float16"}, {"steps": "many"},
    {"searched_per_prompt": 4}, {"kept_per_prompt": 4}, {"lag": 2}, {"max_response_tokens": 4000},
    {"adam_beta2": 1}, {"max_replays": -1}, {"report_to": "trackio"},
    {"synchronous": True, "lag": 1, "recent_probability": 0.5, "reset_reference_every": 50},
    {"lr_schedule": "warmup_stable_decay", "decay_steps": 0}, {"victim_top_p": 2},
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: "-".join(map(str, mistake)))
def test_mistakes_are_told_in_one_line_and_leave_nothing(mistake, gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    line = refused(arguments(gsm8k, out, **mistake), capsys)
    name, value = list(mistake.items())[-1]
    assert f"--{name}" in line and str(value).split("@")[0] in line
    assert not out.exists()


def test_a_mistake_ends_the_program_with_code_2(gsm8k, tmp_path):
    flags = arguments(gsm8k, tmp_path / "run", model="/nowhere/model")
    out, err = run_tba(flags, code=2, interpreter=True)
    assert out == "" and "--model /nowhere/model" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 14, 0)])
def test_other_versions_of_python_are_refused(version):
    code = f"import runpy, sys; sys.version_info = {version}; runpy.run_path({tba.__file__!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "Python 3.11 to 3.13" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_tmpdir_whose_path_is_too_long_for_a_socket(gsm8k, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    run_tba(arguments(gsm8k, tmp_path / "run", steps=1, eval_every=0, eval_samples=8))


def test_a_flag_that_is_misspelt_and_data_that_do_not_fit(gsm8k, tldr, redteam, tmp_path, capsys):
    out = tmp_path / "run"
    assert "--stpes" in refused([*arguments(gsm8k, out), "--stpes", "3"], capsys)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "1+1?", "solution": "2"}) + "\n")
    line = refused(arguments(gsm8k, out, dataset=data), capsys)
    assert "answer" in line and str(data) in line
    data.write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    assert "--dataset" in refused(arguments(gsm8k, out, dataset=data), capsys)
    empty = judges_of(redteam) | {"attacker_prompt": ""}
    assert "--attacker_prompt" in refused(arguments(redteam, out, **empty), capsys)
    short = judges_of(redteam) | {"min_attack_tokens": 33}
    assert "--min_attack_tokens 33" in refused(arguments(redteam, out, **short), capsys)
    judges = {"task": "tldr", "reward_model": tldr / "model", "gold_reward_model": tldr / "gold"}
    assert "--reward_model" in refused(arguments(tldr, out, **judges), capsys)
    if not tba.vllm_can_run():
        assert "--engine vllm" in refused(arguments(gsm8k, out, engine="vllm"), capsys)
    assert not out.exists()


def test_a_folder_that_holds_a_run_or_in_which_one_is_under_way(gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, steps=10_000, eval_every=0, eval_samples=8, save_every=1))
    run.until(lambda: list(out.glob("checkpoint-*")), "a checkpoint")
    assert "--output_dir" in refused(arguments(gsm8k, out), capsys)
    assert "--resume" in refused(["--resume", out], capsys)
    run.process.kill()
    run.process.wait()
    run.gone()
    assert "--output_dir" in refused(arguments(gsm8k, out), capsys)
    assert "--steps" in refused(["--resume", out, "--steps", 0], capsys)
    assert "--synchronous" in refused(["--resume", out, "--synchronous"], capsys)
    for name in ("--lora_rank", "--reset_reference_every"):
        assert name in refused(["--resume", out, name, 2], capsys)
    flags = ["--resume", out, "--dataset", gsm8k / "data" / "test.jsonl"]
    assert "--dataset" in refused(flags, capsys)


def test_flags_before_resume_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(tba, "executed", [], raising=False)
    for name in ("own", "other"):
        (tmp_path / f"{name}.py").write_text(f"import tba\n\ntba.executed.append({name!r})\n")
    saved = {"plugin": str(tmp_path / "own.py"), "steps": 3}
    (tmp_path / "config.json").write_text(json.dumps({"config": saved}))
    other = ["--steps", "9", "--plugin", str(tmp_path / "other.py")]
    config = tba.parse([*other, "--resume", str(tmp_path)])
    assert (config.steps, config.plugin, tba.executed) == (3, saved["plugin"], ["own"])
    config = tba.parse(["--resume", str(tmp_path), *other])
    assert (config.steps, config.plugin) == (9, other[-1])


def test_two_runs_of_the_same_second_get_two_folders(monkeypatch):
    monkeypatch.setattr(tba.time, "strftime", lambda text: text)
    folders = []
    for process in (1, 2):
        monkeypatch.setattr(tba.os, "getpid", lambda process=process: process)
        config = tba.settings(steps=1)
        tba.resolve(config)
        folders.append(config.output_dir)
    assert folders[0] != folders[1]


def test_help_tells_of_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        tba.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for kind in tba.FLAGS:
        for f in dataclasses.fields(kind):
            assert re.search(f"--{f.name}[ ,]", said)  # a comma since Python 3.13
            assert len(f.metadata["help"]) > 10
    counts = {kind.__name__: len(dataclasses.fields(kind)) for kind in tba.FLAGS}
    assert counts["Config"] <= 61 and sum(counts.values()) <= 90
