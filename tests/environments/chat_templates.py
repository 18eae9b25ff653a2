"""Chat templates that write what those of published models write, and a small tokenizer with their control tokens.

They are our own texts: shorter, with other words around the tools. Where they put turns, reasoning, calls and results is as in the originals.
"""

from __future__ import annotations

import functools
from typing import Any

from burnish.models.tokenizer import Tokenizer

_CHATML_TOOLS = (
    "{%- if tools -%}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}Tools:\n"
    "{%- for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' -%}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif -%}"
)
_CHATML_CALLS = (
    "{%- for call in m.tool_calls or [] -%}{%- if body or not loop.first %}{{ '\n' }}{% endif -%}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor -%}'
    "{{ '<|im_end|>\n' }}"
)
_CHATML_RESULT = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\n<tool_response>\n' + m.content }}"
    "{{ '\n</tool_response>' }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}"
)
QWEN25 = (
    _CHATML_TOOLS + "{%- for m in messages -%}{%- set body = m.content -%}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' + body }}" + _CHATML_CALLS + "{%- elif m.role == 'tool' -%}"
    + _CHATML_RESULT + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)  # fmt: skip
QWEN3 = (
    _CHATML_TOOLS + "{%- set found = namespace(query=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and "
    "m.content.endswith('</tool_response>')) -%}{%- set found.query = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- set body = m.content -%}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' -%}{%- set thought = m.reasoning_content or '' -%}"
    "{%- if not thought and '</think>' in body -%}{%- set thought = body.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set body = body.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > found.query and (loop.last or thought) -%}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif -%}"
    "{{ body }}" + _CHATML_CALLS + "{%- elif m.role == 'tool' -%}" + _CHATML_RESULT + "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
)  # fmt: skip
LLAMA3 = (
    "{{ bos_token }}{%- for m in messages -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"
)
LLAMA31 = (
    "{{ bos_token }}{%- for m in messages -%}{%- set head = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' -%}"
    "{%- if m.tool_calls -%}{%- if m.tool_calls | length > 1 -%}{{ raise_exception('one call at a time') }}{%- endif -%}"
    '{{ head + \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}{{ m.tool_calls[0].function.arguments | tojson }}'
    "{{ '}<|eot_id|>' }}{%- elif m.role == 'tool' -%}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}<|eot_id|>"
    "{%- else -%}{{ head + m.content | trim + '<|eot_id|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"
)
GEMMA = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
MISTRAL = (
    "{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}"
    "{%- set users = rest | selectattr('role', 'equalto', 'user') | list -%}"
    "{%- for m in rest | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}{%- endfor -%}"
    "{{ bos_token }}{%- for m in rest -%}{%- if m.role == 'user' -%}"
    "{%- if tools and m == users[-1] -%}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{%- endif -%}"
    "{{ '[INST]' + (messages[0].content + '\n\n' if loop.last and messages[0].role == 'system' else '') + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls is defined -%}{{ '[TOOL_CALLS][' }}{%- for call in m.tool_calls -%}"
    "{%- if call.id | length != 9 -%}{{ raise_exception('ids have nine characters') }}{%- endif -%}{%- if not loop.first -%}{{ ', ' }}{%- endif -%}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{%- endfor -%}{{ ']' + eos_token }}"
    "{%- elif m.role == 'assistant' -%}{{ m.content + eos_token }}"
    "{%- elif m.role == 'tool' -%}{%- if m.tool_call_id | length != 9 -%}{{ raise_exception('ids have nine characters') }}{%- endif -%}"
    "{{ '[TOOL_RESULTS]{\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}{%- endif -%}{%- endfor -%}"
)
TEMPLATES = {
    "qwen2.5": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "llama3.1": (LLAMA31, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
}
"""Each template with the token that ends an answer."""
CONTROL = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(
        "<start_of_turn>",
        "<end_of_turn>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
]


@functools.cache
def small_tokenizer(name: str) -> Tokenizer:
    """A tokenizer of bytes and some longer tokens, with one of the templates. Tokens of reasoning and calls are added but not special."""
    template, end = TEMPLATES[name]
    return tokenizer_with(template, end)


def tokenizer_with(template: str, end: str) -> Tokenizer:
    """A small tokenizer with a template and its end token. `<|endoftext|>` also ends completions."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("t", "h"), ("th", "e"), ("\u010a", "\u010a"), ("i", "n"), ("\u0120", "a")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    inner: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, bos_token="<s>", additional_special_tokens=CONTROL
    )
    inner.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    inner.chat_template = template
    other = inner.convert_tokens_to_ids("<|endoftext|>")
    return Tokenizer(inner, {"eos_token_id": [inner.eos_token_id, other]})
