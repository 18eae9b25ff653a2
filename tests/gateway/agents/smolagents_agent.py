"""An agent of smolagents that calls tools, as in the package's guide. Its last step is a call of `final_answer`."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def run(row, base_url, api_key):
    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=8, verbosity_level=0)
    return float(f"answer is {row['answer']}" in str(agent.run(row["prompt"])))
