from __future__ import annotations

import json

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError, RequestError
from engine.text.tokenizer import MAX_HELD_TOKENS, Detokenizer, Tokenizer
from tests.tiny_tokenizers import CHATML, byte_level, save, sentencepiece_like

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "hello wörld 😀"},
]
TEMPLATES = {
    "chatml": CHATML,
    "block layout": "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content }}\n"
    "  {% endif %}\n{% endfor %}\n{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}",
    "json without escapes": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.content | trim }}{% endfor %}",
    "generation marks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "tools and documents": "{{ tools is none }} {{ documents is none }} {{ tools is defined }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}",
}
SPECIALS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = save(byte_level(), tmp_path_factory.mktemp("byte"), chat_template=CHATML, **SPECIALS)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory):
    folder = save(sentencepiece_like(), tmp_path_factory.mktemp("piece"), bos_token="<s>")
    return Tokenizer.from_folder(folder)


def pushed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("build", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("text", ["hello world", " hello", "", "12345 😀\n\n", "<s><|end|>x"])
def test_encodes_and_decodes_as_transformers_does(tmp_path, build, flags, text):
    names = SPECIALS if build is byte_level else {"bos_token": "<s>", "eos_token": "</s>"}
    folder = save(build(), tmp_path, **names, **flags)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for add in (True, False):
        ids = oracle(text, add_special_tokens=add)["input_ids"]
        assert ours.encode(text, add_special_tokens=add) == ids
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("build", [byte_level, sentencepiece_like])
def test_long_texts_become_what_short_ones_do(build):
    ours, alone = Tokenizer(build()), build()
    text = "hello wörld 😀 12 <|end|><s>\n" * 2_000
    for add in (True, False):
        assert ours.encode(text, add) == alone.encode(text, add_special_tokens=add).ids
    encoding = alone.encode(text)
    assert ours.spans(text) == encoding.offsets
    for skip in (True, False):
        wanted = alone.decode(encoding.ids, skip_special_tokens=skip)
        assert ours.decode(encoding.ids, skip_special_tokens=skip) == wanted


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_renders_chats_as_transformers_does(tmp_path, template):
    folder = save(byte_level(), tmp_path, chat_template=template, **SPECIALS)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = oracle.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.from_folder(folder).render_chat(MESSAGES) == wanted


def test_a_template_file_wins_over_the_config(tmp_path):
    folder = save(byte_level(), tmp_path, chat_template="from config")
    (folder / "chat_template.jinja").write_text("from file")
    assert Tokenizer.from_folder(folder).render_chat(MESSAGES) == "from file"


def test_of_named_templates_the_default_is_used(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = save(byte_level(), tmp_path, chat_template=named)
    assert Tokenizer.from_folder(folder).render_chat(MESSAGES) == "plain"


def test_without_a_template_chat_is_refused_and_completions_named(piece_tokenizer):
    with pytest.raises(RequestError, match="/v1/completions") as refusal:
        piece_tokenizer.render_chat(MESSAGES)
    assert refusal.value.code == "no_chat_template"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.here }}",
        "{{ messages[9]['content'] + 1 }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_refuses_is_the_clients_error(tmp_path, template):
    tokenizer = Tokenizer.from_folder(save(byte_level(), tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="chat template refuses") as refusal:
        tokenizer.render_chat(MESSAGES)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {"type": "Unheard"}}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{% for %}"})),
        ("tokenizer_config.json", json.dumps({"chat_template": 3})),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content):
    folder = save(byte_level(), tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError) as error:
        Tokenizer.from_folder(folder)
    assert error.value.where == str(folder / name)


@pytest.mark.parametrize(
    "others",
    [
        ["vocab.json"],
        ["merges.txt"],
        ["spiece.model"],
        ["qwen.tiktoken"],
    ],
)
def test_other_files_of_a_tokenizer_are_named_where_tokenizer_json_is_missing(tmp_path, others):
    for name in (*others, "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert f"of {', '.join(others)} (" in caught.value.hint


def test_merges_without_the_prefix_that_their_model_cuts_off_are_refused(tmp_path):
    """`tokenizers` would cut a letter in two, and end the process when it tells of that."""
    path = save(byte_level(), tmp_path) / "tokenizer.json"
    values = json.loads(path.read_text())
    pieces = ["a", "\u0120", "b", "#b", "ab"]
    values["model"] |= {
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": [["a", "#b"]],
        "continuing_subword_prefix": "#",
    }
    values["added_tokens"], values["post_processor"] = [], None
    path.write_text(json.dumps(values))
    assert Tokenizer.from_folder(tmp_path).vocab_size == len(pieces)
    values["model"]["merges"] += [["a", "\u0120"]]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="prefix"):
        Tokenizer.from_folder(tmp_path)


def test_a_chain_of_stages_that_each_double_the_text_is_refused(tmp_path):
    save(byte_level(), tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    stage = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    stage["trim_offsets"] = True
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [stage] * 100}
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="stages"):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_truncation_and_padding_saved_with_the_tokenizer_are_ignored(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(save(backend, tmp_path))
    assert len(tokenizer.encode("hello 12 12 12 12")) == len(
        byte_level().encode("hello 12 12 12 12")
    )


def test_token_bytes_add_up_to_the_text(byte_tokenizer, piece_tokenizer):
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        text = "hello world \u00e4 \U0001f600 \u200b\x00\x7f\xad<think>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        raw = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert raw.decode().removeprefix(" ") == text
    assert byte_tokenizer.token_bytes(byte_tokenizer.vocab_size) is None
    assert byte_tokenizer.token_text(byte_tokenizer.encode("\u00e4", False)[0]) == "\ufffd"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_byte_level_pieces_add_up_to_the_whole(byte_tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, byte_tokenizer.vocab_size + 3), max_size=40))
    pieces = pushed(Detokenizer(byte_tokenizer), ids)
    assert "".join(pieces) == byte_tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_long_runs_of_parts_of_characters_add_up_to_the_whole(byte_tokenizer, data):
    parts = [byte_tokenizer.encode(c, False) for c in ("\u00e4", "\u20ac", "\U0001f4a7", "\u00ff")]
    some_part = st.sampled_from(sorted({token_id for ids in parts for token_id in ids}))
    ids = data.draw(st.lists(some_part, min_size=MAX_HELD_TOKENS, max_size=60))
    pieces = pushed(Detokenizer(byte_tokenizer), ids)
    assert "".join(pieces) == byte_tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_of_any_text_are_whole_characters(byte_tokenizer, piece_tokenizer, text):
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        ids = tokenizer.encode(text)
        pieces = pushed(Detokenizer(tokenizer), ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_byte_fallback_pieces_add_up_where_bytes_are_characters(piece_tokenizer, data):
    character = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\u2581")
    in_bytes = character.map(lambda c: [3 + byte for byte in c.encode()])
    word = st.integers(259, piece_tokenizer.vocab_size - 1).map(lambda i: [i])
    special = st.integers(0, 2).map(lambda i: [i])
    parts = data.draw(st.lists(st.one_of(in_bytes, word, special), max_size=20))
    ids = [token_id for part in parts for token_id in part]
    assert "".join(pushed(Detokenizer(piece_tokenizer), ids)) == piece_tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_ids_of_a_byte_fallback_vocabulary_give_text_that_never_shrinks(piece_tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, piece_tokenizer.vocab_size - 1), max_size=40))
    text = "".join(pushed(Detokenizer(piece_tokenizer), ids))
    # Of an invalid run, what was valid when it was sent stays; everything else is as decoded.
    visible = [c for c in piece_tokenizer.decode(ids) if c != "\ufffd"]
    remaining = iter(text)
    assert all(c in remaining for c in visible)


def test_a_byte_that_breaks_a_run_does_not_take_back_or_repeat_what_was_sent(piece_tokenizer):
    euro, word = [3 + byte for byte in "\u20ac".encode()], piece_tokenizer.encode("h", False)[-1:]
    pieces = pushed(Detokenizer(piece_tokenizer), [*euro, 3 + 0xFF, *word])
    assert pieces == ["", "", "\u20ac", "", "\ufffdh", ""]


def test_a_full_hold_is_not_cut_inside_a_character_that_may_yet_be_finished(piece_tokenizer):
    broken, word = [3 + 0x80, 3, 3, 3], piece_tokenizer.vocab_size - 1
    ids = [*broken, word, *(3 + byte for byte in "\U00010000".encode())]
    assert "".join(pushed(Detokenizer(piece_tokenizer), ids)).endswith("\U00010000")


def test_an_endless_run_of_broken_bytes_is_sent_on_and_not_hoarded(byte_tokenizer):
    broken = byte_tokenizer.encode("\u00ff", False)[:1]
    detokenizer = Detokenizer(byte_tokenizer)
    sent = "".join(detokenizer.push(token_id) for token_id in broken * 100)
    assert len(sent) >= 100 - MAX_HELD_TOKENS


def test_a_completion_keeps_the_space_that_parts_it_from_its_prompt(piece_tokenizer):
    prompt = piece_tokenizer.encode("hello")
    answer = piece_tokenizer.encode("world", add_special_tokens=False)
    assert "".join(pushed(Detokenizer(piece_tokenizer, prompt), answer)) == " world"
    assert "".join(pushed(Detokenizer(piece_tokenizer), answer)) == "world"


def test_whatever_the_library_raises_in_a_reply_is_a_refusal():
    """A panic of it is no Exception, and would end the daemon."""

    class Panic(BaseException):
        pass

    class Broken:
        def __getattr__(self, name):
            return getattr(tokenizer_here, name)

        def decode(self, *_, **__):
            raise Panic("at lib.rs")

    tokenizer_here, tokenizer = byte_level(), Tokenizer(byte_level())
    tokenizer._backend = Broken()
    with pytest.raises(RequestError):
        tokenizer.decode([1])
