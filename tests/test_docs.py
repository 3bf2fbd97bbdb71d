"""What the docs promise has tests, which they name."""

import re

from conftest import ROOT

GUARANTEES, TABLE = re.search(
    r"## Guarantees\n(.*?)### Which tests hold which promise\n(.*?)\n## ",
    (ROOT / "docs" / "operations.md").read_text(),
    re.DOTALL,
).groups()


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
