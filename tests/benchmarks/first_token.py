"""From an empty environment to the first token of a model by its name, on a hub on loopback.

usage: python -m tests.benchmarks.first_token FOLDER [--name owner/name] [-- PIP OPTIONS]

A new venv, `pip install` of this checkout (compiled there, wheels from wherever pip is told), then
`penstock serve --model owner/name` with an empty cache: the files come from a hub of the tests' own
on this machine. The clock stops with the first token that a client reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.hub import Repository, folder_files, serving

ROOT = Path(__file__).parents[2]
READY_S = 300
COPIED = ("engine", "appliance", "tui", "migrations", "pyproject.toml", "setup.py", "README.md")


def first_token(client: httpx.Client) -> str:
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {") and (text := json.loads(line[6:])["choices"][0]["text"]):
                return text
    raise AssertionError("no token")


def wait_ready(client: httpx.Client, daemon: subprocess.Popen) -> None:
    until_s = time.monotonic() + READY_S
    while True:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert daemon.poll() is None, "the daemon has ended"
        assert time.monotonic() < until_s, "it does not become ready"
        time.sleep(0.02)


def run(folder: Path, name: str, pip_options: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as home_name:
        home = Path(home_name)
        source = home / "source"  # a clean one: what was built here before is not taken along
        for each in COPIED:
            copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
            source.mkdir(exist_ok=True)
            skip = {"ignore": shutil.ignore_patterns("*.so", "__pycache__")}
            copy(ROOT / each, source / each, **(skip if copy is shutil.copytree else {}))
        marks = [("begin", time.monotonic())]
        subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
        marks.append(("venv", time.monotonic()))
        pip = [home / "venv/bin/pip", "install", "-q", *pip_options, str(source)]
        subprocess.run(pip, check=True)
        marks.append(("pip install", time.monotonic()))
        repository = Repository(folder_files(folder))
        with serving(**{name.replace("/", "__"): repository}) as hub:
            env = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK", "PYTHON"))}
            env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HOME": str(home)}
            serve = [home / "venv/bin/penstock", "serve", "--model", name]
            socket = home / "p.sock"
            serve += ["--socket", str(socket), "--state-dir", str(home / "state")]
            daemon = subprocess.Popen(serve, env=env, cwd=home)
            transport = httpx.HTTPTransport(uds=str(socket))
            try:
                with httpx.Client(transport=transport, base_url="http://localhost") as client:
                    wait_ready(client, daemon)
                    marks.append(("download and load", time.monotonic()))
                    token = first_token(client)
                    marks.append(("first token", time.monotonic()))
            finally:
                daemon.terminate()
                daemon.wait()
        parts = {
            about: round(at_s - before_s, 2)
            for (_, before_s), (about, at_s) in itertools.pairwise(marks)
        }
        return {"seconds": parts, "all": round(marks[-1][1] - marks[0][1], 2), "token": token}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="owner/model")
    parser.add_argument("pip_options", nargs="*")
    options = parser.parse_args()
    print(json.dumps(run(options.folder, options.name, options.pip_options), indent=1))


if __name__ == "__main__":
    main()
