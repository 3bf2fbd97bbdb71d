"""Models and data that are named as on the hub, served on loopback (tests/hub.py)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODELS, ROOT
from harness import Run, arguments, plugin_of_docs, run_tba, steps_of
from hub import Hub, stock
from test_docs import CODE_BLOCK, OPERATIONS, TEXT, sections
from test_started import overwrite_weights

from tba import read_lines

SMALL = (
    "--steps 2 --num_searchers 1 --engine transformers --dtype float32 --initial_trajectories 8 "
    "--prompts_per_step 2 --trained_per_prompt 4 --searched_per_prompt 4 --max_response_tokens 8 "
    "--eval_samples 8 --eval_responses 1 --sft_epochs 1 --victim_max_tokens 8 --victim_samples 2"
).split()
SMALL += ["--cluster", ""]


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


def commands() -> list[str]:
    """README's and paper.md's commands for real models, and that of operations.md's chat model."""
    texts = [
        sections(TEXT[ROOT / "README.md"])["train-a-real-model"],
        TEXT[ROOT / "docs" / "paper.md"],
        sections(OPERATIONS)["a-chat-model-on-one-24-gb-gpu-gsm8k"],
    ]
    found = []
    for block in re.findall(r"(?:^    .*\n)+", CODE_BLOCK.sub("", "\n".join(texts)), re.MULTILINE):
        lines = re.sub(r"\\\n\s*|  +# .*", "", re.sub(r"^    ", "", block, flags=re.MULTILINE))
        whole = r".+" if "bench/compare.py" in lines else r"^for .*?^done$|^\S.*?$"
        found += re.findall(whole, lines.strip(), re.DOTALL | re.MULTILINE)
    return list(dict.fromkeys(command for line in found for command in alternatives(line)))


def alternatives(command: str) -> list[str]:
    """The commands that a usage line stands for: [a|b] is each of them, `...` all of the script's.

    >>> alternatives("bash run_tldr.sh [410m|1b]")
    ['bash run_tldr.sh 410m', 'bash run_tldr.sh 1b']
    """
    command = command.replace("FILE", "SFT.json")
    if not (choice := re.search(r"\[(.*)\]", command)):
        return [command]
    script = ROOT / re.search(r"run_\w+\.sh", command)[0]
    known = re.search(r"^  (.*)\) \w+=\$1; shift", script.read_text(), re.MULTILINE)[1]
    words = choice[1].split("|")
    assert set(words) <= {*known.split(" | "), "..."}, command
    words = known.split(" | ") if "..." in words else words
    return [command.replace(choice[0], word) for word in words]


def shell(command: str, folder) -> list[list[str]]:
    """Run a command of the docs in a folder; returns the arguments of each tba.py, not started."""
    for name in ("tba.py", "bench", *(path.name for path in ROOT.glob("run_*.sh"))):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    python = folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(
        '#!/bin/bash\ncase "$1" in\n'
        "  *tba.py) printf '%s\\0' \"$@\" >> calls; printf '\\1' >> calls ;;\n"
        f'  *) exec {sys.executable} "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    path = f"{python.parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=os.environ | {"PATH": path}, check=True
    )
    calls = folder / "calls"
    found = calls.read_text().split("\1")[:-1] if calls.exists() else []
    calls.unlink(missing_ok=True)
    return [call.split("\0")[1:-1] for call in found]


def distinct(calls: list[list[str]]) -> list[list[str]]:
    """Those that differ in more than what SMALL sets and the run's folder."""
    different = {}
    for call in calls:
        kept, keep = [], True
        for word in call:
            if word.startswith("--"):
                keep = word not in (*SMALL, "--output_dir")
            kept += [word] * keep
        different.setdefault(tuple(kept), call)
    return list(different.values())


ALL = commands()
QUICK = [
    "bash run_tldr.sh 410m",
    "bash run_redteam.sh gpt2 --sft_data SFT.json",
    "bash run_redteam.sh llama --sft_data SFT.json",
    next(command for command in ALL if "--task math" in command),
]


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=c[:60], marks=[pytest.mark.slow] * (c not in QUICK)) for c in ALL],
)
def test_a_command_of_the_docs_runs_as_it_stands(command, hub, tmp_path):
    write_files_of_the_docs(tmp_path)
    lines = command.split("\n")
    runs = "\n".join(line for line in lines if "compare.py" not in line)
    for call in distinct(shell(runs, tmp_path)):
        steps = "0" if "--steps 0" in command else "2"
        _, err = run_tba([*call, *SMALL, "--steps", steps])
        assert "Traceback" not in err
    assert len(hub.requests) > 10 and not unwanted(hub)
    folders = list((tmp_path / "runs").iterdir())
    assert folders and all(len(read_lines(f / "metrics.jsonl")) == int(steps) for f in folders)
    for line in lines:
        if "compare.py" in line:
            shell(line, tmp_path)


def write_files_of_the_docs(folder):
    """The warm start's data, and the chat plug-in of hacking.md."""
    rows = (MODELS / "redteam" / "sft.jsonl").read_text().splitlines()[:40]
    (folder / "SFT.json").write_text(f"[{','.join(rows)}]")
    (folder / "gsm8k_chat.py").write_text(plugin_of_docs("--task gsm8k_chat"))


def unwanted(hub) -> list[str]:
    """Requests for files that are not read."""
    other = "|".join(
        (
            r"resolve/.*(\.(h5|onnx|ot|pth)|original/|openvino/|training_args|socratic)",
            r"(gpt2|MiniLM-L6-v2)/resolve/.*\.bin",  # they have safetensors
            r"EleutherAI/.*\.safetensors(?!\.index)",  # its tokenizer is used
        )
    )
    return [request for request in hub.requests if re.search(other, request)]


def test_a_script_typed_in_a_bare_shell(hub, tmp_path):
    write_files_of_the_docs(tmp_path)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    bare = ["env", "-i", f"PATH={path}", f"HOME={tmp_path}", f"HF_ENDPOINT={hub.url}"]
    command = [*bare, "bash", ROOT / "run_gsm8k.sh", *SMALL, "--output_dir", "run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 2: accuracy" in done.stdout and "Traceback" not in done.stderr
    assert (tmp_path / ".cache" / "huggingface").exists()


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


def test_what_a_run_has_loaded_is_there_offline(hub, tmp_path, monkeypatch):
    """TL;DR's judge has a tokenizer of another repository, and no safetensors."""
    (call,) = shell("bash run_tldr.sh", tmp_path)
    run_tba([*call, *SMALL, "--output_dir", "online"])
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_tba([*call, *SMALL, "--output_dir", "offline"])
    assert not hub.requests


def test_what_hf_download_has_loaded_is_there_offline(hub, monkeypatch):
    def download(*names):
        hf = Path(sys.executable).with_name("hf")
        subprocess.run([hf, "download", *names], check=True, capture_output=True)

    download("--repo-type", "dataset", DATASET.split(":")[0])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "`hf download`" in refused(gsm8k_args(), "model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    download(MODEL)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_tba(gsm8k_args())
    assert not hub.requests
    assert "`hf download`" in refused(gsm8k_args("other", dataset="openai/gsm9k:main"), "dataset")


# ----------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        (
            "model",
            "realtreetune/rho-1b-sft-GSM8k",
            "is no folder, and not on the hub (private ones need HF_TOKEN)",
        ),
        (
            "model",
            "meta-llama/Llama-3.2-1B",
            "is gated: accept its licence on the hub, and set HF_",
        ),
        ("dataset", "openai/gsm9k:main", "doesn't exist on the Hub or cannot be accessed; use "),
        ("dataset", "openai/gsm8k:mian", "'mian' not found. Available: ['main', 'socratic']; use "),
    ],
)
def test_names_that_the_hub_does_not_serve(flag, value, says, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    local = {"model": str(MODELS / "gsm8k" / "model")} if flag == "dataset" else {}
    assert says in refused(gsm8k_args(**local, **{flag: value}), flag)


@pytest.mark.parametrize("flag", ["model", "dataset"])
def test_no_network(flag, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    local = {"model": str(MODELS / "gsm8k" / "model")} if flag == "dataset" else {}
    says = refused(gsm8k_args(**local), flag)
    assert says.startswith("the hub cannot be reached, and the cache lacks it; `hf download`")


def test_the_next_run_completes_a_download_that_broke_off(hub):
    hub.broken.add("model-00002-of-00002.safetensors")
    assert re.match(r"the download failed \(.*\); try again", refused(gsm8k_args(), "model"))
    hub.broken = {"test-00000-of-00001.parquet"}
    assert re.match(r"the download failed \(.*\); try again", refused(gsm8k_args(), "dataset"))
    hub.broken.clear()
    run_tba(gsm8k_args())


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


def test_a_run_keeps_the_commit_that_it_started_with(policy, gsm8k, tmp_path):
    """Searchers that restart and runs that resume, whatever the newest commit is."""
    first = policy()
    flags = {"eval_every": 0, "eval_samples": 8, "steps": 100_000}
    out = tmp_path / "run"
    run = Run(out, arguments(gsm8k, out, model="org/policy", **flags))
    run.reaches(2)

    def restarts(times):
        run.want("die-generating")
        run.says("warning: Searcher 0 ", times)
        run.reaches(steps_of(out) + 30)

    policy(lambda folder: (folder / "README.md").write_text("What it is."))
    restarts(1)
    policy(overwrite_weights)
    policy.hub.requests.clear()
    restarts(2)
    os.kill(run.process.pid, signal.SIGINT)
    run.ends(130)

    def resume(*more):
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
