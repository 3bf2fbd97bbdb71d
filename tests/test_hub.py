"""Models and data that are named as on the hub, served on loopback (tests/hub.py)."""

import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import MODELS, ROOT
from harness import Run, arguments, plugin_of_docs, run_tba, steps_of
from hub import Hub, stock
from test_docs import OPERATIONS, TEXT, code_of, sections
from test_started import overwrite_weights

import tba

SMALL = (
    "--steps 2 --num_searchers 1 --engine transformers --dtype float32 --initial_trajectories 8 "
    "--prompts_per_step 2 --trained_per_prompt 4 --searched_per_prompt 4 --max_response_tokens 8 "
    "--eval_samples 8 --eval_responses 1 --sft_epochs 1 --victim_max_tokens 8 --victim_samples 2"
).split()
SMALL += ["--cluster", ""]
SET_ANYWAY = [word for word in SMALL if word.startswith("--")] + ["--output_dir", "--seed"]


@pytest.fixture(scope="session")
def stocked(tmp_path_factory):
    """A hub with all repositories, of which nobody may change any."""
    hub = Hub()
    stock(hub, tmp_path_factory.mktemp("hub"))
    yield hub
    hub.close()


@pytest.fixture
def hub(stocked, tmp_path, monkeypatch):
    """The hub that runs use, from an empty folder with an empty cache."""
    monkeypatch.setenv("HF_ENDPOINT", stocked.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.chdir(tmp_path)
    stocked.requests.clear()
    yield stocked
    stocked.broken.clear()


# ------------------------------------------------------------------- the commands of the docs

SCRIPTS = {
    "run_gsm8k.sh": ["", "table2"],
    "run_tldr.sh": ["410m", "1b", "2.8b"],
    "run_redteam.sh": ["gpt2", "llama", "llama-130k", "gflownet", "gflownet-llama"],
}


def commands() -> list[str]:
    """The scripts' runs, and the commands for real models of README and paper.md."""
    found = [f"bash {script} {run}".strip() for script, runs in SCRIPTS.items() for run in runs]
    chat = sections(OPERATIONS)["a-chat-model-on-one-24-gb-gpu-gsm8k"]
    for text in (TEXT[ROOT / "README.md"], TEXT[ROOT / "docs" / "paper.md"], chat):
        for code in code_of(text):
            whole = re.match(r"(STEPS=\d+ )?(bash run_\w+\.sh|python tba.py --task) ", code)
            if whole and not re.search(r"\.\.\.|\$|\||tests/|--tiny|--resume", code):
                found.append(code.replace("FILE", "SFT.json"))
    data = lambda c: " --sft_data SFT.json" * ("redteam" in c and "sft_data" not in c)
    distinct: dict[str, str] = {}  # in more than numbers, and flags that SMALL sets
    for command in found:
        command += data(command)
        words = re.sub(rf"STEPS=\d+ | ({'|'.join(SET_ANYWAY)}) \S+", "", command)
        distinct.setdefault(re.sub(r" \d[\d.@,e-]*(?= |$)", " #", words), command)
    return list(distinct.values())


def arguments_of(command: str, folder: Path) -> list[str]:
    """What a command gives to tba.py, which is not started."""
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(f'#!/bin/bash\nshift\nprintf "%s\\0" "$@" > {folder}/arguments\n')
    python.chmod(0o755)
    own = {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHON": "python"}
    subprocess.run(["bash", "-ec", command], cwd=ROOT, env=os.environ | own, check=True)
    return (folder / "arguments").read_text().split("\0")[:-1]


QUICK = ["bash run_redteam.sh gpt2 --sft_data SFT.json"]  # the others are slow


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=c[:60], marks=[pytest.mark.slow] * (c not in QUICK)) for c in commands()],
)
def test_a_command_of_the_docs_runs_as_it_stands(command, hub, tmp_path, monkeypatch):
    write_files_of_the_docs(tmp_path)
    steps = "0" if "--steps 0" in command else "2"
    args = [*arguments_of(command, tmp_path), *SMALL, "--steps", steps]
    _, err = run_tba([*args, "--output_dir", "run"])
    assert "Traceback" not in err and len(tba.read_lines(Path("run/metrics.jsonl"))) == int(steps)
    assert len(hub.requests) > 10 and not unwanted(hub)
    if command.endswith("run_tldr.sh 1b"):  # its judge has a tokenizer of another repository
        hub.requests.clear()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        run_tba([*args, "--output_dir", "offline"])
        assert not hub.requests


def write_files_of_the_docs(folder):
    """The warm start's data, and the chat plug-in of hacking.md."""
    rows = (MODELS / "redteam" / "sft.jsonl").read_text().splitlines()[:40]
    (folder / "SFT.json").write_text(f"[{','.join(rows)}]")
    (folder / "gsm8k_chat.py").write_text(plugin_of_docs("--task gsm8k_chat"))
    (folder / "bench").symlink_to(ROOT / "bench")


def unwanted(hub) -> list[str]:
    """Requests for files that are not read."""
    other = r"resolve/.*(\.(h5|onnx|ot|pth)|original/|openvino/|training_args|socratic)"
    other += r"|(gpt2|MiniLM-L6-v2)/resolve/.*\.bin"  # they have safetensors
    other += r"|EleutherAI/.*\.safetensors(?!\.index)"  # its tokenizer is used
    return [request for request in hub.requests if re.search(other, request)]


PAPERS = {  # what the scripts give to tba.py, beside tables 2, 3 and B.3
    "bash run_gsm8k.sh": {
        "prompts_per_step": 7, "trained_per_prompt": 20, "searched_per_prompt": 24,
        "sync_every": 2, "recent_probability": 0.95, "temperature": 0.7, "steps": 700,
        "max_recent_draws": 1.56, "beta": "0.014@0,0.004@500", "initial_trajectories": 500,
        "objective": "tb",
    },
    "bash run_gsm8k.sh table2": {"steps": 1000, "beta": "0.012@0,0.004@500"},
    "STEPS=625 bash run_tldr.sh 1b": {
        "prompts_per_step": 8, "trained_per_prompt": 20, "searched_per_prompt": 20,
        "sync_every": 10, "recent_probability": 0.5, "steps": 625, "max_response_tokens": 128,
        "initial_trajectories": 10_000, "dtype": "float32",
    },
    "bash run_redteam.sh gpt2 --sft_data x": {
        "beta": "0.05", "sync_every": 10, "kept_per_prompt": 100_000, "steps": 5000,
        "prompts_per_step": 16, "trained_per_prompt": 8,
    },
    "bash run_redteam.sh gflownet --sft_data x": {
        "lockstep": True, "objective": "tb_learned_z", "recent_probability": 0.5,
        "prompts_per_step": 8,
    },
    "bash run_redteam.sh llama --sft_data x": {"toxicity_suffix": "\n\n"},
}  # fmt: skip


def test_the_scripts_settings_are_the_papers(tmp_path):
    parsed = [tba.parse(arguments_of(command, tmp_path)) for command in PAPERS]
    for config, expected in zip(parsed, PAPERS.values(), strict=True):
        assert {name: getattr(config, name) for name in expected} == expected
        config.eval_every = 0
    gsm8k, table2, tldr, attack, _, llama = parsed
    rate = lambda config, step: tba.at_step(config, step).learning_rate
    for config, stable in ((gsm8k, 350), (table2, 450)):  # warmup over 50, cosine over 500 steps
        for step in range(config.steps):
            decayed = max(0, step - 49 - stable) / 500
            factor = min((step + 1) / 50, (1 + math.cos(math.pi * decayed)) / 2)
            assert rate(config, step) == pytest.approx(1e-5 * factor)
    for step in range(625):  # linear
        assert rate(tldr, step) == pytest.approx(3e-6 * (1 - step / 625))
    assert [tba.schedule_value(tldr.beta, step) for step in (0, 100)] == [1, 0.05]
    # warmup over 100 steps, then linear to 0 at step 40,000
    rates = [rate(attack, step) for step in (0, 49, 99, 4999)]
    assert rates == pytest.approx([1e-6, 5e-5, 1e-4, 0.88e-4], rel=0.02)
    warm_start = [tba.schedule_value(attack.sft_learning_rate, step, 102) for step in range(102)]
    assert warm_start == pytest.approx(np.linspace(0, 3e-5, 103)[:-1])  # warmup over all its steps
    assert tba.schedule_value(llama.reference_temperature, 2000) == 1.2
    assert "{attack}" in attack.victim_template
    with pytest.raises(subprocess.CalledProcessError, match="status 2"):
        arguments_of("bash run_redteam.sh gpt2", tmp_path)  # the attacker had no warm start


# ------------------------------------------------------------------------------------ the cache

MODEL, DATASET = "realtreetune/rho-1b-sft-GSM8K", "openai/gsm8k:main"


def gsm8k_args(out: str = "run", **flags: str) -> list[str]:
    """A very small run of README's first command, with other values of some flags."""
    given = {"task": "gsm8k", "model": MODEL, "dataset": DATASET, "output_dir": out} | flags
    return [*SMALL, *(part for name, value in given.items() for part in (f"--{name}", value))]


def refused(args: list[str], flag: str) -> str:
    """What the one line says that ends a run because of a flag."""
    _, err = run_tba(args, code=2)
    start = f"tba.py: error: --{flag} {args[args.index(f'--{flag}') + 1]}: "
    last = err.splitlines()[-1]
    assert last.startswith(start) and len(last) < 300 and "Traceback" not in err, err
    return last.removeprefix(start)


@pytest.mark.slow
def test_what_hf_download_has_loaded_is_there_offline(hub, monkeypatch):
    """`hf` completes a download that broke off, too."""

    def download(*names):
        hf = Path(sys.executable).with_name("hf")
        subprocess.run([hf, "download", *names], check=True, capture_output=True)

    files = {"model": "model-00002-of-00002.safetensors", "dataset": "test-00000-of-00001.parquet"}
    for flag, file in files.items():
        hub.broken = {file}
        assert re.match(r"the download failed \(.*\); try again", refused(gsm8k_args(), flag))
    hub.broken.clear()
    download("--repo-type", "dataset", DATASET.split(":")[0])
    download(MODEL)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_tba(gsm8k_args())
    assert not hub.requests
    assert "`hf download`" in refused(gsm8k_args("other", model="org/other"), "model")
    assert "`hf download`" in refused(gsm8k_args("other", dataset="openai/gsm9k:main"), "dataset")


NOT_SERVED = {
    "realtreetune/rho-1b-sft-GSM8k": "is no folder, and not on the hub (private ones need HF_",
    "meta-llama/Llama-3.2-1B": "is gated: accept its licence on the hub, and set HF_",
    "openai/gsm9k:main": "doesn't exist on the Hub or cannot be accessed; use ",
    "openai/gsm8k:mian": "'mian' not found. Available: ['main', 'socratic']; use ",
}
LOCAL = {"model": str(MODELS / "gsm8k" / "model")}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_names_that_the_hub_does_not_serve(name, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    flags = {"dataset": name} | LOCAL if ":" in name else {"model": name}
    assert NOT_SERVED[name] in refused(gsm8k_args(**flags), next(iter(flags)))


@pytest.mark.parametrize("flag", ["model", pytest.param("dataset", marks=pytest.mark.slow)])
def test_no_network(hub, monkeypatch, flag):
    """`datasets` tries for twenty seconds."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    says = refused(gsm8k_args(**({} if flag == "model" else LOCAL)), flag)
    assert says.startswith("the hub cannot be reached, and the cache lacks it; `hf download`")


@pytest.mark.root
def test_a_full_disk(hub, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", disk])
    if mount.returncode:
        pytest.skip("no file system may be mounted here")
    monkeypatch.setenv("HF_HOME", str(disk))
    try:
        assert "No space left; HF_HOME" in refused(gsm8k_args(), "model")
    finally:
        subprocess.run(["umount", disk], check=True)


# ------------------------------------------------------------------------------------ commits


@pytest.fixture
def policy(tmp_path, hub, monkeypatch):
    """A hub with one model, org/policy. Function: change its files; returns the new commit."""
    own = Hub()
    monkeypatch.setenv("HF_ENDPOINT", own.url)
    newest = MODELS / "gsm8k" / "model"

    def commit(change=lambda folder: None):
        nonlocal newest
        folder = tmp_path / f"commit-{len(list(tmp_path.glob('commit-*')))}"
        newest = shutil.copytree(newest, folder)
        change(newest)
        return own.add("org/policy", newest)

    commit.hub = own
    yield commit
    own.close()


def test_a_models_folder_is_that_of_its_first_commit(policy, tmp_path, monkeypatch):
    """Also in a process that has only the settings, and an empty cache; a new run's is newest."""
    first, newest = policy(), policy(overwrite_weights)
    constants = sys.modules["huggingface_hub.constants"]
    importlib.reload(constants)  # it reads the environment
    try:
        config = tba.settings(model="org/policy")
        config.folders["model"] = str(tmp_path / "gone" / first)
        kept = tba.model_folder("model", config)
        assert Path(kept).name == first and config.folders["model"] == kept
        config.folders.clear()
        assert Path(tba.model_folder("model", config)).name == newest
    finally:
        monkeypatch.undo()
        importlib.reload(constants)


@pytest.mark.slow
def test_a_run_keeps_the_commit_that_it_started_with(policy, gsm8k, tmp_path):
    """Searchers that restart and runs that resume, whatever the newest commit is."""
    first = policy()
    flags = {"eval_every": 0, "eval_samples": 8, "steps": 100_000}
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, model="org/policy", **flags))
    run.reaches(2)

    policy(overwrite_weights)
    run.want("die-generating")
    run.says("warning: Searcher 0 ")
    run.reaches(steps_of(out) + 30)
    os.kill(run.process.pid, signal.SIGINT)
    run.ends(130)

    def resume(*more):
        policy.hub.requests.clear()
        args = ["--resume", str(out), "--steps", str(steps_of(out) + 2), *more]
        run_tba(args)
        given = json.loads((out / "config.json").read_text())["config"]
        return Path(given["folders"]["model"])

    assert resume().name == first and not policy.hub.requests
    kept = tmp_path / "kept"
    (tmp_path / "cache").rename(kept)
    assert resume().name == first and policy.hub.requests  # it is downloaded again
    snapshot = next(kept.glob(f"hub/*/snapshots/{first}"))
    assert resume("--model", str(snapshot)) == snapshot
    # a name, where it was a folder, asks for the newest commit, which has other weights
    args = ["--resume", str(out), "--model", "org/policy"]
    assert "changed since the start" in refused(args, "model")
