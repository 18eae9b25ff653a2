"""The recording endpoint of agents, and the parts of HTTP and OpenAI's API that it shares with `serve`."""
