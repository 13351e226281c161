"""The server tests of llama.cpp and vLLM against a running daemon: what they ask, what we answer.

usage: python -m tests.peers FOLDER URL KEY MODEL [pytest's arguments]

FOLDER is tools/server/tests of llama.cpp's sources, which the source archive of llama-cpp-python
has under vendor/llama.cpp, or tests of vLLM's source archive. The daemon listens on URL, as
http://127.0.0.1:8000, with a key; MODEL is the folder of what it serves. Needs openai, requests and
pytest; llama.cpp's tests also filelock and wget, vLLM's also anthropic, jsonschema, pybase64,
pytest-asyncio, regex, torch and transformers. docs/peer-suites.md says what fails, and why. The
daemon is started with --model-aliases '*' --cors-origins '*', for the tests name models of their
own, and llama.cpp's ask as pages do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VLLM = (
    "anthropic/test_messages",
    *(
        f"openai/chat_completion/test_{name}"
        for name in (
            *("chat", "chat_completion", "chat_echo", "chat_logit_bias_validation"),
            *("extra_content_fields", "root_path"),
        )
    ),
    *(
        f"openai/completion/test_{name}"
        for name in ("completion", "prompt_validation", "token_in_token_out")
    ),
    "openai/models/test_models",
    "openai/responses/test_simple",
    *("openai/test_chunked_prompt", "openai/test_return_token_ids"),
    *("openai/test_return_tokens_as_ids", "openai/test_stop_token_ids"),
    *("serve/instrumentator/test_basic", "serve/tokenize/test_tokenization"),
    "openai/chat_completion/test_completion_with_function_calling",
)
"""Files about APIs that are spoken here. Tests in them that send nothing are left out."""


def main(folder: str, url: str, key: str, model: str, *arguments: str) -> int:
    """Run them in their folder."""
    tests = Path(folder).resolve()
    is_vllm = (tests / "entrypoints").is_dir()
    environ = {
        **os.environ,
        "PENSTOCK_URL": url,
        "PENSTOCK_KEY": key,
        "PENSTOCK_MODEL": str(Path(model).resolve()),
        "PYTHONPATH": f"{tests}:{Path(__file__).resolve().parent}",
    }
    if is_vllm:
        environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)
        files = [f"tests/entrypoints/{name}.py" for name in VLLM]
        own = ["-p", "stub_vllm", "-c", os.devnull, f"--rootdir={tests.parent}"]
        own += [f"--confcutdir={tests / 'entrypoints'}", "-p", "no:cacheprovider"]
    else:
        files = ["unit"]
        own = ["-p", "stub_llamacpp", "-m", "not slow"]  # as their tests.sh does
    command = [sys.executable, "-m", "pytest", *own, "-q", "--tb=line", *arguments, *files]
    cwd = tests.parent if is_vllm else tests
    return subprocess.run(command, cwd=cwd, env=environ, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
