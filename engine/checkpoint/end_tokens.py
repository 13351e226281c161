"""Find the tokens that end a reply: all that any of a model's files says.

Fine-tunes often change one file and leave the others as they were; a reply that no file's token
ends would run on to its limit.

Never: reads weights or an ordinary vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.checkpoint.chat_files import (
    SPECIAL_FILES,
    read_added_tokens,
    read_chat_template,
    read_object,
    token_text,
)

END_MARKS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
    | {"<end_of_turn>", "<|end_of_turn|>", "<turn|>", "[|endofturn|]", "<|endofturn|>", "<eos>"}
    | {"<|observation|>", "<seed:eos>", "</s>", "<EOT>", "<|EOT|>", "<|eot|>", "<|eom|>"}
    | {"<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>"}
    | {"<end_of_utterance>"}
)
"""Control tokens that end a reply, whatever the files call the end-of-text token."""
_MESSAGE_END, _HARMONY_ENDS = "<|end|>", frozenset({"<|return|>", "<|call|>"})


def end_marks(texts: Iterable[str]) -> frozenset[str]:
    """Choose the marks that end a reply out of a model's tokens."""
    found = END_MARKS.intersection(texts)
    # in Harmony a reply has several messages, and each ends with a mark of its own
    return found - {_MESSAGE_END} if found & _HARMONY_ENDS else found


def end_tokens(folder: Path, stated: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """List the tokens that end a reply by the file that says so.

    Args:
        stated: what generation_config.json and config.json say, by their names.

    Raises:
        CheckpointError: a file cannot be read.
    """
    added = read_added_tokens(folder)
    by_place = {place: ids for place, ids in stated.items() if ids}
    for place in SPECIAL_FILES:
        text = token_text(read_object(folder / place).get("eos_token"))
        if text in added:
            by_place[place] = (added[text],)
    template = read_chat_template(folder)
    if template is not None:
        marks = [mark for mark in end_marks(added) if mark in template.text]
        if own := tuple(sorted(added[mark] for mark in marks)):
            by_place[f"{template.place}, as end of turn"] = own
    return by_place
