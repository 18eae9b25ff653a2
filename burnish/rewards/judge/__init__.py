"""A language model that reads an answer and gives a verdict: a generative reward model behind an endpoint or an engine."""
