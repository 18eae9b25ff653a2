"""Agents that behave badly in all the ways that agents do; the column `kind` of the row says how. As a function and as a program.

Calls that belong to the conversation of an episode begin with its prompt. All others contain NOISE. It needs the standard library alone, so that
a thousand of these start quickly.
"""

import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

NOISE = "NOISE"


class Refused(Exception):
    """The endpoint answered with an error status."""

    def __init__(self, status, text):
        super().__init__(f"{status}: {text}")
        self.status = status


def noise_body(number=0, **more):
    return {"model": "m", "messages": [{"role": "user", "content": f"{NOISE} {number}"}]} | more


class Policy:
    """The model at an address."""

    def __init__(self, base_url, api_key):
        self.base_url, self.api_key = base_url, api_key
        parts = urlsplit(base_url)
        self.host, self.port, self.path = parts.hostname, parts.port, parts.path

    def post(self, body, path="/chat/completions", headers=None, timeout=None):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", "Authorization": "Bearer " + self.api_key} | (headers or {})
        try:
            connection.request("POST", self.path + path, data, given)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise Refused(answer.status, text[:200])
        return json.loads(text)

    def ask(self, messages, **more):
        return self.post({"model": "m", "messages": messages} | more)["choices"][0]["message"]

    def status(self, body):
        """The status of an answer; 0 if the connection was closed before there was one."""
        try:
            self.post(body)
        except Refused as refused:
            return refused.status
        except OSError:
            return 0
        return 200

    def talk(self, row, turns=3):
        """The conversation that every healthy episode has. Its answers decide the reward."""
        messages, said = [{"role": "user", "content": row["prompt"]}], ""
        for turn in range(turns):
            message = self.ask(messages)
            said += message["content"]
            messages += [message, {"role": "user", "content": f"turn {turn}"}]
        return float(sum(map(ord, said)) % 100) / 100

    def raw(self, data):
        """Send bytes and hang up without an answer."""
        with socket.create_connection((self.host, self.port)) as connection:
            connection.sendall(data)

    def half_a_stream(self):
        """Begin a stream, and hang up."""
        body = json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": f"{NOISE} stream"}], "stream": True}
        ).encode()
        head = f"POST {self.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.api_key}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((self.host, self.port)) as connection:
            connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connection.recv(32)


# --- healthy ones ----------------------------------------------------------------------------------------------------------


def talks(policy, row):
    return policy.talk(row)


def leaves_streams(policy, row):
    for _ in range(2):
        policy.half_a_stream()
    return policy.talk(row)


def retries(policy, row):
    """The same call several times at once with one key: one sample."""
    body = {"model": "m", "messages": [{"role": "user", "content": row["prompt"]}]}
    answers = []

    def call():
        answers.append(policy.post(body, headers={"Idempotency-Key": "one"})["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    call()
    assert len(answers) == 5
    assert len(set(answers)) == 1
    messages = [*body["messages"], {"role": "assistant", "content": answers[0]}, {"role": "user", "content": "go on"}]
    return float(len(policy.ask(messages)["content"]) % 7)


def sends_garbage(policy, row):
    dice = random.Random(row["prompt"])
    bodies = [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": 3}', b'{"messages": []}', b'{"messages": [{"role": "king", "content": 1}]}',
        b'{"messages": [{"role": "user", "content": "NOISE"}], "n": -1}', b'{"messages": [{"role": "user", "content": "NOISE"}], "max_tokens": "x"}',
        b'{"messages": [{"role": "assistant", "content": "NOISE"}]}', b'{"messages": [{"role": "tool", "content": "NOISE"}]}', b"[" * 100000,
    ]  # fmt: skip
    for body in dice.sample(bodies, 6):
        assert 400 <= policy.status(body) < 500, body[:100]
    for data in (
        b"\x16\x03\x01\x02",
        b"GET\r\n\r\n",
        b"POST / HTTP/9.9\r\n\r\n",
        b"POST /s/x/v1/models HTTP/1.1\r\nContent-Length: 99\r\n\r\nx",
    ):
        policy.raw(data)
    return policy.talk(row)


def steals(policy, row):
    """Uses the address or the key of another episode, and both."""
    others = [path for path in Path(row["folder"]).glob("*.json") if json.loads(path.read_text())[0] != policy.base_url]
    if others:
        url, key = json.loads(random.Random(row["prompt"]).choice(sorted(others)).read_text())
        assert Policy(url, policy.api_key).status(noise_body()) in (401, 410)
        assert Policy(policy.base_url, key).status(noise_body()) == 401
        assert Policy(url, key).status(noise_body("stolen")) in (200, 410, 429)
    return policy.talk(row)


def floods(policy, row):
    """Hundreds of calls at once. Some are told to wait."""
    outcomes = []

    def call(number):
        outcomes.append(policy.status(noise_body(number, n=32)))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(row.get("flood", 60))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {200, 429, 0}, outcomes
    return policy.talk(row)


def sends_much(policy, row):
    """100 MB, which are refused before they are all sent."""
    body = b'{"messages": [{"role": "user", "content": "' + b"x" * 100_000_000 + b'"}]}'
    assert policy.status(body) in (413, 429, 0)
    return policy.talk(row)


def calls_late(policy, row):
    """Leaves a thread or a child behind that goes on calling."""

    def call():
        for number in range(30):
            policy.status(noise_body(number))
            time.sleep(0.05)

    reward = policy.talk(row)
    if os.fork() == 0:
        os.setsid()
        call()
        os._exit(0)
    threading.Thread(target=call, daemon=True).start()
    return reward


# --- sick ones ---------------------------------------------------------------------------------------------------------------


def raises(policy, row):
    policy.post(noise_body())
    raise RuntimeError("this agent raises")


def exits(policy, row):
    policy.post(noise_body())
    os._exit(3)


def kills_itself(policy, row):
    policy.post(noise_body())
    os.kill(os.getpid(), signal.SIGKILL)


def never_calls(policy, row):
    return 1.0


def gives_a_bad_reward(policy, row):
    policy.talk(row)
    return {"reward": "high"}


def gives_no_number(policy, row):
    policy.talk(row)
    return float("nan")


def hangs(policy, row):
    policy.post(noise_body())
    time.sleep(10_000)


def hangs_at_once(policy, row):
    time.sleep(10_000)


def has_children_that_go_on(policy, row):
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            while True:
                policy.status(noise_body())
                time.sleep(0.02)
    time.sleep(10_000)


def run(row, base_url, api_key):
    policy, function = Policy(base_url, api_key), globals()[row["kind"]]
    if row["is_healthy"]:
        path = Path(row["folder"], f"{row['number']}.json")
        path.with_suffix(".part").write_text(json.dumps([base_url, api_key]))
        path.with_suffix(".part").rename(path)
    return function(policy, row)


if __name__ == "__main__":
    result = run(json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print(json.dumps(result))
