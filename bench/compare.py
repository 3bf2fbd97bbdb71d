"""Overlay the curves of several runs: reward, KL, reward against KL, held-out metrics.

    python bench/compare.py runs/a runs/b ... [--smooth 10] [--out compare.png]

A run is labelled by its folder's name and the flags in which the runs differ. The last evaluation
of each run is printed.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tba import read_lines

NOT_METRICS = ("step", "n")  # keys of an evaluation that are not metrics
IGNORED_SETTINGS = ("output_dir", "resume", "said")  # settings whose differences have no meaning


def run_labels(runs: list[Path]) -> list[str]:
    """Each run's name and its values of the flags in which the runs differ."""
    settings = [json.loads((run / "config.json").read_text())["config"] for run in runs]
    differ = [
        name for name in settings[0]
        if name not in IGNORED_SETTINGS and len({str(s.get(name)) for s in settings}) > 1
    ]  # fmt: skip
    return [
        " ".join([run.name, *(f"{name}={own.get(name)}" for name in differ[:4])])
        for run, own in zip(runs, settings, strict=True)
    ]


def smooth(values: list, width: int) -> np.ndarray:
    """The running mean over the last `width` values, ignoring NaN."""
    array = np.array(values, float)
    starts = [max(0, i + 1 - width) for i in range(len(array))]
    windows = [array[start : i + 1] for i, start in enumerate(starts)]
    return np.array([np.nanmean(w) if np.isfinite(w).any() else math.nan for w in windows])


def draw(runs: list[Path], width: int, out: Path) -> None:
    """Write a figure with a panel per metric and a line per run."""
    labels = run_labels(runs)
    metrics = [read_lines(run / "metrics.jsonl") for run in runs]
    evaluations = [read_lines(run / "eval.jsonl") for run in runs]
    names = [name for name in evaluations[0][0] if name not in NOT_METRICS]
    columns = math.ceil((3 + len(names)) / 2)
    figure = Figure(figsize=(4.2 * columns, 7.5), layout="constrained")
    axes = figure.subplots(2, columns).flatten()
    for label, steps, evaluated in zip(labels, metrics, evaluations, strict=True):
        at = [m["step"] for m in steps]
        reward = smooth([m["reward"] for m in steps], width)
        kl = smooth([m["kl"] for m in steps], width)
        axes[0].plot(at, reward, lw=1, label=label)
        axes[1].plot(at, kl, lw=1)
        axes[2].plot(kl, reward, lw=1)
        for panel, name in zip(axes[3:], names, strict=False):
            values = [record.get(name) for record in evaluated]
            panel.plot([record["step"] for record in evaluated], values, "o-", ms=3, lw=1)
        last = ", ".join(f"{name} {evaluated[-1].get(name, math.nan):.4g}" for name in names)
        print(f"{label}: step {evaluated[-1]['step']}: {last}")
    titles = ["reward", "KL to the reference, nats", "reward against KL"]
    titles += [f"held out: {name}" for name in names]
    for panel, title in zip(axes, titles, strict=False):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("KL, nats" if "against" in title else "optimizer step")
        panel.grid(alpha=0.3)
    for panel in axes[len(titles) :]:
        panel.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--smooth", type=int, default=10, help="steps in the running mean")
    parser.add_argument("--out", type=Path, default=Path("compare.png"))
    args = parser.parse_args()
    for run in args.runs:
        if not (run / "eval.jsonl").exists():
            parser.error(f"{run}: has no eval.jsonl")
    draw(args.runs, args.smooth, args.out)


if __name__ == "__main__":
    main()
