"""Every plug-in of docs/hacking.md runs as it stands there; one is resumed."""

import re

import pytest
from harness import ROOT, arguments, read_lines, run_tba

TEXT = (ROOT / "docs" / "hacking.md").read_text()
BLOCKS = re.findall(r"```python\n# flags: ([^\n]*)\n(.*?)```", TEXT, re.DOTALL)
FLAGS = {
    "steps": 3, "eval_every": 0, "eval_samples": 8, "recent_probability": None,
    "initial_trajectories": 32, "sync_every": 1,
}  # fmt: skip


@pytest.mark.parametrize(("flags", "text"), BLOCKS, ids=[flags.split()[1] for flags, _ in BLOCKS])
def test_plugins_of_the_documentation(flags, text, gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(text)
    out = tmp_path / "run"
    settings = arguments(gsm8k, out, plugin=plugin, **FLAGS)
    said, _ = run_tba([*settings, *flags.split()])
    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 3
    if "tb_staleness" in flags:
        assert all(-1 <= m["staleness_residual"] <= 1 for m in metrics)
    if "tb_short" in flags:
        assert metrics[0]["price"] == 0 < metrics[1]["price"]
    if "counted" in flags:
        assert "generated" in said
    if "varied" in flags or "next_reference" in text:
        run_tba(["--resume", str(out), "--steps", "5"])
        assert len(read_lines(out / "metrics.jsonl")) == 5


def test_there_are_plugins_of_every_kind():
    text = "".join(text for _, text in BLOCKS)
    for name in ("FLAGS", "OBJECTIVES", "REPLAY_RULES", "TASKS", "ENGINES", "next_reference"):
        assert f"tba.{name}" in text
