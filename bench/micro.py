"""Microbenchmarks: ratios of CPU times, measured alternately.

    python bench/micro.py

* floor: a training step, relative to a plain forward, backward and AdamW over the same tokens:
  rows of 1,024 tokens, causal attention without a mask, each prompt once, logits of responses only.
  Also the floating-point operations of both, and what the step's additional ones are for;
* packed: the step on packed rows, relative to one row per response;
* TRL: the step, relative to TRL's GRPOTrainer, which pads these responses in one micro-batch
  (pip install --no-deps trl==1.16.0; skipped without it);
* queue: groups per second through the Manager's queue.
"""

import argparse
import importlib.util
import math
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from common import ROOT  # beside this file; it finds the tests' helpers
from harness import learner_of, random_groups
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import tba

FILES = ROOT / "tests" / "models" / "gsm8k"
SHAPES = {  # tokens of a prompt, of a response on average; responses to each of 3 prompts
    "GSM8K": (140, 150, 16),
    "TL;DR": (350, 35, 16),
    "long": (140, 500, 8),
}
VOCABULARY = 4096
Groups = list[list[tba.Trajectory]]
Step = Callable[[], object]


def wide_model(folder: Path) -> Path:
    """Save a random Llama with 4 layers of width 256; returns its folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FILES / "model")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def groups_of(task: tba.Task, prompt: int, response: int, K: int) -> Groups:
    """3 groups of K random responses of about this length; replaces the prompts."""
    rng = np.random.default_rng(0)
    vocabulary = len(task.tokenizer)
    task.train_prompts[:50] = [rng.integers(0, vocabulary, prompt, np.int32) for _ in range(50)]
    return random_groups(task, 3, K, shortest=response // 2, longest=response * 3 // 2)


def plain_step(model: Path, groups: Groups, prompts: list[np.ndarray]) -> Step:
    """A function that takes the floor's optimizer step on these groups."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-5, fused=True)
    asked = [prompts[group[0].prompt_id] for group in groups]
    tokens = np.concatenate([*asked, *(t.tokens for group in groups for t in group)])
    rows = math.ceil(len(tokens) / 1024)
    ids = torch.from_numpy(np.resize(tokens, (rows, math.ceil(len(tokens) / rows)))).long()
    # here, all prompts precede all responses: which token is whose makes no difference
    positions = torch.arange(sum(map(len, asked)), len(tokens)) - 1
    targets = ids.flatten()[positions + 1]

    def step() -> None:
        hidden = policy.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        logits = policy.lm_head(hidden[positions])
        torch.nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_step(model: Path, groups: Groups, prompts: list[np.ndarray]) -> Step:
    """A function that takes an optimizer step on these responses with TRL's GRPO loss."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    flat = [t for group in groups for t in group]
    policy = transformers.AutoModelForCausalLM.from_pretrained(model).train()
    config = GRPOConfig(
        output_dir=str(model), use_cpu=True, bf16=False, report_to="none", max_steps=1,
        num_generations=len(groups[0]), per_device_train_batch_size=len(flat),
        gradient_checkpointing=False,
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


def ratios_of(step: Step, other: Step, rounds: int) -> np.ndarray:
    """CPU times of `step` over those of `other`, called alternately (rounds,)."""
    ratios = []
    for _ in range(rounds):
        start = time.process_time()
        step()
        middle = time.process_time()
        other()
        ratios.append((middle - start) / (time.process_time() - middle))
    return np.array(ratios)


def operations(step: Step) -> dict[str, float]:
    """Floating-point operations of a step: of attention, and of other matrix products."""
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    forward = getattr(torch.ops.aten, attention)
    backward = getattr(torch.ops.aten, f"{attention}_backward")
    counts = {
        forward: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        backward: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v),
    }
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        step()
    found = counter.get_flop_counts()["Global"]
    own = {op: n for op, n in found.items() if op in counts}
    return {"attention": sum(own.values()), "products": sum(found.values()) - sum(own.values())}


def print_operations(learner: tba.Learner, groups: Groups, step: Step, floor: Step) -> None:
    """Print what a step computes beyond the floor, in fractions of the floor's operations."""
    executed = operations(step)
    needed = operations(floor)
    prompts = learner.task.train_prompts
    sequences = [(prompts[group[0].prompt_id], [t.tokens for t in group]) for group in groups]
    units = tba.plan_rows(
        sequences, learner.policy.row_tokens, learner.config.tokens_per_microbatch
    )
    repeated = sum(len(unit[0].prompt) * (len(unit) - 1) for unit in units)  # tokens
    answered = sum(len(t.tokens) for group in groups for t in group)
    tokens = answered + sum(len(prompt) for prompt, _ in sequences)
    head = 2 * VOCABULARY * learner.model.config.hidden_size * answered  # of one pass
    beyond = {
        "prompts repeated": repeated / tokens * (needed["products"] - 3 * head),
        "logits computed again": head,
        "attention": executed["attention"] - needed["attention"],
    }
    more = sum(executed.values()) - sum(needed.values())
    beyond["padding"] = more - sum(beyond.values())
    total = sum(needed.values())
    text = ", ".join(f"{name} {count / total:.3f}" for name, count in beyond.items())
    print(f"  {1 + more / total:.2f} of the floor's floating-point operations: {text}")


def print_steps(name: str, packed: tba.Learner, unpacked: tba.Learner, groups: Groups) -> None:
    """Print the ratios of steps on these responses."""
    unpacked.task.train_prompts = prompts = packed.task.train_prompts
    now = tba.at_step(packed.config, 0)
    model = Path(packed.config.model)
    step = lambda: packed.step(groups, now, 0)
    floor = plain_step(model, groups, prompts)

    def compare(other: str, function: Step, rounds: int) -> None:
        ratios = ratios_of(step, function, rounds)
        spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
        print(f"{name}: a step takes {np.median(ratios):.2f} ({spread}) of the time of: {other}")

    compare("floor", floor, 7)
    compare("one row per response", lambda: unpacked.step(groups, now, 0), 3)
    if importlib.util.find_spec("trl"):  # made last: its logits slow down all that follows
        compare("TRL", trl_step(model, groups, prompts), 3)
    print_operations(packed, groups, step, floor)


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
        flags = {"model": model, "recent_probability": 0.95, "tokens_per_microbatch": 16_384}
        packed, unpacked = (learner_of(FILES, Path(folder) / "run", **flags) for _ in range(2))
        unpacked.policy.row_tokens = 0
        for name, (prompt, response, K) in SHAPES.items():
            groups = groups_of(packed.task, prompt, response, K)
            print_steps(name, packed, unpacked, groups)
        print_queue(random_groups(packed.task, 1, 16, shortest=125, longest=375)[0])


if __name__ == "__main__":
    main()
