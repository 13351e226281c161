"""Find the tokens that end a reply: all that any of a model's files says.

Fine-tunes often change one file and leave the others as they were; a reply that no file's token
ends would run on to its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.checkpoint.chat_files import read_chat_template
from engine.checkpoint.folder_files import FolderFiles
from engine.checkpoint.token_files import read_token_files

END_MARKS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
    | {"<end_of_turn>", "<|end_of_turn|>", "<turn|>", "[|endofturn|]", "<|endofturn|>", "<eos>"}
    | {"<|observation|>", "<seed:eos>", "</s>", "<EOT>", "<|EOT|>", "<|eot|>", "<|eom|>"}
    | {"<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>"}
    | {"<end_of_utterance>", "<|role_end|>", "<|eos|>", "[e~[", "[EOS]", "[EOT]", "_<EOT>"}
)
"""Control tokens that end a reply, whatever the files call the end-of-text token."""
_MESSAGE_END, _HARMONY_ENDS = "<|end|>", frozenset({"<|return|>", "<|call|>"})
_NEXT_TURN, _GLM_RESULT = "<|user|>", "<|observation|>"


def end_marks(texts: Iterable[str]) -> frozenset[str]:
    """Choose the marks that end a reply out of a model's tokens."""
    known = frozenset(texts)
    found = END_MARKS & known
    if _GLM_RESULT in found:  # GLM's turns have no end: the mark of the next one is it
        found |= known & {_NEXT_TURN}
    # in Harmony a reply has several messages, and each ends with a mark of its own
    return found - {_MESSAGE_END} if found & _HARMONY_ENDS else found


def end_tokens(
    folder: FolderFiles, stated: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """List the tokens that end a reply by the file that says so.

    Args:
        stated: what generation_config.json and config.json say, by their names.

    Raises:
        CheckpointError: a file cannot be read.
    """
    tokens = read_token_files(folder)
    by_place = {place: ids for place, ids in stated.items() if ids}
    for place, named in tokens.named.items():
        text = named.get("eos_token")
        if text is not None and (token_id := tokens.token_id(text)) is not None:
            by_place[place] = (token_id,)
    template = read_chat_template(folder)
    if template is not None:
        known = {mark for mark in (*END_MARKS, _NEXT_TURN) if mark in template.text}
        ids = {
            tokens.token_id(mark)
            for mark in end_marks(known | set(tokens.ids))
            if mark in template.text
        }
        if own := tuple(sorted(token_id for token_id in ids if token_id is not None)):
            by_place[f"{template.place}, as end of turn"] = own
    return by_place
