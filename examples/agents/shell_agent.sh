#!/bin/sh
# An agent in the shell: one question to the model, one line as the result. Any program that can send an HTTP request is an agent.
# burnish train examples/agents/shell_agent.yaml
# The row is in row.json of the working directory, and on standard input. The recipe's reward scores the last answer of the model.
set -eu
body=$(python3 -c '
import json
row = json.load(open("row.json"))
prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
print(json.dumps({"model": "policy", "messages": [{"role": "user", "content": prompt}]}))')
curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
    --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" --data "$body" > answer.json
echo '{"metrics": {"bytes": '"$(wc -c < answer.json)"'}}'
