"""Generate greedy tokens with transformers, where the user has installed it.

    python -m engine.worker.reference < {"folder", "dtype", "prompts", "num_tokens"}

Owns: the process that imports transformers; Penstock itself does without.
Invariant: stdout is one JSON document: transformers' version, and each prompt's output tokens.
Never: serves a request, or loads code of a checkpoint.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import torch


def model_of(folder: str, dtype: str) -> Any:
    """Load a checkpoint as transformers does, in evaluation mode."""
    transformers = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    is_text = type(config) in transformers.AutoModelForCausalLM._model_mapping
    kind = "AutoModelForCausalLM" if is_text else "AutoModelForImageTextToText"
    loaded = getattr(transformers, kind).from_pretrained(folder, dtype=getattr(torch, dtype))
    return loaded.eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest continuation, past any end of text."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def main() -> None:
    """Read the request and write the answer."""
    asked = json.load(sys.stdin)
    model = model_of(asked["folder"], asked["dtype"])
    outputs = [greedy(model, prompt, asked["num_tokens"]) for prompt in asked["prompts"]]
    version = import_module("transformers").__version__
    json.dump({"version": version, "outputs": outputs}, sys.stdout)


if __name__ == "__main__":
    main()
