"""Microbenchmarks: ratios of two times, measured alternately.

    python bench/micro.py [--files FOLDER]      # a folder like tests/models/gsm8k

* packed: a training step on packed rows, relative to one row per response, for prompts and
  responses of GSM8K's and of TL;DR's proportions;
* TRL: the same step, relative to TRL's GRPOTrainer, which pads these responses in one micro-batch
  (pip install --no-deps trl==1.16.0; skipped without it);
* generation: a batch of the transformers engine that runs the prompt once for its 16 responses,
  relative to once per response;
* sync: the cost of a sync to the training thread (snapshot and probes), relative to a plain copy of
  the weights and the probes;
* replay: drawing a batch from a full buffer, as a fraction of a training step;
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

SHAPES = {"GSM8K": (140, 150), "TL;DR": (350, 35)}  # tokens of a prompt, of a response on average
Groups = list[list[tba.Trajectory]]


def median_seconds(*functions: Callable[[], object], rounds: int = 7) -> list[float]:
    """The median time of each function, called alternately."""
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [float(np.median(own)) for own in times]


def wide_model(files: Path, folder: Path) -> Path:
    """Save a random Llama with 4 layers of width 256; returns its folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(files / "model")
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
    seconds, plain_seconds, *trl_seconds = median_seconds(*steps)
    speedup = plain_seconds / seconds
    print(f"packed, {name}: {speedup:.2f} times as fast ({seconds:.2f} s per step)")
    for other in trl_seconds:
        print(f"TRL, {name}: a step takes {seconds / other:.2f} of TRL's time")


def print_generation(name: str, config: tba.Config, prompt: np.ndarray, length: int) -> None:
    """Print the speedup by running a prompt once for its 16 responses."""
    once = tba.TransformersEngine(config, 0, "model", 1024)
    often = tba.TransformersEngine(config, 0, "model", 1024)
    often.shares_prompts = False

    def generate(engine: tba.TransformersEngine) -> None:
        request = tba.Request(0, prompt, 16, max_tokens=length, min_tokens=length, temperature=1.0)
        engine.submit(request)
        engine.step()

    seconds, plain = median_seconds(lambda: generate(once), lambda: generate(often))
    print(f"generation, {name}: {plain / seconds:.2f} times as fast ({seconds:.2f} s)")


def print_sync(learner: tba.Learner) -> None:
    """Print the cost of a weight sync to the training thread."""
    learner.snapshot = tba.FlatWeights(learner.weights, torch.float32, torch.device("cpu"))
    own = torch.cat([tensor.flatten() for tensor in learner.weights.values()]).detach()
    other = torch.empty_like(own)

    def sync() -> None:
        learner.copy_weights()
        learner.score_probes()

    def copy_and_probes() -> None:
        other.copy_(own)
        learner.score_probes()

    seconds, minimum = median_seconds(sync, copy_and_probes, rounds=21)
    print(f"sync: {seconds / minimum:.2f} times a copy and the probes ({1000 * seconds:.1f} ms)")


def print_replay(learner: tba.Learner, groups: Groups) -> None:
    """Print what drawing a batch from 2,000 prompts costs, relative to a step on these groups."""
    rule = tba.RecentOrReward(tba.ReplayBuffer(learner.config), learner.config)
    now = tba.at_step(learner.config, 0)
    for index in range(2000):
        for group in random_groups(learner.task, 3, 16, longest=12):
            for t in group:
                t.prompt_id = index
            rule.buffer.add(tba.Group(index, group))
        if index > 1900:
            rule.on_group(tba.Group(index, group))
    (draw,) = median_seconds(lambda: rule.sample(7, 16), rounds=50)
    (step,) = median_seconds(lambda: learner.step(groups, now, 0))
    print(f"replay: a draw of 7 x 16 takes {draw / step:.4f} of a training step")


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", type=Path, default=ROOT / "tests" / "models" / "gsm8k")
    files = parser.parse_args().files
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = wide_model(files, Path(folder))
        flags = {"model": model, "recent_probability": 0.95, "tokens_per_microbatch": 4096}
        packed, plain = (learner_of(files, Path(folder) / "run", **flags) for _ in range(2))
        plain.policy.row_tokens = 0
        for name, (prompt, response) in SHAPES.items():
            groups = groups_of(packed.task, prompt, response)
            print_steps(name, packed, plain, groups)
            print_generation(name, packed.config, packed.task.train_prompts[0], response)
        print_sync(packed)
        print_replay(packed, groups_of(packed.task, *SHAPES["GSM8K"]))
        print_queue(random_groups(packed.task, 1, 16, shortest=125, longest=375)[0])


if __name__ == "__main__":
    main()
