"""Turn text into token ids, and a stream of ids back into text.

Invariant: encode, decode and render equal transformers' for a folder; a GGUF file's ids are its
own.
Never: knows requests, and never loads a tokenizer from outside the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.checkpoint.chat_files import (
    ChatTemplateText,
    read_chat_template,
    template_in_metadata,
)
from engine.checkpoint.folder_files import FolderFiles
from engine.checkpoint.gguf import GgufModel, find_gguf
from engine.checkpoint.token_files import TokenFiles, read_token_files
from engine.checkpoint.tokenizer_source import WHOLE, tokenizer_hint
from engine.errors import CheckpointError, Overran, RequestError, Unreadable, reading_model
from engine.text.chat_template import TOO_COSTLY, ChatTemplate
from engine.text.decoder_stages import check_token_texts, decoder_stages
from engine.text.encoder import LONG_BYTES, Encoder
from engine.text.folder_tokenizer import build_tokenizer
from engine.text.gguf_tokenizer import read_tokenizer, special_tokens
from engine.text.tokenizer_expressions import expressions_of, with_expressions

MAX_ADDED = 1 << 15  # each takes as long to build as ten ordinary ones
"""Maximum of tokens beside the ordinary vocabulary."""
MAX_DECODED_HERE = 64
"""Maximum of token ids that are decoded beside the loop's work: the last ones of a reply."""
MARK_BYTES = 16
"""Bytes besides a text or a pair in a message."""
GROUP_BYTES = LONG_BYTES - (8 << 10)
"""Maximum of texts that are tokenized at once; the job's name and cores come with them."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a checkpoint's files say of its tokenizer and its chats."""

    text: str
    """The tokenizer in the form of tokenizer.json."""
    where: Path
    """The file that it is from."""
    special_tokens: Mapping[str, str]
    """`bos_token` and similar tokens, which templates use as variables."""
    tokens: TokenFiles | None
    """Tokens that files beside it list; None: it is a GGUF file's."""
    template: ChatTemplateText | None
    template_where: Path | None = None
    """The file with the template."""

    @classmethod
    def read(cls, path: Path, *, has_chats: bool = True, source: str = "") -> TokenizerFiles:
        """Read the tokenizer, what files say of its tokens, and the chat template of a checkpoint.

        For a GGUF file, or a folder with only such a file, they come from its metadata.

        Args:
            has_chats: False: leave the template out.
            source: the file that the tokenizer is made from; empty: the preferred one.

        Raises:
            CheckpointError: a file is missing or broken; `where` names it.
        """
        with reading_model(path):
            gguf = find_gguf(path)
            if gguf is not None:
                return cls._of_gguf(GgufModel.open(gguf), has_chats)
            return cls._of_folder(path, has_chats, source)

    @classmethod
    def _of_folder(cls, folder: Path, has_chats: bool, name: str) -> TokenizerFiles:
        files = FolderFiles(folder)
        tokens = read_token_files(files, name)
        if tokens.source is None:
            hint = tokenizer_hint(path.name for path in folder.glob("*"))
            missing = folder / WHOLE
            raise CheckpointError(f"there is no {WHOLE}", where=str(missing), hint=hint)
        where = folder / tokens.source.name
        if (count := len(tokens.ids) + len(tokens.marks)) > MAX_ADDED:
            what = f"{count} tokens beside the vocabulary, at most {MAX_ADDED} are read"
            raise CheckpointError(what, where=str(where))
        with _refusals(where):
            if tokens.source.name == WHOLE:
                text = tokens.vocabulary
                _check_stages(text)
                _check_merges(text)
            else:
                text = build_tokenizer(files, tokens).to_str()
        tokens = replace(tokens, vocabulary="")
        found = read_chat_template(files) if has_chats else None
        place = None if found is None else folder / found.place
        return cls(text, where, tokens.variables, tokens, found, place)

    @classmethod
    def _of_gguf(cls, model: GgufModel, has_chats: bool) -> TokenizerFiles:
        found = template_in_metadata(model.metadata, model.path) if has_chats else None
        text = read_tokenizer(model).to_str()
        return cls(text, model.path, special_tokens(model), None, found, model.path)

    def build(self) -> tokenizers.Tokenizer:
        """Build the tokenizer.

        Raises:
            CheckpointError: it is refused.
        """
        with reading_model(self.where), _refusals(self.where):
            backend = tokenizers.Tokenizer.from_str(self.text)
            if self.tokens is not None:
                _add_listed(backend, self.tokens)
        return backend

    def build_on_trial(self) -> Tokenizer:
        """Build the tokenizer and use it once; what that takes, it takes again elsewhere.

        Raises:
            CheckpointError: it is refused, or a token's text may become too long.
        """
        with reading_model(self.where):
            backend = self.build()
            tokenizer = Tokenizer(backend)
            with _refusals(self.where):
                check_token_texts(tokenizer.max_token_chars, decoder_stages(backend))
            tokenizer.decode(tokenizer.encode(TRIAL_TEXT))
        return tokenizer

    def digest(self) -> bytes:
        """Return what tells these files from others that make other ids."""
        made = hashlib.blake2b(self.text.encode())
        if self.tokens is not None:
            made.update(repr((self.tokens.listed, sorted(self.tokens.marks))).encode())
        return made.digest()


TRIAL_TEXT = "Once upon a time, 1234 \u00e4\u4e2d\U0001f600\n\n  x = [a-b]\t" * 4
"""Letters, digits, signs and spaces, as in any prompt."""


@contextmanager
def _refusals(where: Path) -> Iterator[None]:
    """Turn into CheckpointError the plain Exception that `tokenizers` raises for any reason."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot read the tokenizer: {error}", where=str(where)) from error


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        encoder: Encoder | None = None,
        expressions: str = "",
    ) -> None:
        self._backend, self._encoder, self._expressions = backend, encoder, expressions
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_tokens = dict(special_tokens or {})
        if isinstance(chat_template, str):
            chat_template = ChatTemplate(chat_template, "chat_template")
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._silent_ids = {token_id for token_id, token in added.items() if token.special}
        decoder = {stage["type"] for stage in decoder_stages(backend)}
        self._is_byte_level = "ByteLevel" in decoder
        self._has_byte_tokens = "ByteFallback" in decoder
        self.is_context_free = decoder == {"ByteLevel"}
        """Whether each token stands for fixed bytes, independent of its neighbours."""
        self._pieces: dict[int, str] = {}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocab), default=1)
        """Maximum characters per token; a text has at least len / this many tokens."""

    @classmethod
    def from_folder(cls, path: Path, *, has_chats: bool = True) -> Tokenizer:
        """Read a checkpoint's files and build what they hold, here.

        Raises:
            CheckpointError: as TokenizerFiles.read(), or the chat template is broken.
        """
        return cls.from_files(TokenizerFiles.read(path, has_chats=has_chats))

    @classmethod
    def from_files(cls, files: TokenizerFiles, encoder: Encoder | None = None) -> Tokenizer:
        """Build what was read.

        Args:
            encoder: tokenizes in this one's place.

        Raises:
            CheckpointError: the tokenizer cannot be built, or the chat template is broken.
        """
        found, template = files.template, None
        if found is not None:
            template = ChatTemplate(found.text, str(files.template_where), found.tool_text)
        special = files.special_tokens
        return cls(
            files.build(),
            chat_template=template,
            special_tokens=special,
            encoder=encoder,
            expressions=expressions_of(files.text),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, by default with the ids that its post-processor adds.

        Raises:
            RequestError: the tokenizer refuses the text, or takes too much for it.
            Unavailable: nothing tokenizes it.
        """
        if self._encoder is not None:
            return _numbers(self._asked("encode", text, add_special_tokens))
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_each(
        self,
        texts: Iterable[str | tuple[str, str]],
        add_special_tokens: bool = True,
        *,
        cpus: Sequence[int] = (),
    ) -> Iterator[list[int]]:
        """Yield the ids of each text, and of each pair the ids of two texts as one.

        Texts are tokenized in groups.

        Args:
            cpus: the cores that the process of this tokenizer is to use; empty: any.

        Raises:
            RequestError: as encode().
        """
        for group in _groups(texts):
            if self._encoder is None:
                found = self._backend.encode_batch_fast(
                    group, add_special_tokens=add_special_tokens
                )
                yield from (encoding.ids for encoding in found)
                continue
            asked = group, add_special_tokens, list(cpus)
            numbers = _numbers(self._asked("encode_each", *asked))
            at = len(group)
            for count in numbers[:at]:
                yield numbers[at : at + count]
                at += count

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids; ids outside the vocabulary are silent.

        Raises:
            RequestError: the tokenizer refuses them.
        """
        ids = [token_id for token_id in token_ids if token_id < self.vocab_size]
        if self._encoder is not None and len(ids) > MAX_DECODED_HERE:
            return self._asked("decode", ids, skip_special_tokens).decode()
        try:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            raise _refusal(f"{type(error).__name__}: {error}") from error

    def piece(self, token_id: int) -> str:
        """Decode a single token, with a cache."""
        text = self._pieces.get(token_id)
        if text is None:
            text = self._pieces[token_id] = self.decode([token_id])
        return text

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return each token's place in the text; (0, 0) for tokens that encoding adds."""
        if self._encoder is not None:
            ends = iter(_numbers(self._asked("spans", text)))
            return list(zip(ends, ends, strict=True))
        spans: list[tuple[int, int]] = self._backend.encode(text).offsets
        return spans

    def _asked(self, job: str, *args: Any) -> bytes:
        """Have the encoder do a job, and tell a client of what it refuses."""
        assert self._encoder is not None
        try:
            return self._encoder.read(job, *args)
        except Overran as error:
            raise _refusal(with_expressions(error, self._expressions), TOO_COSTLY) from error
        except Unreadable as error:
            raise _refusal(error.what) from error

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Render the prompt of a conversation, with the options of ChatTemplate.render.

        Encode it with `add_special_tokens=False`: the template writes its own.

        Raises:
            RequestError: the model has no template (`no_chat_template`) or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions with a prompt",
                code="no_chat_template",
                param="messages",
            )
        variables = {**self._special_tokens, **options.pop("variables", {})}
        return self.chat_template.render(messages, variables=variables, **options)

    def ids(self) -> dict[str, int]:
        """Return the ids of all tokens, by the vocabulary's own form of each."""
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return ids

    def has_token(self, text: str) -> bool:
        """Say whether the vocabulary has this token."""
        return self._backend.token_to_id(text) is not None

    def special_id(self, text: str) -> int | None:
        """Return the id of this special token; None: not special."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self._silent_ids else None

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of the texts that are special tokens."""
        found = {text: self.special_id(text) for text in texts if text}
        return {text: token_id for text, token_id in found.items() if token_id is not None}

    def special_texts_in(self, texts: Iterable[str]) -> dict[str, int]:
        """Find the special tokens whose text is in one of these texts; return their ids."""
        within = "\n".join(texts)
        if not within:
            return {}
        return {
            text: one for one in self._silent_ids if (text := self._added[one]) and text in within
        }

    def is_silent(self, token_id: int) -> bool:
        """Say whether an id is special or outside the vocabulary."""
        return token_id in self._silent_ids or self._backend.id_to_token(token_id) is None

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own form of a token; None: unknown."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token; U+FFFD for a part of a character."""
        raw = self.token_bytes(token_id)
        return "" if raw is None else raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a single token; None: unknown."""
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


def _groups(texts: Iterable[str | tuple[str, str]]) -> Iterator[list[str | tuple[str, str]]]:
    """Cut texts into groups that are short together; a long text is alone."""
    group: list[str | tuple[str, str]] = []
    num_bytes = 0
    for text in texts:
        parts = (text,) if isinstance(text, str) else text
        size = MARK_BYTES + sum((1 if part.isascii() else 4) * len(part) for part in parts)
        if group and num_bytes + size > GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(text)
        num_bytes += size
    if group:
        yield group


def _refusal(why: str, code: str = "invalid_value") -> RequestError:
    about = f"the model's tokenizer cannot be used with this text: {why}"
    return RequestError(about, code=code, hint="is it as its maker published it? else shorten it")


def _numbers(data: bytes) -> list[int]:
    found = array("I")
    found.frombytes(data)
    return found.tolist()


def _byte_of(character: str) -> bytes:
    """Return the byte of a byte-level vocabulary's character.

    Printable Latin-1 stands for itself; the 68 others were numbered from U+0100 in byte order.
    """
    code = ord(character)
    if code >= 0x100:
        rank = code - 0x100
        return _HIDDEN_BYTES[rank : rank + 1] or character.encode()
    return bytes((code,))


_HAS_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"(?!")')
_HIDDEN_BYTES = bytes((*range(0x21), *range(0x7F, 0xA1), 0xAD))


_BYTE_LEVEL = re.compile(r'"type"\s*:\s*"ByteLevel"')
_MAX_BYTE_LEVELS = 8
"""Others have three: each before the model doubles a text, so that a chain fills the memory."""


def _check_stages(text: str) -> None:
    """Refuse long chains of byte-level stages."""
    if (count := len(_BYTE_LEVEL.findall(text))) > _MAX_BYTE_LEVELS:
        raise ValueError(f"{count} byte-level stages, at most {_MAX_BYTE_LEVELS} are read")


def _check_merges(text: str) -> None:
    """Refuse merges that lack the prefix which their model cuts off: `tokenizers` would abort."""
    if _HAS_PREFIX.search(text) is None:
        return
    model = json.loads(text)["model"]
    for merge in model.get("merges") or []:
        right = merge.split(" ")[-1] if isinstance(merge, str) else merge[-1]
        if not right.startswith(model.get("continuing_subword_prefix") or ""):
            raise ValueError(f"a merge with {right[:40]!r}, which lacks the continuing prefix")


_MARK = re.compile(r"[<\[].*[>\]]", re.DOTALL)
"""Special tokens by their form: a padding token that is a word stays one."""


def _add_listed(backend: tokenizers.Tokenizer, tokens: TokenFiles) -> None:
    """Add tokens that only the files beside tokenizer.json list, where they get their ids."""
    known = set(backend.get_added_tokens_decoder())
    size = backend.get_vocab_size(with_added_tokens=False)
    beside = [each for listed in tokens.listed.values() for each in listed]
    for token in sorted(beside, key=lambda each: each.token_id):
        token_id = backend.token_to_id(token.text)
        if token_id is None:
            token_id = max(size, *(one + 1 for one in known), 0)
        if token_id == token.token_id and token_id not in known:
            flags = {"normalized": not token.is_special, **token.flags}
            added = AddedToken(token.text, special=token.is_special, **flags)
            backend.add_tokens([added])
            known.add(token_id)
    plain = [
        text
        for text in sorted(tokens.marks)
        if _MARK.fullmatch(text) and backend.token_to_id(text) not in (None, *known)
    ]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in plain])


REPLACEMENT = "\ufffd"
MAX_UNFINISHED_TOKENS = 3
"""Maximum tokens of an unfinished character in UTF-8."""
MAX_HELD_TOKENS = 8
"""Maximum tokens held back.

A longer run ending in U+FFFD is cut where its parts decode to the whole."""


class Detokenizer:
    """Turn one sequence's token ids into text, a piece per token.

    Decoders depend on context: SentencePiece ones strip the space before the first token, and a
    character may span tokens. So new tokens are decoded after the last piece's tokens, and a piece
    that ends in U+FFFD waits for its rest. Each push decodes a bounded window.

    Args:
        context_ids: tokens that the text continues (a prompt to complete); otherwise the text
            begins a document of its own.
    """

    def __init__(self, tokenizer: Tokenizer, context_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []
        spoken = [token_id for token_id in context_ids if not tokenizer.is_silent(token_id)]
        self._move_context(spoken[-MAX_HELD_TOKENS:])

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty within a character."""
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
        """Return the rest at the end; an unfinished character becomes U+FFFD."""
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
        """Count the leading held tokens that later tokens cannot change."""
        whole = self._text_of(self._held)
        for size in range(len(self._held) - MAX_UNFINISHED_TOKENS, 0, -1):
            tail = self._tokenizer.decode(self._held[size:])
            if self._text_of(self._held[:size]) + tail == whole:
                return size
        return len(self._held)
