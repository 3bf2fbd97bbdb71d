"""The docs: promises name their tests, links lead somewhere, commands and flags exist."""

import argparse
import dataclasses
import re
import shlex

import pytest
from conftest import ROOT
from test_runs import METRICS

import tba

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCS += [ROOT / "bench" / "README.md", ROOT / "tests" / "virtual_gpu" / "README.md"]
TEXT = {path: path.read_text() for path in DOCS}
OPERATIONS = TEXT[ROOT / "docs" / "operations.md"]
CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
GUARANTEES, TABLE = re.search(
    r"## Guarantees\n(.*?)### Which tests hold which promise\n(.*?)\n## ", OPERATIONS, re.DOTALL
).groups()
each_doc = pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))


def test_every_promise_names_tests_that_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    defined = set(re.findall(r"^def test_(\w+)\(", tests, re.MULTILINE))
    rows = dict(re.findall(r"^\| ([^`|]+) \| (`.*`) \|$", TABLE, re.MULTILINE))
    for promise, names in rows.items():
        missing = set(re.findall(r"`(\w+)`", names)) - defined
        assert not missing, (promise, missing)
    promises = re.findall(r"^\* \*\*(.*?)\*\*", GUARANTEES, re.MULTILINE)
    assert len(promises) > 15
    assert [promise for promise in promises if promise not in rows] == []


def sections(text: str) -> dict[str, str]:
    """Each heading's anchor, as GitHub forms it, -> the text up to the next heading as high."""
    text = CODE_BLOCK.sub("", text)
    found = {}
    for heading in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE):
        level, title = heading.groups()
        title = re.sub(r"\]\([^)]*\)", "", title)  # the address of a link
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        end = re.compile(rf"^#{{1,{len(level)}}} ", re.MULTILINE).search(text, heading.end())
        found[anchor] = text[heading.start() : end.start() if end else len(text)]
    return found


@each_doc
def test_links_and_anchors_resolve(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXT[path]):
        if re.match(r"\w+:", link):
            continue  # another site
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in sections(target.read_text()), link


def test_numbers_of_the_readme_stand_in_the_results():
    results = sections(TEXT[ROOT / "docs" / "results.md"])
    numbers_of = lambda text: set(re.findall(r"\d[\d.,]*\b", text))
    rows = re.findall(r"^\| (.*\]\(docs/results\.md#.*)$", TEXT[ROOT / "README.md"], re.MULTILINE)
    for row in rows:
        what, *numbers = row.split(" | ")
        there = "".join(results[anchor] for anchor in re.findall(r"results\.md#([\w-]+)", what))
        assert numbers_of(" ".join(numbers)) <= numbers_of(there), row


def defined_in(*texts: str) -> set[str]:
    """Names of the flags that these Python texts define."""
    forms = r'add_argument\(\s*"--(\w+)"|^    (\w+): .* = (?:tba\.)?(?:flag|schedule)\('
    return {a or b for a, b in re.findall(forms, "\n".join(texts), re.MULTILINE)}


PROGRAMS = {path.name: path.read_text() for path in (ROOT / "bench").glob("*.py")}
FLAGS = {f.name for kind in tba.FLAGS for f in dataclasses.fields(kind)} | {"help"}
PLUGIN_FLAGS = defined_in(PROGRAMS["objectives.py"], TEXT[ROOT / "docs" / "hacking.md"])


def code_of(text: str) -> list[str]:
    """The code spans of a text, and the lines of its code blocks without comments."""
    prose = CODE_BLOCK.sub("", text)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    blocks = [block for block in CODE_BLOCK.findall(text) if re.match(r"```(bash|sh)?\n", block)]
    blocks += re.findall(r"^    .*$", prose, re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", "\n".join(blocks))
    lines = [re.sub(r"\s# .*", "", line).strip() for line in joined.split("\n")]
    return [code.replace("\\|", "|") for code in spans + lines]


PARSER = argparse.ArgumentParser(add_help=False, exit_on_error=False)
for owner in tba.FLAGS:
    tba.add_flags(PARSER, owner)
PARSER.add_argument("--help", action="store_true")
for flag in PLUGIN_FLAGS - FLAGS:
    PARSER.add_argument(f"--{flag}")


@each_doc
def test_commands_and_flags_exist(path):
    """Flags of tba.py and of the scripts have values of the right type and within their range."""
    own = FLAGS | PLUGIN_FLAGS | {"tiny"}
    for code in code_of(TEXT[path]):
        if alone := re.match(r"--([\w-]+)", code):
            assert alone[1] in own | defined_in(*PROGRAMS.values()), code
            continue
        command = re.search(r"(?:^|[\s/])(tba\.py|run_\w+\.sh|\w+\.py)(?:\s(.*))?$", code)
        if not command:
            continue
        name, rest = command[1], re.split(r" (?:[|&;]|&&) ", command[2] or "")[0]
        if re.match(r"(python |bash )?(bench|tests)/", code):
            assert (ROOT / re.search(r"\S+/\S+", code)[0]).exists(), code
        flags = set(re.findall(r"(?<!\S)--([\w-]+)", rest))
        known = defined_in(PROGRAMS[name]) | {"help"} if name in PROGRAMS else own
        assert flags <= known, code
        whole = name == "tba.py" and not re.search(r"\.\.\.|\[|\$", rest)
        if whole or name.startswith("run_"):
            words = shlex.split(re.sub(r"\$\w+", "2", rest))  # a variable of the shell
            values = [word for word in words if word != "--tiny"]
            others = PARSER.parse_known_args(values)[1]
            assert name.startswith("run_") or not others, code


def test_metrics_in_the_docs_exist():
    """`METRICS` are exactly those that a run writes (test_runs.py)."""
    how_to = sections(OPERATIONS)["how-to-read-a-run"]
    keys = OPERATIONS[OPERATIONS.index("Keys of metrics.jsonl") : OPERATIONS.index("## Where it")]
    named = ""
    for text, column in ((how_to, 1), (keys, 0)):
        rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)]
        named += " ".join(row[column] for row in rows if len(row) > column)
    names = set(re.findall(r"`([a-z_]+\*?)`", named))
    assert len(names) > 20
    for name in names:
        assert any(re.fullmatch(name.replace("*", ".*"), metric) for metric in METRICS), name
