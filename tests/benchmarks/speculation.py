"""How fast replies come with and without speculation, asked in turn through the socket.

usage: python -m tests.benchmarks.speculation MODEL [--rounds 8] [--tokens 160] [--batch 8]
       [--kinds edit,quote,prose,drawn] [--peer PYTHON]

Two daemons serve MODEL, with `--speculate off` and `auto`, on all cores. Kinds of text: `edit`, a
function written again with one change; `quote`, a paragraph of a document; `prose`, which has
nothing to copy but its own repetitions; `drawn`, prose at temperature 1, which hardly repeats
itself. Each round asks both for the same text, one after the other, alone and (prose) in a batch.
PYTHON has llama-cpp-python, which reads MODEL's file alone, with and without its prompt
lookup. Printed: tokens a second after the first token, and the ratio by pairs with the interval
of its median (95 %, bootstrap). Replies of both daemons must be equal.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

CODE = '''def read_rows(path, separator=","):
    """Read a table from a file."""
    rows = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            fields = [field.strip() for field in line.split(separator)]
            rows.append(fields)
    return rows


def column(rows, index):
    """Return one column of a table."""
    values = []
    for row in rows:
        if index < len(row):
            values.append(row[index])
    return values
'''
DOCUMENT = (Path(__file__).parents[2] / "engine/starter/sample/runbook.txt").read_text()[:3000]
NAMES = ("table", "sheet", "grid", "matrix", "lines", "records", "items", "entries")


def prompt_of(kind: str, number: int) -> str:
    """Make a text to be continued, another one for each number."""
    name = NAMES[number % len(NAMES)]
    if kind == "edit":
        return (
            f"The file before:\n```python\n{CODE}```\n\nThe same file, with `rows` renamed to"
            f' `{name}`:\n```python\ndef read_{name}(path, separator=","):\n'
        )
    if kind == "quote":
        start = DOCUMENT.index("\n", 200 * (number % 8)) + 1
        return f"{DOCUMENT}\n\n----\n\nThe document says:\n\n{DOCUMENT[start : start + 120]}"
    return f"Number {number + 1}: a story about a {name} that nobody had seen before.\n\nOnce"


def ask(address: str, prompt: str, num_tokens: int, temperature: int = 0) -> tuple[float, str]:
    """Return tokens a second after the first, and the text."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": temperature,
        "seed": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(address)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first_s = last_s = 0.0
    text = ""
    for line in response:
        if line.startswith(b"data: {"):
            last_s = time.perf_counter()
            first_s = first_s or last_s
            told = json.loads(line[6:])
            text += "".join(choice["text"] for choice in told["choices"])
    connection.close()
    return (num_tokens - 1) / (last_s - first_s), text


def ask_many(address: str, prompts: list[str], num_tokens: int) -> float:
    """Return the tokens a second of a batch, from its start to its end."""
    threads = [
        threading.Thread(target=ask, args=(address, prompt, num_tokens)) for prompt in prompts
    ]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(prompts) * num_tokens / (time.perf_counter() - started_s)


def daemon(stack: ExitStack, model: str, state: Path, speculate: str) -> str:
    """Start one, wait until it is ready, and return its socket."""
    state.mkdir(parents=True)
    address, log = f"{state}/p.sock", stack.enter_context((state / "stderr").open("w+"))
    command = [sys.executable, "-m", "appliance.cli", "serve", "--model", model]
    command += ["--socket", address, "--state-dir", str(state), "--roles", "colocated"]
    command += ["--speculate", speculate, "--prefix-cache", "on", "--ssd-cache", "off"]
    process = stack.enter_context(subprocess.Popen(command, stderr=log))
    stack.callback(process.terminate)
    while "ready on" not in (state / "stderr").read_text():
        assert process.poll() is None, (state / "stderr").read_text()
        time.sleep(0.05)
    return address


PEER = """
import json, sys, time
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
model, prompts, num_tokens, num_guessed = json.load(sys.stdin)
draft = LlamaPromptLookupDecoding(num_pred_tokens=num_guessed) if num_guessed else None
llama = Llama(model, n_ctx=2048, n_threads=2, verbose=False, draft_model=draft, logits_all=False)
for prompt in prompts:
    ids, times = llama.tokenize(prompt.encode(), special=False), []
    for _ in llama.generate(ids, temp=0.0):
        times.append(time.perf_counter())
        if len(times) == num_tokens:
            break
    print((num_tokens - 1) / (times[-1] - times[0]), flush=True)
"""


def peer(
    python: str, model: str, prompts: list[str], num_tokens: int, num_guessed: int
) -> list[float]:
    """Tokens a second of llama.cpp on the same prompts."""
    order = json.dumps([model, prompts, num_tokens, num_guessed])
    done = subprocess.run(
        [python, "-c", PEER], input=order, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stderr[-2000:])
    return [float(line) for line in done.stdout.split()]


def interval(ratios: list[float]) -> str:
    """Describe the median ratio with the interval of 95 % of resampled medians."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.2f} [{medians[50]:.2f}, {medians[1949]:.2f}]"


def report(what: str, off: list[float], auto: list[float], name: str = "penstock") -> None:
    """Print a line."""
    ratios = [a / b for a, b in zip(auto, off, strict=True)]
    plain, faster = statistics.median(off), statistics.median(auto)
    print(
        f"{what:<12} {name:<12} off {plain:7.1f}  with {faster:7.1f}"
        f" tok/s  ratio {interval(ratios)}  n {len(off)}",
        flush=True,
    )


def main() -> None:
    """Start the daemons, ask them in turn, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--kinds", default="edit,quote,prose,drawn")
    parser.add_argument("--peer")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms = [daemon(stack, options.model, folder / arm, arm) for arm in ("off", "auto")]
        for kind in options.kinds.split(","):
            rates: list[list[float]] = [[], []]
            prompts = [prompt_of(kind, number) for number in range(options.rounds)]
            for number, prompt in enumerate(prompts):
                texts = ["", ""]
                for index in (0, 1) if number % 2 else (1, 0):
                    is_drawn = int(kind == "drawn")
                    rate, texts[index] = ask(arms[index], prompt, options.tokens, is_drawn)
                    rates[index].append(rate)
                assert texts[0] == texts[1], (kind, number)
            report(kind, *rates)
            if options.peer and kind != "drawn":
                args = options.peer, options.model, prompts, options.tokens
                plain = peer(*args, 0)
                for num_guessed in (3, 7):
                    looked_up = peer(*args, num_guessed)
                    if len(looked_up) == len(plain) > 0:
                        report(kind, plain, looked_up, f"llama.cpp {num_guessed}")
        if options.batch:
            rates = [[], []]
            for number in range(options.rounds):
                prompts = [prompt_of("prose", 8 * number + each) for each in range(options.batch)]
                for index in (0, 1) if number % 2 else (1, 0):
                    rates[index].append(ask_many(arms[index], prompts, options.tokens))
            report(f"batch {options.batch}", *rates)
        for arm in arms:
            command = [sys.executable, "-m", "appliance.cli", "status", "--socket", arm]
            page = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            print(*(line for line in page.splitlines() if line.startswith("guesses")), sep="\n")


if __name__ == "__main__":
    main()
