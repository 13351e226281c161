"""Describe to Dynamo what a daemon serves.

Invariant: equal descriptions need one registration.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.api.formats.format_choice import THOUGHTS, output_format_of
from appliance.api.formats.tool_format import FORMATS
from engine.errors import ConfigError
from engine.text.read_models import read_tokenizer

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
"""Dynamo's parsers by our formats of tool calls; other formats have none."""
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
    """The folder with config.json, tokenizer and chat template, which the frontend reads."""
    max_model_len: int
    block_size: int
    num_blocks: int
    """Blocks of all pools together."""
    tool_parser: str | None = None
    """Dynamo's parser of tool calls; None: none fits."""
    reasoning_parser: str | None = None


def served_model(models: dict[str, Any], frame: dict[str, Any]) -> ServedModel:
    """Describe the model from /v1/models and a frame.

    Raises:
        ConfigError: Dynamo's frontend cannot read this kind of model.
    """
    model = models["data"][0]
    folder = Path(model["root"])
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            "Dynamo's frontend needs a folder with tokenizer.json and config.json",
            where=str(folder),
            hint="serve the model as safetensors in Hugging Face format instead of GGUF",
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
    """Count the blocks that new work cannot have."""
    pools = [pool for pool in frame["pools"] if pool["name"] != "ring"]
    return sum(pool["num_blocks"] - pool["free"] - pool["cached"] for pool in pools)


def _parsers(folder: Path, tools: str, reasoning: str) -> tuple[str | None, str | None]:
    """Return Dynamo's parsers for tool calls and reasoning."""
    tokenizer = read_tokenizer(folder)
    if tokenizer.chat_template is None:
        return None, None
    found = output_format_of(tokenizer, tools, reasoning)
    tool = next((name for name, one in FORMATS.items() if one is found.tools), None)
    thought = next((name for name, one in THOUGHTS.items() if one is found.thoughts), None)
    if tool == "harmony":
        return "harmony", "gpt_oss"
    return TOOL_PARSERS.get(tool or ""), REASONING_PARSERS.get(thought or "")
