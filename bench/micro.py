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
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tba


def median_seconds(*functions, rounds: int = 7) -> list[float]:
    """The median time of each function, called alternately."""
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [float(np.median(own)) for own in times]


def load_learner(model: Path, files: Path) -> tba.Learner:
    """A Learner for this model."""
    config = tba.settings(
        model=str(model), dataset=str(files / "data"), engine="transformers", dtype="float32",
        num_searchers=1, logprob_tolerance=1e-3, recent_probability=0.95,
        max_response_tokens=32, temperature=1.0, tokens_per_microbatch=4096,
    )  # fmt: skip
    return tba.Learner(config, tba.load_task(config), tba.Ranks())


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


def random_groups(learner: tba.Learner, prompt: int, response: int) -> list[list[tba.Trajectory]]:
    """3 groups of 16 random responses of about this length; replaces 3 of the prompts."""
    rng = np.random.default_rng(0)
    vocabulary = len(learner.task.tokenizer)
    groups = []
    for prompt_id in range(3):
        learner.task.train_prompts[prompt_id] = rng.integers(0, vocabulary, prompt).astype(np.int32)
        group = []
        for _ in range(16):
            T = int(rng.integers(response // 2, response * 3 // 2))
            trajectory = tba.Trajectory(
                tokens=rng.integers(0, vocabulary, T).astype(np.int32),
                logprobs=np.full(T, -5, np.float32),
                ref_logprobs=np.full(T, -5, np.float32),
                ended=True,
                temperature=1.0,
                in_kl=True,
                reward=float(rng.random()),
                prompt_id=prompt_id,
                version=0,
                last_version=0,
                reference_version=0,
            )
            group.append(trajectory)
        groups.append(group)
    return groups


def trl_step(model: Path, groups: list[list[tba.Trajectory]], prompts: list[np.ndarray]):
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
    pad = torch.nn.utils.rnn.pad_sequence
    responses = [torch.from_numpy(t.tokens).long() for t in flat]
    inputs = {
        "prompt_ids": torch.stack([torch.from_numpy(prompts[t.prompt_id]).long() for t in flat]),
        "completion_ids": pad(responses, batch_first=True),
        "completion_mask": pad([torch.ones_like(tokens) for tokens in responses], batch_first=True),
        "old_per_token_logps": pad([torch.from_numpy(t.logprobs) for t in flat], batch_first=True),
        "advantages": torch.randn(len(flat)),
    }
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    inputs["prompt_mask"] = torch.ones_like(inputs["prompt_ids"])
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-5, fused=True)

    def step() -> None:
        """One optimizer step."""
        trainer._compute_loss(policy, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Print a line per ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", type=Path, default=ROOT / "tests" / "models" / "gsm8k")
    files = parser.parse_args().files
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory()
    model = wide_model(files, Path(folder.name))
    packed = load_learner(model, files)
    plain = load_learner(model, files)
    plain.policy.row_tokens = 0
    once = tba.TransformersEngine(packed.config, 0, "model", 1024)
    often = tba.TransformersEngine(plain.config, 0, "model", 1024)
    often.shares_prompts = False
    now = tba.at_step(packed.config, 0)
    for name, prompt, response in (("GSM8K", 140, 150), ("TL;DR", 350, 35)):
        groups = random_groups(packed, prompt, response)
        random_groups(plain, prompt, response)

        def step(learner: tba.Learner, groups: list = groups) -> None:
            """One training step."""
            learner.step(groups, now, 0)

        steps = [lambda: step(packed), lambda: step(plain)]
        if importlib.util.find_spec("trl"):
            steps.append(trl_step(model, groups, packed.task.train_prompts))
        packed_seconds, plain_seconds, *trl_seconds = median_seconds(*steps)
        speedup = plain_seconds / packed_seconds
        print(f"packed, {name}: {speedup:.2f} times as fast ({packed_seconds:.2f} s per step)")
        for seconds in trl_seconds:
            print(f"TRL, {name}: a step takes {packed_seconds / seconds:.2f} of TRL's time")

        def generate(engine: tba.TransformersEngine, P: int = prompt, T: int = response) -> None:
            """16 responses of T tokens to a prompt of P."""
            ids = packed.task.train_prompts[0][:P]
            engine.submit(tba.Request(0, ids, 16, max_tokens=T, min_tokens=T, temperature=1.0))
            engine.step()

        seconds, plain_seconds = median_seconds(lambda: generate(once), lambda: generate(often))
        print(f"generation, {name}: {plain_seconds / seconds:.2f} times as fast ({seconds:.2f} s)")

    packed.snapshot = tba.FlatWeights(packed.weights, torch.float32, torch.device("cpu"))
    own = torch.cat([tensor.flatten() for tensor in packed.weights.values()]).detach()
    other = torch.empty_like(own)

    def sync() -> None:
        """What a weight sync does in the training thread."""
        packed.copy_weights()
        packed.score_probes()

    def copy_and_probes() -> None:
        """The minimum cost."""
        other.copy_(own)
        packed.score_probes()

    seconds, minimum = median_seconds(sync, copy_and_probes, rounds=21)
    print(f"sync: {seconds / minimum:.2f} times a copy and the probes ({1000 * seconds:.1f} ms)")

    config = packed.config
    rule = tba.RecentOrReward(tba.ReplayBuffer(config), config)
    for index in range(2000):
        for group in random_groups(packed, 4, 8):
            for t in group:
                t.prompt_id = index
            rule.buffer.add(tba.Group(index, group))
        if index > 1900:
            rule.on_group(tba.Group(index, group))
    (draw,) = median_seconds(lambda: rule.sample(7, 16), rounds=50)
    print(f"replay: a draw of 7 x 16 takes {draw / packed_seconds:.4f} of a training step")

    manager = tba.SyncManager()
    manager.start()
    queue = manager.Queue()
    pickled = pickle.dumps(random_groups(packed, 4, 250)[0])
    start = time.perf_counter()
    for _ in range(500):
        queue.put((0, pickled))
    taken = [queue.get() for _ in range(500)]
    print(f"queue: {len(taken) / (time.perf_counter() - start):.0f} groups per second")
    manager.shutdown()
    folder.cleanup()


if __name__ == "__main__":
    main()
