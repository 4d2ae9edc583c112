"""A job as text: its mistakes have their lines, whatever the text is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_manager.domain.job_text import TextProblem, read_job_text

VALID = "name: gpt\nworkdir: /w\nrun: python train.py\nglobal_batch: 8\nresources:\n  max_gpus: 2\n"


def test_yaml_and_json_are_jobs() -> None:
    spec, problems = read_job_text(VALID)
    assert not problems
    assert spec is not None
    assert (spec.name, spec.resources.max_gpus) == ("gpt", 2)
    assert read_job_text(spec.model_dump_json()) == (spec, [])
    assert read_job_text(VALID + "copy_workdir: false\n") == (spec, [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (VALID.replace("global_batch: 8", "global_batch: 0"), (4, "global_batch", "greater than or equal to 1")),
        (VALID.replace("max_gpus", "max_gpu"), (6, "resources.max_gpu", "did you mean max_gpus?")),
        (VALID.replace("run: python train.py\n", ""), (1, "run", "is missing")),
        (VALID + "env:\n  LR: 0.1\n", (8, "env.LR", "0.1: a variable is text: write it in quotes")),
        (VALID + "run: again\n", (7, "run", "is given twice")),
        (VALID + "copy_workdir: true\n", (7, "copy_workdir", "varuna submit")),
        ("name: [", (1, "", "not valid YAML")),
        (VALID + "env: &e {A: b}\nlabels: *e\n", (8, "", "the alias *e is not taken here: write it out")),
        (VALID + "env: &e {A: *e}\n", (7, "", "the alias *e is not taken")),
        ("- a list", (1, "", "expected 'key: value' lines")),
        ("", (1, "", "expected 'key: value' lines")),
    ],
)
def test_a_mistake_has_its_line(text: str, problem: tuple[int, str, str]) -> None:
    spec, problems = read_job_text(text)
    assert spec is None
    line, field, part = problem
    assert [(one.line, one.field) for one in problems] == [(line, field)]
    assert part in problems[0].text


def test_a_short_text_does_not_become_a_long_document() -> None:
    doubled = "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 41))
    tenfold = "".join(f"  A{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 10)}]\n" for n in range(1, 11))
    for text in ("a0: &a0 {x: 1}\n" + doubled, VALID + "env:\n  A0: &b0 [x]\n" + tenfold):
        spec, problems = read_job_text(text)
        assert spec is None
        assert "alias" in problems[0].text


@given(st.text(max_size=200) | st.text(alphabet="ab: -[]{}&*!|>'\"\n#?%@\t0", max_size=60))
def test_any_text_is_a_job_or_has_problems(text: str) -> None:
    spec, problems = read_job_text(text)
    assert (spec is None) == bool(problems)
    assert all(isinstance(one, TextProblem) and one.line >= 1 for one in problems)
