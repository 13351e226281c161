"""Clients as people use them against a daemon, over its socket and TCP.

usage: python -m tests.clients [MODEL] [pytest's arguments]

Without MODEL: apps, each with one task and a tool call, through a scripted model: Claude Code,
Codex, opencode, Qwen Code, Continue, aider, llm, LiteLLM, and by their source Ollama's command,
Open WebUI, Copilot, Zed and Roo Code. They are nobody's dependencies here, and found on PATH: npm
install @anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code @continuedev/cli;
pip install aider-chat, llm with llm-ollama, and litellm, each in an environment of its own.

MODEL is a folder or a GGUF file of a model that follows instructions, for libraries. One whose
template knows no tools shows most: SmolLM2-135M-Instruct. Four APIs by their official clients
(openai, anthropic, ollama), and langchain, instructor and pydantic-ai with tools: pip install
langchain-openai instructor 'pydantic-ai-slim[openai]'. What is not installed is skipped, and named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

APPS = ("check_apps.py",)
LIBRARIES = ("check_official.py", "check_frameworks.py")


def main(*arguments: str) -> int:
    """Run the checks; pytest's exit code."""
    here, environ, checks = Path(__file__).resolve().parent, dict(os.environ), APPS
    if arguments and not arguments[0].startswith("-"):
        model, *arguments = arguments
        environ["PENSTOCK_CHECKED_MODEL"] = str(Path(model).resolve())
        checks = LIBRARIES
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rs", "-W", "ignore", *arguments]
    command += [str(here / name) for name in checks]
    return subprocess.run(command, cwd=here.parents[1], env=environ, check=False).returncode


if __name__ == "__main__":
    if "-h" in sys.argv or "--help" in sys.argv:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
