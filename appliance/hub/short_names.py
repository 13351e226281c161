"""List short names of well-known open models, such as `qwen3:0.6b`.

Each is an instruction-tuned model of a supported family, published on the hub under that name. A
name without a tag means the most usual size. The table [short_names] of the configuration adds
more. `model_aliases` differs: it names the served model for clients.

Never: imports anything.
"""

from __future__ import annotations

from collections.abc import Mapping

SHORT_NAMES: Mapping[str, str] = {
    "gemma2": "google/gemma-2-9b-it",
    "gemma2:2b": "google/gemma-2-2b-it",
    "gemma2:9b": "google/gemma-2-9b-it",
    "gemma2:27b": "google/gemma-2-27b-it",
    "gemma3": "google/gemma-3-4b-it",
    "gemma3:270m": "google/gemma-3-270m-it",
    "gemma3:1b": "google/gemma-3-1b-it",
    "gemma3:4b": "google/gemma-3-4b-it",
    "gemma3:12b": "google/gemma-3-12b-it",
    "gemma3:27b": "google/gemma-3-27b-it",
    "gpt-oss": "openai/gpt-oss-20b",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "gpt-oss:120b": "openai/gpt-oss-120b",
    "llama3.1": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1:70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama3.2": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2:3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.3": "meta-llama/Llama-3.3-70B-Instruct",
    "llama3.3:70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral:8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "phi3.5": "microsoft/Phi-3.5-mini-instruct",
    "phi3.5:3.8b": "microsoft/Phi-3.5-mini-instruct",
    "phi4": "microsoft/phi-4",
    "phi4:14b": "microsoft/phi-4",
    "phi4-mini": "microsoft/Phi-4-mini-instruct",
    "phi4-mini:3.8b": "microsoft/Phi-4-mini-instruct",
    "qwen2.5": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5:14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5:32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-coder": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "qwen2.5-coder:32b": "Qwen/Qwen2.5-Coder-32B-Instruct",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B",
    "qwen3:4b": "Qwen/Qwen3-4B",
    "qwen3:8b": "Qwen/Qwen3-8B",
    "qwen3:14b": "Qwen/Qwen3-14B",
    "qwen3:32b": "Qwen/Qwen3-32B",
    "qwen3:30b-a3b": "Qwen/Qwen3-30B-A3B",
    "smollm2": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2:135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "smollm3:3b": "HuggingFaceTB/SmolLM3-3B",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "tinyllama:1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
"""Hub names by the short names that users type, in lower case."""
