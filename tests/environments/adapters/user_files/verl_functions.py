# verl_functions.py, named by function_tool_path
from verl.tools.function_tool import function_tool

@function_tool("lookup")
def find(word: str, limit: int = 3):
    """Look a word up.

    Args:
        word: The word.
        limit: Most lines to return.
    """
    return {"word": word, "lines": ["..."] * limit}, 0.0
