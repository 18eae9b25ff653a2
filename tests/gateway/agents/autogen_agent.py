"""An agent of AutoGen: an assistant with a tool, as in the package's tutorial."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def run(row, base_url, api_key):
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": ModelFamily.UNKNOWN,
        "structured_output": False,
    }
    client = OpenAIChatCompletionClient(model="policy", base_url=base_url, api_key=api_key, model_info=info)
    agent = AssistantAgent("solver", model_client=client, tools=[multiply], max_tool_iterations=4)
    result = await agent.run(task=row["prompt"])
    await client.close()
    return float(f"answer is {row['answer']}" in result.messages[-1].content)
