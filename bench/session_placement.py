"""Time to place a call in the token tree of a session, and to record its answer, at several turns of a dialogue of 128 turns.

    python bench/session_placement.py --tokenizer DIR [--turns 128]

DIR is the directory of a tokenizer, such as Qwen2.5's. Templates and messages are those of bench/dialogue_rendering.py: answers of about 200
tokens, questions of about 40. The agent sends the whole conversation with each call, as JSON, and drops reasoning.

Times are processor time of one thread: the median of 8 turns of 3 dialogues. `keys_us` is a part of `place_us`: hashing the messages, which grows
with the conversation. The rest renders and tokenises the
new message, copies the tokens of the prompt and looks up hashes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from common import save, table
from dialogue_rendering import QUESTION, TimedTokenizer, answer_of, tokenizer_for

from burnish.environments.tools.call_formats import call_format
from burnish.gateway.message_keys import chain_digests, head_digest, message_keys
from burnish.gateway.session_renderer import SessionRenderer
from burnish.gateway.token_tree import SessionTree

REPEATS, WINDOW = 3, 8
ROWS = [("qwen2.5", "keep"), ("qwen3", "keep"), ("qwen3", "as_template"), ("llama3", "keep")]
Times = dict[str, float]


def played(tokenizer: TimedTokenizer, name: str, renderer: SessionRenderer, turns: int) -> list[Times]:
    """One dialogue: the times of each turn, in microseconds."""
    tree, found = SessionTree(renderer), list[Times]()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Which one is it?"}]
    for turn in range(turns):
        text, _ = answer_of(name, turn)
        sampled = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        logp = [-0.5] * len(sampled)
        given = json.loads(json.dumps(messages))
        times = [time.process_time()]
        chain_digests(head_digest(None, None), message_keys(given))
        times.append(time.process_time())
        prompt = tree.place(given)
        times.append(time.process_time())
        message = tree.record(prompt, sampled, logp, 0, "stop", f"r{turn}")
        times.append(time.process_time())
        keys, place, record = (1e6 * (after - before) for before, after in zip(times, times[1:], strict=False))
        found.append({"place_us": place, "keys_us": keys, "record_us": record, "tokens": float(len(prompt.tokens))})
        message.pop("reasoning_content", None)
        messages += [message, {"role": "user", "content": f"{QUESTION}{turn}?"}]
    assert tree.metrics["continued"] == turns - 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--turns", type=int, default=128)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, history in ROWS:
        tokenizer = tokenizer_for(args.tokenizer, name)
        renderer = SessionRenderer(tokenizer, history=history, call_format=call_format("hermes"))  # type: ignore[arg-type]
        dialogues = [played(tokenizer, name, renderer, args.turns) for _ in range(REPEATS)]
        for end in (16, args.turns // 2, args.turns):
            window = [times for dialogue in dialogues for times in dialogue[end - WINDOW : end]]
            medians = {key: statistics.median(times[key] for times in window) for key in window[0]}
            rows.append({"template": name, "history": history, "turn": end} | medians)
    columns = ["template", "history", "turn", "tokens", "place_us", "keys_us", "record_us"]
    print(table(rows, columns))
    print(save("session_placement", rows))


if __name__ == "__main__":
    main()
