"""Counts what an optimizer step asks of a GPU: launches, synchronizations, bytes, memory.

    VIRTUAL_GPUS=1 bash tests/virtual_gpu/run.sh python bench/gpu_counts.py    # no GPU; a minute

Prints the table in docs/operations.md; times nothing. Random Llamas of 2 and 4 layers take steps in
bfloat16 on a micro-batch of 2 or 3 prompts; differences give numbers per layer and token. Operators
on CUDA tensors, except views and allocations, are launches; their bytes are those of inputs and
outputs.
"""

import gc
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import ROOT  # beside this file; it finds the tests' helpers
from harness import learner_of, random_groups
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tba

FILES = ROOT / "tests" / "models" / "gsm8k"
H, MLP, V = 128, 352, 3000  # hidden and intermediate size, as 4:11; vocabulary
P, K, T = 100, 20, 200  # tokens of a prompt, responses to it, tokens of each
L, TOKENS = 900, 4500  # tokens of a packed row, of a prompt's 5 rows
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}


class Count(TorchDispatchMode):
    """Counts launches, synchronizations and bytes by phase and kind."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "step"
        self.launches: Counter = Counter()
        self.waits: Counter = Counter()  # the CPU waits for the GPU
        self.bytes: Counter = Counter()
        self.scores = 0  # of attention, per head

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op._schema.name.removeprefix("aten::")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in inputs + outputs}
        if "cuda" not in devices or op.is_view or name in NO_KERNEL:
            return result
        if name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.waits[self.phase] += 1
        elif len(devices) == 2 and name in ("copy_", "_to_copy"):
            non_blocking = (kwargs or {}).get("non_blocking", False) or args[2:] == (True,)
            self.waits[self.phase] += not (outputs[0].is_cuda or non_blocking)
        else:
            self.add(name, inputs, outputs)
        return result

    def add(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Add an operator that runs on the GPU."""
        kind = "elementwise"
        if "varlen_attn" in name:
            kind = "attention"
            if "backward" not in name:
                queries, keys = (starts.diff().double().cpu() for starts in inputs[3:5])
                self.scores += (queries * keys - queries.square() / 2).sum().item()
        elif name in ("mm", "bmm", "addmm", "gather", "scatter_add"):
            kind = "other"  # matmuls; one logit per token
        elif any(x.shape[1:] == (V,) for x in inputs + outputs):
            kind = "logits"
        distinct = {x.data_ptr(): x for x in inputs[name == "copy_" :]}.values()
        zeros = inputs[:1] if name == "slice_backward" else []  # and a copy into a part of them
        sizes = [min(x.nbytes, x.untyped_storage().nbytes()) for x in [*distinct, *outputs, *zeros]]
        self.launches[self.phase] += 1 + len(zeros)
        self.bytes[self.phase, kind] += sum(sizes)


def measure(layers: int, prompts: int, checkpointing: bool) -> Count:
    """Counts of a step on one micro-batch, a weight sync, and a checkpoint."""
    gc.collect()
    memory = lambda which: torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=MLP, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, eos_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        transformers.LlamaForCausalLM(config).save_pretrained(path)
        transformers.AutoTokenizer.from_pretrained(FILES / "model").save_pretrained(path)
        flags = {"model": path, "dtype": "bfloat16", "gradient_checkpointing": checkpointing}
        learner = learner_of(FILES, Path(folder) / "run", **flags)
    learner.policy.gathers = True  # without a trial
    learner.policy.row_tokens = tba.TokenLogProbs.ROW_TOKENS  # as if the model were wider
    learner.task.train_prompts[:50] = [np.arange(P, dtype=np.int32)] * 50
    now = tba.at_step(learner.config, 0)
    with Count():  # allocates the optimizer's state
        learner.step(random_groups(learner.task, 1, 2), now, 0)
    torch.cuda.reset_peak_memory_stats()
    count = Count()
    count.parameters = sum(p.numel() for p in learner.model.parameters())
    count.idle = memory("current")
    run_microbatches = tba.run_microbatches

    def in_phase(*args: Any) -> Any:
        count.phase = "micro-batch"
        for values in run_microbatches(*args):
            count.graph = memory("current") - count.idle
            yield values
        count.phase = "step"

    with count:
        tba.run_microbatches = in_phase
        learner.step(random_groups(learner.task, prompts, K, T + 1, shortest=T), now, 0)
        tba.run_microbatches = run_microbatches
        count.logits = memory("peak") - count.idle - count.graph
        count.phase = "sync"
        learner.snapshot = tba.FlatWeights(learner.weights, torch.bfloat16, nccl=False)
        tba.copy_weights(learner)
        tba.policy_probes(learner)
        count.phase = "checkpoint"
        tba.saved_weights(learner)
        learner.state()
    return count


def column(checkpointing: bool) -> dict[str, str]:
    """What is counted, with or without --gradient_checkpointing."""
    sizes = (2, 2), (2, 3), (4, 2), (4, 3)  # layers, prompts
    counts = [measure(*size, checkpointing) for size in sizes]
    one, *_ = counts
    # parts of a count: constant, per layer, per prompt, per layer and prompt
    design = [[1, layers, prompts, layers * prompts] for layers, prompts in sizes]
    fit = lambda values: np.linalg.solve(design, values)
    parameters = fit([count.parameters for count in counts])[1]
    launches = fit([count.launches["micro-batch"] for count in counts])
    work = fit([count.bytes["micro-batch", "elementwise"] for count in counts])
    kept = fit([count.graph for count in counts])
    needed = 2 * 2 * (P * P / 2 + K * (T * P + T * T / 2))  # in 2 layers, of 2 prompts
    return {
        "launches per micro-batch and layer": f"{launches[1]:.0f}",
        "launches per micro-batch": f"{launches[0] + 2 * launches[2]:.0f}",
        "launches per step": f"{one.launches['step']}",
        "synchronizations per step": f"{one.waits['step'] + one.waits['micro-batch']}",
        "synchronizations per sync by Gloo, of 21 tensors": f"{one.waits['sync']}",
        "synchronizations per checkpoint, of 21 tensors": f"{one.waits['checkpoint']}",
        "passes over logits": f"{one.bytes['micro-batch', 'logits'] / (2 * K * T * 4 * V):.1f}",
        "elementwise, bytes per token and layer": f"{work[3] / TOKENS / H:.0f} H",
        "casts and sums of gradients, bytes per parameter": f"{work[1] / parameters:.0f}",
        "attention, computed / needed": f"{one.scores / needed:.1f}",
        "kept for the backward pass, bytes per token and layer": f"{kept[3] / TOKENS:,.0f}",
        "kept for the backward pass, bytes per parameter": f"{kept[1] / parameters:.0f}",
        "kept between steps, bytes per parameter": f"{one.idle / one.parameters:.0f}",
        "peak of logits, MB": f"{one.logits / 1e6:.1f}",
    }


if __name__ == "__main__":
    plain, checkpointed = column(False), column(True)
    for name, value in plain.items():
        print(f"| {name} | {value} | {checkpointed[name]} |")
