"""A GSM8K agent with a calculator, written with the `openai` client alone.

It offers the tool, runs the calls that the model writes, and stops at the first answer without a call. It returns that answer; the recipe's
reward compares the number in it (recipes/gsm8k_agent.yaml).
"""

import ast
import json
import operator
from typing import Any

SYSTEM = "Solve the problem step by step. Use the calculator for arithmetic. Put the final number within \\boxed{}."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as (12+3)*4/5."}},
            "required": ["expression"],
        },
    },
}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
MAX_CALLS = 6


def value_of(node: ast.expr) -> float:
    """Return the value of an arithmetic expression."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.operand))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    raise ValueError("expected numbers with +, -, *, / and parentheses")


def calculate(arguments: str) -> str:
    """Return the result of a call, or what is wrong with it."""
    try:
        return f"{value_of(ast.parse(json.loads(arguments)['expression'].strip(), mode='eval').body):.10g}"
    except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError, AttributeError, RecursionError) as error:
        return f"error: {error}"


async def run(row: dict[str, Any], client: Any) -> dict[str, Any]:
    """Play one episode."""
    question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    used = 0
    for _ in range(MAX_CALLS):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        answer = response.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            used += 1
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"answer": answer.content or "", "metrics": {"calculations": used}}
