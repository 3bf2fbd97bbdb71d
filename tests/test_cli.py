"""The command line: every bad input, the plan, the help, resuming, and the shell scripts."""

import dataclasses
import fcntl
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from conftest import (
    CACHE,
    REAL_GSM8K,
    ROOT,
    arguments,
    random_groups,
    run_tba,
    trainer_of,
)
from harness import PATIENCE, read_lines, wait_until

import tba


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = {"question": "1+1?", "answer": "#### 2"}
BAD_FLAGS = {
    "unknown task": ({"task": "chess"}, "--task chess"),
    "unknown engine": ({"engine": "llama.cpp"}, "--engine llama.cpp: choose one of auto, "),
    "unknown objective": ({"objective": "ppo"}, "--objective ppo"),
    "no model": ({"model": None}, "--model"),
    "no dataset": ({"dataset": None}, "--dataset"),
    "missing model path": ({"model": "/no/such/model"}, "--model /no/such/model"),
    "missing dataset path": ({"dataset": "/no/such/data"}, "--dataset /no/such/data"),
    "S < K": ({"searched_per_prompt": 7}, "--searched_per_prompt 7"),
    "K < 2": ({"trained_per_prompt": 1}, "--trained_per_prompt 1"),
    "m > 1": ({"recent_probability": 1.5}, "--recent_probability 1.5"),
    "m < 0": ({"recent_probability": -0.1}, "--recent_probability -0.1"),
    "beta = 0": ({"beta": 0}, "--beta 0"),
    "beta < 0": ({"beta": -1}, "--beta -1"),
    "a value of a schedule = 0": ({"beta": "1@0,0@9"}, "--beta 1@0,0@9: write VALUE, or"),
    "a schedule that falls back": ({"tau": "1@0,2@9,3@8"}, "--tau 1@0,2@9,3@8: write"),
    "a schedule without a start": ({"beta": "1@5"}, "--beta 1@5: write VALUE, or VALUE@0,"),
    "no schedule": ({"beta": "1:0"}, "--beta 1:0: write VALUE, or"),
    "a setting that was renamed": (
        {"beta_final": 1},
        "--beta_final: was replaced; write --beta 0.0",
    ),
    "a setting that is gone": ({"sync_patience": 1}, "--sync_patience: was replaced; write noth"),
    "unknown replay rule": ({"replay_rule": "best"}, "--replay_rule best: choose one of newest, r"),
    "a lag without lockstep": ({"lag": 2}, "--lag 2: needs --synchronous"),
    "replay in no lockstep": (
        {"synchronous_replay": True},
        "--synchronous_replay True: needs --synchronous",
    ),
    "replay with a lag": (
        {"synchronous": True, "synchronous_replay": True, "lag": 2},
        "--lag 2: leave it out, or --synchronous_replay",
    ),
    "equal answers": ({"eval_responses": 4}, "--eval_responses 4: greedy ones are all the same"),
    "no answers": ({"eval_responses": 0}, "--eval_responses 0: must be at least 1"),
    "cold answers": ({"eval_temperature": 0}, "--eval_temperature 0.0: must be greater than 0"),
    "no prompts to evaluate": ({"eval_dataset": "/no/such"}, "--eval_dataset /no/such: no such"),
    "nothing to learn": ({"sft_held_out": 1}, "--sft_held_out 1.0: must be less than 1"),
    "a thaw": ({"freeze_buffer_at": -1}, "--freeze_buffer_at -1: must be at least 0"),
    "a log Z that stays": ({"log_z_learning_rate": 0}, "--log_z_learning_rate 0.0: must be great"),
    "temperature = 0": ({"temperature": 0}, "--temperature 0"),
    "no steps": ({"steps": 0}, "--steps 0"),
    "not a number": ({"steps": "many"}, "--steps: invalid int value: 'many'"),
    "nan": ({"learning_rate": "nan"}, "--learning_rate nan"),
    "infinite": ({"temperature": "inf"}, "--temperature inf: must be a finite number"),
    "capacity below K": ({"kept_per_prompt": 4}, "--kept_per_prompt 4"),
    "tracker not installed": ({"report_to": "trackio"}, "--report_to trackio"),
    "response beyond context": ({"max_response_tokens": 300}, "--max_response_tokens 300"),
    "unknown flag": ({"colour": "red"}, "--colour"),
    "no run to resume": ({"resume": "/no/such/run"}, "--resume /no/such/run: holds no run"),
    "no key to bind": ({"bind": "10.0.0.1:29500"}, "export TBA_AUTHKEY="),
    "no key to join": ({"join": "10.0.0.1:29500"}, "export TBA_AUTHKEY="),
    "places without a port": ({"remote_searchers": 2}, "--remote_searchers 2: needs --bind"),
    "remote Searchers in lockstep": (
        {"remote_searchers": 1, "bind": "127.0.0.1:29500", "synchronous": True},
        "--remote_searchers 1: leave out --synchronous",
    ),
    "a long prompt": ({"max_prompt_tokens": 5}, "--max_prompt_tokens 5: the prompt of training"),
    "no restarts": ({"max_restarts": -1}, "--max_restarts -1"),
    "recompute without vLLM": ({"on_sync": "recompute"}, "--on_sync recompute: only vLLM"),
    "no decay": ({"lr_schedule": "warmup_stable_decay"}, "--decay_steps 0"),
    "no time": ({"transfer_timeout": 0}, "--transfer_timeout 0"),
    "more time than fits": (
        {"transfer_timeout": 1e30},
        "--transfer_timeout 1e+30: must be at most",
    ),
    "more memory than there is": (
        {"kv_cache_gib": 1e300},
        "--kv_cache_gib 1e+300: must be at most",
    ),
    "no decay of the mean": ({"adam_beta1": 1}, "--adam_beta1 1.0: must be less than 1"),
    "no decay of the square": ({"adam_beta2": 1}, "--adam_beta2 1.0: must be less than 1"),
    "a huge seed": ({"seed": 2**32}, "--seed 4294967296: must be at most 4294967295"),
    "a negative seed": ({"seed": -1}, "--seed -1: must be at least 0"),
}
BAD_DATA = {
    "missing column": ([{"question": "?", "reply": "2"}] * 2, "has no column answer"),
    "no gold number": (
        [GOOD, {"question": "?", "answer": "none"}],
        "held-out row 1: the gold answer has no",
    ),
    "empty question": ([{"question": " ", "answer": "2"}, GOOD], "row 0: the question is empty"),
    "empty": ([], "name a .json, .jsonl, .csv, .tsv (or one of these with .gz) or .parquet with"),
    "no question": ([{"question": None, "answer": "2"}, GOOD], "row 0: the question is None"),
    "a number": ([{"question": i, "answer": "2"} for i in (1, 2)], "row 0: the question is 1; it"),
    "no answer": ([{"question": "?", "answer": None}, GOOD], "row 0: the gold answer has no"),
    "one example": ([GOOD], "it has 1 row(s); it needs two rows or more, one to train on and one"),
    "a prompt beyond the context": (
        [{"question": "apples " * 400, "answer": "2"}, GOOD],
        "exceeds the model's context of 256",
    ),
}


def main(args, capsys):
    """tba.main in this process; returns (exit code, standard output, lines of standard error)."""
    try:
        code = tba.main([str(arg) for arg in args])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, [line for line in captured.err.splitlines() if line.strip()]


def expect_error(args, message, capsys, out):
    """One line that has `message`, and code 2, with --dry_run too, and nothing is made."""
    for more in ([], ["--dry_run"]):
        code, _, lines = main([*args, *more], capsys)
        assert code == 2
        assert len(lines) == 1 and lines[0].startswith("tba.py: error: "), lines
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


def test_a_tokenizer_without_an_end(gsm8k, tmp_path, capsys):
    """The model's configuration has one: that is not enough."""
    model, out = shutil.copytree(gsm8k / "model", tmp_path / "model"), tmp_path / "run"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["eos_token"] = None
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    error = f"--model {model}: its tokenizer has no EOS token; add one"
    expect_error(arguments(gsm8k, out, model=model), error, capsys, out)


def test_a_machine_without_git_records_no_commit(gsm8k, tmp_path, monkeypatch):
    assert tba.git_commit()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tba.git_commit() is None
    folder = trainer_of(gsm8k, tmp_path / "run").folder
    assert json.loads((folder.path / "config.json").read_text())["git_commit"] is None


@pytest.mark.parametrize("name", ["model", "dataset"])
def test_a_hub_name_out_of_reach_is_refused_but_can_be_planned_with(name, gsm8k, tmp_path, capsys):
    args = arguments(gsm8k, tmp_path / "run", **{name: "nobody/nothing"})
    code, _, (line,) = main(args, capsys)
    assert code == 2 and line.startswith(f"tba.py: error: --{name} nobody/nothing: ")
    code, plan, lines = main([*args, "--dry_run"], capsys)
    assert code == 0 and not lines and f"not checked: --{name} nobody/nothing: " in plan
    assert not (tmp_path / "run").exists()


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


def test_more_searchers_than_gpus_allow(gsm8k, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    out = tmp_path / "run"
    args = arguments(gsm8k, out, num_searchers=4)
    expect_error(args, "the driver is too old", capsys, out)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    expect_error(args, "--num_searchers 4: 4 GPU(s) allow 3", capsys, out)


@pytest.mark.skipif(tba.vllm_can_run(), reason="vLLM can run here")
def test_vllm_without_a_device(gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    expect_error(arguments(gsm8k, out, engine="vllm"), "--engine vllm", capsys, out)


def test_a_folder_that_holds_a_run(gsm8k, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    code, _, lines = main(arguments(gsm8k, tmp_path), capsys)
    assert code == 2 and len(lines) == 1
    assert f"--output_dir {tmp_path}: holds a run; name another folder" in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"config.json": '{"model_type": "llama"}'}, 2),  # a model's folder
        ({"config.json": '{"config'}, 2),
        ({"config.json": '{"command": []}'}, 0),  # a start that failed
        ({"config.json": '{"command": []}', "metrics.jsonl": ""}, 2),
        ({"config.json": '{"command": []}', "eval.jsonl": ""}, 2),
        ({"config.json": '{"command": []}', "checkpoint-0": None}, 2),
        ({"final": None}, 2),
    ],
)
def test_what_a_failed_start_has_left_can_be_overwritten_and_nothing_else(
    files, code, gsm8k, tmp_path, capsys
):
    out = tmp_path / "run"
    out.mkdir()
    for name, text in files.items():
        (out / name).mkdir() if text is None else (out / name).write_text(text)
    found, _, lines = main([*arguments(gsm8k, out), "--dry_run"], capsys)
    assert found == code and len(lines) == (code == 2)
    resumable = "checkpoint-0" in files
    assert code == 0 or lines[0].endswith(f"use --resume {out}" if resumable else "another folder")


def test_a_folder_in_which_another_run_starts_is_not_touched(gsm8k, tmp_path, capsys):
    """Neither has written there yet: the second must not put its settings beside the first's."""
    out = tmp_path / "run"
    out.mkdir()
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    code, _, (line,) = main(arguments(gsm8k, out), capsys)
    assert code == 2
    fix = "another run is under way there; name another folder"
    assert line == f"tba.py: error: --output_dir {out}: {fix}"
    assert not list(out.iterdir())
    os.close(held)
    # one that came and went while this one read its data
    config = tba.parse(arguments(gsm8k, out))
    tba.resolve(config)
    tba.check_settings(config)
    (out / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds a run; name another folder"):
        tba.claim_folder(config)


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "runs/gsm8k-20260101-000000" + form[24:])
    folders = set()
    for _ in range(3):
        config = tba.Config(engine="transformers")
        tba.resolve(config)
        folders.add(config.output_dir)
    assert len(folders) == 3


def test_an_output_folder_that_cannot_be_made(gsm8k, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "run" / "deep", tmp_path / "file"):
        for more in ([], ["--dry_run"]):
            code, _, (line,) = main([*arguments(gsm8k, out), *more], capsys)
            assert code == 2
            fix = f"{tmp_path / 'file'} is no folder that can be written to"
            assert line == f"tba.py: error: --output_dir {out}: {fix}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("utf-16.jsonl", (json.dumps(GOOD) + "\n").encode("utf-16") * 2),
        ("utf-16.csv", "question,answer\n?,1\n".encode("utf-16")),
        ("latin-1.csv", "question,answer\n\u00c4pfel,1\n".encode("latin-1")),
        (
            "latin-1.jsonl",
            '{"question": "\u00c4pfel", "answer": "1"}\n'.encode("latin-1") * 2,
        ),
    ],
)
def test_an_encoding_that_cannot_be_read(name, content, gsm8k, tmp_path, capsys):
    path, out = tmp_path / name, tmp_path / "run"
    path.write_bytes(content)
    args = arguments(gsm8k, out, dataset=path)
    expect_error(args, f"tba.py: error: --dataset {path}: ", capsys, out)


def test_held_out_rows_that_are_training_rows_too_are_warned_about(gsm8k, tmp_path, capsys):
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(40)]
    data, args = tmp_path / "data", arguments(gsm8k, tmp_path / "run", dataset=tmp_path / "data")
    data.mkdir()
    write(data / "train.jsonl", *rows[:20])
    write(data / "test.jsonl", *rows[20:])
    assert main([*args, "--dry_run"], capsys)[::2] == (0, [])
    write(data / "test.jsonl", *rows[20:30], rows[3], {**rows[4], "answer": "#### 5"}, rows[7])
    code, _, (line,) = main([*args, "--dry_run"], capsys)
    assert code == 0
    both = "2 held-out rows, such as row 10, are training rows too"
    assert line == f"warning: --dataset {data}: {both}"


WSD = {"lr_schedule": "warmup_stable_decay", "steps": 10}
DOUBTFUL = {  # flags that are allowed, and what is warned of; None: nothing
    "all are near": ({"near_duplicate": 2}, "--near_duplicate 2.0: almost any two responses"),
    "few are near": ({"near_duplicate": 0.25}, None),
    "a long warm-up": ({"warmup_steps": 5}, "--warmup_steps 5: the learning rate never reaches"),
    "a warm-up": ({"warmup_steps": 4, "lr_schedule": "linear"}, None),
    "no decay": (WSD | {"stable_steps": 10, "decay_steps": 5}, "--stable_steps 10: with the warm"),
    "a rate of 0": (WSD | {"stable_steps": 2, "decay_steps": 5}, "--decay_steps 5: the learning"),
    "half a decay": (WSD | {"stable_steps": 2, "decay_steps": 16}, None),
    "one batch": (
        {"prompts_per_step": 4001, "initial_trajectories": 9},
        "--initial_trajectories 9: a batch of 4001 x 8 = 32008 repeats trajectories",
    ),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_settings_that_learn_next_to_nothing_are_warned_about(case, gsm8k, tmp_path, capsys):
    flags, warning = DOUBTFUL[case]
    args = arguments(gsm8k, tmp_path / "run", **flags)
    code, _, lines = main([*args, "--dry_run"], capsys)
    assert code == 0 and len(lines) == int(warning is not None), lines
    assert warning is None or lines[0].startswith(f"warning: {warning}")


@pytest.mark.slow
def test_nothing_is_left_in_the_temporary_folder(gsm8k, tmp_path):
    """Whatever ends a run: a bad flag, an error, a signal at any moment, or that it is finished."""
    (tmp_path / "broken.py").write_text(
        "import tba\n"
        "class Broken(tba.GSM8K):\n"
        "    def rewards(self, examples, responses, ended):\n"
        "        raise ArithmeticError\n"
        "    def setup(self, device, engine_of):\n"  # so that it is not tried before the start
        "        pass\n"
        "tba.TASKS['broken'] = Broken\n"
    )
    ends = {  # name: (exit code, flags)
        "unreadable": (2, {"steps": "many"}),
        "wrong": (2, {"steps": 0}),
        "error": (1, {"task": "broken", "task_file": tmp_path / "broken.py"}),
        "early": (143, {}),
        "late": (130, {"steps": 100_000, "save_every": 0}),
        "finished": (0, {"steps": 1, "eval_every": 0, "eval_samples": 4}),
    }
    processes = {}
    for name, (_, flags) in ends.items():
        (tmp_path / name).mkdir()
        command = [sys.executable, str(ROOT / "tba.py")]
        command += arguments(gsm8k, tmp_path / f"run-{name}", **flags)
        env = {**os.environ, "TMPDIR": str(tmp_path / name)}
        with open(tmp_path / f"{name}.log", "w") as log:
            processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def interrupt(name, number, condition):
        wait_until(lambda: condition() or processes[name].poll() is not None, name)
        assert list((tmp_path / name).iterdir())  # or this shows nothing
        processes[name].send_signal(number)

    # before there is anything to save, and in the midst of training
    interrupt("early", signal.SIGTERM, lambda: list((tmp_path / "early").iterdir()))
    interrupt("late", signal.SIGINT, (tmp_path / "run-late" / "metrics.jsonl").exists)
    for name, (code, _) in ends.items():
        said = tmp_path / f"{name}.log"
        assert processes[name].wait(PATIENCE) == code, said.read_text()
        assert not list((tmp_path / name).iterdir()), name
    assert "Traceback" not in (tmp_path / "early.log").read_text()


def test_a_stop_signal_is_not_lost_while_another_process_starts():
    """It arrives late; the process that starts meanwhile holds it back until it can handle it."""
    arrived = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: arrived.append(number))
    try:
        with tba.stop_signals_held():
            mask = subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True)
            signal.raise_signal(signal.SIGUSR1)
            assert not arrived
        assert arrived == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    held = int(mask.stdout.split()[1], 16)
    assert all(held >> (number - 1) & 1 for number in tba.STOP_SIGNALS)


def test_dry_run_prints_the_plan_and_makes_nothing(gsm8k, tmp_path, capsys):
    out = tmp_path / "run"
    code, plan, lines = main([*arguments(gsm8k, out, num_searchers=3), "--dry_run"], capsys)
    assert code == 0 and not lines
    for part in ("B x K = 4 x 8 = 32", "3 Searcher(s) on the CPU", "4,000 training prompts", "GiB"):
        assert part in plan
    assert not out.exists()


def test_help_explains_every_flag_in_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, text, _ = main(["--help"], capsys)
    assert code == 0 and "(default: )" not in text
    first, second, *_ = text.splitlines()
    assert first.startswith("usage: ") and not second  # no wall
    squeeze = lambda text: "".join(text.split())  # argparse breaks lines at hyphens too
    at = 0
    for field in dataclasses.fields(tba.Config):
        if title := tba.GROUPS_OF_HELP.get(field.name):
            at = text.index(f"\n\n{title}:\n", at)
        at = text.index(f"\n  --{field.name}", at)  # in its group, in the order of Config
        assert squeeze(tba.help_text(field)) in squeeze(text[at:])
    for default in ("(default: 0.95)", "(default: oldest)", "(default: 700)"):
        assert default in text


def test_help_shows_defaults_of_zero_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, text, _ = main(["--help"], capsys)
    shown = text[text.index("--warmup_steps") : text.index("--stable_steps")]
    assert "(default: 0)" in shown


# ------------------------------------------------------------------------------------- resume


@pytest.fixture(scope="module")
def interrupted(gsm8k, tmp_path_factory):
    """A run of two steps as an interruption leaves it; `whole` beside it took three more."""
    whole = tmp_path_factory.mktemp("interrupted") / "whole"
    trainer = trainer_of(
        gsm8k, whole, steps=10, lr_schedule="linear", learning_rate=1e-3, weight_decay=0.1
    )
    trainer.last_step_end = time.perf_counter()
    stored = random_groups(trainer.problem, 8, 8)
    trainer.arrived = [tba.Group(g[0].prompt_id, g, 0, i) for i, g in enumerate(stored)]
    trainer.collect()
    trainer.evaluation.done_at = 0
    for _ in range(2):
        trainer.train_step()
    trainer.checkpoints.save()
    trainer.checkpoints.finish()
    folder = shutil.copytree(whole, whole.with_name("interrupted"))
    for _ in range(3):
        trainer.train_step()
    trainer.folder.bar.close()
    return folder


@pytest.fixture
def run(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "run")


@pytest.fixture
def resume(tmp_path, capsys):
    """Function: `main` with --resume of a copy of a run, for this process keeps a run's lock.

    Returns (exit code, standard output, lines of standard error); {} stands for the folder there.
    A run that is refused must not change.
    """
    number = itertools.count()

    def resume(run, *flags):
        copy = shutil.copytree(run, tmp_path / f"copy-{next(number)}")
        before = contents(copy)
        code, out, lines = main(["--resume", copy, *flags], capsys)
        assert contents(copy) == before
        return code, out, [line.replace(str(copy), "{}") for line in lines]

    return resume


def contents(folder: Path) -> dict:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


REFUSED = {  # what is wrong: (flags after --resume DIR, the message; {} is the folder)
    "another model": (
        ["--model", "nobody/nothing"],
        "--model nobody/nothing: ",
    ),
    "adapters that were not trained": (
        ["--lora_rank", 4],
        "--lora_rank 4: {}/checkpoint-2 was trained with 0; leave it out",
    ),
    "another folder": (
        ["--output_dir", "elsewhere"],
        "--output_dir elsewhere: leave it out: a resumed run goes on in its folder, {}",
    ),
    "a warm start it had not": (["--sft_data", "more.jsonl"], "--resume {}: its sft/, which"),
    "fewer steps than done": (["--steps", 1], "--steps 1: {}/checkpoint-2 has taken 2 already"),
    "an evaluation": (["--eval_only"], "--resume {}: leave out --eval_only"),
    "a bad value": (["--learning_rate", "-1"], "--learning_rate -1.0: must be greater than 0"),
    "another task": (["--task", "chess"], "--task chess: choose one of"),
    "a missing task file": (["--task_file", "/no/such.py"], "--task_file /no/such.py: no such"),
}


@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
@pytest.mark.parametrize("case", REFUSED)
def test_a_run_is_not_resumed_with(case, dry, run, capsys):
    """One line, code 2, and no file of the run is changed."""
    flags, message = REFUSED[case]
    before = contents(run)
    code, _, lines = main(["--resume", run, *flags, *dry], capsys)
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith(f"tba.py: error: {message.format(run)}")
    assert contents(run) == before


@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_a_run_is_not_resumed_with_other_training_prompts(dry, run, gsm8k, tmp_path, capsys):
    rows = (gsm8k / "data" / "train.jsonl").read_text().splitlines()
    fewer, before = tmp_path / "fewer.jsonl", contents(run)
    fewer.write_text("\n".join(rows[:100]) + "\n")
    code, _, (line,) = main(["--resume", run, "--dataset", fewer, *dry], capsys)
    assert code == 2 and contents(run) == before
    assert line.startswith(
        f"tba.py: error: --dataset {fewer}: its prompts or answers are not those of the run"
    )


def test_a_run_is_not_resumed_with_other_answers(run, gsm8k, tmp_path, capsys):
    """The rewards in its replay buffer compare with those that it had."""
    data, before = shutil.copytree(gsm8k / "data", tmp_path / "data"), contents(run)
    first, *others = (data / "train.jsonl").read_text().splitlines()
    changed = json.loads(first)
    changed["answer"] += "1"
    (data / "train.jsonl").write_text("\n".join([json.dumps(changed), *others]) + "\n")
    code, _, (line,) = main(["--resume", run, "--dataset", data], capsys)
    assert code == 2 and contents(run) == before
    assert "its prompts or answers are not those of the run" in line


def test_examples_of_a_users_own_kind_have_a_checksum_that_repeats(gsm8k, tmp_path):
    """Also where they hold objects, whose texts name their addresses."""

    def checksum(answer: object) -> int:
        problem.task.train[0]["answer"] = {"gold": object(), 7: answer}
        return problem.checksum()

    problem = trainer_of(gsm8k, tmp_path / "run").problem
    assert checksum("two") == checksum("two") != checksum("three")


def test_the_same_data_and_model_in_another_place_can_be_resumed_with(run, resume, gsm8k, tmp_path):
    data, model = (shutil.copytree(gsm8k / n, tmp_path / "moved" / n) for n in ("data", "model"))
    flags = ["--dataset", str(data), "--model", str(model)]
    code, plan, lines = resume(run, *flags, "--dry_run")
    assert code == 0 and not lines and "/checkpoint-2" in plan.split("resume     ")[1]
    trainer = resumed(run, *flags)
    assert trainer.config.model == str(model) and trainer.checkpoints.state()["base"][
        "model"
    ] == str(model)
    assert json.loads((run / "config.json").read_text())["config"]["model"] == str(model)
    # from now on without these flags; and with other weights in that place no more
    assert resume(run, "--dry_run")[0] == 0
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-8] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    for more in ([], flags):
        code, _, (line,) = resume(run, *more)
        assert code == 2
        assert line.startswith(f"tba.py: error: --model {model}: its weights are not those that")


def test_adapters_are_resumed_with_the_settings_they_were_trained_with(
    resume, gsm8k, tmp_path, capsys
):
    out = tmp_path / "run"
    trainer = trainer_of(gsm8k, out, lora_rank=2, lora_alpha=8)
    trainer.checkpoints.save()
    trainer.checkpoints.finish()
    capsys.readouterr()
    for name, value in ("lora_rank", 0), ("lora_rank", 3), ("lora_alpha", 16):
        code, _, (line,) = resume(out, f"--{name}", value)
        trained = {"lora_rank": 2, "lora_alpha": 8}[name]
        fix = f"{{}}/checkpoint-0 was trained with {trained}; leave it out"
        assert code == 2 and line.startswith(f"tba.py: error: --{name} {value}: {fix}")
    assert resume(out, "--dry_run")[::2] == (0, [])
    # as another version of peft might name them
    trainer = resumed(out)
    adapters = trainer.saved["adapters"]
    adapters["elsewhere"] = adapters.popitem()[1]
    with pytest.raises(tba.InputError, match="no place for its adapter elsewhere"):
        trainer.learner.restore(trainer.saved)


def test_a_run_goes_on_with_masters_in_another_dtype(run):
    """And without adapters their scale is nothing that could differ."""
    flags = ["--dtype", "bfloat16", "--master_dtype", "bfloat16", "--lora_alpha", "8"]
    trainer = resumed(run, *flags)
    trainer.last_step_end = time.perf_counter()
    trainer.train_step()
    states = trainer.learner.optimizer.state_dict()["state"].values()
    assert {state["exp_avg"].dtype for state in states} == {torch.bfloat16}
    assert all(state["step"] == 3 for state in states)


def test_what_was_said_is_saved_and_what_was_resolved_is_shown(run):
    """A setting that follows from another, or from the machine, follows from those of today."""
    record = json.loads((run / "config.json").read_text())
    said, resolved = record["config"], record["resolved"]
    assert said.keys() == resolved.keys()
    for name, of_said, of_resolved in [
        ("dtype", "auto", "float32"), ("num_searchers", 0, 1),
        ("logprob_tolerance", 0.0, 1e-3), ("engine", "transformers", "transformers"),
    ]:  # fmt: skip
        assert (said[name], resolved[name]) == (of_said, of_resolved)
    flags = {"beta": 0.5, "dtype": "bfloat16", "master_dtype": "bfloat16"}
    config = resumed(run, *(str(x) for k, v in flags.items() for x in (f"--{k}", v))).config
    assert {config.at(step).beta for step in (0, 2, 10_000)} == {0.5}
    assert config.logprob_tolerance == 0.5
    again = tba.parse(["--resume", str(run)])
    assert again.beta == "0.5" and again.logprob_tolerance == 0


def test_a_run_under_way_is_not_resumed(run, capsys):
    folder = os.open(run, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # as the process that trains has it
    before = contents(run)
    for dry in ([], ["--dry_run"]):
        code, _, (line,) = main(["--resume", run, *dry], capsys)
        assert code == 2 and line == f"tba.py: error: --resume {run}: this run is under way"
    assert contents(run) == before
    os.close(folder)
    assert main(["--resume", run, "--dry_run"], capsys)[0] == 0  # the lock went with its holder


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_checkpoint_named_for_its_run_is_pointed_out(slash, run, capsys):
    code, _, (line,) = main(["--resume", f"{run}/checkpoint-2{slash}"], capsys)
    assert code == 2 and f"name the run that it belongs to: --resume {run} " in line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "[]",
        '{"config": []}',
        '{"config": {}}',
    ],
)
def test_a_folder_without_a_runs_config_holds_no_run(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    code, _, lines = main(["--resume", tmp_path], capsys)
    assert code == 2 and len(lines) == 1 and f"--resume {tmp_path}: holds no run" in lines[0]


def test_the_folder_of_an_evaluation_is_said_to_be_one(run, capsys):
    record = json.loads((run / "config.json").read_text())
    record["config"]["eval_only"] = True
    (run / "config.json").write_text(json.dumps(record))
    code, _, (line,) = main(["--resume", run], capsys)
    assert code == 2 and f"--resume {run}: holds an evaluation (--eval_only)" in line


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(run, capsys):
    """Whether they are cut short, changed in the middle, or without a file."""

    def copy(step: int) -> Path:
        return shutil.copytree(run / "checkpoint-2", run / f"checkpoint-{step}")

    for step, file in (6, "trainer.pt"), (5, "model.safetensors"):
        whole = (copy(step) / file).read_bytes()
        (run / f"checkpoint-{step}" / file).write_bytes(whole[: len(whole) // 2])
    state = bytearray((copy(4) / "trainer.pt").read_bytes())
    state[len(state) // 2] ^= 1
    (run / "checkpoint-4" / "trainer.pt").write_bytes(state)
    (copy(3) / "trainer.pt").unlink()
    for step, file in (10, "model.safetensors"), (9, "tokenizer.json"), (8, "checksums.json"):
        content = bytearray((copy(step) / file).read_bytes())
        content[len(content) // 2] ^= 1
        (run / f"checkpoint-{step}" / file).write_bytes(content)
    (copy(7) / "config.json").unlink()
    code, plan, lines = main(["--resume", run, "--dry_run"], capsys)
    assert code == 0 and f"resume     {run / 'checkpoint-2'}" in plan
    assert len(lines) == 8
    for step, line in zip((10, 9, 8, 7, 6, 5, 4, 3), lines, strict=True):
        assert line.startswith(f"warning: {run}/checkpoint-{step} is not used: ")


def test_lines_that_are_no_records_are_named_and_left_out(run, capsys):
    first, second = (run / "metrics.jsonl").read_bytes().splitlines()
    damaged = b"\n".join([first, b"null", b"{}", b"\xff\x00", second, b'{"step": "2"}', b""])
    (run / "metrics.jsonl").write_bytes(damaged)
    (run / "eval.jsonl").write_text("null\n")
    with open(run / "completions.jsonl", "a+") as file:
        file.write("[1, 2]\n")
        file.seek(0)
        of_completions = len(file.readlines())
    assert main(["--resume", run, "--dry_run"], capsys)[::2] == (0, [])
    trainer = resumed(run)
    lines = capsys.readouterr().err.splitlines()
    for line in (
        f"warning: {run}/metrics.jsonl: lines without a record are left out: 2, 3, 4, 6",
        f"warning: {run}/completions.jsonl: lines without a record are left out: {of_completions}",
        f"warning: {run}/eval.jsonl: lines without a record are left out: 1",
    ):
        assert line in lines
    assert read_lines(run / "metrics.jsonl") == [json.loads(first), json.loads(second)]
    assert trainer.folder.summary() == f"curves: {run}/curves.png"


def test_a_disk_that_fills_up_leaves_the_model_that_was_there(run, capsys):
    """With a limit on the size of files in place of a full disk."""
    trainer = resumed(run)
    assert trainer.checkpoints.save_final()
    before, limits = contents(run), resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert not trainer.checkpoints.save_final()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(run) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {run}/final could not be saved: ")
    assert line.endswith(f"; --resume {run} writes it again")


def test_a_run_without_a_checkpoint_that_loads_is_not_resumed(run, capsys):
    (run / "checkpoint-2" / "trainer.pt").write_bytes(b"PK")
    before = contents(run)
    code, _, lines = main(["--resume", run], capsys)
    assert code == 2 and len(lines) == 2 and "warning: " in lines[0]
    assert lines[1].startswith(f"tba.py: error: --resume {run}: has no checkpoint that loads")
    assert contents(run) == before


def test_a_checkpoint_without_its_model_is_damaged_too(run, capsys):
    (run / "checkpoint-2" / "model.safetensors").unlink()
    code, _, lines = main(["--resume", run, "--dry_run"], capsys)
    assert code == 2 and f"{run}/checkpoint-2 is not used" in lines[0]


def test_the_checkpoint_just_written_is_not_the_one_that_goes(run, gsm8k):
    """A damaged one of a later step is in the folder when the run that was resumed saves."""
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-7")
    (run / "checkpoint-7" / "trainer.pt").write_bytes(b"PK")
    trainer = resumed(run, "--keep_checkpoints", "1")
    trainer.step = 5
    trainer.checkpoints.save()
    trainer.checkpoints.finish()
    assert (run / "checkpoint-5").exists()


def resumed(run, *flags):
    """A Trainer without Searchers that goes on with a run."""
    config = tba.parse(["--resume", str(run), *flags])
    tba.resolve(config)
    tba.check_settings(config)
    problem = tba.load_problem(config)
    saved = tba.read_checkpoint(config, problem)
    trainer = tba.Trainer(config, problem, tba.RunFolder(config, saved), saved)
    trainer.load()
    trainer.folder.bar.close()
    return trainer


def test_a_resumed_run_goes_on_where_it_was_with_the_flags_given_then(run):
    """Learning rate and weight decay too; what was written after the checkpoint is forgotten."""
    before = read_lines(run / "metrics.jsonl")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(before[-1] | {"step": 3}) + '\n{"step": 4, "lo')
    flags = {"learning_rate": 0.5, "weight_decay": 0.25, "steps": 20, "beta": 0.125}
    trainer = resumed(run, *(str(x) for k, v in flags.items() for x in (f"--{k}", v)))
    assert trainer.step == 2 and len(trainer.buffer) == 64
    group, of_log_z = trainer.learner.optimizer.param_groups
    assert of_log_z["weight_decay"] == 0
    assert group["weight_decay"] == 0.25 and group["lr"] == pytest.approx(0.5 * 18 / 20)
    assert trainer.config.beta == "0.125" and trainer.config.max_response_tokens == 32  # as before
    saved = tba.transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoint-2")
    for old, new in zip(saved.parameters(), trainer.learner.model.parameters(), strict=True):
        assert torch.equal(old, new)
    assert len(trainer.learner.optimizer.state) == len(list(trainer.learner.model.parameters()))
    assert all(state["step"] == 2 for state in trainer.learner.optimizer.state.values())
    assert torch.equal(torch.get_rng_state(), trainer.saved["random"])
    record = json.loads((run / "config.json").read_text())
    assert record["config"]["learning_rate"] == 0.5 and record["resumed_from"] == "checkpoint-2"
    assert read_lines(run / "metrics.jsonl") == before


@pytest.mark.parametrize("text", ["", '{"step": 1, "lo'])
def test_curves_are_drawn_of_the_metrics_that_are_there(text, run):
    """After a disk was full, or an interruption before the first step: a run must not end of it."""
    (run / "metrics.jsonl").unlink()
    folder = resumed(run).folder
    (run / "metrics.jsonl").write_text(text)
    folder.draw_curves()


def test_a_resumed_run_takes_the_very_steps_that_it_would_have_taken(interrupted, run):
    trainer = resumed(run)
    trainer.last_step_end = time.perf_counter()
    for _ in range(3):
        trainer.train_step()
    names = "step loss grad_norm log_z entropy lr recent_fraction".split()
    of_step = lambda folder: [
        [line[name] for name in names] for line in read_lines(folder / "metrics.jsonl")
    ]
    whole = of_step(interrupted.with_name("whole"))
    assert of_step(run) == whole and [line[0] for line in whole] == [1, 2, 3, 4, 5]
    assert len({line[1] for line in whole}) == 5  # every batch was another


def test_resuming_shows_no_warning_of_a_library(run, recwarn):
    resumed(run)
    assert not [str(w.message) for w in recwarn if "optimizer.step()" in str(w.message)]


def test_flags_before_resume_give_way_to_the_runs_own(run, gsm8k):
    """So a script with all its flags can be given --resume."""
    elsewhere = run.with_name("elsewhere")
    script = arguments(gsm8k, elsewhere, steps=10, lr_schedule="linear", learning_rate=1e-3)
    config = tba.parse([*script, "--beta", "9", "--resume", str(run), "--seed", "3"])
    assert config.beta == "0.05" and config.seed == 3 and config.output_dir == str(run)


# ------------------------------------------------------------------------------------ scripts


@pytest.mark.skipif(not REAL_GSM8K.exists(), reason="GSM8K is not beside this repository")
def test_real_gsm8k_runs_end_to_end(gsm8k, tmp_path):
    """Real problems through the tiny model: long prompts, real gold answers."""
    model = tiny.make_model("long_llama", gsm8k / "model", tmp_path / "model")
    data, out = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    (data / "train.jsonl").symlink_to(REAL_GSM8K / "train.jsonl")
    held_out = (REAL_GSM8K / "test.jsonl").read_text().splitlines()[:40]
    (data / "test.jsonl").write_text("\n".join(held_out) + "\n")
    stdout, _ = run_tba(arguments(gsm8k, out, model=model, dataset=data, steps=2, eval_samples=8))
    assert "7,473 training prompts" in stdout and "on all 40 held-out prompts: accuracy" in stdout
    evaluations = [(e["step"], e["split"], e["n"]) for e in read_lines(out / "eval.jsonl")]
    assert evaluations == [(0, "held_out", 8), (2, "held_out", 8), (2, "held_out_whole", 40)]


def run_script(words, *flags, python=sys.executable, folder=None):
    env = {**os.environ, "PYTHON": str(python), "TBA_CACHE": str(CACHE)}
    command = ["bash", str(ROOT / words[0]), *words[1:], *flags]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)


@pytest.fixture
def flags_of_script(tmp_path):
    """Function: words of a command -> the arguments with which the script starts tba.py."""
    printer = tmp_path / "python"
    printer.write_text("#!/usr/bin/env bash\n[[ $1 == */tiny.py ]] || printf '%s\\0' \"$@\"\n")
    printer.chmod(0o755)

    def flags_of(words, *flags):
        done = run_script(words, *flags, python=printer, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        program, *arguments = done.stdout.removesuffix("\0").split("\0")
        assert program == str(ROOT / "tba.py")
        return arguments

    return flags_of


@pytest.mark.parametrize("task", ["gsm8k", "tldr", "redteam"])
def test_tiny_scripts_plan(task, request, flags_of_script, tmp_path, capsys):
    request.getfixturevalue(task)
    flags = ["--tiny", "--dry_run", "--steps", "123", "--output_dir", tmp_path / "out"]
    words = flags_of_script([f"run_{task}.sh"], *map(str, flags))
    code, plan, lines = main(words, capsys)
    assert code == 0 and not lines
    assert "123 steps" in plan and "not checked" not in plan
    assert not (tmp_path / "out").exists()


def test_scripts_refuse_unknown_sizes_victims_and_values():
    for script in ("run_gsm8k.sh", "run_tldr.sh", "run_redteam.sh"):
        done = run_script([script, "7b"])
        assert done.returncode == 2 and "choose" in done.stderr and done.stderr.count("\n") == 1
    for steps in ("many", "9", "-5", "010"):
        env = {**os.environ, "STEPS": steps}
        command = ["bash", str(ROOT / "run_tldr.sh")]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 2 and f"STEPS={steps}: a number of at least 10" in done.stderr
    bad = run_script(["run_gsm8k.sh", "--beta", "-1"])
    assert bad.returncode == 2 and "--beta -1: write" in bad.stderr and bad.stderr.count("\n") == 1


# ------------------------------------------------------------------------------- memory of GPUs

SIZES = {  # layers, width, vocabulary, parameters, bytes kept a token, layer and unit of width
    "rho-1b": (22, 2048, 32_000, 1_100_000_000, 61),
    "Qwen2.5-7B": (28, 3584, 152_064, 7_600_000_000, 81),
}


def memory(name: str, gpu: float, shared: bool, largest: int = 0, **flags):
    """The plan's text, its warnings and the KV cache's bytes, of a model in bfloat16."""
    config = tba.Config(model=name, dtype="bfloat16", **flags)
    *shape, parameters, kept = SIZES[name]
    problem = tba.Problem(None, None, [], [], [], tuple(shape), parameters, judge_bytes=0)
    problem.activation_bytes = kept * shape[0] * shape[1]
    problem.largest_kv_cache = largest
    plan = tba.memory_plan(config, problem, gpu, shared)
    doubts = list(tba.memory_doubts(config, plan))
    return tba.memory_text(plan), doubts, tba.kv_cache_bytes(config, plan)


@pytest.mark.parametrize(("gpu", "shared"), [(79.6, True), (79.6, False), (139.8, True)])
def test_gsm8k_fits_and_the_cache_gets_the_rest(gpu, shared):
    text, doubts, kv_cache_bytes = memory("rho-1b", gpu, shared)
    assert "weights 4.1, gradients 4.1, optimizer 8.2, casts 2.05, activations" in text
    taken = [float(line.split(" GiB")[0].split()[-1]) for line in text.splitlines()]
    used = sum(taken) if shared else max(taken)
    assert 0.9 * gpu < used < 0.96 * gpu
    assert kv_cache_bytes > 2 * 2**30
    assert doubts == []


def test_weights_on_their_way_count_where_they_lie():
    """A Searcher that shares the Trainer's GPU reads them from the Trainer's snapshot."""
    own, _, cache_of_own = memory("rho-1b", 79.6, shared=False)
    trainer, searcher = own.splitlines()
    assert "snapshot 2.05" in trainer and "staging 2.05" in searcher
    policy, staging = 2.05, 2.05
    assert cache_of_own / 2**30 < 0.93 * 79.6 - 2 * policy - staging
    trainer, searcher = memory("rho-1b", 79.6, shared=True)[0].splitlines()
    assert "snapshot 2.05" in trainer and "staging" not in searcher


def test_memory_of_judges_and_of_two_engines():
    with_judge = tba.Config(task="redteam", model="rho-1b", dtype="bfloat16", kv_cache_gib=8)
    problem = tba.Problem(None, None, [], [], [], (22, 2048, 32_000), 10**9, judge_bytes=8 * 2**30)
    plan = tba.memory_plan(with_judge, problem, 79.6, False)
    assert "judges 8," in tba.memory_text(plan)
    assert tba.kv_cache_bytes(with_judge, plan) == 4 * 2**30  # the attacker's and the victim's


def test_memory_without_gpus_is_planned_and_never_doubted():
    text, doubts, kv_cache_bytes = memory("Qwen2.5-7B", float("nan"), shared=False)
    assert "KV cache 1" in text and "CUDA" not in text
    assert doubts == [] and kv_cache_bytes == 2**30


def test_what_does_not_fit_is_a_warning_that_names_the_flag_to_change():
    """The figures are estimates: the run begins, with a small KV cache."""
    less = {"tokens_per_microbatch": 1024, "gradient_checkpointing": True}
    text, (doubt,), kv_cache_bytes = memory("rho-1b", 79.6, True, tokens_per_microbatch=65536)
    assert doubt.startswith("--tokens_per_microbatch 65536: the Trainer and the Searcher together")
    assert " GiB more than a GPU of 79.6 GiB has; lower it, or set --gradient_checkpoi" in doubt
    assert "KV cache 0.5" in text and kv_cache_bytes == 2**29
    fits = {"tokens_per_microbatch": 65536, "gradient_checkpointing": True}
    assert memory("rho-1b", 79.6, True, **fits)[1] == []
    _, (doubt,), _ = memory("Qwen2.5-7B", 79.6, False, tokens_per_microbatch=1024)
    assert doubt.startswith("--model Qwen2.5-7B: the Trainer needs about ")
    _, (doubt,), _ = memory("rho-1b", 23.6, True, **less)
    assert doubt.startswith("--model rho-1b: the Trainer and the Searcher together need about ")
    _, (doubt,), _ = memory("rho-1b", 79.6, False, kv_cache_gib=100)
    assert doubt.startswith("--kv_cache_gib 100: the Searcher needs about ")
    assert memory("rho-1b", 23.6, False, **less)[1] == []


WIDTHS = {  # the published models of FACTS' sizes: bytes a token, layer and unit of width, read
    ("llama", 61): {"hidden_size": 2048, "intermediate_size": 5632, "num_key_value_heads": 4,
                    "num_hidden_layers": 22, "num_attention_heads": 32},
    ("llama", 73): {"hidden_size": 2048, "intermediate_size": 8192, "num_key_value_heads": 8,
                    "num_hidden_layers": 16, "num_attention_heads": 32},
    ("qwen2", 81): {"hidden_size": 3584, "intermediate_size": 18944, "num_key_value_heads": 4,
                    "num_hidden_layers": 28, "num_attention_heads": 28},
    ("gpt2", 65): {"n_embd": 768, "n_head": 12, "n_layer": 12},
    ("gpt_neox", 43): {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                       "num_attention_heads": 16},
}  # fmt: skip


@pytest.mark.parametrize(("family", "expected"), WIDTHS)
def test_activations_of_published_sizes_are_planned(family, expected):
    """Nothing of that size is allocated."""
    shape = tba.transformers.AutoConfig.for_model(family, **WIDTHS[family, expected])
    found = tba.activation_bytes(tba.Config(dtype="bfloat16"), shape)
    found /= shape.num_hidden_layers * shape.hidden_size
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_activations_are_planned_as_real_tensors_are_kept(family, wide, dtype):
    width = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    if wide:
        width = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    if family != "gpt2":
        width["intermediate_size"] = 3 * width["hidden_size"]
        width["num_key_value_heads"] = 2
    shape = tba.transformers.AutoConfig.for_model(family, vocab_size=100, **width)
    config = tba.Config(dtype=dtype)
    L = 307
    planned = tba.activation_bytes(config, shape, L)
    fallback = 29 * config.torch_dtype.itemsize * width["hidden_size"] * width["num_hidden_layers"]
    assert planned != fallback
    tba.switch_dropout_off(shape)
    model = tba.transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    model.train()
    weights = {tensor.data_ptr() for tensor in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    kept = {}  # what autograd holds, but for weights and their copies

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    mask = torch.ones(1, 1, L, L, dtype=torch.bool)
    ids = torch.zeros(1, L, dtype=torch.long)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), cast:
        inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": mask}
        output = model.base_model(**inputs, use_cache=False)
    assert output.last_hidden_state.requires_grad
    assert planned == pytest.approx(sum(kept.values()) / L, rel=0.15)


def test_a_trainer_that_shares_a_gpu_leaves_the_searcher_its_part():
    trainer, searcher = {"weights": 20.0}, {"policy": 10.0}
    shared = tba.MemoryPlan(trainer, searcher, kv_cache=30.0, gpu=80.0, shared=True)
    assert shared.trainer_share == 0.5
    assert tba.MemoryPlan(trainer, searcher, 30.0, 80.0, shared=False).trainer_share == 1
    assert tba.MemoryPlan(trainer, searcher, 30.0, float("nan"), shared=True).trainer_share == 1
    full = tba.MemoryPlan({"weights": 70.0}, searcher, 0.5, 80.0, shared=True)
    assert full.trainer_share == 70 / 80  # a plan that does not fit is a warning elsewhere


def test_a_kv_cache_is_no_larger_than_can_be_used(gsm8k):
    """Keys and values of all layers of as many of the longest responses as decode at a time."""
    text, _, kv_cache_bytes = memory("rho-1b", 79.6, False, largest=5 * 2**30)
    assert kv_cache_bytes == 5 * 2**30 and "KV cache 5" in text
    _, _, whole = memory("rho-1b", 79.6, False, largest=5 * 2**30, kv_cache_gib=9.0)
    assert whole == 9 * 2**30  # as was asked for
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 4}
    rho = tba.transformers.LlamaConfig(**shape)
    config = tba.Config(dtype="bfloat16", sequences_in_flight=256, max_response_tokens=512)
    least = 256 * (200 + 512) * 22 * 2 * 4 * 64 * 2
    assert least < tba.largest_kv_cache(config, rho, 200) < 1.1 * least
    config = tba.Config(model=str(gsm8k / "model"), dtype="float32")
    problem = tba.Problem(None, None, [], [], [], (2, 64, 100), 1, 0, kv_cache_bytes=2**30)
    assert tba.VLLMEngine.kv_cache_size(config, problem, 60) < 2**30
    config.kv_cache_gib = 1.0
    assert tba.VLLMEngine.kv_cache_size(config, problem, 60) == 2**30


def test_a_host_without_a_compiler_or_with_other_gpus_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = tba.Config(engine="vllm", num_searchers=1)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ValueError, match=r"--engine vllm: finds no C compiler, .*; install gcc"):
        tba.check_machine(config)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(tba.sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(ValueError, match=r"there is no /nowhere/Python.h, .*python3-dev"):
        tba.check_machine(config)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ValueError, match="is for ROCm; install one for CUDA"):
        tba.check_machine(config)


@pytest.mark.parametrize("answer", [None, "echo '[N/A]'", "exit 9"])
def test_gpus_whose_memory_nobody_tells_are_not_planned_for(answer, tmp_path, monkeypatch, capsys):
    """nvidia-smi is missing, fails, or knows no memory, as of a MIG instance."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0a1b")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if answer else str(tmp_path))
    if answer:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert np.isnan(tba.gpu_gib())
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: nvidia-smi does not tell the GPUs' memory (")
    assert "--kv_cache_gib" in warning
