"""An agent as people write them: a script with the `openai` client that solves a problem, then checks its own answer.

It knows nothing of burnish. `OPENAI_BASE_URL` and `OPENAI_API_KEY` say which model it talks to; in training that is the policy, and every
token is recorded. The row comes on standard input. It prints its answer as the last line, and the recipe's reward scores it.

    burnish train examples/agents/openai_script.yaml
"""

import json
import os
import sys

from openai import OpenAI

client = OpenAI()
model = os.environ.get("OPENAI_MODEL", "policy")
row = json.load(sys.stdin)

messages = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
for question in (None, "Check your answer step by step, then write the final answer within \\boxed{}."):
    if question is not None:
        messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=model, messages=messages).choices[0].message
    messages.append({"role": "assistant", "content": answer.content})

print(json.dumps({"answer": answer.content}))
