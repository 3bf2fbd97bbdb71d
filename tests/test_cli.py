"""The command line: every bad input, the plan, the help, and the shell scripts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CACHE, REAL_GSM8K, ROOT, arguments, run_tba

import tba


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = {"question": "1+1?", "answer": "#### 2"}
BAD_FLAGS = {
    "unknown task": ({"task": "chess"}, "--task chess"),
    "unknown engine": ({"engine": "llama.cpp"}, "--engine llama.cpp"),
    "unknown objective": ({"objective": "ppo"}, "--objective ppo"),
    "no model": ({"model": None}, "--model"),
    "no dataset": ({"dataset": None}, "--dataset"),
    "missing model path": ({"model": "/no/such/model"}, "--model /no/such/model"),
    "missing dataset path": ({"dataset": "/no/such/data"}, "--dataset /no/such/data"),
    "unreachable model": ({"model": "nobody/nothing"}, "--model nobody/nothing"),
    "unreachable dataset": ({"dataset": "nobody/nothing"}, "--dataset nobody/nothing"),
    "S < K": ({"searched_per_prompt": 7}, "--searched_per_prompt 7"),
    "K < 2": ({"trained_per_prompt": 1}, "--trained_per_prompt 1"),
    "m > 1": ({"recent_probability": 1.5}, "--recent_probability 1.5"),
    "m < 0": ({"recent_probability": -0.1}, "--recent_probability -0.1"),
    "beta = 0": ({"beta": 0}, "--beta 0"),
    "beta < 0": ({"beta": -1}, "--beta -1"),
    "beta_final = 0": ({"beta_final": 0}, "--beta_final 0"),
    "temperature = 0": ({"temperature": 0}, "--temperature 0"),
    "no steps": ({"steps": 0}, "--steps 0"),
    "not a number": ({"steps": "many"}, "--steps"),
    "nan": ({"learning_rate": "nan"}, "--learning_rate nan"),
    "capacity below K": ({"kept_per_prompt": 4}, "--kept_per_prompt 4"),
    "tracker not installed": ({"report_to": "trackio"}, "--report_to trackio"),
    "response beyond context": ({"max_response_tokens": 300}, "--max_response_tokens 300"),
    "unknown flag": ({"colour": "red"}, "--colour"),
    "no run to resume": ({"resume": "/no/such/run"}, "--resume /no/such/run: holds no run"),
    "no key to bind": ({"bind": "10.0.0.1:29500"}, "export TBA_AUTHKEY="),
    "no key to join": ({"join": "10.0.0.1:29500"}, "export TBA_AUTHKEY="),
    "seats without a port": ({"remote_searchers": 2}, "--remote_searchers 2: needs --bind"),
    "no restarts": ({"max_restarts": -1}, "--max_restarts -1"),
    "no time": ({"transfer_timeout": 0}, "--transfer_timeout 0"),
}
BAD_DATA = {
    "missing column": ([{"question": "?", "reply": "2"}] * 2, "has no column answer"),
    "no gold number": (
        [GOOD, {"question": "?", "answer": "none"}],
        "row 0: the gold answer has no",
    ),
    "empty question": ([{"question": " ", "answer": "2"}, GOOD], "row 0: the question is empty"),
    "empty": ([], "it is empty"),
    "one example": ([GOOD], "it is empty"),
    "a prompt beyond the context": (
        [{"question": "apples " * 400, "answer": "2"}, GOOD],
        "exceeds the model's context of 256",
    ),
}


def expect_error(args, message, capsys, out):
    """main() answers with one line that has `message`, and code 2, and creates nothing."""
    try:
        code = tba.main(args)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("tba.py: error: "), captured.err
    assert message in lines[0]
    assert not out.exists()


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(case, gsm8k, tmp_path, capsys):
    flags, message = BAD_FLAGS[case]
    out = tmp_path / "run"
    expect_error(arguments(gsm8k, out, **flags), message, capsys, out)


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(case, gsm8k, tmp_path, capsys):
    rows, message = BAD_DATA[case]
    data = write(tmp_path / "data.jsonl", *rows)
    out = tmp_path / "run"
    args = arguments(gsm8k, out, dataset=data, prompts_per_step=1)
    expect_error(args, message, capsys, out)


def test_malformed_data_and_model_folders(gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    (tmp_path / "bad.jsonl").write_text('{"question": "?", \n')
    args = arguments(gsm8k, out, dataset=tmp_path / "bad.jsonl")
    expect_error(args, "--dataset", capsys, out)
    (tmp_path / "data.xml").write_text("<a/>")
    expect_error(arguments(gsm8k, out, dataset=tmp_path / "data.xml"), ".jsonl", capsys, out)
    (tmp_path / "empty").mkdir()
    expect_error(arguments(gsm8k, out, model=tmp_path / "empty"), "--model", capsys, out)
    expect_error(arguments(gsm8k, out, dataset=tmp_path / "empty"), "--dataset", capsys, out)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", ":29500", "203.0.113.1:29500"])
def test_addresses_that_cannot_be_bound(address, gsm8k, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TBA_AUTHKEY", "k" * 32)
    out = tmp_path / "run"
    expect_error(arguments(gsm8k, out, bind=address), f"--bind {address}: ", capsys, out)


def test_pickled_weights_are_refused(gsm8k, tmp_path, capsys):
    pickled = shutil.copytree(gsm8k / "model", tmp_path / "model")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    out = tmp_path / "run"
    expect_error(arguments(gsm8k, out, model=pickled), "its weights are pickled", capsys, out)


def test_more_searchers_than_gpus_allow(gsm8k, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    out = tmp_path / "run"
    args = arguments(gsm8k, out, num_searchers=4)
    expect_error(args, "--num_searchers 4: 4 GPU(s) allow 3", capsys, out)


@pytest.mark.skipif(tba.vllm_can_run(), reason="vLLM can run here")
def test_vllm_without_a_device(gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    expect_error(arguments(gsm8k, out, engine="vllm"), "--engine vllm", capsys, out)


def test_a_folder_that_holds_a_run(gsm8k, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    _, err = run_tba(arguments(gsm8k, tmp_path), code=2)
    assert err.count("\n") == 1 and f"--output_dir {tmp_path}: already holds a run" in err


def test_dry_run_prints_the_plan_and_makes_nothing(gsm8k, tmp_path):
    out = tmp_path / "run"
    stdout, err = run_tba([*arguments(gsm8k, out, num_searchers=3), "--dry_run"])
    for part in ("B x K = 4 x 8 = 32", "3 Searcher(s) on the CPU", "4,000 training prompts", "GiB"):
        assert part in stdout
    assert not out.exists() and "Traceback" not in err


def test_help_explains_every_flag_with_its_default():
    stdout, _ = run_tba(["--help"])
    squeeze = lambda text: "".join(text.split())  # argparse breaks lines at hyphens too
    text = squeeze(stdout)
    for field in tba.dataclasses.fields(tba.Config):
        assert f"--{field.name}" in text
        assert squeeze(field.metadata["help"]) in text
    assert "(default:0.95)" in text


@pytest.mark.skipif(not REAL_GSM8K.exists(), reason="GSM8K is not beside this repository")
def test_real_gsm8k_runs_end_to_end(gsm8k, tmp_path):
    """Real problems through the tiny model: long prompts, real gold answers."""
    import tiny
    from transformers import AutoTokenizer

    model = tiny.make_model("long_llama", gsm8k / "model", tmp_path / "model")
    assert AutoTokenizer.from_pretrained(model)
    args = arguments(
        gsm8k, tmp_path / "run", model=model, dataset=REAL_GSM8K, steps=2, eval_samples=8
    )
    stdout, _ = run_tba(args)
    assert "7,473 training prompts" in stdout and "accuracy" in stdout


PAPER = {  # script: what its plan must say
    "run_gsm8k.sh": ("B x K = 7 x 20 = 140", "beta 0.014 -> 0.004"),
    "run_tldr.sh 2.8b": ("B x K = 8 x 20 = 160", "pythia2.8b-sft", "10000 initial"),
    "run_redteam.sh llama-3.2-1b": ("B x K = 16 x 8 = 128", "tau 2.0 -> 1.0"),
}


def run_script(words, *flags, folder=None):
    env = {**os.environ, "PYTHON": sys.executable, "TBA_CACHE": str(CACHE)}
    command = ["bash", str(ROOT / words[0]), *words[1:], *flags]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)


@pytest.mark.parametrize("script", PAPER)
def test_scripts_dry_run_with_the_papers_numbers(script, tmp_path):
    flags = ["--dry_run", "--steps", "123", "--output_dir", str(tmp_path / "out")]
    done = run_script(script.split(), *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("123 steps", "not checked", *PAPER[script]):
        assert part in done.stdout


@pytest.mark.parametrize("task", ["gsm8k", "tldr", "redteam"])
def test_tiny_scripts_dry_run(task, request, tmp_path):
    request.getfixturevalue(task)
    flags = ["--tiny", "--dry_run", "--steps", "123", "--output_dir", str(tmp_path / "out")]
    done = run_script([f"run_{task}.sh"], *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "123 steps" in done.stdout and "not checked" not in done.stdout
    assert not (tmp_path / "out").exists()


def test_scripts_refuse_unknown_sizes_and_victims():
    for script in ("run_tldr.sh", "run_redteam.sh"):
        done = run_script([script, "7b"])
        assert done.returncode == 2 and "choose" in done.stderr and done.stderr.count("\n") == 1
    bad = run_script(["run_gsm8k.sh", "--beta", "-1"])
    assert bad.returncode == 2 and "--beta -1.0" in bad.stderr
