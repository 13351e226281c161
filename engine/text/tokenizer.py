"""Text to token ids, and back while they come: the one door to `tokenizers`.

Owns: the model's tokenizer, from tokenizer.json or made of a GGUF file's metadata; the chat
template that belongs to it; of streamed text the part that is not yet a whole character.
Invariant: encode, decode and render give what transformers gives for the same folder; a GGUF
file's ids are its own.
Never: knows requests, and never loads a tokenizer from anywhere but the folder.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import CheckpointError, RequestError
from engine.folder.gguf import GgufModel, find_gguf
from engine.text.chat_template import ChatTemplate

# A tokenizer out of a GGUF file's metadata, as the checkpoint's own tokenizer.json would be.
# The format keeps tokens, their kinds, and either merges or scores; how text is cut before merging
# it keeps as a name only. The names are a table here: an unknown one would cut words elsewhere than
# the model has learnt them, so it is refused.
# Invariant: ids are those of the file. Never: reads a file.


_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, after_signs: str = r"[\r\n]*", contractions: str = _CONTRACTIONS) -> str:
    """Contractions, words with the sign before them, numbers, signs, white space."""
    return (
        rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{after_signs}|{_SPACES}"
    )


def _cased(digits: str, ending: str) -> str:
    """The same with words that also end where small letters are followed by capitals."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}[{upper}]*[{lower}]+{ending}|{before}[{upper}]+[{lower}]*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "mellum", "gigachat"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    "deepseek-v3": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
    "seed-coder": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), (_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "tekken": (_cased(r"\p{N}", ""),),
}
"""Patterns that cut text, one after the other, by the name that the file has for them."""
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"}) | {
    "glm4", "tekken",
}  # fmt: skip
"""Those whose tokens are used as they are, before any merging."""
_BEGINS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"})
"""Those whose texts begin with a token of its own, where the file does not say."""
_NORMALISED = frozenset({"qwen2", "deepseek-r1-qwen"})


def read_tokenizer(model: GgufModel) -> tokenizers.Tokenizer:
    """The tokenizer of a file.

    Raises:
        CheckpointError: it has none, or one of a kind that is not known; says which.
    """
    kind = model.text("tokenizer.ggml.model")
    tokens = _tokens(model)
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(model, tokens)
        elif kind == "llama":
            tokenizer = _sentence_piece(model, tokens)
        else:
            needed = "gpt2 (byte-level BPE) and llama (SentencePiece) are served"
            raise model.bad("tokenizer.ggml.model", needed)
        _add_tokens(tokenizer, model, tokens)
        _add_ends(tokenizer, model, tokens, kind)
    except CheckpointError:
        raise
    # tokenizers raises plain Exception for whatever it refuses
    except Exception as error:
        what = f"its tokenizer cannot be made: {error}"
        raise CheckpointError(what[:300], where=str(model.path)) from error
    return tokenizer


def special_tokens(model: GgufModel) -> dict[str, str]:
    """`bos_token` and its kind, which templates use as variables."""
    tokens = _tokens(model)
    ids = {name: model.integer(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIALS.items()}
    return {
        name: tokens[token_id]
        for name, token_id in ids.items()
        if token_id is not None and token_id < len(tokens)
    }


def _tokens(model: GgufModel) -> list[str]:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise model.bad("tokenizer.ggml.tokens", "a list of tokens is needed")
    return tokens


def _byte_level(model: GgufModel, tokens: list[str]) -> tokenizers.Tokenizer:
    name = model.text("tokenizer.ggml.pre")
    cuts = _CUTS.get(name or "")
    if cuts is None:
        known = ", ".join(sorted(_CUTS))
        raise model.bad("tokenizer.ggml.pre", f"known ways to cut text are {known}")
    listed = model.metadata.get("tokenizer.ggml.merges")
    if not isinstance(listed, list):
        raise model.bad("tokenizer.ggml.merges", "a list of merges is needed")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in listed)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(_vocabulary(tokens), merges, ignore_merges=name in _WHOLE_WORDS)
    )
    if name in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(model: GgufModel, tokens: list[str]) -> tokenizers.Tokenizer:
    scores = model.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, array) or len(scores) != len(tokens):
        raise model.bad("tokenizer.ggml.scores", "one for each token is needed")
    unknown = tokens[min(model.integer("tokenizer.ggml.unknown_token_id") or 0, len(tokens) - 1)]
    vocabulary = _vocabulary(tokens)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            list(_merges(vocabulary, scores)),
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    has_prefix = model.flag("tokenizer.ggml.add_space_prefix") is not False
    begin = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
    end = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: array[float]) -> Iterator[tuple[str, str]]:
    """Every way to make a token of two others, the likeliest tokens first."""
    found = []
    for token, token_id in vocabulary.items():
        if len(token) > 1 and not (token.startswith("<0x") and len(token) == 6):
            splits = ((token[:i], token[i:]) for i in range(1, len(token)))
            known = [each for each in splits if each[0] in vocabulary and each[1] in vocabulary]
            known.sort(key=lambda each: (vocabulary[each[0]], vocabulary[each[1]]))
            found += [(scores[token_id], each) for each in known]
    found.sort(key=lambda each: -each[0])
    return (each for _, each in found)


def _vocabulary(tokens: Iterable[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _add_tokens(tokenizer: tokenizers.Tokenizer, model: GgufModel, tokens: list[str]) -> None:
    """Control tokens, which are silent in replies, and others that no merging cuts."""
    kinds = model.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = array("i", [1] * len(tokens))
    if not isinstance(kinds, array) or len(kinds) != len(tokens):
        raise model.bad("tokenizer.ggml.token_type", "one for each token is needed")
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_ends(
    tokenizer: tokenizers.Tokenizer, model: GgufModel, tokens: list[str], kind: str
) -> None:
    """What stands before and after a text, where it is no conversation."""
    begins = kind == "llama" or model.text("tokenizer.ggml.pre") in _BEGINS
    said = {"bos": model.flag("tokenizer.ggml.add_bos_token")}
    said["eos"] = model.flag("tokenizer.ggml.add_eos_token")
    wanted = {"bos": begins if said["bos"] is None else said["bos"], "eos": said["eos"] is True}
    ids = {
        name: model.integer(f"tokenizer.ggml.{name}_token_id")
        for name, is_wanted in wanted.items()
        if is_wanted
    }
    marks = {
        name: (tokens[token_id], token_id)
        for name, token_id in ids.items()
        if token_id is not None and token_id < len(tokens)
    }
    if marks:
        before, after = (f"{marks[name][0]}" if name in marks else "" for name in ("bos", "eos"))
        parts = [each for each in (before, "$A", after) if each]
        pair = [each for each in (before, "$A", "$B", after) if each]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, pair=pair, special_tokens=list(marks.values())
        )


# --------------------------------------------------------------------------------------------------


MAX_HELD_LENGTH = 4096
"""Longer texts and lists of ids are worked on in batches of one: `tokenizers` keeps the interpreter
lock while it works on a single text, and gives it up for a batch. Short ones are faster alone."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_tokens = dict(special_tokens or {})
        if isinstance(chat_template, str):
            chat_template = ChatTemplate(chat_template, "chat_template")
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._silent_ids = {token_id for token_id, token in added.items() if token.special}
        decoder = _decoder_types(backend)
        self._is_byte_level = "ByteLevel" in decoder
        self._has_byte_tokens = "ByteFallback" in decoder
        self.is_context_free = decoder == {"ByteLevel"}
        """A text's bytes are those of its tokens, whatever stands beside each."""
        self._pieces: dict[int, str] = {}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocab), default=1)
        """No token stands for more characters, so a text has at least len / this many tokens."""

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a checkpoint.

        Of a GGUF file, or a folder that has only such a one, the same out of its metadata.

        Raises:
            CheckpointError: a file is missing or broken; `where` names it.
        """
        gguf = find_gguf(folder)
        if gguf is not None:
            return cls._from_gguf(GgufModel.open(gguf))
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                "there is no tokenizer.json",
                where=str(path),
                hint="save the checkpoint with a fast tokenizer (transformers: save_pretrained)",
            )
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        # tokenizers raises plain Exception for whatever its JSON reader or a model refuses.
        except Exception as error:
            raise CheckpointError(f"cannot read the tokenizer: {error}", where=str(path)) from error
        config = _read_config(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_config(folder / "special_tokens_map.json")
        return cls(
            backend,
            chat_template=_read_template(folder, config),
            special_tokens=_special_tokens(config),
        )

    @classmethod
    def _from_gguf(cls, model: GgufModel) -> Tokenizer:
        source = model.text("tokenizer.chat_template")
        tool_source = model.text("tokenizer.chat_template.tool_use")
        template = ChatTemplate(source, str(model.path), tool_source) if source else None
        return cls(
            read_tokenizer(model), chat_template=template, special_tokens=special_tokens(model)
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the ids its post-processor adds unless told not to."""
        if len(text) > MAX_HELD_LENGTH:
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        else:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary are silent."""
        ids = [token_id for token_id in token_ids if token_id < self.vocab_size]
        if len(ids) > MAX_HELD_LENGTH:
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return str(text)

    def piece(self, token_id: int) -> str:
        """What a token decodes to alone; kept, as the same ones come again and again."""
        text = self._pieces.get(token_id)
        if text is None:
            text = self._pieces[token_id] = self.decode([token_id])
        return text

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where in the text each of its tokens stands; (0, 0) for those that encoding adds."""
        if len(text) > MAX_HELD_LENGTH:
            (encoding,) = self._backend.encode_batch([text])
        else:
            encoding = self._backend.encode(text)
        spans: list[tuple[int, int]] = encoding.offsets
        return spans

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The prompt for a conversation, with the options of ChatTemplate.render.

        Encode it with `add_special_tokens=False`: the template writes its own.

        Raises:
            RequestError: there is no template (`no_chat_template`) or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions with a prompt",
                code="no_chat_template",
                param="messages",
            )
        variables = {**self._special_tokens, **options.pop("variables", {})}
        return self.chat_template.render(messages, variables=variables, **options)

    def has_token(self, text: str) -> bool:
        """Whether the vocabulary has a token that is written so."""
        return self._backend.token_to_id(text) is not None

    def special_id(self, text: str) -> int | None:
        """Id of the special token that is written so; None if there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self._silent_ids else None

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of the texts that are special tokens, with their ids."""
        found = {text: self.special_id(text) for text in texts if text}
        return {text: token_id for text, token_id in found.items() if token_id is not None}

    def is_silent(self, token_id: int) -> bool:
        """True for special ids, and for ids that the vocabulary does not have."""
        return token_id in self._silent_ids or self._backend.id_to_token(token_id) is None

    def token(self, token_id: int) -> str | None:
        """How the vocabulary itself writes a token; None if it does not have it."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_text(self, token_id: int) -> str:
        """What one token alone stands for; U+FFFD where it is part of a character."""
        raw = self.token_bytes(token_id)
        return "" if raw is None else raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that one token stands for; None if the vocabulary does not have it."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._is_byte_level:
            return b"".join(_byte_of(character) for character in token)
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


def _byte_of(character: str) -> bytes:
    """The byte that a character of a byte-level vocabulary stands for.

    Printable Latin-1 stands for itself; the 68 others were numbered from U+0100 in byte order.
    """
    code = ord(character)
    if code >= 0x100:
        rank = code - 0x100
        return _HIDDEN_BYTES[rank : rank + 1] or character.encode()
    return bytes((code,))


_HIDDEN_BYTES = bytes((*range(0x21), *range(0x7F, 0xA1), 0xAD))


def _decoder_types(backend: tokenizers.Tokenizer) -> set[str]:
    """Names of the decoder's parts."""
    if backend.decoder is None:
        return set()
    # Its pickled state is its JSON; to_str() would write out the whole vocabulary.
    spec = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in spec.get("decoders", [spec])}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error
    if not isinstance(config, dict):
        raise CheckpointError("it is not a JSON object", where=str(path))
    return config


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind, which templates use as variables."""
    found = {}
    extra = config.get("extra_special_tokens")
    for name, value in {**config, **(extra if isinstance(extra, dict) else {})}.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _read_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    """The chat template; a file of its own wins over the config."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error
    where = str(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    named: dict[str, Any] = {"default": template}
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
    source, tool_source = named.get("default"), named.get("tool_use")
    if not isinstance(source, str | None) or not isinstance(tool_source, str | None):
        raise CheckpointError("chat_template is neither a string nor a list", where=where)
    return ChatTemplate(source, where, tool_source) if source else None


# From token ids to text while they come, a piece per token.
# Invariant: never half a character; the pieces add up to what the whole would decode to (of a run
# of SentencePiece byte tokens that turns invalid, what was valid so far is already out and stays).
# Never: keeps more than a bounded window, so the cost per token does not grow.


REPLACEMENT = "\ufffd"
MAX_UNFINISHED_TOKENS = 3
"""An unfinished character in UTF-8."""
MAX_HELD_TOKENS = 8
"""Tokens held back at most. A longer run that ends in U+FFFD is cut before what may yet become a
character, where its parts, decoded alone, show that no finished character spans the cut."""


class Detokenizer:
    """One sequence's way from token ids to text, a piece per token.

    Decoders are not free of context: SentencePiece ones strip the space before the first token,
    and a character may span tokens. So the new tokens are decoded behind the last piece's tokens,
    and a piece that ends in U+FFFD waits for its rest. Each push decodes a bounded window.

    Args:
        tokenizer: the model's.
        context_ids: what comes before, if the text continues it (a prompt to complete); otherwise
            the text begins a document of its own.
    """

    def __init__(self, tokenizer: Tokenizer, context_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []
        spoken = [token_id for token_id in context_ids if not tokenizer.is_silent(token_id)]
        self._move_context(spoken[-MAX_HELD_TOKENS:])

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if self._tokenizer.is_context_free and not self._held:
            piece = self._tokenizer.piece(token_id)
            if not piece.endswith(REPLACEMENT):
                return piece
        if self._tokenizer.is_silent(token_id):
            return ""
        self._held.append(token_id)
        text = self._text_of(self._held)
        if not text.endswith(REPLACEMENT):
            return self._emit(len(self._held), text)
        if len(self._held) < MAX_HELD_TOKENS:
            return ""
        size = self._settled_size()
        return self._emit(size, self._text_of(self._held[:size]))

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""
        return self._emit(len(self._held), self._text_of(self._held)) if self._held else ""

    def _text_of(self, token_ids: list[int]) -> str:
        whole = self._tokenizer.decode(self._context + token_ids)
        if whole.startswith(self._context_text):
            return whole[len(self._context_text) :]
        # A byte-fallback decoder judges a run of byte tokens as a whole; what is out is out.
        return self._tokenizer.decode(token_ids)

    def _emit(self, size: int, text: str) -> str:
        done, self._held = self._held[:size], self._held[size:]
        self._move_context(done)
        return text

    def _move_context(self, token_ids: list[int]) -> None:
        tokenizer = self._tokenizer
        if not tokenizer.is_context_free:
            self._context = token_ids
            is_one = len(token_ids) == 1
            self._context_text = (
                tokenizer.piece(token_ids[0]) if is_one else tokenizer.decode(token_ids)
            )

    def _settled_size(self) -> int:
        """How many held tokens, from the front, no later token can change."""
        whole = self._text_of(self._held)
        for size in range(len(self._held) - MAX_UNFINISHED_TOKENS, 0, -1):
            tail = self._tokenizer.decode(self._held[size:])
            if self._text_of(self._held[:size]) + tail == whole:
                return size
        return len(self._held)
