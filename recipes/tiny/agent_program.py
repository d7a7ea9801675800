"""A program that asks a chat endpoint for the answer to a question, and passes it a calculator's result once."""

import json
import os
import sys
import urllib.request


def ask(messages: list, **options) -> str:
    body = json.dumps({"model": "policy", "messages": messages} | options).encode()
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, head)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


messages = [{"role": "user", "content": sys.argv[1]}]
steps = ask(messages, stop="#")
digits = steps[::2]
result = str(sum(map(int, digits)) % 5) if digits.isdecimal() else "?"
messages += [{"role": "assistant", "content": steps}, {"role": "user", "content": f"={result}#"}]
try:
    ask(messages)
except OSError:  # no room was left
    sys.exit(1)
