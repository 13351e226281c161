"""Architectures that people will ask for and that are not served, each with the reason.

What is served is one decoder: layers of attention over a pool whose blocks have one shape, and of a
feed-forward, in one stream. These need more than a row of the table of families.
Owns: the reasons.
Invariant: none of them is in the table of families.
Never: reads a file.
"""

from __future__ import annotations

_RECURRENT = (
    "most of its layers keep a state that every token changes, which no block of the KV pool "
    "holds: moving, caching and recovering a sequence would have to carry it too"
)
_STREAMS = (
    "it adds embeddings of their own to each layer, beside the one stream of tokens, and some "
    "layers use the keys and values of another"
)
_CHUNKED = (
    "its attention ends at borders of chunks, which no attention kernel here knows, and its "
    "experts are weighed before they compute; the smallest has 109 billion parameters"
)
_LATENT = "its keys and values are kept compressed, in a form that the KV pool does not have"

UNSERVED = {
    "gemma3n": _STREAMS,
    "llama4": _CHUNKED,
    "qwen3next": _RECURRENT,
    "qwen35": _RECURRENT,
    "deepseekv2": _LATENT,
    "deepseekv3": _LATENT,
}
"""By the beginning of an architecture's name in lower case, without marks: config.json and GGUF
have the same up to that."""


def reason(name: str) -> str | None:
    """Why an architecture or model type is not served, if that is known here."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    plain = plain.replace("deepseek2", "deepseekv2")
    return next((why for start, why in UNSERVED.items() if plain.startswith(start)), None)
