"""Plot the trade-off between two metrics of several runs, a point for each last evaluation.

    python bench/pareto.py runs/a runs/b ... [--x perplexity --y win_rate] [--out pareto.png]

The default axes are perplexity and win rate (tldr) or cosine distance and attack success rate
(redteam); perplexity is computed as in the authors' code, over the tokens of query and summary. A
thin line through a run's earlier evaluations leads to its point. With `--eval_samples` these use
the first held-out prompts only; the one after the last step uses all of them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
from matplotlib.figure import Figure

NOT_METRICS = ("step", "n")
AXES = [("perplexity", "win_rate"), ("cosine_distance", "attack_success_rate")]


def fail(message: str) -> NoReturn:
    """End with one line and exit code 2."""
    print(f"pareto.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def labels(runs: list[Path]) -> list[str]:
    """For each run the shortest end of its path that is unique.

    >>> labels([Path("/a/x/run"), Path("/b/x/run"), Path("/b/other")])
    ['a/x/run', 'b/x/run', 'other']
    """

    def label(run: Path) -> str:
        for n in range(1, len(run.parts)):
            end = run.parts[-n:]
            if all(other is run or other.parts[-n:] != end for other in runs):
                return "/".join(end)
        return str(run)

    return [label(run) for run in runs]


def read_evaluations(run: Path) -> list[dict]:
    """The records of a run's eval.jsonl; a truncated last line is ignored."""
    if not run.is_dir():
        fail(f"{run}: no such folder")
    try:
        lines = (run / "eval.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        records = [json.loads(line) for line in lines]
    except FileNotFoundError:
        fail(f"{run}: has no eval.jsonl; is it the folder of a run?")
    except (OSError, ValueError) as error:
        fail(f"{run}: its eval.jsonl cannot be read: {error}")
    if not records:
        fail(f"{run}: its eval.jsonl has no evaluation yet")
    return records


def metrics_of(record: dict) -> dict[str, float | None]:
    """A record's metrics, without the keys that identify the evaluation."""
    return {key: value for key, value in record.items() if key not in NOT_METRICS}


def choose_axes(x: str | None, y: str | None, names: list[str]) -> tuple[str, str]:
    """The axes given by --x and --y, or the first pair of AXES that is among `names`."""
    pair = next((pair for pair in AXES if set(pair) <= set(names)), (None, None))
    x, y = x or pair[0], y or pair[1]
    if not x or not y:
        fail(f"choose axes with --x and --y; the evaluations have {', '.join(names)}")
    return x, y


def draw(curves: dict[str, list[tuple[float, float]]], x: str, y: str) -> Figure:
    """A figure of each curve's points (x, y), the last of them emphasised."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        columns = np.array(points, np.float64).T  # null becomes nan
        (line,) = axes.plot(*columns, ".-", linewidth=1, markersize=4, alpha=0.4)
        style = {"markersize": 9, "markeredgecolor": "white", "zorder": 3}
        axes.plot(*points[-1], "o", color=line.get_color(), label=label, **style)
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    # outside, where it does not cover points
    figure.legend(loc="outside lower center", ncols=min(3, len(curves)), fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.error = fail
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--x", help="metric of the horizontal axis")
    parser.add_argument("--y", help="metric of the vertical axis")
    parser.add_argument("--out", type=Path, default=Path("pareto.png"), help="output image")
    args = parser.parse_args()
    runs = list(dict.fromkeys(run.resolve() for run in args.runs))
    records = dict(zip(labels(runs), map(read_evaluations, runs), strict=True))
    names = list(metrics_of(next(iter(records.values()))[0]))
    x, y = choose_axes(args.x, args.y, names)

    curves = {}
    for label, evaluations in records.items():
        drawn = [metrics_of(e) for e in evaluations]
        if missing := ", ".join(name for name in (x, y) if name not in drawn[-1]):
            has = ", ".join(drawn[-1])
            fail(f"{label}: its evaluations have no {missing} (they have {has})")
        if not all(isinstance(drawn[-1][name], int | float) for name in (x, y)):
            fail(f"{label}: {x} or {y} of its last evaluation is not a number")
        curves[label] = [(m[x], m[y]) for m in drawn]  # null (no number) is a gap
    try:
        draw(curves, x, y).savefig(args.out, dpi=120)
    except (OSError, ValueError) as error:
        fail(f"--out {args.out}: {error}")
    for label, evaluations in records.items():
        e = evaluations[-1]
        numbers = {k: v for k, v in metrics_of(e).items() if isinstance(v, int | float)}
        values = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        print(f"{label}: step {e['step']}, {e['n']} held-out prompts: {values}")
    print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
