"""Define verify: compute fixed prompts in every way that the daemon has, and compare the texts.

Invariant: each way gets the same token ids, sent without a chat template, and is compared with the
first; a way that was not tried is absent.
Never: uses a running daemon; imports torch or transformers, which compute in another process.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from appliance.cli import listings, models, terminal
from appliance.cli.tables import Format
from appliance.cli.terminal import Output
from appliance.client.calls import Client
from appliance.client.ephemeral import daemon
from engine.errors import PenstockError
from engine.system.python_child import python_command

PROMPT_TOKENS = (5, 64, 65, 300)
"""Lengths below, at and behind a block's border, and of several chunks."""
_TIMEOUT_S = 600.0


class Text(NamedTuple):
    """One prompt's output in one way."""

    token_ids: list[int]
    cached_tokens: int = 0
    margins: tuple[float, ...] = ()
    """How much log-probability put each token ahead of the next likeliest."""


def verify(
    model: models.Name,
    dtype: Annotated[
        str, typer.Option(metavar="CHOICE", help="As of serve; float32 is the strict test.")
    ] = "auto",
    weights: Annotated[str, typer.Option(metavar="CHOICE", help="As of serve.")] = "stored",
    kv_dtype: Annotated[str, typer.Option(metavar="CHOICE", help="As of serve.")] = "auto",
    tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens of each output.")] = 32,
    output: Output = Format.TABLE,
) -> None:
    """Compute fixed prompts in every way that the daemon has, and compare the texts.

    Ways: cold, cached, in a batch, handed over from prefill to decode, with guessed tokens, and by
    transformers where it is installed. Ends with 1 if a text differs; MARGIN says how near the two
    tokens were there.
    """
    path = models.named(model, None).folder
    options = ["--model", str(path), "--dtype", dtype, "--weights", weights]
    options += ["--kv-dtype", kv_dtype, "--roles", "static", "--ssd-cache", "off"]
    terminal.note("penstock: starting two daemons of its own, one after the other ...")
    with daemon(*options, "--speculate", "off") as where:
        client = Client(where, timeout_s=_TIMEOUT_S)
        state = client.get("/v1/penstock/state")
        prompts = _prompts(client, tokens)
        texts = dict(_texts(client, prompts, tokens))
    with daemon(*options, "--speculate", "7") as where:
        client = Client(where, timeout_s=_TIMEOUT_S)
        texts["speculated"] = [_text(client, prompt, tokens, "guessed") for prompt in prompts]
    if weights == "stored" and kv_dtype == "auto" and path.is_dir():  # else it rounds elsewhere
        texts |= _by_transformers(path, state["dtype"], prompts, tokens)
    rows = compare(texts, [len(prompt) for prompt in prompts])
    terminal.write(terminal.listing("verify", listings.TEXTS, output).render(rows))
    if output.is_for_people:
        terminal.write(_to_send(state, rows) + "\n")
    if any(row["result"] != "equal" for row in rows):
        raise typer.Exit(1)


def compare(texts: dict[str, list[Text]], prompt_tokens: list[int]) -> list[dict[str, Any]]:
    """Compare each way's texts with the first way's, in a row for each way and prompt."""
    first, *others = texts
    rows = []
    for way in others:
        for length, expected, found in zip(prompt_tokens, texts[first], texts[way], strict=True):
            pairs = zip(expected.token_ids, found.token_ids, strict=True)
            equal = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            total = len(expected.token_ids)
            rows.append(
                {
                    "way": way,
                    "prompt_tokens": length,
                    "cached_tokens": found.cached_tokens,
                    "equal_tokens": total if equal is None else equal,
                    "output_tokens": total,
                    "margin": None if equal is None else expected.margins[equal],
                    "result": "equal" if equal is None else "DIFFERENT",
                }
            )
    return rows


def _prompts(client: Client, num_tokens: int) -> list[list[int]]:
    """Cut prompts out of the token ids of one fixed English text."""
    text = (files("engine.starter") / "sample" / "runbook.txt").read_text("utf-8")
    ids = client.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    room = client.get("/v1/models")["data"][0]["max_model_len"] - num_tokens
    lengths = [length for length in PROMPT_TOKENS if length <= room]
    if not lengths:
        raise PenstockError(f"the model has no room for {num_tokens} tokens behind a prompt")
    starts = range(0, len(ids), max(len(ids) // (2 * len(lengths)), 1))
    ids += ids  # a vocabulary of words makes few tokens of it
    return [ids[start : start + n] for start, n in zip(starts, lengths, strict=False)]


def _texts(client: Client, prompts: list[list[int]], tokens: int) -> Iterator[tuple[str, Any]]:
    """Compute the prompts in each way, the reference first."""

    def one(salt: str, prompt: list[int]) -> Text:
        return _text(client, prompt, tokens, salt)

    roles = "/v1/penstock/roles"
    client.post(roles, {"roles": "colocated"})
    yield "cold", [one("alone", prompt) for prompt in prompts]
    yield "cached", [one("alone", prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        yield "in a batch", list(pool.map(lambda prompt: one("batch", prompt), prompts))
    client.post(roles, {"roles": "static"})
    yield "handed over", [one("split", prompt) for prompt in prompts]


def _text(client: Client, prompt: list[int], tokens: int, salt: str) -> Text:
    reply = client.post(
        "/v1/completions",
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "repetition_penalty": 1,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "cache_salt": f"verify {salt}",  # finds only what this way has computed
        },
    )
    choice = reply["choices"][0]
    best = [sorted(each.values())[-2:] for each in choice["logprobs"]["top_logprobs"]]
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Text(choice["token_ids"], cached, tuple(each[-1] - each[0] for each in best))


def _by_transformers(
    folder: Path, dtype: str, prompts: list[list[int]], tokens: int
) -> dict[str, list[Text]]:
    """Have transformers compute the same prompts; empty where it is missing or cannot."""
    if importlib.util.find_spec("transformers") is None:
        terminal.note("penstock: transformers is not installed here: not compared with it")
        return {}
    asked = {"folder": str(folder), "dtype": dtype, "prompts": prompts, "num_tokens": tokens}
    ended = subprocess.run(
        python_command("-m", "engine.worker.reference"),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        why = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        terminal.note(f"penstock: transformers cannot compute this model: {why[:200]}")
        return {}
    found = json.loads(ended.stdout)
    return {f"transformers {found['version']}": [Text(ids) for ids in found["outputs"]]}


def _to_send(state: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Say on one line what a report needs."""
    ways = {row["way"]: [r["result"] for r in rows if r["way"] == row["way"]] for row in rows}
    told = ", ".join(f"{way} {all_.count('equal')}/{len(all_)}" for way, all_ in ways.items())
    workers = ", ".join(sorted({str(worker["device"]) for worker in state["workers"]}))
    about = (
        f"penstock {metadata.version('penstock')}, {state['model']}, {state['dtype']}, {workers}"
    )
    return f"{about}: equal {told}"
