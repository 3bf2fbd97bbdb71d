"""Models and data that are named as on the hub, served on loopback (tests/hub.py)."""

import os
import re
import subprocess
import sys

import pytest
from conftest import MODELS, ROOT
from harness import plugin_of_docs, run_tba
from hub import Hub, stock
from test_docs import CODE_BLOCK, OPERATIONS, TEXT, sections

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
    use(stocked, monkeypatch)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.chdir(tmp_path)
    stocked.requests.clear()
    return stocked


def use(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


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
    """Requests for files in formats that are not read, and for weights where a tokenizer is."""
    other = (
        r"\.(h5|msgpack|onnx|ot|pth)|original/|onnx/|openvino/|gpt2.*/pytorch_model|training_args"
    )
    other += r"|MiniLM.*\.bin|EleutherAI/.*\.safetensors$|socratic"
    return [request for request in hub.requests if re.search(rf"/resolve/.*({other})", request)]
