"""Makes a small chat model from nothing, and the first lessons it gets, for agents that train on a laptop.

    python examples/agents/small_chat_model.py FOLDER

FOLDER/model is a Hugging Face directory: a llama of 0.4 million random weights, a tokenizer with one token for each character and for each fixed
piece of a tool call, and a chat template in the style of Qwen. FOLDER/lessons.jsonl are 8,000 dialogues of a poor student: one of four
calls the calculator, the others guess, and what is copied has slips.
"""

import json
import random
import string
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CALL, END_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
START, END = "<|im_start|>", "<|im_end|>"
PIECES = (CALL, END_CALL, "user\n", "assistant\n", "tool\n", f"{END}\n")
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{%- for call in m.tool_calls or [] -%}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor -%}'
    "{{ '<|im_end|>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    "{%- if tools and false -%}{#- The model knows its only tool, which need not be listed. -#}{%- endif -%}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each printable character and for each fixed piece of the template."""
    vocab = {text: index for index, text in enumerate(["<unk>", *string.printable])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    backend.add_tokens([AddedToken(text, normalized=False) for text in PIECES[:-1]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, unk_token="<unk>", chat_template=TEMPLATE
    )


def make_model(folder: Path) -> None:
    """Write a model with random weights."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def problem(dice: random.Random) -> tuple[str, int]:
    """Return a problem and its value."""
    a, b, sign = dice.randrange(10, 1000), dice.randrange(10, 1000), dice.choice("+-*")
    return f"{a}{sign}{b}", a + b if sign == "+" else a - b if sign == "-" else a * b


def copied(text: str, dice: random.Random) -> str:
    """Return a text with one wrong digit in three of twenty cases."""
    places = [place for place, character in enumerate(text) if character.isdigit()]
    if dice.random() >= 0.15:
        return text
    place = dice.choice(places)
    return text[:place] + dice.choice("123456789") + text[place + 1 :]


def lessons(num: int, dice: random.Random) -> list[dict]:
    """Return what a poor student does. Every answer is a row, with the messages before it as the prompt."""
    rows = []
    for number in range(num):
        text, value = problem(dice)
        asked = [{"role": "user", "content": f"{text}="}]
        if dice.random() >= 0.25:
            guess = "".join(c if c == "-" else dice.choice(string.digits) for c in str(value))
            rows.append({"prompt": asked, "completion": guess})
            continue
        call = copied(text, dice)
        function = {"name": "calculator", "arguments": {"expression": call}}
        answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "content": f"{eval(call):g}", "tool_call_id": str(number)}
        rows.append({"prompt": asked, "completion": CALL + call + END_CALL})
        rows.append({"prompt": [*asked, answer, result], "completion": copied(result["content"], dice)})
    return rows


if __name__ == "__main__":
    target = Path(sys.argv[1])
    make_model(target / "model")
    with open(target / "lessons.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in lessons(8000, random.Random(0)))
    print(f"wrote {target / 'model'} and {target / 'lessons.jsonl'}")
