"""Data, tokenizers and model folders as people have them: tests/odd_inputs.py has the cases."""

import odd_inputs
import pytest

PARTS = 16  # for several workers


def test_cases_have_names_of_their_own():
    names = [case.name for case in odd_inputs.CASES]
    assert len(names) > 400 and len(set(names)) == len(names)


@pytest.mark.parametrize("part", range(PARTS))
def test_odd_inputs_are_trained_on_as_they_are_or_refused_in_one_line(part):
    wrong = []
    for case in odd_inputs.CASES[part::PARTS]:
        outcome = odd_inputs.run_case(case)
        if not outcome.right:
            wrong.append(f"{case.name}: {outcome.code} {outcome.line}")
    assert not wrong, "\n".join(wrong)
