"""Make what the paper downloads, tiny but real: data, tokenizer, and a fine-tuned policy.

    python tests/tiny.py gsm8k --out DIR        # some tens of seconds on one CPU core, offline

DIR/data holds two-step word problems in GSM8K's own schema, DIR/model a tokenizer and a Llama of
about 0.2 M parameters. It is fine-tuned on noisy demonstrations, of which most follow a wrong
strategy for the whole solution: the policy is right in a quarter of its samples and hardly ever in
its greedy answer, so that reinforcement learning has something to find.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tba import GSM8K

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
NAMES = "Ann Ben Cleo Dan Eve Finn Gina Hugo Iris Jack".split()
THINGS = "apples books coins cards shells stamps pens marbles".split()
MORE = ["buys {} more", "finds {} more", "gets {} more"]
FEWER = ["gives away {}", "loses {}", "sells {}"]
WRONG = 0.7  # share of demonstrations that follow a wrong strategy
VERSION = 5  # of what this file makes: an older cache is made anew


def word_problem(rng: random.Random) -> dict:
    """One problem: question, its three numbers and two signs."""
    while True:
        a, b, c = rng.randint(2, 14), rng.randint(1, 6), rng.randint(1, 6)
        signs = rng.choice([1, -1]), rng.choice([1, -1])
        if min(a + signs[0] * b, a + signs[0] * b + signs[1] * c) >= 0:
            break
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    first, second = (rng.choice(MORE if sign > 0 else FEWER) for sign in signs)
    question = (
        f"{name} has {NUMBERS[a]} {things}. {name} {first.format(NUMBERS[b])}. "
        f"Then {name} {second.format(NUMBERS[c])}. How many {things} does {name} have?"
    )
    return {"question": question, "steps": (a, b, c, *signs)}


def solution(steps: tuple, strategy: str = "right") -> str:
    """A worked solution in GSM8K's format; a wrong strategy drops the last step or swaps signs."""
    a, b, c, s, t = steps
    if strategy == "swap":
        s, t = -s, -t
    lines, total = [], a
    for sign, number in ((s, b), (t, c))[: 1 if strategy == "drop" else 2]:
        after = max(0, total + sign * number)
        lines.append(f"{total}{'+' if sign > 0 else '-'}{number}={after}")
        total = after
    return "\n".join([*lines, f"#### {total}"])


def write_lines(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_tokenizer(texts: list[str], path: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=448, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", model_max_length=512
    )
    fast.save_pretrained(path)
    return fast


def architecture(name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """A tiny configuration of a model family; heads of width 32, vLLM's least on a CPU."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    common = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": name in ("gpt2", "tied_llama"),
    }
    long = {"intermediate_size": 192, "max_position_embeddings": 256}
    return {
        "llama": lambda: LlamaConfig(**shape, **long, **common),
        "long_llama": lambda: LlamaConfig(
            **shape, intermediate_size=192, max_position_embeddings=2048, **common
        ),
        "tied_llama": lambda: LlamaConfig(**shape, **long, **common),
        "qwen2": lambda: Qwen2Config(**shape, **long, num_key_value_heads=1, **common),
        "gpt_neox": lambda: GPTNeoXConfig(**shape, **long, **common),
        "gpt2": lambda: GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=256, **common),
    }[name]()


def make_model(name: str, tokenizer_path: Path, out: Path, seed: int = 0) -> Path:
    """A random model of an architecture, saved with a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(architecture(name, tokenizer))
    with torch.no_grad():  # far from uniform, so that log-probabilities tell weights apart
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def fine_tune(
    model: torch.nn.Module, sequences: list[tuple[list[int], list[int]]], steps: int, seed: int
) -> None:
    """Supervised fine-tuning on (prompt, response) token lists, 64 at a time."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        batch = rng.sample(sequences, 64)
        length = max(len(p) + len(r) for p, r in batch)
        ids = torch.zeros(64, length, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for row, (prompt, response) in enumerate(batch):
            ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
            labels[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def make_gsm8k(out: Path, seed: int = 0, steps: int = 900) -> None:
    """Data and policy for `--task gsm8k`."""
    rng = random.Random(seed)
    problems: dict[str, tuple] = {}
    while len(problems) < 4200:
        problem = word_problem(rng)
        problems[problem["question"]] = problem["steps"]
    questions = list(problems)
    records = [{"question": q, "answer": solution(problems[q])} for q in questions]
    write_lines(out / "data" / "train.jsonl", records[:4000])
    write_lines(out / "data" / "test.jsonl", records[4000:])

    demonstrations = []
    for q in questions[:4000]:
        strategy = rng.choices(["right", "drop", "swap"], [1 - WRONG, WRONG * 0.75, WRONG * 0.25])[
            0
        ]
        prompt = GSM8K.prompt(None, {"question": q})
        demonstrations.append((prompt, solution(problems[q], strategy)))
    model_path = out / "model"
    tokenizer = make_tokenizer([p + s for p, s in demonstrations], model_path)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(architecture("llama", tokenizer))
    sequences = [
        (tokenizer(p)["input_ids"], [*tokenizer(s)["input_ids"], tokenizer.eos_token_id])
        for p, s in demonstrations
    ]
    fine_tune(model, sequences, steps, seed)
    model.save_pretrained(model_path)


MAKERS = {"gsm8k": make_gsm8k}


def make(task: str, out: Path) -> None:
    """Make a task's files in `out` unless they are there already."""
    mark = out / f"made-{task}-{VERSION}"
    if mark.exists():
        return
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    MAKERS[task](out)
    AutoTokenizer.from_pretrained(out / "model")  # what was made can be loaded
    mark.touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("task", choices=MAKERS)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    make(arguments.task, arguments.out)
