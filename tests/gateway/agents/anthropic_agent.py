"""An agent with the package `anthropic`: its tool loop, as in the documentation, with and without a stream."""

import os

from anthropic import Anthropic

TOOL = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def run(row, base_url, api_key):
    os.environ.pop("ANTHROPIC_API_KEY", None)
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    options = {"model": "policy", "max_tokens": 400, "system": "Use the tool.", "tools": [TOOL]}
    while True:
        if row["way"] == "stream":
            with client.messages.stream(messages=messages, **options) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **options)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return float(f"answer is {row['answer']}" in answer.content[0].text)
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] * call.input["b"])}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
