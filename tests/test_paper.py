"""The scripts' settings are the paper's, and every command of bench/PAPER.md is one that starts."""

import json
import os
import shlex
import subprocess

import pytest
from conftest import ROOT
from test_cli import main

import tba

# what the paper says of each run (Tables 2-4, B.1-B.3): the flags of tba.py with these values
GSM8K = {
    "model": "realtreetune/rho-1b-sft-GSM8K",
    "learning_rate": 1e-5,
    "lr_schedule": "warmup_stable_decay",
    "warmup_steps": 50,
    "decay_steps": 500,
    "temperature": 0.7,
    "max_prompt_tokens": 512,
    "max_response_tokens": 512,
    "prompts_per_step": 7,
    "trained_per_prompt": 20,
    "searched_per_prompt": 24,
    "recent_probability": 0.95,
    "sync_every": 2,
    "reward_inverse_temperature": 0.0,
    "initial_trajectories": 500,
    "objective": "tb",
    "eval_every": 0,
}
TLDR = {
    "model": "mnoukhov/pythia410m-sft-tldr",
    "learning_rate": 3e-6,
    "lr_schedule": "linear",
    "temperature": 0.7,
    "max_prompt_tokens": 512,
    "max_response_tokens": 128,
    "prompts_per_step": 8,
    "trained_per_prompt": 20,
    "searched_per_prompt": 20,
    "recent_probability": 0.5,
    "sync_every": 10,
    "reward_inverse_temperature": 1.0,
    "initial_trajectories": 10_000,
    "dtype": "float32",
    "objective": "tb",
    "gold_score_at": "before_eos",
    "gradient_checkpointing": False,
}
REDTEAM = {
    "steps": 5000,
    "beta": "0.05",
    "sync_every": 10,
    "evict": "oldest",
    "objective": "tb",
    "recent_probability": 0.5,
    "freeze_buffer_at": 0,
    "synchronous": False,
}
GPT2 = {
    "model": "gpt2",
    "victim_model": "vicgalle/gpt2-alpaca",
    "tau": "2@0,1@500",
    "explore_low": 0.5,
    "explore_high": 2.0,
}
LLAMA = {
    "model": "meta-llama/Llama-3.2-1B",
    "victim_model": "meta-llama/Llama-3.1-8B-Instruct",
    "toxicity_model": "meta-llama/Llama-Guard-3-8B",
    "tau": "2@0,1@1000",
    "reference_temperature": "1@0,1.2@2000",
    "explore_low": 0.7,
    "explore_high": 2.0,
}
SYNCHRONOUS = {
    "beta": "0.1",
    "sync_every": 1,
    "objective": "tb_learned_z",
    "synchronous": True,
    "synchronous_replay": True,
}
RUNS = {
    "run_gsm8k.sh": GSM8K | {"steps": 700, "stable_steps": 350, "beta": "0.014@0,0.004@500"},
    "run_gsm8k.sh table2": GSM8K
    | {"steps": 1000, "stable_steps": 450, "beta": "0.012@0,0.004@500"},
    "run_tldr.sh": TLDR | {"steps": 256, "beta": "1@0,0.7625@32,0.05@32"},
    "STEPS=425 run_tldr.sh 1b": TLDR
    | {"steps": 425, "beta": "1@0,0.7625@53,0.05@53", "model": "mnoukhov/pythia1b-sft-tldr"},
    "STEPS=625 run_tldr.sh 2.8b": TLDR
    | {
        "steps": 625,
        "beta": "1@0,0.7625@78,0.05@78",
        "model": "mnoukhov/pythia2.8b-sft-tldr",
        "gradient_checkpointing": True,
    },
    "run_redteam.sh": REDTEAM | GPT2 | {"kept_per_prompt": 100_000, "freeze_buffer_at": 4000},
    "run_redteam.sh llama": REDTEAM | LLAMA | {"kept_per_prompt": 150_000},
    "run_redteam.sh llama-130k": REDTEAM
    | LLAMA
    | {"kept_per_prompt": 130_000, "recent_probability": 0.6},
    "run_redteam.sh gflownet": REDTEAM
    | GPT2
    | SYNCHRONOUS
    | {"kept_per_prompt": 1000, "evict": "lowest_total"},
    "run_redteam.sh gflownet-llama": REDTEAM
    | LLAMA
    | SYNCHRONOUS
    | {"kept_per_prompt": 5000, "evict": "lowest_reward"},
}


def arguments_of(command: str, tmp_path) -> list[str]:
    """The arguments with which a command starts tba.py."""
    words = shlex.split(command)
    env = dict(os.environ)
    while "=" in words[0]:
        name, value = words.pop(0).split("=")
        env[name] = value
    if words[:2] == ["python", "tba.py"]:
        return words[2:]
    if words[0] == "bash":
        words.pop(0)
    printer = tmp_path / "python"
    printer.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\"\n")
    printer.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / words[0]), *words[1:]],
        env=env | {"PYTHON": str(printer)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    program, *arguments = done.stdout.removesuffix("\0").split("\0")
    assert program == str(ROOT / "tba.py")
    return arguments


@pytest.mark.parametrize("run", RUNS)
def test_a_scripts_settings_are_the_papers(run, tmp_path):
    config = tba.parse(arguments_of(run, tmp_path))
    for name, value in RUNS[run].items():
        assert getattr(config, name) == value, name
    if run.startswith("run_redteam"):
        assert config.prompts_per_step * config.trained_per_prompt == 128
        assert config.reward_inverse_temperature == 1  # replay by reward


def commands() -> list[str]:
    lines = (ROOT / "bench" / "PAPER.md").read_text().splitlines()
    return [line.strip() for line in lines if line.startswith("    ")]


@pytest.fixture(scope="session")
def stand_ins(gsm8k, tldr, redteam, tmp_path_factory):
    """Function: a task -> flags that put tiny models and data in the place of the paper's."""
    problems = tmp_path_factory.mktemp("math") / "problems.jsonl"
    rows = [{"problem": f"{i} + 1?", "solution": f"\\boxed{{{i + 1}}}"} for i in range(40)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {
        "gsm8k": {
            "model": gsm8k / "model",
            "dataset": gsm8k / "data",
            "dataset_config": "",
            "max_response_tokens": 64,
        },
        "tldr": {
            "model": tldr / "model",
            "dataset": tldr / "data",
            "reward_model": tldr / "reward",
            "gold_reward_model": tldr / "gold",
            "gold_reward_tokenizer": "",
            "max_response_tokens": 64,
        },
        "redteam": {
            "model": redteam / "model",
            "sft_data": redteam / "sft.jsonl",
            "victim_model": redteam / "victim",
            "toxicity_model": redteam / "toxicity",
            "toxicity_label": "toxic",
            "sentence_model": redteam / "model",
        },
        "math": {
            "model": gsm8k / "model",  # without a chat template, as a base model may be
            "dataset": problems,
            "eval_dataset": problems,
            "max_response_tokens": 64,
        },
    }
    return lambda task: [str(x) for name, v in files[task].items() for x in (f"--{name}", v)]


def test_the_papers_commands_are_all_there():
    found = "\n".join(commands())
    runs = ("table2", "gpt2", "llama", "llama-130k", "gflownet", "gflownet-llama")
    for part in (*runs, "STEPS=625", "--lag 2", "--lag 10"):
        assert f" {part} " in f"{found} ".replace("\n", " ")
    text = (ROOT / "bench" / "PAPER.md").read_text()
    for number in range(1, 10):
        assert f"Figure {number}" in text
    for number in range(1, 7):
        assert f"Table {number}" in text


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_the_papers_commands_start(command, stand_ins, tmp_path, capsys):
    """As they are, where the hub is out of reach; and with tiny models and data, all is checked."""
    flags = arguments_of(command, tmp_path)
    task = flags[flags.index("--task") + 1]
    if "SFT.json" in flags:
        flags[flags.index("SFT.json")] = stand_ins("redteam")[3]
    more = ["--output_dir", str(tmp_path / "run"), "--dry_run"]
    code, plan, lines = main([*flags, *more], capsys)
    assert code == 0 and "not checked: " in plan, lines
    code, plan, lines = main([*flags, *more, *stand_ins(task)], capsys)
    assert code == 0 and "not checked" not in plan, lines
    assert not (tmp_path / "run").exists()
