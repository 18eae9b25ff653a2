"""Predictions about programs: what is read as an answer, and that an answer can bring nothing but plain values."""

from __future__ import annotations

import pytest

from burnish.rewards.code_prediction import code_output, predicted_arguments, prediction_tests


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ("f(1, 'a')", "1, 'a'"),
        ("assert f({1: [2]}) == 3", "{1: [2]}"),
        ("```python\nf(a=-1, b=set([2]))\n```", "a=-1, b=set([2])"),
        ("f()", ""),
        ("f(*range(3))", "*range(3)"),
        ("f(open('x'))", None),
        ("f((lambda: 1)())", None),
        ("f([x for x in y])", None),
        ("f('a'.upper())", None),
        ("f(1)(2)", None),
        ("g(1)", None),
        ("f(" + "-" * 9000 + "1)", None),
        ("f(" + "(" * 9000, None),
        ("f('" + "a" * 20_000 + "')", None),
        ("", None),
    ],
)  # fmt: skip
def test_only_a_call_with_plain_arguments_is_read(answer: str, arguments: str | None) -> None:
    assert predicted_arguments(f"so <answer>{answer}</answer>") == arguments


def test_outputs_are_compared_by_value() -> None:
    for said, value in (("{'b': 2, 'a': (1,)}", 1.0), ("{'a': (1,)}", 0.0), ("dict(a=(1,), b=2)", 0.0), ("", 0.0)):
        assert code_output(f"<answer>{said}</answer>", "{'a': (1,), 'b': 2}", {}) == value
    with pytest.raises(ValueError, match="is not a Python literal"):
        code_output("<answer>1</answer>", "f(1)", {})


def test_an_answer_without_code_and_output_is_an_error() -> None:
    with pytest.raises(ValueError, match="an object with code and output"):
        prediction_tests({"code": "def f(): pass"})
    with pytest.raises(ValueError, match="is not a Python literal"):
        prediction_tests({"code": "def f(): pass", "output": "g()"})
