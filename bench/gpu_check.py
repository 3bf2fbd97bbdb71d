"""The first hour on real GPUs: checks, in 15 minutes, what no test without a GPU can show.

    python bench/gpu_check.py [--logs FOLDER] [--minutes 15] [CHECK ...]

In this order: driver and versions; kernels (vLLM's log-probabilities against the Trainer's, in runs
that must learn); races (checksums of 500 weight syncs); nccl; size (memory and times of a random
model like RhoMath-1B, or of a smaller one); redteam (two vLLM engines in a process). Prints a table
for docs/operations.md. Exits with 0 if no check failed, with 1 if any did, with 3 without a GPU.
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tba

MODELS = ROOT / "tests" / "models"
GB = 1e9
Shape = tuple[int, int, int, int, int]
SIZES: dict[str, Shape] = {  # hidden, intermediate, layers, vocabulary; tokens of a micro-batch
    "1.1 B": (2048, 5632, 22, 32_000, 16_384),  # RhoMath-1B
    "1.1 B, small micro-batches": (2048, 5632, 22, 32_000, 4096),
    "0.3 B": (1024, 2816, 20, 32_000, 4096),
    "tiny": (64, 192, 2, 428, 4096),  # where no other fits
}
SHARE = 0.25  # vLLM's fraction of a GPU that it shares with the Trainer
Row = tuple[str, str, str, bool | None]  # what, measured, expected, passed


class Checks:
    """Each method that yields rows of the table is a check."""

    def __init__(self, logs: Path, minutes: float) -> None:
        self.logs = logs
        self.minutes = minutes
        self.deadline = time.monotonic() + 60 * minutes
        self.gpus = torch.cuda.device_count()
        self.memory = int(self.part("environment")[0])
        self.engine = "vllm" if tba.vllm_can_run() else "transformers"

    def execute(self, name: str, seconds: float, *words: object, **variables: object) -> str:
        """Run a command; returns its output. Raises RuntimeError if it fails.

        `seconds` is its time limit if all checks have 15 minutes.
        """
        log = self.logs / f"{name}.log"
        environment = os.environ | {key: str(value) for key, value in variables.items()}
        with log.open("w") as file:
            process = subprocess.Popen(
                [*map(str, words)], stdout=file, stderr=file, start_new_session=True,
                env=environment,
            )  # fmt: skip
        try:
            own_limit = seconds * self.minutes / 15
            process.wait(max(0, min(own_limit, self.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            raise RuntimeError("stopped at its time limit") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(errors="replace").replace("\r", "\n").strip()
        if process.returncode:
            lines = re.findall(r".*[Ee]rror:.*", text) or text.split("\n")
            raise RuntimeError(f"exit code {process.returncode}: {lines[-1][:150]}")
        return text

    def part(self, name: str, *arguments: object) -> list[str]:
        """Run a function of this file in its own process; returns the words of its result."""
        text = self.execute(name, 120, sys.executable, __file__, "--part", name, *arguments)
        lines, _, result = text.partition("result:")
        if name == "environment":
            print(lines, end="", flush=True)
        return result.split("\n")[0].split()

    def run(self, name: str, seconds: float, variables: dict, **flags: object) -> tuple:
        """Run tba.py; returns its metrics and evaluations."""
        out = Path(tempfile.mkdtemp(dir=self.logs))
        settings = {
            "task": "gsm8k", "model": MODELS / "gsm8k/model", "dataset": MODELS / "gsm8k/data",
            "output_dir": out, "engine": self.engine, "prompts_per_step": 8,
            "trained_per_prompt": 16, "searched_per_prompt": 16, "initial_trajectories": 128,
            "beta": 0.05, "learning_rate": "1e-4@0,0@end", "max_grad_norm": 1, "temperature": 1.0,
            "max_response_tokens": 32, "sequences_in_flight": 128, "eval_every": 0,
            "gpu_memory_utilization": SHARE if self.gpus == 1 else 0.5,
        } | flags  # fmt: skip
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        try:
            self.execute(name, seconds, sys.executable, ROOT / "tba.py", *words, **variables)
            return tba.read_lines(out / "metrics.jsonl"), tba.read_lines(out / "eval.jsonl")
        finally:
            shutil.rmtree(out)  # its checkpoints are large

    def kernels(self) -> Iterator[Row]:
        first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        one_gpu = {"CUDA_VISIBLE_DEVICES": first_gpu}
        adapters = {"lockstep": True, "lora_rank": 8, "learning_rate": 2e-3}
        cases = [
            ("vllm", "float32", "one GPU", one_gpu, {"gpu_memory_utilization": SHARE}),
            ("vllm", "bfloat16", "all GPUs", {}, {}),
            ("transformers", "bfloat16", "all GPUs", {}, {}),
            ("transformers", "float32", "lockstep with adapters", {}, adapters),
        ]
        for engine, dtype, text, variables, more in cases:
            gap_limit, kl_limit = (1e-3, 0.01) if dtype == "float32" else (1.0, 0.5)
            expected = f"gap < {gap_limit:g}, KL < {kl_limit:g}, learns"
            name = f"{engine}, {dtype}, {text}"
            flags = {"engine": engine, "dtype": dtype, "steps": 40, "eval_every": 20} | more
            try:
                metrics, evaluations = self.run(name.replace(", ", "-"), 150, variables, **flags)
            except RuntimeError as error:
                yield name, str(error), expected, False
                continue
            gap = max(m["logprob_gap"] for m in metrics)
            kl = abs(metrics[0]["kl"])  # of equal weights, by decoding and by packed scoring
            first = evaluations[0]["accuracy"]
            last = evaluations[-1]["accuracy"]
            passed = gap < gap_limit and kl < kl_limit and last > first + 0.3
            text = f"gap {gap:.2g}, KL {kl:.2g}, accuracy {first:.2f} -> {last:.2f}"
            yield name, text, expected, passed

    def races(self) -> Iterator[Row]:
        _, (hidden, intermediate, _, vocabulary, _) = self.size_that_fits()
        self.part("model", self.logs / "model", hidden, intermediate, 4, vocabulary)
        sums = self.logs / "sums.txt"
        sums.unlink(missing_ok=True)
        metrics, _ = self.run(
            "races", 270, {"GPU_CHECK_SUMS": sums}, plugin=__file__, model=self.logs / "model",
            steps=10**6, sync_every=1, max_recent_draws=10**6, learning_rate=1e-5,
            prompts_per_step=2, trained_per_prompt=8, searched_per_prompt=8,
        )  # fmt: skip
        lines = [line.split() for line in sums.read_text().splitlines()]
        sent = {version: total for who, version, total in lines if who == "sent"}
        same = [sent[version] == total for who, version, total in lines if who != "sent"]
        gap = max(m["logprob_gap"] for m in metrics)
        text = f"{len(sent)} syncs: {same.count(False)} of {len(same)} sums differ, gap {gap:.2g}"
        yield "races", text, "none differs", all(same) and len(same) > 20

    def nccl(self) -> Iterator[Row]:
        if self.gpus < 2:
            yield "broadcast", "needs two GPUs", "", None
            return
        store = self.logs / "store"
        store.unlink(missing_ok=True)
        speed = float(self.part("nccl", self.gpus, store)[0])
        expected = "PCIe 10 to 25, NVLink 100 or more"
        yield f"broadcast to {self.gpus - 1} GPU(s)", f"{speed:.1f} GB/s", expected, speed > 8

    def size(self) -> Iterator[Row]:
        name, shape = self.size_that_fits()
        self.part("model", self.logs / "model", *shape[:4])
        metrics, _ = self.run(
            "size", 330, {}, model=self.logs / "model", steps=30,
            prompts_per_step=7, trained_per_prompt=20, searched_per_prompt=24, sync_every=2,
            max_response_tokens=150, sequences_in_flight=256, learning_rate=1e-6,
            tokens_per_microbatch=shape[4],
        )  # fmt: skip
        late = metrics[len(metrics) // 4 :]
        median = lambda value: statistics.median(map(value, late))
        step = median(lambda m: m["forward_backward_seconds"] + m["optimizer_seconds"])
        busy = median(lambda m: m["trainer_busy"])
        decoding = median(lambda m: m["generated_tokens_per_second"] / m["searchers_alive"])
        sync = sum(m["sync_seconds"] for m in late) / len({m["version"] for m in late})
        peak = 2**30 * max(m["gpu_memory_gib"] for m in metrics)
        most = estimate(shape)
        # the estimates are for GPUs that are not shared
        compare = lambda good: good if name == "1.1 B" and self.gpus > 1 else None
        good = compare(step < 3)
        yield f"Trainer's memory, {name}", f"{peak / GB:.1f} GB", f"{most / GB:.1f}", peak < most
        yield "step", f"{step:.2f} s, busy {busy:.2f}", "1.1 B: H100 1.0 s, A100 1.8 s", good
        good = compare(decoding > 7500)
        yield "decoding", f"{decoding:,.0f} tokens/s", "1.1 B, H100: 15,000 to 20,000", good
        good = compare(sync < 0.3)
        yield "sync, training thread", f"{1000 * sync:.0f} ms", "1.1 B, H100: 120 ms", good

    def redteam(self) -> Iterator[Row]:
        flags = ["--engine", self.engine, "--steps", 6, "--eval_every", 6]
        flags += ["--output_dir", self.logs / "redteam"]
        script = ROOT / "run_redteam.sh"
        self.execute("redteam", 200, "bash", script, "--tiny", *flags, PYTHON=sys.executable)
        yield f"red-teaming, {self.engine}", "ended after its 6 steps", "", True

    def size_that_fits(self) -> tuple[str, Shape]:
        """Name and shape of the largest model that fits."""
        *sizes, tiny = SIZES.items()
        room = (0.6 if self.gpus == 1 else 0.95) * self.memory  # a Searcher may need the rest
        for name, shape in sizes:
            if estimate(shape) < room:
                return name, shape
        return tiny


def estimate(shape: Shape) -> float:
    """The Trainer's peak memory in bytes, as in docs/operations.md."""
    hidden, intermediate, layers, vocabulary, tokens = shape
    layer = 2.25 * hidden**2 + 3 * hidden * intermediate
    parameters = 2 * vocabulary * hidden + layers * layer
    row = tba.TokenLogProbs.ROW_TOKENS
    activations = (20 * hidden + 8 * intermediate + 2 * row) * layers * tokens
    logits = 4 * vocabulary * (3 * tba.TokenLogProbs.CHUNK + 3 * hidden)
    return 20 * parameters + activations + logits


def environment() -> None:
    """Print versions and GPUs, and the first GPU's memory in bytes."""
    for name in ("torch", "vllm", "transformers", "triton", "nvidia-nccl-cu13"):
        for found in metadata.distributions(name=name):
            print(name, found.version, end="; ")
    print("Python", sys.version.split()[0])
    gpus = range(torch.cuda.device_count())
    for i in gpus:
        device = torch.cuda.get_device_properties(i)
        peers = [j for j in gpus if j != i and torch.cuda.can_device_access_peer(i, j)]
        print(f"GPU {i}: {device.name}, {device.total_memory / GB:.1f} GB, direct access: {peers}")
    print("result:", torch.cuda.get_device_properties(0).total_memory)


def model(folder: str, *shape: str) -> None:
    """Save a random Llama with the tiny model's tokenizer."""
    import transformers

    hidden, intermediate, layers, vocabulary = map(int, shape)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64), num_key_value_heads=max(1, hidden // 512),
        vocab_size=vocabulary, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    with torch.device("cuda"):
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in (MODELS / "gsm8k" / "model").glob("tokenizer*"):
        shutil.copy(path, folder)


def nccl(size: str, store: str) -> None:
    """Broadcast 1 GB ten times from the first GPU; prints GB/s."""
    torch.multiprocessing.spawn(nccl_member, (int(size), store), int(size))


def nccl_member(rank: int, size: int, store: str) -> None:
    """A process of `nccl`."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", f"file://{store}", rank=rank, world_size=size)
    data = torch.zeros(10**9, dtype=torch.uint8, device="cuda")
    torch.distributed.broadcast(data, 0)  # connects
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        torch.distributed.broadcast(data, 0)
    torch.cuda.synchronize()
    if rank == 0:
        print("result:", 10 * len(data) / GB / (time.perf_counter() - start), flush=True)
    torch.distributed.destroy_process_group()


def install_checksums() -> None:
    """In the run of `races`: log checksums of weights as sent and as received."""
    end = time.monotonic() + 150
    syncs = []
    begin_if_due = tba.WeightSync.begin_if_due
    load_weights = tba.load_weights

    def note(who: str, version: int, weights: tba.FlatWeights) -> None:
        bits = weights.flat.view(torch.int16 if weights.flat.itemsize == 2 else torch.int32)
        with open(os.environ["GPU_CHECK_SUMS"], "a") as file:
            file.write(f"{who} {version} {bits.sum(dtype=torch.int64).item()}\n")

    def begin(sync: tba.WeightSync, step: int) -> None:
        before = sync.transfer
        begin_if_due(sync, step)
        if sync.transfer is not before and not sync.transfer.reference:
            note("sent", step, sync.learner.snapshot)
            syncs.append(step)
        if len(syncs) == 500 or time.monotonic() > end:
            sync.config.steps = step  # the run ends

    def load(searcher: tba.Searcher) -> None:
        # before they are said to be loaded: the next ones may arrive then
        note("received", searcher.staged.version, searcher.staging)
        load_weights(searcher)

    tba.WeightSync.begin_if_due = begin
    tba.load_weights = load


def main() -> int:
    """Run the checks; returns the exit code."""
    names = ["kernels", "races", "nccl", "size", "redteam"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"some of {', '.join(names)}")
    parser.add_argument("--logs", type=Path, help="folder for logs; default: a temporary one")
    help_text = "time for all checks together; the limit of each changes in proportion"
    parser.add_argument("--minutes", type=float, default=15, help=help_text)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.part:
        globals()[flags.part[0]](*flags.part[1:])
        return 0
    if unknown := set(flags.checks) - set(names):
        parser.error(f"no check {min(unknown)}: choose from {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current command, too
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        print("driver", driver)
        if int(driver.split(".")[0]) < 580:
            print("older than R580: the pinned torch and vllm, built for CUDA 13, cannot use it;")
            print("docs/operations.md, Where it runs, names other builds")
    except Exception as error:
        print(f"no NVIDIA driver: {error}")
    if not torch.cuda.is_available():
        print("no GPU found: nothing was checked")
        return 3
    logs = flags.logs or Path(tempfile.mkdtemp(prefix="gpu_check-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"logs: {logs}", flush=True)
    checks = Checks(logs.resolve(), flags.minutes)
    rows: list[Row] = []
    for name in flags.checks or names:
        start = time.monotonic()
        try:
            for row in getattr(checks, name)():
                rows.append(row)
                print(f"{time.monotonic() - start:4.0f} s  {row[0]}: {row[1]}", flush=True)
        except Exception as error:
            rows.append((name, tba.first_line(error), "", False))
            print(f"{time.monotonic() - start:4.0f} s  {name} failed: {error}", flush=True)
    print("\n| check | measured | expected | |\n|---|---|---|---|")
    words = {True: "ok", False: "FAILED", None: "-"}
    for what, measured, expected, passed in rows:
        print(f"| {what} | {measured} | {expected} | {words[passed]} |")
    return int(any(passed is False for *_, passed in rows))


if __name__ == "__main__":
    sys.exit(main())
elif "GPU_CHECK_SUMS" in os.environ:
    install_checksums()
