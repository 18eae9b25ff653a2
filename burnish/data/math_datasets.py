r"""Readers of published mathematics: GSM8K and its variants, word problems, MATH, AIME and AMC, Minerva, OlympiadBench.

Each reader takes one record with the columns that its docstring names, and returns the question with its answer.
`published_datasets.SHAPES` names them. The answer is asked for within \boxed{}.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

from burnish.data.files import Record
from burnish.data.published_example import (
    PublishedExample,
    UnusableRow,
    first_value,
    question_of,
    renamed_columns,
    user_messages,
)

BOXED_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
NUMBER = re.compile(r"-?\d+(\.\d+)?(/\d+)?")
SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)")
PLACEHOLDER = re.compile(r"\bN_(\d+)\b")
YEAR = re.compile(r"(?:19|20)\d\d")
MAWPS_QUESTIONS = ("sQuestion", "original_text")
"""Columns of the question in two publications of MAWPS."""


def gsm8k(record: Record) -> PublishedExample:
    """GSM8K: the answer is the number after `####`, without commas."""
    question, solution = question_of(record), record["answer"]
    if solution is None:
        raise UnusableRow("no answer")
    answer = plain_number(str(solution).rpartition("####")[2])
    if answer is None:
        raise UnusableRow("no number behind ####")
    return PublishedExample(question, user_messages(question + BOXED_INSTRUCTION), answer)


def plain_number(text: str) -> str | None:
    """`$1,450.0` as `1450`; None for a text that is not a number."""
    digits = text.replace("^\\circ", "").replace(",", "").replace("$", "").strip().rstrip(".")
    if not NUMBER.fullmatch(digits):
        return None
    return re.sub(r"\.0+$", "", digits)


def contest_problem(record: Record) -> PublishedExample:
    """AIME and AMC: `problem` and `answer`, a number, in several spellings. The year is in `Year`, or in `ID` or `url`."""
    question, value = question_of(record), first_value(record, "answer", "final_answer", "Answer")
    if value is None:
        raise UnusableRow("no answer")
    answer = plain_number(str(value))
    if answer is None:
        raise UnusableRow("the answer is no number")
    extra = renamed_columns(record, difficulty="difficulty")
    year = contest_year(record)
    extra |= {} if year is None else {"year": year}
    return PublishedExample(question, user_messages(question + BOXED_INSTRUCTION), answer, extra)


def contest_year(record: Record) -> int | None:
    """The year of a contest problem, from its year, its ID (`2024-I-1`) or its address (`.../2022_AMC_12A_Problems/...`)."""
    for name in ("Year", "year", "ID", "id", "url"):
        found = YEAR.search(str(record.get(name) or ""))
        if found:
            return int(found[0])
    return None


def math_problem(record: Record) -> PublishedExample:
    r"""MATH and similar sets: the answer is `answer` in LaTeX, or the last `\boxed{}` of `solution`."""
    question, answer = question_of(record), first_value(record, "answer", "final_answer", "Answer")
    if answer is None and record.get("solution") is not None:
        answer = last_boxed_answer(str(record["solution"]))
    if answer is None or not str(answer).strip():
        raise UnusableRow("no answer")
    extra = renamed_columns(record, subject="subject") or renamed_columns(record, subject="type")
    level = first_value(record, "level", "difficulty")
    if level is not None:
        found = re.search(r"\d+(\.\d+)?", str(level))
        extra["level"] = float(found[0]) if found else None
    return PublishedExample(question, user_messages(question + BOXED_INSTRUCTION), str(answer).strip(), extra)


def last_boxed_answer(solution: str) -> str | None:
    r"""The inside of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 5`) of a solution, or None."""
    starts = list(re.finditer(r"\\f?boxed\s*|\\fbox\s*", solution))
    if not starts:
        return None
    rest = solution[starts[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$.,]", rest, maxsplit=1)[0] or None
    depth = 0
    for at, brace in ((m.start(), m[0]) for m in re.finditer(r"(?<!\\)[{}]", rest)):
        depth += 1 if brace == "{" else -1
        if depth == 0:
            return rest[1:at]
    return None


def verl_record(record: Record) -> PublishedExample:
    """A record that is in verl's layout already: prompt and ground truth are taken as they are."""
    truth = (record["reward_model"] or {}).get("ground_truth")
    if (record["reward_model"] or {}).get("style") == "model":
        raise UnusableRow("reward_model.style is model, so no rule checks its answer")
    if truth is None or truth == "":
        raise UnusableRow("no answer")
    messages = record["prompt"]
    if not isinstance(messages, list) or not messages:
        raise TypeError(f"prompt should be a list of messages, got {type(messages).__name__}")
    plain_messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    question = "\n".join(message["content"] for message in plain_messages if message["role"] == "user")
    return PublishedExample(strip_format_request(question), plain_messages, truth)


def strip_format_request(question: str) -> str:
    """A question without the sentence that asks for a format, which differs between data sets with the same question."""
    return re.sub(r"\s*(Let's think|Please reason) step by step[^.]*\\boxed\{\}\.?\s*$", "", question)


# --- word problems ---------------------------------------------------------------------------------------------------


def word_problem(record: Record) -> PublishedExample:
    """SVAMP (`Body`, `Question`, `Answer`, `Type`), ASDiv (the same in small letters), MultiArith (`question`, `final_ans`), MAWPS.

    MAWPS has `sQuestion` and `lSolutions`, `original_text` and `ans`, or a `Question` with the places `N_00` of its `Numbers`.
    A unit in parentheses behind the answer (ASDiv: `9 (apples)`) is left out.
    """
    parts = (first_value(record, "Body", "body"), first_value(record, "Question", "question", *MAWPS_QUESTIONS))
    question = " ".join(str(part).strip() for part in parts if part is not None)
    numbers = str(record.get("Numbers") or "").split()
    if numbers:
        places = [int(place) for place in PLACEHOLDER.findall(question)]
        if places and max(places) >= len(numbers):
            raise ValueError(f"the question has the place N_{max(places):02d}, but there are {len(numbers)} Numbers")
        question = PLACEHOLDER.sub(lambda found: numbers[int(found[1])], question)
    value = first_value(record, "Answer", "answer", "final_ans", "lSolutions", "ans")
    if isinstance(value, list) and len(value) != 1:
        raise UnusableRow("several answers" if value else "no answer")
    answer = None if value is None else plain_number(re.sub(r"\s*\([^()]*\)\s*$", "", str(_only(value))))
    if not question:
        raise UnusableRow("no question")
    if answer is None:
        raise UnusableRow("no answer" if value is None else "the answer is no number")
    extra = renamed_columns(record, type="Type") or renamed_columns(record, type="solution_type")
    return PublishedExample(question, user_messages(question + BOXED_INSTRUCTION), answer, extra)


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def gsm_hard(record: Record) -> PublishedExample:
    """GSM-hard: `input` and `target`, a number with many digits, which an answer must match to 0.001 (Gao et al. 2022, 2211.10435)."""
    question = str(record["input"] or "").strip()
    if not question:
        raise UnusableRow("no question")
    try:
        target = float(record["target"])
    except (TypeError, ValueError):
        raise UnusableRow("no answer" if record["target"] is None else "the answer is no number") from None
    if not math.isfinite(target):
        raise UnusableRow("the answer is no number")
    answer = {"answers": [f"{target:.15g}" if abs(target) < 1e15 else f"{target:.0f}"], "tolerance": [0.001]}
    return PublishedExample(question, user_messages(question + BOXED_INSTRUCTION), json.dumps(answer))


def gsm_plus(record: Record) -> PublishedExample:
    """GSM-Plus: `question` and `answer`, and in `perturbation_type` how the question differs from GSM8K's. `None` cannot be answered."""
    question, value = question_of(record), record["answer"]
    if value is None or str(value).strip() in ("", "None"):
        raise UnusableRow("no answer")
    answer = plain_number(str(value))
    if answer is None:
        raise UnusableRow("the answer is no number")
    extra = renamed_columns(record, type="perturbation_type")
    return PublishedExample(question, user_messages(question + BOXED_INSTRUCTION), answer, extra)


# --- problems of several answers -------------------------------------------------------------------------------------


def minerva_problem(record: Record) -> PublishedExample:
    r"""Minerva's university problems: the answer is `answer`, or the last `\boxed{}` of `solution`. `4.5e33` becomes LaTeX."""
    example = math_problem(record)
    found = SCIENTIFIC.fullmatch(example.answer)
    if found is None:
        return example
    return replace(example, answer=rf"{found[1]} \times 10^{{{int(found[2])}}}")


def olympiad_problem(record: Record) -> PublishedExample:
    """OlympiadBench: `final_answer` (a list), `is_multiple_answer`, `unit`, `error` (the tolerance), `context`, `subfield`.

    The problems of text alone whose answer can be checked are usable: not proofs, and none with images.
    """
    question = question_of(record)
    if any(record.get(f"image_{n}") is not None for n in range(1, 10)) or "<image_" in question:
        raise UnusableRow("it has images")
    answers, is_several = expected_answers(record)
    context, unit = record.get("context"), record.get("unit")
    text = "\n".join(str(part).strip() for part in (context, question) if part)
    if is_several:
        text += "\nThe problem has several answers: give all of them in the box, separated by commas."
    if unit:
        text += f"\nThe unit of the answer is {unit}; leave it out of the box."
    answer: dict[str, Any] = {"answers": answers, **({"several": True} if is_several else {})}
    if str(record.get("error") or "").strip():
        answer["tolerance"] = [float(part) for part in str(record["error"]).split(",")]
    extra = renamed_columns(record, subject="subfield", difficulty="difficulty", type="answer_type")
    return PublishedExample(text, user_messages(text + BOXED_INSTRUCTION), json.dumps(answer), extra)


def expected_answers(record: Record) -> tuple[list[str], bool]:
    """The answers of an OlympiadBench record without dollars, and whether there are several."""
    value = record["final_answer"]
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [value]
    answers = [str(item).strip().strip("$").strip() for item in value or []]
    if not any(answers):
        is_proof = "proof" in str(record.get("question_type") or "").lower()
        raise UnusableRow("a proof, which no answer checks" if is_proof else "no answer")
    if record.get("answer_type") == "Need_human_evaluate":
        raise UnusableRow("a person must judge its answer")
    is_several = record.get("is_multiple_answer") in (True, "True", "true")
    if len(answers) != 1 and not is_several:
        raise UnusableRow(f"{len(answers)} answers, but is_multiple_answer is not set")
    return answers, is_several
