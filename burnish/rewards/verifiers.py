r"""Built-in verifiers: pure functions `(completion, answer, extra, **options) -> float`.

A completion that cannot be parsed is incorrect (0.0), never an exception. An *expected* answer that cannot be parsed is an error in the
data. It raises, so that it is counted and reported instead of becoming a silent 0.

Verifiers run in killable worker processes (burnish.rewards.worker_pool). The deadline there stops a regular expression that backtracks
for ever or `\boxed{9^{9^{9^{9}}}}`, so nothing here needs a timeout.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from burnish.config.errors import UserError, did_you_mean
from burnish.config.extras import install_hint
from burnish.data.gui_actions import gui_reward, read_target
from burnish.data.tasks.proofs import checked_answer
from burnish.rewards.answer_texts import answer_block, has_words, last_boxed, normalized_words, token_f1
from burnish.rewards.code_prediction import code_input, code_output
from burnish.rewards.code_reward import SCORE_MODES, code, process_runner
from burnish.rewards.instruction_checks import MODES, ifeval
from burnish.rewards.lean_reward import check_lean, lean
from burnish.rewards.math_answers import answer_set, math_verifier
from burnish.rewards.pair_verdicts import rm_r1
from burnish.rewards.score_types import PartResult, require_answer
from burnish.rewards.tagged_answers import SEARCH_R1_SCORES, research, search_r1, table_r1

# --- exact -----------------------------------------------------------------------------------------------------------


def exact(completion: str, answer: Any, extra: Mapping[str, Any], *, ignore_case: bool = False) -> float:
    """1 if the completion, or its `<answer>` block, equals the answer, ignoring surrounding white space."""
    require_answer(answer)

    def normal(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    candidates = [completion, answer_block(completion)]
    return float(any(c is not None and normal(c) == normal(str(answer)) for c in candidates))


# --- proof -----------------------------------------------------------------------------------------------------------


def proof(completion: str, answer: Any, extra: Mapping[str, Any]) -> PartResult:
    """1 if the completion proves the theorem that is the row's answer, such as `p & q |- q & p`. The details are the checker's message."""
    require_answer(answer)
    is_right, message = checked_answer(completion, str(answer))
    return PartResult(float(is_right), details=message)


# --- number ----------------------------------------------------------------------------------------------------------

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)])-)?(?:\\[dt]?frac\{{(?P<top>-?{_DIGITS})\}}\{{(?P<bottom>-?{_DIGITS})\}}"
    rf"|(?P<plain>{_DIGITS})(?:\s?/\s?(?P<over>{_DIGITS}))?)"
)
_NUMBER_NOISE = re.compile(r"\\?[$%]|\\[,;! ]|(?<=\d)\{,\}(?=\d)")
_MAX_EXPONENT = 400  # beyond the range of a float; without it 1e999999999 would become a gigabyte of digits


def _exact_value(digits: str) -> Fraction:
    exponent = digits.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > _MAX_EXPONENT:
        raise ValueError(f"exponent of {digits} is out of range")
    return Fraction(digits.replace(",", ""))


def last_number(text: str) -> Fraction | None:
    r"""The exact value of the last number in a text: `1,234.50`, `-3/4`, `\frac{3}{4}`, `1e-3`; `$` and `%` are ignored."""
    text = _NUMBER_NOISE.sub(lambda m: "," if m[0] == "{,}" else "", text.replace("−", "-"))
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    found = matches[-1]
    top, bottom = found["top"] or found["plain"], found["bottom"] or found["over"] or "1"
    try:
        value = _exact_value(top) / _exact_value(bottom)
    except (ValueError, ZeroDivisionError):  # more digits than Python converts, too large an exponent, or x/0
        return None
    return -value if found["sign"] else value


def answered_number(text: str) -> Fraction | None:
    r"""The number that a text answers with: in its `<answer>` block, in `\boxed{}`, after `####`, else its last number."""
    text = answer_block(text) or text
    boxed = last_boxed(text)
    if boxed is not None:
        return last_number(boxed)
    return last_number(text.rpartition("####")[2])


def number(completion: str, answer: Any, extra: Mapping[str, Any]) -> float:
    """1 if the answered number equals the expected one exactly (0.50 equals 1/2). The answer may be a whole GSM8K solution."""
    require_answer(answer)
    expected = answered_number(str(answer))
    if expected is None:
        raise ValueError(f"the expected answer {answer!r} contains no number")
    return float(answered_number(completion) == expected)


# --- multiple choice -------------------------------------------------------------------------------------------------

# In running text a lone `a` or `I` is usually a word, not a choice. A lower-case letter therefore counts only at the end of a clause.
_LETTER = r"(?:\(([A-Ja-j])\)|(I(?!['’]|\s+[a-z])|[A-HJ])(?![A-Za-z'’])|([a-j])(?=\s*(?:[.,;:!)*\n]|$)))"
_STATED_LETTER = re.compile(rf"(?i:answer|choice|option)(?:\s+(?i:is))?\s*[:=]?\s*\**\s*{_LETTER}")
_PARENTHESISED_LETTER = re.compile(r"\(([A-Ja-j])\)")
_LONE_LETTER = re.compile(r"(?:\\text\{|\\mathrm\{|\\textbf\{)?\W*([A-Ja-j])\W*")
_LEADING_LETTER = re.compile(r"\**\(?([A-J])[.):]\**\s")


def chosen_letter(text: str) -> str | None:
    r"""The letter A to J that a text chooses: `\boxed{B}`, `answer is B`, `(B)`, `B` alone or `B. Paris`. The last match counts."""
    text = (answer_block(text) or text).strip()
    alone = _LONE_LETTER.fullmatch(last_boxed(text) or text)
    if alone:
        return alone[1].upper()
    for pattern in (_STATED_LETTER, _PARENTHESISED_LETTER):
        matches = pattern.findall(text)
        if matches:
            return "".join(matches[-1]).upper()
    led = _LEADING_LETTER.match(text)
    return led[1] if led else None


def choice(completion: str, answer: Any, extra: Mapping[str, Any]) -> float:
    """1 if the chosen letter is the expected one; case and parentheses do not matter."""
    require_answer(answer)
    expected = _LONE_LETTER.fullmatch(str(answer).strip())
    if expected is None:
        raise ValueError(f"the expected answer {answer!r} is not a choice letter from A to J")
    return float(chosen_letter(completion) == expected[1].upper())


# --- short answers ---------------------------------------------------------------------------------------------------

QA_METRICS = ("em", "f1", "sub_em")


def qa(completion: str, answer: Any, extra: Mapping[str, Any], *, metric: str = "em") -> float:
    r"""How well the `<answer>` block, the `\boxed{}` or else the whole completion matches one of the accepted answers.

    em: 1 for the same words, else 0. f1: the best word F1. sub_em: 1 if an accepted answer is a part of it, word by word. Normalisation and metrics are SQuAD's (Rajpurkar et al. 2016, 1606.05250).
    """
    require_answer(answer)
    accepted = [normalized_words(str(one)) for one in (answer if isinstance(answer, list | tuple) else [answer])]
    block = answer_block(completion)
    answered = normalized_words(block if block is not None else last_boxed(completion) or completion)
    if metric == "em":
        return float(answered in accepted)
    if metric == "sub_em":
        return float(any(has_words(answered, expected) for expected in accepted))
    return max(token_f1(answered, expected) for expected in accepted)


# --- format ----------------------------------------------------------------------------------------------------------

_UNTAGGED = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = rf"\s*<think>(?=\s*(?!</think>)\S){_UNTAGGED}</think>\s*<answer>{_UNTAGGED}</answer>\s*"


def format_verifier(completion: str, answer: Any, extra: Mapping[str, Any], *, pattern: str = R1_FORMAT) -> float:
    """1 if the whole completion matches the pattern. The default is R1's format: thinking, then answer (DeepSeek-R1, 2501.12948)."""
    return float(re.compile(pattern, re.DOTALL).fullmatch(completion) is not None)


def think_format(completion: str, answer: Any, extra: Mapping[str, Any], *, opened: bool = False) -> float:
    """1 if the completion has R1's format, thinking then answer, once each. Set `opened` if the prompt already ends with `<think>`."""
    return format_verifier(f"<think>{completion}" if opened else completion, answer, extra)


# --- language --------------------------------------------------------------------------------------------------------

LANGUAGE_SCRIPTS = {
    "ar": {"ARABIC"},
    "el": {"GREEK"},
    "en": {"LATIN"},
    "he": {"HEBREW"},
    "hi": {"DEVANAGARI"},
    "ja": {"CJK", "HIRAGANA", "KATAKANA"},
    "ko": {"HANGUL"},
    "ru": {"CYRILLIC"},
    "th": {"THAI"},
    "zh": {"CJK"},
}
_SCRIPTS_WITHOUT_SPACES = {"CJK", "HIRAGANA", "KATAKANA"}  # each character counts as a word
# Each alternative stops at its own next opening, so that unclosed openings cost one pass in all, not one pass each.
_MARKUP = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$[^$]*\$\$|\$[^$\n]*\$|\\\[(?:(?!\\\[).)*?\\\]|\\\((?:(?!\\\().)*?\\\)"
    r"|\\begin\{(?:(?!\\begin\{).)*?\\end\{\w+\*?\}|\\boxed\{[^{}]*\}|\\[A-Za-z]+|</?\w+>",
    re.DOTALL,
)


@functools.lru_cache(maxsize=1 << 16)
def _script(character: str) -> str:
    """The script of a letter, from its Unicode name; the empty string for other characters."""
    if not character.isalpha():
        return ""
    words = re.split(r"[ -]", unicodedata.name(character, "UNNAMED"))
    script = words[1] if words[0] in ("FULLWIDTH", "HALFWIDTH") else words[0]
    return {"IDEOGRAPHIC": "CJK", "MATHEMATICAL": ""}.get(script, script)


def strip_markup(text: str) -> str:
    """A text without LaTeX, code and tags, which belong to no language."""
    return _MARKUP.sub(" ", text)


def count_words_by_script(text: str) -> Counter[str]:
    """Number of words per script. A CJK character is a word; in other scripts a run of letters is.

    Digits, punctuation, LaTeX, code and tags do not count.
    """
    words: Counter[str] = Counter()
    # Drop vowel signs: they are not letters, but must not end the word they are in.
    letters = (c for c in strip_markup(text) if unicodedata.category(c)[0] != "M")
    for script, run in itertools.groupby(letters, _script):
        words[script] += sum(1 for _ in run) if script in _SCRIPTS_WITHOUT_SPACES else 1
    del words[""]
    return words


def language(completion: str, answer: Any, extra: Mapping[str, Any], *, target: str) -> float:
    """The fraction of words before `</think>` that are in the script of the target language; 1 if there are no words.

    Languages are told apart by script, so `en` means Latin letters. This is the language consistency reward of DeepSeek-R1 (2501.12948).
    """
    words = count_words_by_script(completion.partition("</think>")[0])
    total = sum(words.values())
    return sum(words[script] for script in LANGUAGE_SCRIPTS[target]) / total if total else 1.0


# --- published scoring rules ---------------------------------------------------------------------------------------

PUBLISHED_RULES = ("simple_rl", "logic_rl", "deepscaler")


def task_verifier(completion: str, answer: Any, extra: Mapping[str, Any]) -> float:
    """The score by the checker of the generated task `extra["task"]`."""
    from burnish.data.tasks.registry import score_answer

    return float(score_answer(extra["task"], completion, answer, dict(extra)))


CHECKERS: dict[str, Callable[..., float]] = {
    "exact": exact,
    "number": number,
    "choice": choice,
    "math": math_verifier,
    "task": task_verifier,
}


def rule_total(rule: str, correct: bool, answered: bool, formatted: bool) -> float:
    """The total score of a published rule.

    simple_rl: 1 right, -0.5 wrong, -1 no answer. logic_rl: format 1 or -1, and answer 2 right, -1.5 wrong, -2 not found
    or badly formatted. deepscaler: 1 if right and well formatted, else 0.
    """
    if rule == "simple_rl":
        return (1.0 if correct else -0.5) if answered else -1.0
    if rule == "logic_rl":
        if not (formatted and answered):
            return -2.0 + (1.0 if formatted else -1.0)
        return 1.0 + (2.0 if correct else -1.5)
    return float(correct and formatted)


def rule_scores(completion: str, answer: Any, extra: Mapping[str, Any], *, rule: str, checker: str = "number") -> float:
    r"""The total score of a published rule. The answer is taken from `<answer>` or `\boxed{}` and judged by `checker`.

    The score is 1 or more exactly if the answer counts as right.
    """
    answered = bool(answer_block(completion) or last_boxed(completion))
    correct = CHECKERS[checker](completion, answer, extra) >= 1 and answered
    return rule_total(rule, correct, answered, think_format(completion, answer, extra) == 1)


# --- dispatching to a row's own verifier ----------------------------------------------------------------------------


def gui_r1(completion: str, answer: Any, extra: Mapping[str, Any], *, bare: bool = False) -> float:
    """0.8 for the expected action on a screen and 0.2 for its form (GUI-R1, 2504.10458). `bare`: a click is its point alone."""
    require_answer(answer)
    expected = json.loads(answer) if isinstance(answer, str) else answer
    return gui_reward(completion, read_target(expected, "the answer of the row"), bare)


def row_verifier(completion: str, answer: Any, extra: Mapping[str, Any]) -> float | PartResult:
    """The score by the verifier that the row names in `extra["verifier"]`; `burnish data prepare` writes that column."""
    name = extra["verifier"]
    if name not in VERIFIERS or name == "row":
        raise ValueError(f"the row's verifier {name!r} is not one of {', '.join(v for v in VERIFIERS if v != 'row')}")
    return VERIFIERS[name](completion, answer, extra)


VERIFIERS: dict[str, Callable[..., float | PartResult]] = {
    "exact": exact,
    "number": number,
    "choice": choice,
    "math": math_verifier,
    "answer_set": answer_set,
    "format": format_verifier,
    "think_format": think_format,
    "language": language,
    "rule_scores": rule_scores,
    "task": task_verifier,
    "qa": qa,
    "search_r1": search_r1,
    "research": research,
    "table_r1": table_r1,
    "ifeval": ifeval,
    "code": code,
    "code_output": code_output,
    "code_input": code_input,
    "proof": proof,
    "lean": lean,
    "rm_r1": rm_r1,
    "gui_r1": gui_r1,
    "row": row_verifier,
}


NEEDS_ANSWER = frozenset(
    {
        "exact",
        "number",
        "choice",
        "math",
        "answer_set",
        "rule_scores",
        "qa",
        "search_r1",
        "research",
        "table_r1",
        "ifeval",
        "code",
        "code_output",
        "code_input",
        "proof",
        "lean",
        "rm_r1",
        "gui_r1",
    }
)
"""Verifiers that compare with the row's expected answer. Whether `row` needs one depends on the verifier that the row names."""


OPTION_CHOICES: dict[str, tuple[str, ...]] = {
    "target": tuple(LANGUAGE_SCRIPTS),
    "rule": PUBLISHED_RULES,
    "checker": tuple(CHECKERS),
    "metric": QA_METRICS,
    "scores": SEARCH_R1_SCORES,
    "mode": MODES,
    "score": SCORE_MODES,
}


def _choices_hint(option: str) -> str:
    return f" (one of: {', '.join(OPTION_CHOICES[option])})" if option in OPTION_CHOICES else ""


def check_verifier(name: str, options: Mapping[str, Any], where: str) -> None:
    """Check a verifier's options before a run starts: unknown or missing options, unknown values, a package that is not installed."""
    parameters = [p for p in inspect.signature(VERIFIERS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    known = [p.name for p in parameters]
    for key in options:
        if key not in known:
            takes = f"takes: {', '.join(known)}" if known else "takes no options"
            raise UserError(f"{where}: unknown option {key!r}{did_you_mean(key, known)} ({takes})")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise UserError(f"{where}: the option {parameter.name!r} is missing{_choices_hint(parameter.name)}")
    for key, choices in OPTION_CHOICES.items():
        if key in options and options[key] not in choices:
            raise UserError(f"{where}: {key} {options[key]!r} is unknown{_choices_hint(key)}")
    if "pattern" in options:
        try:
            re.compile(options["pattern"], re.DOTALL)
        except (re.error, TypeError) as error:
            raise UserError(
                f"{where}: pattern {options['pattern']!r} is not a valid regular expression: {error}"
            ) from error
    if name == "lean":
        check_lean(options, where)
    if {"math", "answer_set"} & {name, options.get("checker")} and importlib.util.find_spec("math_verify") is None:
        raise UserError(f"{where}: the verifier {name} needs math-verify; install it with {install_hint('math')}")


def warm_up(name: str) -> None:
    """Load what a verifier loads on first use, so that this time does not count against the deadline of the first answer."""
    if name in ("math", "answer_set") or (
        name in ("rule_scores", "row") and importlib.util.find_spec("math_verify") is not None
    ):
        math_verifier("\\boxed{\\frac{1}{2}}", "0.5", {})
    if name in ("code", "code_input"):
        process_runner().sandbox.start()
    if name in ("task", "row"):
        import burnish.data.tasks.registry  # noqa: F401
