"""Agents with the package `openai`, as its documentation writes them. The column `way` of the row says which."""

import asyncio
import json

from openai import AsyncOpenAI, OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
FLAT_TOOL = {"type": "function", **TOOL["function"], "strict": False}


def multiply(arguments):
    given = json.loads(arguments)
    return str(given["a"] * given["b"])


def score(text, row):
    return float(text is not None and text.startswith(f"the answer is {row['answer']}"))


def plain(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": row["prompt"]}]
    while True:
        message = client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return score(message.content, row)
        for call in message.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def asynchronous(row, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": row["prompt"]}]
        while True:
            answer = await client.chat.completions.create(
                model="m",
                messages=messages,
                tools=[TOOL],
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0.3,
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return score(message.content, row)
            for call in message.tool_calls:
                result = multiply(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def streaming(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        content, calls = "", {}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        num_tokens = 0
        for chunk in client.chat.completions.create(model="m", messages=messages, tools=[TOOL], **options):
            num_tokens += chunk.usage.completion_tokens if chunk.usage else 0
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or []:
                    known = calls.setdefault(
                        part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                    known["id"] += part.id or ""
                    known["function"]["name"] += part.function.name or ""
                    known["function"]["arguments"] += part.function.arguments or ""
        assert num_tokens > 0
        if not calls:
            return score(content, row)
        messages.append({"role": "assistant", "content": content or None, "tool_calls": list(calls.values())})
        for call in calls.values():
            result = multiply(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def stream_helper(row, base_url, api_key):
    """The client's own accumulator of a stream."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return score(message.content, row)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)})


def several(row, base_url, api_key):
    """Two samples with log-probs; the agent goes on behind the second."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = client.chat.completions.create(model="m", messages=messages, n=2, logprobs=True, top_logprobs=1)
    first, second = answer.choices
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert first.message.content != second.message.content
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert "".join(entry.token for entry in entries).startswith(choice.message.content)
        assert all(entry.logprob < 0 and entry.top_logprobs[0].token == entry.token for entry in entries)
    messages += [second.message, {"role": "user", "content": "And again?"}]
    text = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    return score(text, row)


def responses(row, base_url, api_key):
    """The responses API, which remembers the conversation on the server."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    answer = client.responses.create(model="m", input=row["prompt"], instructions="Use the tool.", tools=[FLAT_TOOL])
    while calls := [item for item in answer.output if item.type == "function_call"]:
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": multiply(call.arguments)}
            for call in calls
        ]
        answer = client.responses.create(
            model="m", previous_response_id=answer.id, input=results, instructions="Use the tool.", tools=[FLAT_TOOL]
        )
    return score(answer.output_text, row)


def responses_by_hand(row, base_url, api_key):
    """The responses API with the history sent by the client."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    items = [{"role": "user", "content": row["prompt"]}]
    while True:
        answer = client.responses.create(model="m", input=items, tools=[FLAT_TOOL], store=False)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return score(answer.output_text, row)
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": multiply(call.arguments)})


def completions(row, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    text = row["prompt"]
    for _ in range(2):
        written = client.completions.create(model="m", prompt=text, max_tokens=400).choices[0].text
        text += written + " And again? "
    return score(written, row)


WAYS = (plain, streaming, stream_helper, several, responses, responses_by_hand, completions)


async def run(row, base_url, api_key):
    for way in WAYS:
        if way.__name__ == row["way"]:
            return await asyncio.to_thread(way, row, base_url, api_key)
    return await asynchronous(row, base_url, api_key)
