"""Time to turn messages into tokens in a dialogue of 128 turns, compared with rendering the whole conversation each turn.

    python bench/dialogue_rendering.py --tokenizer DIR [--turns 128] [--rate 10000]

DIR is the directory of a tokenizer, such as Qwen2.5's. The templates are those of tests/environments/chat_templates.py, which place turns and
reasoning as Qwen2.5, Qwen3 and Llama 3 do; Llama's control tokens are added to the vocabulary. Each answer has about 200 tokens (half of them
reasoning where the template reads it), each user message about 40.

Times are processor time of one thread, a turn, in the quickest of three dialogues (of one for `everything`). `tokenise_us` is spent in the tokenizer (the new text must be
tokenised in any case, and Qwen3's answers are decoded); `template_us` is the rest. The shares are of the time that generating the answers takes if
the engine samples `--rate` tokens a second over all of its rows. `everything` renders and tokenises the whole conversation in every turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Literal

from common import save, table

from burnish.environments.dialogue import ChatRenderer
from burnish.models.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.environments.chat_templates import CONTROL, TEMPLATES

REPEATS = 3
WORDS = "the answer follows from what was said before and so we look at the next part of it "
QUESTION = "No, that is not it. Think of the parts you have not looked at yet, and say which of them is the right one, "
Way = Literal["as_template", "keep", "everything"]
ROWS: list[tuple[str, Way]] = [
    (name, way)
    for name, ways in {
        "qwen2.5": ("as_template", "everything"),
        "qwen3": ("as_template", "keep", "everything"),
        "llama3": ("as_template", "everything"),
    }.items()
    for way in ways  # type: ignore[assignment]  # mypy widens the names
]


class TimedTokenizer(Tokenizer):
    """A tokenizer that adds up the time spent in it."""

    seconds = 0.0

    def encode(self, text: str, special: bool = False) -> list[int]:
        started = time.process_time()
        tokens = super().encode(text, special)
        self.seconds += time.process_time() - started
        return tokens

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        started = time.process_time()
        text = super().decode(tokens, skip_special)
        self.seconds += time.process_time() - started
        return text


def tokenizer_for(directory: str, name: str) -> TimedTokenizer:
    inner = Tokenizer.load(directory)._inner
    template, end = TEMPLATES[name]
    inner.add_special_tokens({"additional_special_tokens": CONTROL})
    inner.bos_token, inner.eos_token, inner.chat_template = "<s>", end, template
    return TimedTokenizer(inner)


def answer_of(name: str, turn: int) -> tuple[str, dict[str, Any]]:
    """An answer as text and as a message."""
    content = f"{WORDS * 5}({turn})"
    if name != "qwen3":
        return WORDS * 5 + content, {"role": "assistant", "content": WORDS * 5 + content}
    thought = (WORDS * 5).strip()
    message = {"role": "assistant", "content": content, "reasoning_content": thought}
    return f"<think>\n{thought}\n</think>\n\n{content}", message


def played(tokenizer: TimedTokenizer, name: str, way: Way, turns: int) -> dict[str, float]:
    """One dialogue: seconds in all and in the tokenizer, and tokens sampled."""
    answers = [answer_of(name, turn) for turn in range(turns)]
    sampled = [[*tokenizer.encode(text), tokenizer.eos_ids[0]] for text, _ in answers]
    questions = [{"role": "user", "content": f"{QUESTION}{turn}?"} for turn in range(turns)]
    renderer = ChatRenderer(tokenizer, history="as_template" if way == "everything" else way)
    _ = renderer.ignores_answers  # computed once a run: the probes of the start are not in the times
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Which one is it?"}]
    conversation = renderer.open(messages)
    tokenizer.seconds, started = 0.0, time.process_time()
    for (_, answer), completion, question in zip(answers, sampled, questions, strict=True):
        if way == "everything":
            messages += [answer, question]
            tokenizer.chat(messages)
        else:
            conversation.extend(completion, [question])
    total = time.process_time() - started
    return {"total": total, "tokeniser": tokenizer.seconds, "sampled": float(sum(map(len, sampled)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument(
        "--rate", type=float, default=10_000, help="tokens a second that the engine samples over all rows"
    )
    args = parser.parse_args()
    tokenizers = {name: tokenizer_for(args.tokenizer, name) for name in dict(ROWS)}
    rows: list[dict[str, Any]] = []
    for name, way in ROWS:
        found = min(
            (played(tokenizers[name], name, way, args.turns) for _ in range(1 if way == "everything" else REPEATS)),
            key=lambda one: one["total"],
        )
        generation = found["sampled"] / args.rate
        rows.append(
            {
                "template": name,
                "history": way,
                "turns": args.turns,
                "sampled_a_turn": found["sampled"] / args.turns,
                "turn_us": 1e6 * found["total"] / args.turns,
                "tokenise_us": 1e6 * found["tokeniser"] / args.turns,
                "template_us": 1e6 * (found["total"] - found["tokeniser"]) / args.turns,
                "template_share": (found["total"] - found["tokeniser"]) / generation,
                "share": found["total"] / generation,
                "assumed_tokens_a_second": args.rate,
            }
        )
    print(table(rows, list(rows[0])[:-1]))
    save("dialogue_rendering", rows)


if __name__ == "__main__":
    main()
