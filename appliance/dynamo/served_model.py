"""Describe to Dynamo what a daemon serves.

Owns: the names of parsers in Dynamo's words.
Invariant: a request that comes again after a death goes on exactly: its seed, penalties, minimum
and grammar follow all of the output, however much of that stands in its prompt by now.
Invariant: two that are equal need one registration.
Never: asks the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.api.tool_format import FORMATS, THOUGHTS, output_format_of
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer

TOOL_PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "llama": "llama3_json",
    "pythonic": "pythonic",
    "harmony": "harmony",
    "deepseek_v3": "deepseek_v3",
    "glm": "glm45",
    "gemma": "gemma4",
}
"""Our formats of tool calls, by the names of Dynamo's parsers; others it has none for."""
REASONING_PARSERS = {
    "think": "qwen3",
    "mistral": "mistral",
    "gemma": "gemma4",
    "granite": "granite",
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, and how a daemon serves it."""

    model_id: str
    folder: Path
    """With its config.json, tokenizer and chat template, which the frontend reads."""
    max_model_len: int
    block_size: int
    num_blocks: int
    """Of all pools together."""
    tool_parser: str | None = None
    """Dynamo's names; None: the model writes no calls that it could read."""
    reasoning_parser: str | None = None


def served_model(models: dict[str, Any], frame: dict[str, Any]) -> ServedModel:
    """Read /v1/models and a frame.

    Raises:
        ConfigError: the model is of a kind that Dynamo's frontend cannot read.
    """
    model = models["data"][0]
    folder = Path(model["root"])
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            "Dynamo's frontend needs a folder with tokenizer.json and config.json",
            where=str(folder),
            hint="serve the model as safetensors in Hugging Face's form instead of a GGUF file",
        )
    pools = [pool for pool in frame["pools"] if pool["name"] != "ring"]
    tools, reasoning = _parsers(folder, model["tool_parser"], model["reasoning_parser"])
    return ServedModel(
        model_id=model["id"],
        folder=folder,
        max_model_len=model["max_model_len"],
        block_size=pools[0]["block_size"],
        num_blocks=sum(pool["num_blocks"] for pool in pools),
        tool_parser=tools,
        reasoning_parser=reasoning,
    )


def used_blocks(frame: dict[str, Any]) -> int:
    """Blocks that new work cannot have."""
    pools = [pool for pool in frame["pools"] if pool["name"] != "ring"]
    return sum(pool["num_blocks"] - pool["free"] - pool["cached"] for pool in pools)


def _parsers(folder: Path, tools: str, reasoning: str) -> tuple[str | None, str | None]:
    """Dynamo's names for how the model writes calls and reasoning."""
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.chat_template is None:
        return None, None
    found = output_format_of(tokenizer, tools, reasoning)
    tool = next((name for name, one in FORMATS.items() if one is found.tools), None)
    thought = next((name for name, one in THOUGHTS.items() if one is found.thoughts), None)
    if tool == "harmony":
        return "harmony", "gpt_oss"
    return TOOL_PARSERS.get(tool or ""), REASONING_PARSERS.get(thought or "")
