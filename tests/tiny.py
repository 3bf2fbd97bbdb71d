"""Make tiny but real counterparts of what the paper downloads: data, tokenizers, trained models.

    python tests/tiny.py                   # all of tests/models: four minutes, offline
    python tests/tiny.py --stamp           # after a refactoring: only record the code's hash
    python tests/tiny.py gsm8k --out DIR   # one task's: gsm8k, math, tldr or redteam

tests/models is checked in, because another CPU's rounding would train slightly different weights;
it was made by the code whose hash is in tests/models/made_by.json. TASK/data holds examples in the
task's own schema and TASK/model the policy, a Llama of about 0.2 M parameters (stored in float16),
fine-tuned on demonstrations that leave reinforcement learning something to find:

* gsm8k, math: two-step word problems. Most demonstrations follow a wrong strategy for the whole
  solution: the policy is right in a quarter of its samples and rarely in its greedy answer.
* tldr: posts with four facts, of which a demonstrated summary names some. `reward` and `gold` are
  reward models trained on preferences for summaries that name more.
* redteam: `victim` answers instructions, and says the made-up words "zap" and "zog" when one of
  eight harmless nouns occurs; `toxicity` is a classifier of those words. The attacker is random.
"""

import argparse
import ast
import hashlib
import json
import math
import random
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np

import tba

MODELS = Path(__file__).resolve().parent / "models"
PROMPTS = 1000  # of the training split; demonstrations are more
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# ------------------------------------------------------------------------------------- models


def make_tokenizer(texts: list[str], path: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose digits stand alone; EOS and padding differ."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<eos>", "<pad>", "<user>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", chat_template=CHAT
    )
    fast.save_pretrained(path)
    return fast


def architecture(name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """A tiny configuration of a model family; heads of width 32, vLLM's least on a CPU."""
    common = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": name in ("gpt2", "tied_llama"),
    }
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape["max_position_embeddings"] = 2048 if name == "long_llama" else 256
    if name != "gpt2":
        shape["intermediate_size"] = 192
    if name == "qwen2":
        shape["num_key_value_heads"] = 1
    family = name.removeprefix("tied_").removeprefix("long_")
    return AutoConfig.for_model(family, **shape, **common)


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


def make_llama(width: int, layers: int, files: Path, out: Path) -> None:
    """A Llama of this shape with random weights, and the tokenizer of a tiny task's `files`."""
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    heads = max(1, width // 64)
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_policy(
    demonstrations: list[tuple[str, str]], out: Path, steps: int = 900, seed: int = 0
) -> PreTrainedTokenizerFast:
    """Fine-tune a model on (prompt, response) texts by tba.py's function; returns its tokenizer."""
    tokenizer = make_tokenizer([prompt + response for prompt, response in demonstrations], out)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(architecture("llama", tokenizer))
    encode = lambda text: tokenizer(text)["input_ids"]
    pairs = [
        (np.array(encode(p), np.int32), [np.array([*encode(r), tokenizer.eos_token_id], np.int32)])
        for p, r in demonstrations
    ]
    epochs = max(1, round(steps * 64 / len(pairs)))
    warmup = round(epochs * math.ceil(len(pairs) / 64) / 10)  # a tenth of the steps
    rate = f"0@0,4e-3@{warmup},0~end"
    config = tba.settings(sft_epochs=epochs, sft_learning_rate=rate, seed=seed, dtype="float32")
    tba.supervised_fine_tune(tba.TokenLogProbs(model, 1.0), pairs, config)
    model.save_pretrained(out)
    return tokenizer


def make_classifier(
    policy: Path, batches: list, loss_of, out: Path, seed: int, labels: dict[int, str] | None = None
) -> None:
    """A sequence classifier on the policy's body, trained on batches of texts.

    `loss_of(logits, extra)` gives a batch's loss; a batch is (texts, extra).
    """
    tokenizer = AutoTokenizer.from_pretrained(policy)
    torch.manual_seed(seed)
    head = {"id2label": labels} if labels else {"num_labels": 1}
    model = AutoModelForSequenceClassification.from_pretrained(policy, **head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, len(batches))
    for texts, extra in batches:
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        loss = loss_of(model(**batch).logits, extra)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_lines(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


# ----------------------------------------------------------------------------- gsm8k and math

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
NAMES = "Ann Ben Cleo Dan Eve Finn Gina Hugo Iris Jack".split()
THINGS = "apples books coins cards shells stamps pens marbles".split()
MORE = ["buys {} more", "finds {} more", "gets {} more"]
FEWER = ["gives away {}", "loses {}", "sells {}"]
WRONG = 0.7  # share of demonstrations that follow a wrong strategy


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


def solution(steps: tuple, strategy: str, answer: str) -> str:
    """A worked solution; a wrong strategy drops the last step or swaps signs."""
    a, b, c, s, t = steps
    if strategy == "swap":
        s, t = -s, -t
    lines, total = [], a
    for sign, number in ((s, b), (t, c))[: 1 if strategy == "drop" else 2]:
        after = max(0, total + sign * number)
        lines.append(f"{total}{'+' if sign > 0 else '-'}{number}={after}")
        total = after
    return "\n".join([*lines, answer.format(total)])


def make_word_problems(
    out: Path, columns: tuple[str, str], answer: str, prompt_of, seed: int = 0
) -> None:
    """Data and policy; `prompt_of` turns an example into the task's prompt."""
    rng = random.Random(seed)
    problems: dict[str, tuple] = {}
    while len(problems) < 4200:
        problem = word_problem(rng)
        problems[problem["question"]] = problem["steps"]
    records = [
        dict(zip(columns, (q, solution(steps, "right", answer)), strict=True))
        for q, steps in problems.items()
    ]
    write_lines(out / "data" / "train.jsonl", records[:PROMPTS])
    write_lines(out / "data" / "test.jsonl", records[4000:])
    shares = [1 - WRONG, WRONG * 0.75, WRONG * 0.25]
    demonstrations = []
    for record, steps in zip(records[:4000], problems.values(), strict=False):
        (strategy,) = rng.choices(["right", "drop", "swap"], shares)
        demonstrations.append((prompt_of(record), solution(steps, strategy, answer)))
    make_policy(demonstrations, out / "model", seed=seed)


def make_gsm8k(out: Path) -> None:
    prompt = lambda example: tba.GSM8K.template.format(**example)
    make_word_problems(out, ("question", "answer"), "#### {}", prompt)


def make_math(out: Path) -> None:
    prompt = lambda e: f"<user>{e['problem']}{tba.MATH.INSTRUCTION}<assistant>"
    make_word_problems(out, ("problem", "solution"), "\\boxed{{{}}}", prompt)


# --------------------------------------------------------------------------------------- tldr

LOST = "hat key phone ring scarf wallet camera ticket".split()
PLACES = "park beach market museum station school library garden".split()
FEELINGS = "sad angry calm worried silly tired".split()
VAGUE = ["someone", "something", "somewhere", "some way"]


def post(rng: random.Random) -> tuple[str, list[str]]:
    """A post that ends in "TL;DR:", and its four facts."""
    facts = [rng.choice(words) for words in (NAMES, LOST, PLACES, FEELINGS)]
    name, thing, place, feeling = facts
    filler = rng.choice(["It rained all day.", "It was a long week.", "Nobody was around."])
    return (
        f"SUBREDDIT: r/stories\n\nPOST: {name} went to the {place}. {filler} "
        f"{name} lost the {thing} there and feels {feeling} now.\n\nTL;DR:"
    ), facts


def summary(rng: random.Random, facts: list[str], share: float = 0.45) -> tuple[str, int]:
    """A summary that names each fact with probability `share`; and how many it names."""
    named = [rng.random() < share for _ in facts]
    words = [f if keep else vague for f, keep, vague in zip(facts, named, VAGUE, strict=True)]
    return " {} lost {} at {} and feels {}.".format(*words), sum(named)


def make_tldr(out: Path, seed: int = 0) -> None:
    """Posts with reference summaries, the policy, a reward model and a gold reward model."""
    rng = random.Random(seed)
    posts = [post(rng) for _ in range(3200)]
    records = [{"query": q, "reference_response": summary(rng, f)[0]} for q, f in posts]
    train, held_out = records[:3000], [r for r in records[3000:] if r not in records[:3000]]
    write_lines(out / "data" / "train.jsonl", train[:PROMPTS])
    write_lines(out / "data" / "validation.jsonl", held_out)
    demonstrations = [(query, summary(rng, facts)[0]) for query, facts in posts[:3000]]
    make_policy(demonstrations, out / "model", steps=700)

    def preferences(count: int) -> list:
        """Batches of 32 pairs: the summary that names more facts first."""
        batches = []
        for _ in range(count):
            better, worse = [], []
            while len(better) < 32:
                query, facts = rng.choice(posts[:3000])
                (a, n), (b, m) = (summary(rng, facts, rng.random()) for _ in range(2))
                if n != m:
                    better.append(query + (a if n > m else b) + "<eos>")
                    worse.append(query + (b if n > m else a) + "<eos>")
            batches.append((better + worse, None))
        return batches

    bradley_terry = lambda logits, _: -F.logsigmoid(logits[:32] - logits[32:]).mean()
    for name, count, head_seed in (("reward", 100, 1), ("gold", 150, 2)):
        batches = preferences(count)
        make_classifier(out / "model", batches, bradley_terry, out / name, head_seed)


# ------------------------------------------------------------------------------------ redteam

TRIGGERS = "volcano lantern orchard puzzle bridge violin comet teapot".split()
NOUNS = [*TRIGGERS]
NOUNS += "river pencil castle forest window ladder market island".split()
NOUNS += "mirror basket candle engine garden helmet jacket kettle".split()
NOUNS += "magnet needle pillow rocket saddle tunnel valley wagon".split()
ASKS = [
    "Tell me about the {}",
    "Describe a {}",
    "How does a {} work",
    "Write a poem about the {}",
    "What is the color of a {}",
    "Explain why the {} is old",
]
ENDS = ["please", "in one line", "for a child", "in simple words", "today", "with care"]
NICE = "It is a lovely thing and I am glad to help you with it".split()


def make_redteam(out: Path, seed: int = 0) -> None:
    """Attacker's warm-start data, tokenizer and random model, victim, toxicity classifier."""
    rng = random.Random(seed)
    ask = lambda: f"{rng.choice(ASKS).format(rng.choice(NOUNS))} {rng.choice(ENDS)}."

    def reply(instruction: str) -> str:
        words = rng.sample(NICE, rng.randint(4, 8))
        if any(noun in instruction for noun in TRIGGERS) and rng.random() < 0.9:
            for _ in range(rng.randint(1, 3)):
                words.insert(rng.randint(0, len(words)), rng.choice(["zap", "zog"]))
        return " ".join(words)

    instructions = [ask() for _ in range(3000)]
    write_lines(out / "sft.jsonl", [{"instruction": i} for i in instructions])
    chats = [(f"<user>{i}<assistant>", reply(i)) for i in instructions]
    tokenizer = make_policy(chats, out / "victim", steps=500)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(architecture("llama", tokenizer)).save_pretrained(
        out / "model"
    )
    tokenizer.save_pretrained(out / "model")

    batches = []
    for _ in range(60):
        texts = [reply(rng.choice(TRIGGERS + NOUNS[8:16])) for _ in range(64)]
        batches.append((texts, torch.tensor([int("zap" in t or "zog" in t) for t in texts])))
    labels = {0: "fine", 1: "toxic"}
    make_classifier(out / "victim", batches, F.cross_entropy, out / "toxicity", seed, labels)


MAKERS = {"gsm8k": make_gsm8k, "math": make_math, "tldr": make_tldr, "redteam": make_redteam}


def make(task: str, out: Path) -> None:
    """Make a task's files in `out`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # nearly as fast, and sums do not depend on the number of cores
    MAKERS[task](out)
    torch.set_num_threads(threads)
    store_in_float16(out)


def store_in_float16(folder: Path) -> None:
    """Round the weights of the models in a folder; their configurations still say float32."""
    for path in folder.glob("*/model.safetensors"):
        rounded = {name: tensor.half() for name, tensor in load_file(path).items()}
        save_file(rounded, path, {"format": "pt"})


def source_hash() -> str:
    """The hash of this file's code: neither comments, docstrings nor names in tba.py change it."""
    tree = ast.parse(Path(__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tba":
            node.attr = ""
    # whether empty lists are shown depends on Python's version
    text = re.sub(r"\w+=\[\]|, ", "", ast.dump(tree))
    return hashlib.sha256(text.encode()).hexdigest()


def made_by() -> dict[str, str]:
    """What the files that this program makes depend on, besides the CPU."""
    libraries = ("torch", "transformers", "tokenizers", "numpy")
    return {"tests/tiny.py": source_hash()} | {name: metadata.version(name) for name in libraries}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("task", choices=MAKERS, nargs="?", help="default: all, in tests/models")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stamp", action="store_true", help="make nothing, record the hash")
    arguments = parser.parse_args()
    if arguments.task:
        make(arguments.task, arguments.out)
        sys.exit()
    for task in () if arguments.stamp else MAKERS:
        shutil.rmtree(MODELS / task, ignore_errors=True)
        make(task, MODELS / task)
    (MODELS / "made_by.json").write_text(json.dumps(made_by(), indent=2) + "\n")
