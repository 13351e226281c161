"""Clients as people use them against one daemon with a real model, over its socket and TCP.

usage: python -m tests.clients MODEL [pytest's arguments]

MODEL is a folder or a GGUF file of a model that follows instructions. One whose template knows no
tools shows most: SmolLM2-135M-Instruct. Four APIs by their official clients (openai, anthropic,
ollama), and langchain, instructor and pydantic-ai with tools; what is not installed is skipped, and
named. The frameworks are nobody's dependencies here: pip install langchain-openai instructor
'pydantic-ai-slim[openai]'.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKS = ("check_official.py", "check_frameworks.py")


def main(model: str, *arguments: str) -> int:
    """Run the checks; pytest's exit code."""
    here = Path(__file__).resolve().parent
    environ = {**os.environ, "PENSTOCK_CHECKED_MODEL": str(Path(model).resolve())}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rs", "-W", "ignore", *arguments]
    command += [str(here / name) for name in CHECKS]
    return subprocess.run(command, cwd=here.parents[1], env=environ, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
