"""Draw the trade-off of several runs, one point each, from their final evaluations.

    python bench/pareto.py runs/a runs/b ... [--x perplexity --y win_rate] [--out pareto.png]

The axes are perplexity and win rate (tldr) or cosine distance and attack success rate (redteam)
unless named. Each run's evaluations along the way are drawn as a thin line.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

AXES = [("perplexity", "win_rate"), ("cosine_distance", "attack_success_rate")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--x", help="metric of the horizontal axis")
    parser.add_argument("--y", help="metric of the vertical axis")
    parser.add_argument("--out", type=Path, default=Path("pareto.png"), help="picture to write")
    args = parser.parse_args()
    curves = {}
    for run in args.runs:
        if not (run / "eval.jsonl").is_file():
            parser.error(f"{run}: no eval.jsonl; name the folder of a run")
        lines = (run / "eval.jsonl").read_text().splitlines()
        curves[run.name] = [json.loads(line) for line in lines]
    last = next(iter(curves.values()))[-1]
    x, y = next(((x, y) for x, y in AXES if x in last and y in last), (args.x, args.y))
    x, y = args.x or x, args.y or y
    for name, curve in curves.items():
        if missing := {x, y} - set(curve[-1]):
            parser.error(f"{name}: its evaluations have no {missing}; name the axes by --x and --y")

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        (line,) = axes.plot([e[x] for e in curve], [e[y] for e in curve], linewidth=0.8, alpha=0.5)
        final = curve[-1]
        axes.plot(final[x], final[y], "o", color=line.get_color(), label=name)
        values = ", ".join(f"{k} {v:.4g}" for k, v in list(final.items())[4:])
        print(f"{name}: step {final['step']}: {values}")
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(args.out, dpi=120)
    print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
