"""An agent of LangGraph: a model with a tool, in the package's own loop. `run` returns the reward.

Install the packages and train:

pip install langgraph langchain langchain-openai
burnish train examples/agents/langgraph_agent.yaml
"""

from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play one episode and return its reward: 1 for the right answer."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    agent = create_agent(model, [multiply])
    question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    try:
        state = await agent.ainvoke({"messages": [("user", question)]}, {"recursion_limit": 8})
    except GraphRecursionError:
        return 0.0
    return float(str(state["messages"][-1].content).strip().endswith(str(row["answer"])))
