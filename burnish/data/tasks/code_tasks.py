"""Tasks about a program that a model proposes and solves (Absolute Zero, Zhao et al. 2025, 2505.03335): their records, prompts and answers.

A task is a program `f`, inputs and their outputs. Three types ask for one part, given the others:

    deduction   program, input                      -> output
    abduction   program, output                     -> input (any that gives the output)
    induction   half of the pairs, and a message    -> program (right on all pairs)

Answers are written in one of two formats:

- `blocks`: `<think>...</think><answer>...</answer>` with fenced blocks named python, input, output and message, as in the paper.
- `expression`: a one-line language for tiny models. `x*2+1;3` proposes the program `f(x) = x*2+1` with the input 3.

Inputs and outputs are Python literals. Reading an answer never executes anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Kind = Literal["deduction", "abduction", "induction"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Format = Literal["blocks", "expression"]
FORMATS: tuple[str, ...] = get_args(Format)
FORBIDDEN_MODULES = [
    "logging",
    "random",
    "multiprocessing",
    "pebble",
    "subprocess",
    "threading",
    "datetime",
    "time",
    "hashlib",
    "calendar",
    "bcrypt",
    "os",
    "sys",
    "shutil",
    "importlib",
    "builtins",
    "posix",
    "secrets",
    "tempfile",
    "uuid",
]
"""The modules that figure 8 of the paper forbids, with os, sys and shutil as a whole, modules that would load any of them, and other sources of chance.

A coin toss passes the two runs of a proposal half of the time, so chance must be refused before.
"""
FORBIDDEN_NAMES = ("__import__", "__builtins__", "open", "id", "hash")
"""Builtins that load any module, read /dev/urandom, or whose values depend on the process."""
_FORM = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_TAGS = ("</think>", "<answer>", "</answer>")
_BLOCK = re.compile(r"^```(\w+)[ \t]*\n(.*?)\n?^```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class CodeTask:
    """A task whose outputs are known. Deduction and abduction have one pair of input and output."""

    kind: Kind
    program: str
    inputs: tuple[str, ...]
    """The arguments of each call, as they are written between its parentheses: `[1, 2], 3`."""
    outputs: tuple[str, ...]
    message: str = ""
    """Only of induction: what the program does, in words."""

    @property
    def num_shown(self) -> int:
        """Number of pairs that an induction task shows. The others test the answer."""
        return max(1, len(self.inputs) // 2)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "inputs": list(self.inputs), "outputs": list(self.outputs)}


def task_from_json(values: dict[str, Any]) -> CodeTask:
    """Return the task of `to_json`."""
    return CodeTask(**{**values, "inputs": tuple(values["inputs"]), "outputs": tuple(values["outputs"])})


@dataclass(frozen=True)
class Proposal:
    """A task without outputs, as a model wrote it."""

    program: str
    inputs: tuple[str, ...]
    message: str = ""


# --- values and programs -----------------------------------------------------------------------------------------------------


class NotALiteral(ValueError):
    """A text is not a Python literal."""


def literal(text: str) -> Any:
    """Return the value of a Python literal. Raises `NotALiteral` for anything else."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise NotALiteral(str(error)) from error


def arguments(text: str) -> tuple[Any, ...]:
    """Return the values of the arguments of a call, from the text between its parentheses."""
    found: tuple[Any, ...] = literal(f"({text.strip()},)")
    return found


def are_equal(left: str, right: str) -> bool:
    """Whether two literals have equal values in Python, as the paper compares them. A text that is no literal equals nothing."""
    try:
        return bool(literal(left) == literal(right))
    except NotALiteral:
        return False


def program_problem(program: str) -> str | None:
    """Return why a program is not accepted before it runs: no function `f` at its top level, or a forbidden module or name. None if it is."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        return f"the program does not parse: {error}"
    if not any(isinstance(node, ast.FunctionDef) and node.name == "f" for node in tree.body):
        return "the program has no function f"
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            return f"the program uses the forbidden name {node.id}"
        for name in names:
            if name.partition(".")[0] in FORBIDDEN_MODULES:
                return f"the program uses the forbidden module {name}"
    return None


def program_key(program: str) -> str:
    """Return a text that is equal for programs that differ only in comments, spaces and line breaks."""
    return ast.dump(ast.parse(program))


# --- reading answers ----------------------------------------------------------------------------------------------------------


def read_blocks(text: str) -> list[tuple[str, str]] | None:
    """Return (name, content) of the fenced blocks of an answer in `<think>...</think><answer>...</answer>`; None in another form."""
    form = _FORM.fullmatch(text)
    if form is None or any(text.count(tag) != 1 for tag in _TAGS):
        return None
    return [(name.lower(), content) for name, content in _BLOCK.findall(form[2].strip())]


def read_proposal(text: str, kind: Kind, format: Format, num_inputs: int, program: str = "") -> Proposal | None:
    """Return what a proposer wrote; None if it is not in the format. `program` is the one that an induction task is about."""
    if format == "expression":
        parts = [part.strip() for part in text.strip().split(";")]
        if not all(parts):
            return None
        if kind == "induction":
            return Proposal(program, tuple(parts)) if len(parts) == num_inputs else None
        return Proposal(expression_program(parts[0]), (parts[1],)) if len(parts) == 2 else None
    blocks = read_blocks(text)
    if blocks is None:
        return None
    found: dict[str, list[str]] = {name: [] for name in ("python", "input", "message")}
    for name, content in blocks:
        found.setdefault(name, []).append(content)
    inputs = tuple(found["input"])
    if kind == "induction":
        is_formed = len(inputs) == num_inputs and len(found["message"]) == 1
        return Proposal(program, inputs, found["message"][0].strip()) if is_formed else None
    return Proposal(found["python"][0], inputs) if (len(found["python"]), len(inputs)) == (1, 1) else None


def read_solution(text: str, kind: Kind, format: Format) -> str | None:
    """Return what a solver answered: an output, an input or a program; None if it is not in the format."""
    if format == "expression":
        written = text.strip()
        return (expression_program(written) if kind == "induction" else written) if written else None
    wanted = {"deduction": "output", "abduction": "input", "induction": "python"}[kind]
    found = [content for name, content in read_blocks(text) or () if name == wanted]
    return found[0] if len(found) == 1 else None


def expression_program(expression: str) -> str:
    """Return the program of the one-line language."""
    return f"def f(x):\n    return {expression}"


def expression_of(program: str) -> str:
    """Return the expression of a program of the one-line language."""
    return program.rpartition("return ")[2]


# --- prompts -------------------------------------------------------------------------------------------------------------------

_FORM_TEXT = "First think, then answer, in this form: <think>your thoughts</think><answer>your answer</answer>. "
_RULES = (
    "The program defines a function `f` with at least one argument and returns a value. It must be deterministic, must not print, read files "
    f"or use the network, and must not use any of: {', '.join((*FORBIDDEN_MODULES, *FORBIDDEN_NAMES))}. The input is what stands between the parentheses of the "
    "call of `f`: literals, separated by commas. The output must be a literal too (numbers, texts, lists, tuples, dictionaries, sets)."
)
_PROPOSE = {
    "deduction": "The task will be solved by someone who sees the program and the input and must work out the output.",
    "abduction": "The task will be solved by someone who sees the program and the output and must find an input that gives it.",
}


def propose_prompt(
    kind: Kind, format: Format, references: Sequence[CodeTask], program: str = "", num_inputs: int = 10
) -> str:
    """Return the proposer's prompt. `references` are past tasks; `program` is the one that an induction task is about."""
    if format == "expression":
        shown = [expression_of(program)] if kind == "induction" else [expression_reference(task) for task in references]
        return f"{kind[:3]}?{' '.join(shown)}>"
    if kind == "induction":
        return (
            f"Make a task about this program:\n\n{_fenced('python', program)}\n\nGive {num_inputs} inputs that show together what the program "
            "does, as different as possible, and a message that describes the program without giving it away. The task will be solved by "
            f"someone who sees the message and half of the inputs with their outputs, and must write the program.\n\n{_FORM_TEXT}The answer "
            f"has {num_inputs} blocks for the inputs, each with what stands between the parentheses of one call, and one for the message:\n\n"
            f"{_fenced('input', '...')}\n{_fenced('message', '...')}"
        )
    past = "\n\n".join(_reference_text(task) for task in references)
    return (
        f"Make a new task about a Python program. {_PROPOSE[kind]} It should need several steps of reasoning, and be neither trivial nor "
        f"impossible.\n\n{_RULES}\n\nPast tasks, from which the new one should differ:\n\n{past}\n\n{_FORM_TEXT}The answer has one block for "
        f"the program and one for the input:\n\n{_fenced('python', 'def f(...):' + chr(10) + '    ...')}\n{_fenced('input', '...')}"
    )


def solve_prompt(task: CodeTask, format: Format) -> str:
    """Return the solver's prompt: all of a task but the part that is asked for."""
    pairs = list(zip(task.inputs, task.outputs, strict=True))
    if format == "expression":
        written = expression_of(task.program)
        return {
            "deduction": f"{written};{task.inputs[0]}=",
            "abduction": f"{written}={task.outputs[0]};",
            "induction": f"{' '.join(f'{i}:{o}' for i, o in pairs[: task.num_shown])} f=",
        }[task.kind]
    program = f"Here is a Python program:\n\n{_fenced('python', task.program)}\n\n"
    if task.kind == "deduction":
        return (
            f"{program}It is called with this input:\n\n{_fenced('input', task.inputs[0])}\n\nWhat does `f` return? {_FORM_TEXT}The answer "
            f"is the output as a Python literal:\n\n{_fenced('output', '...')}"
        )
    if task.kind == "abduction":
        return (
            f"{program}It returned this output:\n\n{_fenced('output', task.outputs[0])}\n\nFind an input that gives it. {_FORM_TEXT}The answer "
            f"is what stands between the parentheses of the call of `f`:\n\n{_fenced('input', '...')}"
        )
    shown = "\n\n".join(
        f"{_fenced('input', one)}\n{_fenced('output', other)}" for one, other in pairs[: task.num_shown]
    )
    about = f"Someone describes it so: {task.message}\n\n" if task.message else ""
    return (
        f"A Python function `f` gave these outputs:\n\n{shown}\n\n{about}Write the function. It is tested on further inputs. {_FORM_TEXT}The "
        f"answer is the program:\n\n{_fenced('python', 'def f(...):' + chr(10) + '    ...')}"
    )


def expression_reference(task: CodeTask) -> str:
    """Return a past task in the one-line language, as a proposer would write it."""
    return f"{expression_of(task.program)};{task.inputs[0]}"


def _reference_text(task: CodeTask) -> str:
    return "\n".join(
        (_fenced("python", task.program), _fenced("input", task.inputs[0]), _fenced("output", task.outputs[0]))
    )


def _fenced(name: str, content: str) -> str:
    return f"```{name}\n{content}\n```"
