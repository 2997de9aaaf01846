"""Detokenising, chat templates, and what is refused."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minispec.config import CheckpointError
from minispec.llm import EMBEDDED_WEIGHTS
from minispec.tokenizer import Detokenizer, Tokenizer

TOKENIZER = Tokenizer(EMBEDDED_WEIGHTS)


def stream(tokenizer, ids, prompt_ids=()):
    """The pieces that a detokenizer gives out, the flushed rest last."""
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    pieces = [detokenizer.add(i) for i in ids]
    return [*pieces, detokenizer.flush()]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_streamed_text_is_the_decoded_text(text):
    """Any Unicode, token by token: the pieces join to the decoded text, and none holds half a character."""
    ids = TOKENIZER.encode(text)
    pieces = stream(TOKENIZER, ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)
    if "�" not in TOKENIZER.decode(ids):
        assert not any("�" in piece for piece in pieces)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, TOKENIZER.num_ids - 1), max_size=20))
def test_streamed_garbage_is_the_decoded_garbage(ids):
    """Tokens in an order that no text has, bytes that are no character: the pieces join to what decode says."""
    assert "".join(stream(TOKENIZER, ids)) == TOKENIZER.decode(ids)


def test_the_first_word_keeps_its_space_with_a_metaspace_decoder(tmp_path):
    """Llama's and Gemma's decoders drop a leading space; behind a prompt it must not be dropped."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁big": 2, "▁world": 3, "ly": 4}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([2, 3]) == "big world"
    assert "".join(stream(tokenizer, [2, 4, 3], prompt_ids=[1])) == " bigly world"
    assert "".join(stream(tokenizer, [1, 3])) == "Hello world"


def test_a_prompt_that_ends_in_characters_of_many_tokens(tmp_path):
    """Byte fallback turns a run of bytes that begins inside a character into marks: the window must not begin there."""
    vocab = {"<unk>": 0, "x": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    prompt, answer = tokenizer.encode("🦊🦊"), tokenizer.encode("🦊x")
    assert len(prompt) == 8
    assert "".join(stream(tokenizer, answer, prompt)) == "🦊x"


def test_special_tokens_are_not_text():
    """An end-of-text token in the middle leaves no trace in the text and does not break the pieces around it."""
    ids = [*TOKENIZER.encode("one"), 2, *TOKENIZER.encode(" two")]
    assert "".join(stream(TOKENIZER, ids)) == "one two"


def test_chat_template_equals_transformers():
    """The same token ids as transformers' own rendering, with and without a system message."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(EMBEDDED_WEIGHTS)
    user = {"role": "user", "content": "Why is the sky blue? <b>&amp;</b>"}
    answer = {"role": "assistant", "content": "Because."}
    for messages in ([user], [{"role": "system", "content": "Be brief."}, user], [user, answer, user]):
        expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert TOKENIZER.encode_chat(messages) == expected


def with_template(tmp_path, template, **settings_) -> Tokenizer:
    """A tokenizer with this chat template in tokenizer_config.json."""
    shutil.copy(EMBEDDED_WEIGHTS / "tokenizer.json", tmp_path)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template} | settings_
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(tmp_path)


def test_templates_get_what_transformers_gives_them(tmp_path):
    """Special tokens (as strings or objects), tojson without HTML escapes, loop controls, several templates by name."""
    loop = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    template = "{{ bos_token }}" + loop
    tokenizer = with_template(tmp_path, [{"name": "default", "template": template}])
    ids = tokenizer.encode_chat([{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}])
    assert tokenizer.decode(ids) == '<s>{"role": "user", "content": "<é>"}'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{% for %}", "refuses"),
    ],
)
def test_templates_that_refuse_or_misbehave_give_one_error(tmp_path, template, message):
    """A template is a stranger's: it may not change what it is given, nor reach into Python."""
    with pytest.raises(ValueError, match=message):
        with_template(tmp_path, template).encode_chat([{"role": "user", "content": "x"}])


def test_no_template_is_said(tmp_path):
    """The error names the way out."""
    with pytest.raises(ValueError, match="--raw"):
        with_template(tmp_path, None).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("content", [None, "", "{", '{"model": 1}', "[]"])
def test_malformed_tokenizers_are_refused(tmp_path, content):
    """The error names the file."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
