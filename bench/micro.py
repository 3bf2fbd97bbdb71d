"""Microbenchmarks: ratios of two times, measured alternately.

    python bench/micro.py

* packed: a training step on packed rows, relative to one row per response, for prompts and
  responses of GSM8K's and of TL;DR's proportions;
* TRL: the same step, relative to TRL's GRPOTrainer, which pads these responses in one micro-batch
  (pip install --no-deps trl==1.16.0; skipped without it);
* queue: groups per second through the Manager's queue.
"""

import argparse
import importlib.util
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from harness import learner_of, random_groups

import tba

FILES = ROOT / "tests" / "models" / "gsm8k"
SHAPES = {"GSM8K": (140, 150), "TL;DR": (350, 35)}  # tokens of a prompt, of a response on average
Groups = list[list[tba.Trajectory]]


def median_seconds(functions: list[Callable[[], object]]) -> list[float]:
    """The median time of each function, called alternately."""
    times = [[] for _ in functions]
    for _ in range(7):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [float(np.median(own)) for own in times]


def wide_model(folder: Path) -> Path:
    """Save a random Llama with 4 layers of width 256; returns its folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FILES / "model")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def groups_of(task: tba.Task, prompt: int, response: int) -> Groups:
    """3 groups of 16 random responses of about this length; replaces the prompts."""
    rng = np.random.default_rng(0)
    vocabulary = len(task.tokenizer)
    task.train_prompts[:50] = [rng.integers(0, vocabulary, prompt, np.int32) for _ in range(50)]
    return random_groups(task, 3, 16, shortest=response // 2, longest=response * 3 // 2)


def trl_step(model: Path, groups: Groups, prompts: list[np.ndarray]) -> Callable[[], None]:
    """A function that takes an optimizer step on these responses with TRL's GRPO loss."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    flat = [t for group in groups for t in group]
    policy = transformers.AutoModelForCausalLM.from_pretrained(model).train()
    config = GRPOConfig(
        output_dir=str(model), use_cpu=True, bf16=False, report_to="none", num_generations=16,
        per_device_train_batch_size=len(flat), gradient_checkpointing=False, max_steps=1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        policy,
        lambda completions, **_: [0.0] * len(completions),
        config,
        Dataset.from_list([{"prompt": "a"}]),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )
    trainer.current_gradient_accumulation_steps = 1
    pad = lambda tensors: torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    responses = [torch.from_numpy(t.tokens).long() for t in flat]
    inputs = {
        "prompt_ids": torch.stack([torch.from_numpy(prompts[t.prompt_id]).long() for t in flat]),
        "completion_ids": pad(responses),
        "completion_mask": pad([torch.ones_like(tokens) for tokens in responses]),
        "old_per_token_logps": pad([torch.from_numpy(t.logprobs) for t in flat]),
        "advantages": torch.randn(len(flat)),
    }
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    inputs["prompt_mask"] = torch.ones_like(inputs["prompt_ids"])
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-5, fused=True)

    def step() -> None:
        trainer._compute_loss(policy, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def print_steps(name: str, packed: tba.Learner, plain: tba.Learner, groups: Groups) -> None:
    """Print what a step on these responses costs, relative to one row per response and to TRL."""
    plain.task.train_prompts = packed.task.train_prompts
    now = tba.at_step(packed.config, 0)
    steps = [lambda: packed.step(groups, now, 0), lambda: plain.step(groups, now, 0)]
    if importlib.util.find_spec("trl"):
        steps.append(trl_step(Path(packed.config.model), groups, packed.task.train_prompts))
    seconds, plain_seconds, *trl_seconds = median_seconds(steps)
    speedup = plain_seconds / seconds
    print(f"packed, {name}: {speedup:.2f} times as fast ({seconds:.2f} s per step)")
    for other in trl_seconds:
        print(f"TRL, {name}: a step takes {seconds / other:.2f} of TRL's time")


def print_queue(group: list[tba.Trajectory]) -> None:
    """Print how many groups per second pass the Manager's queue."""
    manager = tba.SyncManager()
    manager.start()
    queue = manager.Queue()
    pickled = pickle.dumps(group)
    start = time.perf_counter()
    for _ in range(500):
        queue.put((0, pickled))
    taken = [queue.get() for _ in range(500)]
    print(f"queue: {len(taken) / (time.perf_counter() - start):.0f} groups per second")
    manager.shutdown()


def main() -> None:
    """Print a line per ratio."""
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = wide_model(Path(folder))
        flags = {"model": model, "recent_probability": 0.95, "tokens_per_microbatch": 4096}
        packed, plain = (learner_of(FILES, Path(folder) / "run", **flags) for _ in range(2))
        plain.policy.row_tokens = 0
        for name, (prompt, response) in SHAPES.items():
            groups = groups_of(packed.task, prompt, response)
            print_steps(name, packed, plain, groups)
        print_queue(random_groups(packed.task, 1, 16, shortest=125, longest=375)[0])


if __name__ == "__main__":
    main()
