"""Training throughput: packed rows against what else one could do with the same responses.

python bench/step.py [--repeats 7] [--width 256] [--layers 4] [--prompts 3] [--responses 16]

Every variant computes the same step: forward, Trajectory Balance loss, backward, AdamW.

    packed     tba.py: a prompt's responses share rows, the prompt is computed once a row
    repeated   every response repeats its prompt in a row of its own, padded to its micro-batch
    plain      the bound without sharing: rows of one length, nothing padded, prompts repeated
    common     all rows padded to the longest, log-softmax of all logits at once, entropy each step
    maximum    the same, padded to --max_response_tokens of the task's script, as the authors do

Speed is real tokens (prompts repeated) per second; the table gives the median over `repeats`
alternating rounds of each variant's speed over `plain`, with the quartiles, and the peak memory
beside what the model and AdamW take.
"""

import argparse
import json
import math
import multiprocessing
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from accelerate import Accelerator

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tba

VOCABULARY, BETA = 2048, 0.5
# task-like: mean tokens of prompts, of responses, the longest response, and the most allowed
SHAPES = {"GSM8K-like": (100, 100, 256, 512), "TL;DR-like": (350, 35, 64, 128)}


def make_groups(shape: tuple, prompts: int, responses: int) -> tuple[list, list]:
    """Prompts, and a group of trajectories for each, with log-normal lengths of responses."""
    P, mean, longest, _ = shape
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(3, VOCABULARY, int(n)).astype(np.int32)
    texts = [draw(P * rng.uniform(0.7, 1.3)) for _ in range(prompts)]
    groups = []
    for i in range(prompts):
        group = []
        for T in np.clip(rng.lognormal(math.log(mean) - 0.125, 0.5, responses), 2, longest):
            logprobs = -np.ones(int(T), np.float32)
            trajectory = tba.Trajectory(
                tokens=draw(T),
                logprobs=logprobs,
                ended=True,
                reward=float(rng.random() < 0.5),
                ref_logprobs=logprobs,
                prompt_id=i,
                version=0,
                reference=0,
            )
            group.append(trajectory)
        groups.append(group)
    return texts, groups


class Steps:
    """The variants of one optimizer step."""

    def __init__(self, args: argparse.Namespace, shape: tuple) -> None:
        torch.manual_seed(0)
        self.device, heads = tba.own_device(), max(1, args.width // 64)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=3 * args.width,
            num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=heads,
            max_position_embeddings=4096, attn_implementation="sdpa",
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).to(self.device)
        self.policy = tba.TokenLogProbs(self.model, 1.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.most = shape[3]
        self.texts, self.groups = make_groups(shape, args.prompts, args.responses)
        self.flat = [t for group in self.groups for t in group]
        self.pairs = [(self.texts[t.prompt_id], t.tokens) for t in self.flat]
        self.tokens = sum(len(prompt) + len(response) for prompt, response in self.pairs)
        cpu = self.device.type == "cpu"
        config = tba.Config(dtype="float32" if cpu else "bfloat16", beta=str(BETA), tau="1")
        self.now = config.at(0)
        self.learner = SimpleNamespace(
            ranks=tba.Ranks(),
            problem=SimpleNamespace(prompts=self.texts),
            policy=self.policy,
            device=self.device,
            accelerator=Accelerator(cpu=cpu, mixed_precision="no"),
            log_z=torch.zeros(len(self.texts), device=self.device),
        )

    def loss(self, logprobs: torch.Tensor, rows: list) -> torch.Tensor:
        """Trajectory Balance of whole groups."""
        K = len(self.groups[0])
        batch = tba.Batch.of(logprobs, rows, K, 1.0, self.learner.log_z)
        return tba.tb(batch, self.now).loss

    def packed(self) -> None:
        tba.Learner.backward(self.learner, self.groups, self.now)

    def repeated(self) -> None:
        K = len(self.groups[0])
        longest = [max(len(p) + len(r) for p, r in self.pairs[i : i + K])
                   for i in range(0, len(self.pairs), K)]  # fmt: skip
        budget = self.now.tokens_per_microbatch
        for micro in tba.plan_microbatches([(K, length) for length in longest], budget):
            rows = [i * K + j for i in micro for j in range(K)]
            inputs = tba.pack(self.pairs, [[i] for i in rows], self.device)
            logprobs, _ = self.policy(**inputs, entropy=True)
            self.loss(logprobs, [self.flat[i] for i in rows]).backward()

    def plain(self) -> None:
        count = len(self.pairs)
        ids = torch.zeros(count, round(self.tokens / count), dtype=torch.long, device=self.device)
        P = round(sum(len(p) for p, _ in self.pairs) / count)
        hidden = self.model.base_model(ids, use_cache=False).last_hidden_state[:, P - 1 : -1]
        chunks = hidden.flatten(0, 1).split(tba.TokenLogProbs.CHUNK)
        torch.stack(
            [self.model.lm_head(c).log_softmax(-1)[:, 0].sum() for c in chunks]
        ).sum().backward()

    def maximum(self) -> None:
        width = max(len(prompt) for prompt, _ in self.pairs) + self.most
        self.common(width)

    def common(self, width: int = 0) -> None:
        inputs = tba.pack(self.pairs, [[i] for i in range(len(self.pairs))], self.device)
        _, length = inputs["inputs"]["input_ids"].shape
        more = max(0, width - length)
        inputs["where"] += inputs["where"] // length * more
        for name, tensor in inputs["inputs"].items():
            inputs["inputs"][name] = torch.nn.functional.pad(tensor, (0, more))
        logits = self.model(**inputs["inputs"], use_cache=False).logits
        logprobs = logits.log_softmax(-1)  # (B*K, T, V)
        _entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.flatten(0, 1)[inputs["where"]].gather(1, inputs["targets"][:, None])
        self.loss(chosen[:, 0], self.flat).backward()

    def take(self, name: str) -> float:
        """One step; returns its seconds."""
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        synchronize()
        start = time.perf_counter()
        getattr(self, name)()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize()
        return time.perf_counter() - start


VARIANTS = ("packed", "repeated", "plain", "common", "maximum")


def peak_memory(args: argparse.Namespace, task: str, name: str, answer) -> None:
    """In a process of its own: MiB that one step takes beside the model and AdamW's state."""
    torch.set_num_threads(args.threads)
    steps = Steps(args, SHAPES[task])
    for parameter in steps.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    steps.optimizer.step()
    answer.put(peak(steps.device, lambda: steps.take(name)) / 2**20)


def peak(device: torch.device, work) -> int:
    """Bytes that `work` takes at most beside what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    kib = lambda key: int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = kib("VmRSS")
    work()
    return 1024 * (kib("VmHWM") - before)


def measure(args: argparse.Namespace, task: str) -> dict[str, dict[str, float]]:
    """Speed over `plain` (median and quartiles), tokens/s and peak MiB of each variant."""
    steps, context = Steps(args, SHAPES[task]), multiprocessing.get_context("spawn")
    seconds = {name: [] for name in VARIANTS}
    for repeat in range(args.repeats + 1):
        for name in VARIANTS:
            taken = steps.take(name)
            if repeat:  # the first is to warm up
                seconds[name].append(taken)
    result = {}
    for name in VARIANTS:
        ratio = np.array(seconds["plain"]) / np.array(seconds[name])
        low, median, high = np.quantile(ratio, (0.25, 0.5, 0.75))
        answer = context.Queue()
        process = context.Process(target=peak_memory, args=(args, task, name, answer))
        process.start()
        result[name] = {
            "over_plain": median, "low": low, "high": high,
            "tokens_per_second": steps.tokens / float(np.median(seconds[name])),
            "peak_mib": answer.get(timeout=300),
        }  # fmt: skip
        process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("repeats", 7), ("width", 256), ("layers", 4), ("prompts", 3),
                          ("responses", 16), ("threads", 1)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "step.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = {}
    for task in SHAPES:
        results[task] = measure(args, task)
        print(f"{task:12s}  over plain (quartiles)     tokens/s   peak MiB")
        for name, r in results[task].items():
            spread = f"({r['low']:.2f}-{r['high']:.2f})"
            speed = f"{r['tokens_per_second']:10,.0f} {r['peak_mib']:10,.0f}"
            print(f"  {name:10s}  {r['over_plain']:.2f} {spread:22s} {speed}")
        over = {n: results[task]["packed"]["over_plain"] / r["over_plain"]
                for n, r in results[task].items()}  # fmt: skip
        print(f"  packed over common: {over['common']:.2f}, over maximum: {over['maximum']:.2f}",
              flush=True)  # fmt: skip
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
