"""The command line: every bad input, the plan, the help, resuming, and the shell scripts."""

import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from conftest import (
    CACHE,
    REAL_GSM8K,
    ROOT,
    arguments,
    random_groups,
    read_lines,
    run_tba,
    trainer_of,
)

import tba


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = {"question": "1+1?", "answer": "#### 2"}
BAD_FLAGS = {
    "unknown task": ({"task": "chess"}, "--task chess"),
    "unknown engine": ({"engine": "llama.cpp"}, "--engine: invalid choice: 'llama.cpp'"),
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
    "beta_final = 0": ({"beta_final": 0}, "--beta_final 0"),
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
    "no restarts": ({"max_restarts": -1}, "--max_restarts -1"),
    "recompute without vLLM": ({"on_sync": "recompute"}, "--on_sync recompute: only vLLM"),
    "no decay": ({"lr_schedule": "warmup_stable_decay"}, "--decay_steps 0"),
    "no time": ({"transfer_timeout": 0}, "--transfer_timeout 0"),
}
BAD_DATA = {
    "missing column": ([{"question": "?", "reply": "2"}] * 2, "has no column answer"),
    "no gold number": (
        [GOOD, {"question": "?", "answer": "none"}],
        "row 0: the gold answer has no",
    ),
    "empty question": ([{"question": " ", "answer": "2"}, GOOD], "row 0: the question is empty"),
    "empty": ([], "name a .json, .jsonl, .csv or .parquet with examples"),
    "no question": ([{"question": None, "answer": "2"}, GOOD], "row 0: the question is None"),
    "a number": ([{"question": i, "answer": "2"} for i in (1, 2)], "row 0: the question is 1; it"),
    "no answer": ([{"question": "?", "answer": None}, GOOD], "row 0: the gold answer has no"),
    "one example": ([GOOD], "it is empty"),
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
        assert squeeze(field.metadata["help"]) in squeeze(text[at:])
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
    trainer.pool.arrived = [tba.Group(g[0].prompt_id, g, 0, i) for i, g in enumerate(stored)]
    trainer.collect()
    trainer.pool.evaluated = 0
    for _ in range(2):
        trainer.train_step()
    trainer.save_checkpoint()
    folder = shutil.copytree(whole, whole.with_name("interrupted"))
    for _ in range(3):
        trainer.train_step()
    trainer.folder.bar.close()
    return folder


@pytest.fixture
def run(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "run")


def contents(folder: Path) -> dict:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


REFUSED = {  # what is wrong: (flags after --resume DIR, the message; {} is the folder)
    "another model": (
        ["--model", "nobody/nothing"],
        "--model nobody/nothing: the run in {} trains",
    ),
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
        f"tba.py: error: --dataset {fewer}: its prompts are not those of the run"
    )


def test_the_same_data_in_another_place_can_be_resumed_with(run, gsm8k, tmp_path, capsys):
    moved = shutil.copytree(gsm8k / "data", tmp_path / "moved")
    code, plan, lines = main(["--resume", run, "--dataset", moved, "--dry_run"], capsys)
    assert code == 0 and not lines and f"resume     {run / 'checkpoint-2'}" in plan


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
    code, plan, lines = main(["--resume", run, "--dry_run"], capsys)
    assert code == 0 and f"resume     {run / 'checkpoint-2'}" in plan
    assert len(lines) == 4
    for step, line in zip((6, 5, 4, 3), lines, strict=True):
        assert line.startswith(f"warning: {run}/checkpoint-{step} is not used: ")


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
    trainer.step = trainer.pool.step = 5
    trainer.save_checkpoint()
    assert (run / "checkpoint-5").exists()


def resumed(run, *flags):
    """A Trainer without Searchers that goes on with a run."""
    config = tba.parse(["--resume", str(run), *flags])
    config.resolve()
    config.validate()
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
    assert trainer.step == trainer.pool.step == 2 and len(trainer.buffer) == 64
    (group,) = trainer.optimizer.param_groups
    assert group["weight_decay"] == 0.25 and group["lr"] == pytest.approx(0.5 * 18 / 20)
    assert trainer.config.beta == 0.125 and trainer.config.max_response_tokens == 32  # as before
    saved = tba.transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoint-2")
    for old, new in zip(saved.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)
    assert len(trainer.optimizer.state) == len(list(trainer.model.parameters()))
    assert all(state["step"] == 2 for state in trainer.optimizer.state.values())
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
    assert config.beta == 0.05 and config.seed == 3 and config.output_dir == str(run)


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


PAPER = {  # script: what its plan must say
    "run_gsm8k.sh": ("B x K = 7 x 20 = 140", "beta 0.014 -> 0.004"),
    "run_tldr.sh 2.8b": ("B x K = 8 x 20 = 160", "pythia2.8b-sft", "10000 before the first step"),
    "run_redteam.sh llama-3.2-1b": ("B x K = 16 x 8 = 128", "tau 2.0 -> 1.0"),
}


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


@pytest.mark.parametrize("script", PAPER)
def test_scripts_plan_with_the_papers_numbers(script, flags_of_script, tmp_path, capsys):
    flags = ["--dry_run", "--steps", "123", "--output_dir", tmp_path / "out"]
    code, plan, lines = main(flags_of_script(script.split(), *map(str, flags)), capsys)
    assert code == 0, lines
    for part in ("123 steps", "not checked", *PAPER[script]):
        assert part in plan


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
    for script in ("run_tldr.sh", "run_redteam.sh"):
        done = run_script([script, "7b"])
        assert done.returncode == 2 and "choose" in done.stderr and done.stderr.count("\n") == 1
    bad = run_script(["run_gsm8k.sh", "--beta", "-1"])
    assert bad.returncode == 2 and "--beta -1.0" in bad.stderr and bad.stderr.count("\n") == 1


# ------------------------------------------------------------------------------- memory of GPUs

SIZES = {  # layers, width, vocabulary, parameters
    "rho-1b": (22, 2048, 32_000, 1_100_000_000),
    "Qwen2.5-7B": (28, 3584, 152_064, 7_600_000_000),
}


def memory(name: str, gpu: float, shared: bool, **flags):
    """The plan's text, and the problem, of a model in bfloat16 on GPUs of so many GiB."""
    config = tba.Config(model=name, dtype="bfloat16", **flags)
    *shape, parameters = SIZES[name]
    problem = tba.Problem(None, None, [], [], [], tuple(shape), parameters, judge_bytes=0)
    return tba.memory_plan(config, problem, gpu, shared), problem


@pytest.mark.parametrize(("gpu", "shared"), [(79.6, True), (79.6, False), (139.8, True)])
def test_gsm8k_fits_and_the_cache_gets_the_rest(gpu, shared):
    text, problem = memory("rho-1b", gpu, shared)
    assert "weights 4.1, gradients 4.1, optimizer 8.2, casts 2.05, activations" in text
    taken = [float(line.split(" GiB")[0].split()[-1]) for line in text.splitlines()]
    used = sum(taken) if shared else max(taken)
    assert 0.9 * gpu < used < 0.96 * gpu
    assert problem.kv_cache_bytes > 5 * 2**30


def test_memory_of_judges_and_of_two_engines():
    with_judge = tba.Config(task="redteam", model="rho-1b", dtype="bfloat16", kv_cache_gib=8)
    problem = tba.Problem(None, None, [], [], [], (22, 2048, 32_000), 10**9, judge_bytes=8 * 2**30)
    assert "judges 8," in tba.memory_plan(with_judge, problem, 79.6, False)
    assert problem.kv_cache_bytes == 4 * 2**30  # the attacker's and the victim's


def test_what_cannot_fit_names_the_flag_to_change():
    with pytest.raises(ValueError, match=r"--tokens_per_microbatch 65536: .* GiB more than a GPU"):
        memory("rho-1b", 79.6, True, tokens_per_microbatch=65536)
    memory("rho-1b", 79.6, True, tokens_per_microbatch=65536, gradient_checkpointing=True)
    with pytest.raises(ValueError, match=r"--model Qwen2.5-7B: the Trainer needs"):
        memory("Qwen2.5-7B", 79.6, False, tokens_per_microbatch=1024)
    with pytest.raises(ValueError, match=r"--model rho-1b: the Searcher needs"):
        memory("rho-1b", 23.6, True, tokens_per_microbatch=1024, gradient_checkpointing=True)
    memory("rho-1b", 23.6, False, tokens_per_microbatch=1024, gradient_checkpointing=True)
