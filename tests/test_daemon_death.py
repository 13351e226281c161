"""Replies of every API continue after `kill -9` of the daemon, and read as if nothing had been."""

import json
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.daemons import ALONE, ARMS

DRAWN = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 5}
SAID = [{"role": "user", "content": "Tell me of a river."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "minLength": 150, "maxLength": 160}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
BODIES = {
    "choices": ("/v1/completions", {"prompt": "Once", "n": 2, "logprobs": 2, **DRAWN}),
    "echo": ("/v1/completions", {"prompt": "Once upon", "echo": True, "logprobs": 1, **DRAWN}),
    "chat": (
        "/v1/chat/completions",
        {"messages": SAID, "stream_options": {"include_usage": True}, **DRAWN},
    ),
    "tool": (
        "/v1/chat/completions",
        {"messages": SAID, "tools": [TOOL], "tool_choice": "required", "max_tokens": 250}
        | {"temperature": 0},
    ),
    "grammar": (
        "/v1/completions",
        {
            "prompt": "Number:",
            "guided_regex": "[0-9]{180,190}",
            "max_tokens": 200,
            "temperature": 0,
        },
    ),
    "response": (
        "/v1/responses",
        {"input": SAID, "max_output_tokens": 200, "ignore_eos": True, "temperature": 0},
    ),
    "message": ("/v1/messages", {"messages": SAID, **DRAWN, "temperature": 0}),
    "ollama": (
        "/api/generate",
        {"prompt": "Once", "raw": True, "options": {"num_predict": 200, "seed": 3}},
    ),
}
LAST = ("chat", "ollama")
WHOLE = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "logprobs": 1}
TEXTS = ("text", "content", "delta", "response", "arguments", "thinking", "partial_json")
_TIMED = re.compile("created|duration|cache|input_tokens|sequence_number|text_offset")
"""Fields that depend on when a request comes, or on the borders of events."""
_IDS = re.compile(r"\b(?:cmpl|chatcmpl|resp|msg|rs|fc|gen|chat|call)[-_][0-9a-f]{24}\b")


def request_of(path, body):
    """The bytes of a request for a stream, after which the connection closes."""
    data = json.dumps({"stream": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def ask(daemon, path, body, begun=None):
    """POST and read to the end; `begun` is told of the first bytes."""
    received = b""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(120)
        client.connect(str(daemon.socket))
        client.sendall(request_of(path, body))
        while part := client.recv(1 << 16):
            received += part
            if begun is not None and len(received) > 1200:
                begun.release()
                begun = None
    return received


def events(received):
    """The JSON objects of a stream, after a check of its chunks and its end."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        body, end, rest = body + rest[:count], rest[count : count + 2], rest[count + 2 :]
        assert end == b"\r\n"
        if not count:
            break
    assert not rest
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def summed(value, into):
    """Add up all texts of a stream by their place: borders of events depend on time."""
    if isinstance(value, dict):
        index = value.get("index", "")
        for name, each in value.items():
            summed(each, into.setdefault(f"{name}{index}", {}))
    elif isinstance(value, list):
        for each in value:
            summed(each, into.setdefault("[]", {}))
    else:
        into.setdefault("", []).append(value)


def said(received):
    """What a client has read: its texts and tokens by choice, and how many different ids."""
    into: dict = {}
    text = received.partition(b"\r\n\r\n")[2].decode()
    ids = set(_IDS.findall(text))
    for event in events(received):
        if event.get("type") == "ping":  # Anthropic's, while nothing comes
            continue
        summed(json.loads(_IDS.sub("id", json.dumps(event))), into)
    return len(ids), joined(into)


def joined(into, name=""):
    """Join texts and lists, take the last of numbers, and name once what is repeated."""
    told = {}
    for key, value in into.items():
        if key:
            if not _TIMED.search(key):
                told[key] = joined(value, key)
        elif name.rstrip("0123456789") in TEXTS:
            told[key] = "".join(each or "" for each in value)
        elif name == "[]":
            told[key] = value
        else:
            words = {each for each in value if isinstance(each, str)}
            told[key] = sorted(words) or value[-1:]
    return told


@pytest.mark.parametrize("arm", [ALONE, ARMS["shm"]], ids=["alone", "two-workers"])
def test_replies_of_every_api_continue_after_kill_9(start_daemon, tiny_llama, arm):
    daemon = start_daemon(*arm).wait_ready()
    wanted = {name: said(ask(daemon, *asked)) for name, asked in BODIES.items()}
    whole = daemon.complete(**WHOLE)["choices"]
    long = {"prompt": "A long story. " * 40, "max_tokens": 8}
    told = daemon.complete(**long)["choices"]
    rows = {row["id"] for row in daemon.log_rows()}
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(BODIES) + 1) as pool:
        at_once = pool.submit(daemon.complete, **WHOLE)
        daemon.wait_live()
        replies = {name: pool.submit(ask, daemon, *asked, begun) for name, asked in BODIES.items()}
        for _ in BODIES:
            assert begun.acquire(timeout=60)
        os.kill(daemon.pid, signal.SIGKILL)
        assert {name: said(reply.result()) for name, reply in replies.items()} == wanted
        assert at_once.result()["choices"] == whole
    new = [row for row in daemon.log_rows() if row["id"] not in rows]
    again = daemon.complete(**long)  # its blocks were computed by the dead daemon's workers
    assert again["choices"] == told
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert len(new) == len(BODIES) + 1
    assert {row["http_status"] for row in new} == {200}
    assert {row["finish_reason"] for row in new} <= {"length", "stop"}
    daemon.assert_all_free()
    with ThreadPoolExecutor() as pool:
        replies = {name: pool.submit(ask, daemon, *BODIES[name], begun) for name in LAST}
        for _ in LAST:
            assert begun.acquire(timeout=60)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.send_signal(signal.SIGTERM)  # the next daemon drains
        assert all(said(reply.result()) == wanted[name] for name, reply in replies.items())
    assert daemon.process.wait(60) == 0
