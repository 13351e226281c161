"""llama.cpp's own server tests against a running daemon: what they ask, and what we answer.

usage: python -m tests.peers FOLDER URL KEY [pytest's arguments]

FOLDER is tools/server/tests of llama.cpp's sources; the source archive of llama-cpp-python has them
under vendor/llama.cpp. The daemon listens on URL, as http://127.0.0.1:8000, with a key. Needs
requests, filelock, wget and openai beside pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = (
    *("test_basic", "test_completion", "test_chat_completion", "test_compat_anthropic"),
    *("test_compat_oai_responses", "test_tool_call", "test_template", "test_tokenize"),
    *("test_security", "test_infill", "test_ignore_eos", "test_metrics"),
)
"""Those about APIs that are spoken here; others are about embeddings, slots, adapters, images."""


def main(folder: str, url: str, key: str, *arguments: str) -> int:
    """Run them in their folder."""
    environ = {
        **os.environ,
        "PENSTOCK_URL": url,
        "PENSTOCK_KEY": key,
        "PYTHONPATH": f"{Path(folder).resolve()}:{Path(__file__).parent}",
    }
    files = [f"unit/{name}.py" for name in FILES]
    command = [sys.executable, "-m", "pytest", "-p", "stub", "-q", "--tb=line", *arguments, *files]
    return subprocess.run(command, cwd=folder, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
