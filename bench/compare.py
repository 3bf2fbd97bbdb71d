"""Draw several runs in one picture: their curves, or with --pareto the trade-off of two metrics.

    python bench/compare.py runs/a runs/b ... [--smooth 10] [--out compare.png]
    python bench/compare.py --pareto runs/a runs/b ...

A run is labelled by its folder's name and the flags in which the runs differ. The last evaluation
of each run is printed.

The curves are reward, KL, reward against KL, and held-out metrics. The trade-off has a point for a
run's last evaluation, to which a thin line leads through the earlier ones. Its axes are
perplexity and win rate (tldr), or cosine distance and attack success rate (redteam); perplexity is
computed as in the authors' code, over the tokens of query and summary. With `--eval_samples`, the
earlier evaluations use some held-out prompts only; the one after the last step uses all of them.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from common import read_lines  # beside this file
from matplotlib.figure import Figure

NOT_METRICS = ("step", "n")  # keys of an evaluation that are not metrics
IGNORED_SETTINGS = ("output_dir", "resume", "run_id", "said")  # whose differences mean nothing
AXES = [("perplexity", "win_rate"), ("cosine_distance", "attack_success_rate")]
LEGEND = {"loc": "outside lower center", "fontsize": 8}  # where it does not cover points


def run_labels(runs: list[Path]) -> list[str]:
    """Each run's name, or its path if others have its name, and up to 4 flags that differ."""
    settings = [json.loads((run / "config.json").read_text())["config"] for run in runs]
    differ = [
        name
        for name in settings[0]
        if name not in IGNORED_SETTINGS and len({str(own.get(name)) for own in settings}) > 1
    ]
    labels = []
    for run, own in zip(runs, settings, strict=True):
        unique = [other.name for other in runs].count(run.name) == 1
        flags = [f"{flag}={own.get(flag)}" for flag in differ[:4]]
        labels.append(" ".join([run.name if unique else str(run), *flags]))
    return labels


def smooth(values: list, width: int) -> np.ndarray:
    """The running mean over the last `width` values, ignoring NaN."""
    array = np.array(values, float)
    starts = [max(0, i + 1 - width) for i in range(len(array))]
    windows = [array[start : i + 1] for i, start in enumerate(starts)]
    return np.array([np.nanmean(w) if np.isfinite(w).any() else math.nan for w in windows])


def draw_curves(runs: dict[str, Path], names: list[str], width: int) -> Figure:
    """A panel per metric and a line per run."""
    panels = {  # title -> file, x, y, style
        "reward": ("metrics", "step", "reward", "-"),
        "KL to the reference, nats": ("metrics", "step", "kl", "-"),
        "reward against KL": ("metrics", "kl", "reward", "-"),
    }
    panels |= {f"held out: {name}": ("eval", "step", name, "o-") for name in names}
    columns = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(4.2 * columns, 7.5), layout="constrained")
    for place, (title, (file, x, y, style)) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(2, columns, place)
        for label, run in runs.items():
            records = read_lines(run / f"{file}.jsonl")
            at, values = ([record.get(name) for record in records] for name in (x, y))
            if file == "metrics":
                values = smooth(values, width)
            if x == "kl":
                at = smooth(at, width)
            axes.plot(at, values, style, ms=3, lw=1, label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("KL, nats" if x == "kl" else "optimizer step")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), **LEGEND)
    return figure


def draw_tradeoff(evaluations: dict[str, list[dict]], x: str, y: str) -> Figure:
    """Each run's points (x, y), the last of them emphasised."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = figure.subplots()
    for label, records in evaluations.items():
        points = np.array([(record[x], record[y]) for record in records], float)  # null becomes NaN
        (line,) = axes.plot(*points.T, ".-", lw=1, ms=4, alpha=0.4)
        axes.plot(*points[-1], "o", ms=9, mec="white", color=line.get_color(), label=label)
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    figure.legend(ncols=min(3, len(evaluations)), **LEGEND)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--smooth", type=int, default=10, help="steps in the running mean")
    parser.add_argument("--pareto", action="store_true", help="draw the trade-off of two metrics")
    parser.add_argument("--out", type=Path, default=Path("compare.png"), help="output image")
    args = parser.parse_args()
    for run in args.runs:
        if not (run / "eval.jsonl").exists() or not read_lines(run / "eval.jsonl"):
            parser.error(f"{run}: has no evaluation in eval.jsonl; is it the folder of a run?")
    runs = dict(zip(run_labels(args.runs), args.runs, strict=True))
    evaluations = {label: read_lines(run / "eval.jsonl") for label, run in runs.items()}
    names = [name for name in next(iter(evaluations.values()))[0] if name not in NOT_METRICS]
    if args.pareto:
        pairs = [pair for pair in AXES if set(pair) <= set(names)]
        if not pairs:
            parser.error(f"--pareto: no two of {', '.join(names)} are a trade-off")
        figure = draw_tradeoff(evaluations, *pairs[0])
    else:
        figure = draw_curves(runs, names, args.smooth)
    figure.savefig(args.out, dpi=110)
    for label, records in evaluations.items():
        last = {name: records[-1].get(name) for name in names}
        values = ", ".join(f"{k} {math.nan if v is None else v:.4g}" for k, v in last.items())
        print(f"{label}: step {records[-1]['step']}, {records[-1]['n']} held-out prompts: {values}")
    print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
