"""Every plug-in of docs/hacking.md runs as it stands there; one is resumed."""

import contextlib
import http.server
import json
import math
import re
import threading

import pytest
from harness import ROOT, Run, arguments, run_tba

from tba import read_lines

TEXT = (ROOT / "docs" / "hacking.md").read_text()
BLOCKS = re.findall(r"```python\n# flags: ([^\n]*)\n(.*?)```", TEXT, re.DOTALL)
FLAGS = {
    "steps": 3, "eval_every": 0, "eval_samples": 8, "recent_probability": None,
    "initial_trajectories": 32, "sync_every": 1,
}  # fmt: skip


class Judge(http.server.BaseHTTPRequestHandler):
    """Scores a response by its length."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["question"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": len(asked["response"]) / 100}).encode())

    def log_message(self, *args):
        pass


class JudgeServer(http.server.ThreadingHTTPServer):
    """Takes many connections at once."""

    request_queue_size = 128


@contextlib.contextmanager
def judge_server():
    server = JudgeServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_judge_that_is_down_ends_the_run_after_a_checkpoint(gsm8k, tmp_path):
    """The server goes away after some steps: tracebacks are shown, and what was learned is kept."""
    plugin = tmp_path / "mine.py"
    (plugin_text,) = (text for flags, text in BLOCKS if "judged" in flags)
    plugin.write_text(plugin_text)
    out = tmp_path / "run"
    flags = {"task": "judged", "plugin": plugin, "judge_tries": 1, "max_restarts": 1}
    flags |= {"steps": 10_000, "eval_every": 0, "eval_samples": 8, "save_every": 0}
    with judge_server() as server:
        url = f"http://127.0.0.1:{server.server_port}/score"
        run = Run(out, arguments(gsm8k, out, judge_url=url, **flags), hooks=False)
        run.reaches(3)
    said = run.ends(1)
    assert "URLError" in said and "in rewards" in said
    step = read_lines(out / "metrics.jsonl")[-1]["step"]
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{step}"]


@pytest.mark.parametrize(("flags", "text"), BLOCKS, ids=[flags.split()[1] for flags, _ in BLOCKS])
def test_plugins_of_the_documentation(flags, text, gsm8k, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(text)
    out = tmp_path / "run"
    settings = arguments(gsm8k, out, plugin=plugin, **FLAGS)
    with judge_server() as server:
        flags = flags.replace("127.0.0.1:8000", f"127.0.0.1:{server.server_port}")
        said, _ = run_tba([*settings, *flags.split()])
    metrics = read_lines(out / "metrics.jsonl")
    assert len(metrics) == 3
    if "tb_staleness" in flags:
        assert all(-1 <= m["staleness_residual"] <= 1 for m in metrics)
    if "tb_short" in flags:
        assert metrics[0]["price"] == 0 < metrics[1]["price"]
    if "judged" in flags:
        assert all(0 < m["reward"] < 2 for m in metrics)
    if "counted" in flags:
        assert "generated" in said
    if "varied" in flags or "next_reference" in text:
        run_tba(["--resume", str(out), "--steps", "5"])
        metrics = read_lines(out / "metrics.jsonl")
        assert len(metrics) == 5
        assert not math.isnan(metrics[3]["reward"])  # new groups have arrived by then


def test_there_are_plugins_of_every_kind():
    text = "".join(text for _, text in BLOCKS)
    for name in ("FLAGS", "OBJECTIVES", "REPLAY_RULES", "TASKS", "ENGINES", "next_reference"):
        assert f"tba.{name}" in text


@pytest.mark.parametrize("name", ["cluster.py", "objectives.py"])
def test_programs_of_bench_load_as_plugins(name):
    said, _ = run_tba(["--plugin", str(ROOT / "bench" / name), "--help"])
    assert "--replay_rule" in said and ("--group_seconds" in said) == (name == "cluster.py")
