"""The first hour on real GPUs: checks, in 25 minutes, what no test without a GPU can show.

    python bench/gpu_check.py [--logs FOLDER] [--minutes 25] [CHECK ...]

In this order: driver, versions, compiler; kernels (vLLM's log-probabilities against the Trainer's,
in runs that must learn); step (log-probabilities and gradient against the plain model's); races
(checksums of 500 weight syncs); nccl; size (memory and times of a random model like RhoMath-1B, or
of a smaller one, and where a step's time goes); redteam (two vLLM engines in a process). Prints a
report for an issue. Exits with 1 if a check failed, 3 without a GPU or compiler, else 0.
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tba

MODELS = ROOT / "tests" / "models"
GB = 1e9
# sizes of hidden states and MLP, layers, vocabulary, tokens of a micro-batch; GB for the Trainer
SIZES = {
    "1.1 B": (2048, 5632, 22, 32_000, 16_384, 54.7),  # RhoMath-1B
    "1.1 B, small micro-batches": (2048, 5632, 22, 32_000, 4096, 30.9),
    "0.3 B": (1024, 2816, 20, 32_000, 4096, 10.0),
    "tiny": (64, 192, 2, 428, 4096, 0.1),  # where no other fits
}
SHARE = 0.25  # vLLM's fraction of a GPU that it shares with the Trainer
# a step's operators: estimated ms of "1.1 B" on an H100; whether one (name, inputs, weights) is so
KINDS: dict[str, tuple[object, Callable]] = {
    "optimizer": (12, lambda op, *_: re.search("adam|foreach", op)),
    "attention": ("200 to 330", lambda op, *_: "attention" in op),
    "rest": (0, lambda op, inputs, _: not inputs or "embedding" in op),
    "casts, sums of gradients": (30, lambda op, i, w: re.search("copy|add", op) and w >= {*i}),
    "head and log_softmax": (60, lambda _, inputs, w: any(max(w)[0] in i for i in inputs)),
    "linear layers": (540, lambda op, *_: op.endswith("mm")),
    "elementwise": (270, lambda *_: True),
}
Row = tuple[str, str, str, bool | None]  # what, measured, expected, passed
NOT_RUN = "not run: time"


class Checks:
    """Each method that yields rows of the table is a check."""

    def __init__(self, logs: Path, minutes: float) -> None:
        self.logs = logs.resolve()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.patience = max(1, minutes / 25)
        self.deadline = float("inf")
        self.gpus = torch.cuda.device_count()
        self.part("environment")
        self.environment = self.log.read_text().strip()
        self.memory = float(re.search(r"([\d.]+) GB", self.environment)[1])  # the first GPU's
        self.engine = "vllm" if tba.vllm_can_run() else "transformers"
        self.deadline = time.monotonic() + 60 * minutes

    def execute(self, name: str, seconds: float, *words: object, **variables: str) -> str:
        """Run a command; returns its output. Raises RuntimeError if it fails, or TimeoutError.

        `seconds` is its own time limit, longer if --minutes is more than the default.
        """
        remaining = max(0, self.deadline - time.monotonic())
        limit = seconds * self.patience
        self.log = log = self.logs / f"{name}.log"
        with log.open("w") as file:
            options = {"stdout": file, "stderr": file, "start_new_session": True}
            process = subprocess.Popen([*map(str, words)], env=os.environ | variables, **options)
        try:
            process.wait(min(limit, remaining))
        except subprocess.TimeoutExpired:
            over = RuntimeError(f"still ran after {limit:.0f} s")
            raise (TimeoutError(NOT_RUN) if remaining < limit else over) from None
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
        return text.rpartition("result:")[2].split("\n")[0].split()

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
        one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        adapters = {"lockstep": True, "lora_rank": 8, "learning_rate": 2e-3}
        cases = [
            ("vllm", "float32", "one GPU", one, {"gpu_memory_utilization": SHARE}),
            ("vllm", "bfloat16", "all GPUs", {}, {}),
            ("transformers", "bfloat16", "all GPUs", {}, {}),
            ("transformers", "float32", "lockstep with adapters", {}, adapters),
        ]
        for engine, dtype, text, variables, more in cases:
            gap_limit, kl_limit = (1e-3, 0.01) if dtype == "float32" else (1.0, 0.5)
            expected = f"gap < {gap_limit:g}, KL < {kl_limit:g}, learns"
            name = f"{engine}, {dtype}, {text}"
            flags = {"engine": engine, "dtype": dtype, "steps": 40, "eval_every": 20} | more
            limit = 240 if engine == "vllm" else 150
            try:
                metrics, evaluations = self.run(name.replace(", ", "-"), limit, variables, **flags)
            except RuntimeError as error:
                yield name, str(error), expected, False
                continue
            gap = max(m["logprob_gap"] for m in metrics)
            kl = abs(metrics[0]["kl"])  # of equal weights, by decoding and by packed scoring
            first, *_, last = (record["accuracy"] for record in evaluations)
            passed = gap < gap_limit and kl < kl_limit and last > first + 0.3
            text = f"gap {gap:.2g}, KL {kl:.2g}, accuracy {first:.2f} -> {last:.2f}"
            yield name, text, expected, passed

    def step(self) -> Iterator[Row]:
        self.random_model(4)
        for dtype, a, b in (("float32", 1e-3, 1e-3), ("bfloat16", 0.1, 0.05)):
            gap, error = map(float, self.part("step", self.logs / "model", dtype))
            text = f"log-probabilities {gap:.1g}, gradient {error:.1g} apart"
            yield f"step, {dtype}", text, f"< {a:g}, < {b:g}", gap < a and error < b

    def races(self) -> Iterator[Row]:
        self.random_model(4)
        sums = self.logs / "sums.txt"
        sums.unlink(missing_ok=True)
        metrics, _ = self.run(
            "races", 270, {"GPU_CHECK_SUMS": str(sums)}, plugin=__file__, model=self.logs / "model",
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
        store = self.logs / "store"
        store.unlink(missing_ok=True)
        if self.gpus > 1:
            speed = float(self.part("nccl", self.gpus, store)[0])
            expected = "PCIe 10 to 25, NVLink 100 or more"
            yield f"broadcast to {self.gpus - 1} GPU(s)", f"{speed:.1f} GB/s", expected, speed > 8
        else:
            yield "broadcast", "needs two GPUs", "", None

    def size(self) -> Iterator[Row]:
        name, *_, tokens, most = self.random_model()
        metrics, _ = self.run(
            "size", 330, {}, model=self.logs / "model", steps=30,
            prompts_per_step=7, trained_per_prompt=20, searched_per_prompt=24, sync_every=2,
            max_response_tokens=150, sequences_in_flight=256, learning_rate=1e-6,
            tokens_per_microbatch=tokens,
        )  # fmt: skip
        late = metrics[len(metrics) // 4 :]
        median = lambda value: statistics.median(map(value, late))
        step = median(lambda m: m["forward_backward_seconds"] + m["optimizer_seconds"])
        busy = median(lambda m: m["trainer_busy"])
        decoding = median(lambda m: m["generated_tokens_per_second"] / m["searchers_alive"])
        sync = sum(m["sync_seconds"] for m in late) / len({m["version"] for m in late})
        peak = 2**30 / GB * max(m["gpu_memory_gib"] for m in metrics)
        # estimates are for GPUs that are not shared
        check = lambda good: good if name == "1.1 B" and self.gpus > 1 else None
        yield f"Trainer's memory, {name}", f"{peak:.1f} GB", f"< {most}", peak < most
        yield "step", f"{step:.2f} s, busy {busy:.2f}", "H100 1.0 s, A100 1.8 s", check(step < 3)
        yield "decoding", f"{decoding:,.0f} tokens/s", "H100 15,000", check(decoding > 7500)
        yield "sync, training thread", f"{1000 * sync:.0f} ms", "H100 120 ms", check(sync < 0.3)
        wall, *times = map(float, self.part("profile", self.logs / "model", tokens))
        yield "step of 42,000 tokens", f"{wall:.0f} ms, kernels {sum(times):.0f}", "", None
        for (kind, (expected, _)), value in zip(KINDS.items(), times, strict=True):
            text = f"{value:.0f} ms, {value / sum(times):.0%}"
            yield f"its {kind}", text, f"H100 {expected} ms", None

    def redteam(self) -> Iterator[Row]:
        flags = ["--tiny", "--engine", self.engine, "--steps", 6, "--eval_every", 6]
        flags += ["--output_dir", self.logs / "redteam"]
        script = ROOT / "run_redteam.sh"
        self.execute("redteam", 330, "bash", script, *flags, PYTHON=sys.executable)
        yield f"red-teaming, {self.engine}", "ended after its 6 steps", "", True

    def random_model(self, layers: int = 0) -> tuple:
        """Save the largest model of SIZES that fits, or so many of its layers; returns its row."""
        room = (0.6 if self.gpus == 1 else 0.95) * self.memory  # a Searcher may need the rest
        name = next(name for name, row in SIZES.items() if row[-1] < room or name == "tiny")
        hidden, intermediate, depth, vocabulary, *_ = SIZES[name]
        self.part("model", self.logs / "model", hidden, intermediate, layers or depth, vocabulary)
        return name, *SIZES[name]


def environment() -> None:
    """Print versions and GPUs."""
    for path in Path("/proc/driver/nvidia").glob("version"):
        print(path.read_text().split("\n")[0])
    for name in ("torch", "vllm", "transformers", "triton", "nvidia-nccl-cu13"):
        for found in metadata.distributions(name=name):
            print(name, found.version, end="; ")
    print("Python", sys.version.split()[0])
    gpus = range(torch.cuda.device_count())
    for i in gpus:
        device = torch.cuda.get_device_properties(i)
        peers = [j for j in gpus if j != i and torch.cuda.can_device_access_peer(i, j)]
        print(f"GPU {i}: {device.name}, {device.total_memory / GB:.1f} GB, direct access: {peers}")


def model(folder: str, *shape: str) -> None:
    """Save a random Llama with the tiny model's tokenizer."""
    hidden, intermediate, layers, vocabulary = map(int, shape)
    config = tba.transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64), num_key_value_heads=max(1, hidden // 512),
        vocab_size=vocabulary, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    with torch.device("cuda"):
        tba.transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in (MODELS / "gsm8k" / "model").glob("tokenizer*"):
        shutil.copy(path, folder)


def learner_of(B: int, K: int, P: int, T: int, **flags: object) -> tuple:
    """A Learner, K random responses of T tokens to each of B prompts of P, and the settings."""
    import harness  # the tests'

    learner = harness.learner_of(MODELS / "gsm8k", Path(tempfile.gettempdir()) / "none", **flags)
    learner.task.train_prompts[:50] = [tba.np.arange(P, dtype="int32")] * 50
    groups = harness.random_groups(learner.task, B, K, T + 1, shortest=T)
    return learner, groups, tba.at_step(learner.config, 0)


def step(folder: str, dtype: str) -> None:
    """Print how far a step's log-probabilities and gradient are from the plain model's."""
    from harness import plain_logprobs

    learner, groups, now = learner_of(2, 8, 50, 120, model=folder, dtype=dtype)
    learner.backward(groups, now, 0)
    prompt = learner.task.train_prompts[0]  # of all
    responses = [t.tokens for ts in groups for t in ts]
    own = tba.token_logprobs(learner.policy, [(prompt, responses)], now)
    torch.set_float32_matmul_precision("highest")
    kind = tba.transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    plain = torch.cat([plain_logprobs(model, prompt, y, now.temperature)[0] for y in responses])
    batch = tba.dataclasses.replace(learner.make_batch(groups, now, 0), logprobs=plain)
    tba.tb(batch, now).loss.backward()
    gap = abs(tba.np.concatenate(own) - plain.detach().cpu().numpy()).max()
    flat = lambda own: torch.cat([p.grad.flatten() for p in own.parameters()])
    error = (flat(learner.model) - flat(model)).norm() / flat(model).norm()
    print("result:", gap, error.item())


def profile(folder: str, tokens: str) -> None:
    """Print a step's milliseconds, and those of its kernels by kind."""
    flags = {"model": folder, "dtype": "bfloat16", "tokens_per_microbatch": tokens}
    learner, groups, now = learner_of(7, 20, 150, 250, **flags)
    for _ in range(2):
        learner.step(groups, now, 0)
    torch.cuda.synchronize()
    with torch.profiler.profile(record_shapes=True) as profiler:
        start = time.perf_counter()
        learner.step(groups, now, 0)
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    weights = {tuple(p.shape) for p in learner.model.parameters()}
    events = profiler.key_averages(group_by_input_shape=True)
    # operators, which have the times of their kernels; virtual GPUs have none
    events = [x for x in events if x.device_type == torch.autograd.DeviceType.CPU]
    clock = "device" if any(x.self_device_time_total for x in events) else "cpu"
    times: Counter = Counter()
    for x in events:
        inputs = [tuple(shape) for shape in x.input_shapes if shape and isinstance(shape[0], int)]
        kind = next(kind for kind, (_, fits) in KINDS.items() if fits(x.key, inputs, weights))
        times[kind] += getattr(x, f"self_{clock}_time_total") / 1000
    print("result:", 1000 * wall, *(times[kind] for kind in KINDS))


def nccl(rank: int | str, size: int | str, store: str = "") -> None:
    """Broadcast 1 GB ten times from the first GPU to all; prints GB/s."""
    if not store:
        return torch.multiprocessing.spawn(nccl, (int(rank), size), int(rank))
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


def needs() -> Iterator[str]:
    """What this machine lacks for any check."""
    if not torch.cuda.is_available():
        yield "a GPU, and an NVIDIA driver R580 or newer (docs/operations.md, Installing)"
    # Triton compiles a launcher for each kernel
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if not (any(map(shutil.which, compilers)) and header.exists()):
        yield f"{' or '.join(compilers)}, or {header}: apt install gcc python3-dev"


def rows_of(checks: Checks, name: str) -> Iterator[Row]:
    """The rows of a check; the last one says so if it raised, or if time ran out."""
    try:
        yield from getattr(checks, name)()
    except Exception as error:
        yield name, tba.first_line(error), "", None if isinstance(error, TimeoutError) else False


def main() -> int:
    """Run the checks; returns the exit code."""
    names = "kernels step races nccl size redteam".split()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"some of {', '.join(names)}")
    parser.add_argument("--logs", type=Path, help="folder for logs; default: a new one")
    parser.add_argument("--minutes", type=float, default=25, help="time for all checks")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.part:
        globals()[flags.part[0]](*flags.part[1:])
        return 0
    if unknown := set(flags.checks) - set(names):
        parser.error(f"no check {min(unknown)}: choose from {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current command, too
    if missing := [*needs()]:
        print("nothing was checked; missing:", *missing, sep="\n")
        return 3
    checks = Checks(flags.logs or Path(tempfile.mkdtemp(prefix="gpu_check-")), flags.minutes)
    print(checks.environment, f"logs: {checks.logs}", sep="\n", flush=True)
    report = [checks.environment, "", "| check | measured | expected | |", "|---|---|---|---|"]
    failure, unfinished = [], []
    for name in flags.checks or names:
        start = time.monotonic()
        for *row, passed in rows_of(checks, name):
            print(f"{time.monotonic() - start:4.0f} s  {row[0]}: {row[1]}", flush=True)
            word = {True: "ok", False: "FAILED", None: "-"}[passed]
            report.append(f"| {' | '.join(row)} | {word} |")
            unfinished += [name] * (row[1] == NOT_RUN)
            if passed is False and not failure:
                failure = ["", f"{checks.log.name} ends with:"]
                failure += checks.log.read_text(errors="replace").splitlines()[-20:]
    print("\nTo paste into an issue:\n\n```", *report, *failure, "```", sep="\n")
    if unfinished:
        print(f"time is over; for the rest: python {__file__} {' '.join(unfinished)}")
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
elif "GPU_CHECK_SUMS" in os.environ:
    install_checksums()
