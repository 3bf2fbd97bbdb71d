"""Check the GPU code paths with real tiny runs on this machine's GPUs.

    python bench/gpu_check.py [--files FOLDER]      # a folder like tests/models/gsm8k

Each check is a run of tba.py: transformers and vLLM, float32 and bfloat16, one shared GPU or NCCL
between several, LoRA adapters, lockstep. Exits with 0 if all pass, with 1 if any fails, and with 3
if there is no GPU.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tba


def run(name: str, files: Path, folder: Path, **flags: object) -> bool:
    """Run tba.py, and print the outcome; returns whether the model learned."""
    out = folder / name.replace(" ", "-")
    settings = {
        "model": files / "model", "dataset": files / "data", "output_dir": out, "steps": 60,
        "prompts_per_step": 8, "trained_per_prompt": 16, "searched_per_prompt": 16, "beta": 0.05,
        "learning_rate": 1e-4, "max_grad_norm": 1, "temperature": 1.0, "max_response_tokens": 32,
        "sequences_in_flight": 128, "eval_every": 30, "num_searchers": 1,
        "gpu_memory_utilization": 0.2,
    } | flags  # fmt: skip
    command = [sys.executable, str(ROOT / "tba.py")]
    command += [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    start = time.monotonic()
    process = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if process.returncode:
        print(f"FAILED {name}: exit code {process.returncode}\n{process.stderr[-3000:]}")
        return False
    metrics = tba.read_lines(out / "metrics.jsonl")
    accuracies = [record["accuracy"] for record in tba.read_lines(out / "eval.jsonl")]
    late = metrics[len(metrics) // 2 :]
    mean = {key: sum(m[key] for m in late) / len(late) for key in late[0] if key != "kl"}
    learned = accuracies[-1] > accuracies[0] + 0.3
    print(
        f"{'ok    ' if learned else 'FAILED'} {name}: accuracy {accuracies[0]:.2f} -> "
        f"{accuracies[-1]:.2f}, logprob_gap {max(m['logprob_gap'] for m in metrics):.2g}, "
        f"busy {mean['trainer_busy']:.2f} / {mean['searcher_busy']:.2f}, "
        f"sync {1000 * mean['sync_seconds']:.0f} ms a step, {time.monotonic() - start:.0f} s"
    )
    return learned


def main() -> int:
    """Run all checks that this machine allows; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", type=Path, default=ROOT / "tests" / "models" / "gsm8k")
    files = parser.parse_args().files
    gpus = torch.cuda.device_count()
    if not gpus:
        print("no GPU found: nothing was checked")
        return 3
    engines = ["transformers"] + ["vllm"] * tba.vllm_can_run()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for engine in engines:
            for dtype in ("float32", "bfloat16"):
                flags = {"engine": engine, "dtype": dtype}
                results.append(run(f"{engine} {dtype}", files, folder, **flags))
            flags = {"engine": engine, "dtype": "float32"}
            results.append(run(f"{engine} lockstep", files, folder, synchronous=True, **flags))
            adapters = {"lora_rank": 8, "learning_rate": 2e-3}
            results.append(run(f"{engine} adapters", files, folder, **flags, **adapters))
            if gpus > 1:
                results.append(
                    run(f"{engine} NCCL", files, folder, num_searchers=gpus - 1, **flags)
                )
    print(f"{sum(results)} of {len(results)} passed")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
