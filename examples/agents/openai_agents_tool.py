"""An agent of the package `openai-agents` with a calculator as its tool.

`run` gets the row and a client of the policy, and returns the reward. The rest is the package's own loop: it offers the tool, runs the calls
that the model writes, and ends with the first answer without a call.

    pip install openai-agents
    burnish train examples/agents/openai_agents_tool.yaml
"""

import ast
import operator
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

set_tracing_disabled(True)  # else the package posts what it does to its maker
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(node: ast.expr) -> float:
    """Return the value of a sum, difference, product or quotient of numbers."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    raise ValueError("expected numbers with +, -, * and /")


@function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Such as 12*(3+4).
    """
    return f"{value_of(ast.parse(expression, mode='eval').body):g}"


async def run(row: dict[str, Any], client: AsyncOpenAI) -> dict[str, Any]:
    """Play one episode and return its reward: 1 for the right answer. The client is ready; a new one for each episode would cost 50 ms."""
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="solver", model=model, tools=[calculator])
    question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    try:
        result = await Runner.run(agent, question, max_turns=4)
    except MaxTurnsExceeded:
        return {"reward": 0.0, "success": False}
    is_right = str(result.final_output).strip().endswith(str(row["answer"]))
    return {"reward": float(is_right), "success": is_right}
