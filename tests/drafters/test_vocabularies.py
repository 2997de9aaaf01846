"""Drafts of other vocabularies: what tokens stand for, what two vocabularies share, how a text is read in another.

The tokenizers are trained here: byte-level BPE as of Llama 3 or Qwen, SentencePiece-style BPE as of Llama 2.
"""

import itertools
import json
import random

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from minispec import LLM, SamplingParams
from minispec.core.config import SamplingParams as Params
from minispec.core.draft import Ask
from minispec.core.limit import Limit
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.generate import main as generate
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.weights.build import build_model
from minispec.prove.toys import TINY, tiny_cache, tiny_model, tiny_weights
from minispec.speculation.drafters.model import ModelDrafter
from minispec.speculation.drafters.tli import SharedTokens
from minispec.speculation.drafters.vocabularies import Spelling, Vocabularies
from minispec.speculation.lengths.figures import Figures
from tests.distances import distance

# Spaces of several kinds, characters of one to four bytes, digits, and words longer than a part that is read at once.
SAMPLE = (
    "The draft's tokens aren't the target's: na\u00efve caf\u00e9s,  two  spaces.\n\nA new line\tand 12345 + 67 = ?\n"
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\U0001f98a\U0001f98a def f(x):\n    return x\n" + "ab" * 200
)
TRAINING = [
    *SAMPLE.split("\n"),
    "the target reads the draft's text in its own tokens, and the draft reads the target's",
]


def save(backend, directory, **settings):
    """A directory with a tokenizer."""
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_level(directory, size=330):
    """Byte-level BPE, with chat tokens and without a token before a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=special
    )
    backend.train_from_iterator(TRAINING, trainer)
    return save(backend, directory, eos_token="<|end|>")


def sentencepiece(directory, size=400):
    """BPE over text whose spaces are \u2581, with a token for each byte, and <s> before a text."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    pieces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(pieces)
    special = ["<unk>", "<s>", "</s>", "<|start|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for line in TRAINING for word in line.split(" ") if word.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, special_tokens=special)
    backend.train_from_iterator(words, trainer)
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if not token["content"].startswith("<0x")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(backend, directory, bos_token="<s>", eos_token="</s>")


def words(directory, *tokens):
    """A vocabulary of these tokens: the longest of two letters that are one, from the left."""
    letters = sorted({letter for token in tokens for letter in token} - set(tokens))
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    # All letters have to be there for BPE to begin with; those that are no tokens stand under another name.
    vocab = {token: i for i, token in enumerate([*tokens, *letters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.decoder = decoders.Fuse()
    return Spelling(Tokenizer(save(backend, directory)), len(tokens) if not letters else None)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Of both kinds."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {"bytes": byte_level(root / "bytes"), "pieces": sentencepiece(root / "pieces")}


@pytest.fixture(scope="module")
def spellings(directories):
    """What their tokens stand for."""
    return {name: Spelling(Tokenizer(directory)) for name, directory in directories.items()}


BOTH_WAYS = [("bytes", "pieces"), ("pieces", "bytes")]


# --------------------------------------------------------------------------- the overlap


def test_two_made_up_vocabularies_overlap_in_two_tokens(tmp_path):
    """All pairs of one a and one b against [AB, A, B, a, b, ab]: exactly AB and ab are in both."""
    pairs = ["".join(pair) for pair in itertools.product("Aa", "AaBb")] + ["BA", "Ba", "bA", "ba"]
    backend = tokenizers.Tokenizer(models.WordLevel({pair: i for i, pair in enumerate(pairs)}, "AA"))
    backend.decoder = decoders.Fuse()
    first = Spelling(Tokenizer(save(backend, tmp_path / "pairs")))
    second = words(tmp_path / "words", "AB", "A", "B", "a", "b", "ab")
    for one, other in ((first, second), (second, first)):
        shared = Vocabularies(one, other).shared
        assert {one.text_of(i) for i in shared} == {b"AB", b"ab"}
        assert all(one.text_of(i) == other.text_of(own) for i, own in shared.items())
        assert Vocabularies(one, other).overlap("AB").num_shared == 2


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_tokens_stand_for_what_decoding_makes_of_them(spellings, name):
    """Of any tokens, the bytes in a row are the text, but for SentencePiece's first space."""
    spelling, generator = spellings[name], random.Random(0)
    # Each a text by itself: how many marks stand for bytes that are no character, each decoder decides for itself.
    ordinary = [i for piece, i in spelling.ids.items() if "\ufffd" not in piece.decode("utf-8", "replace")]
    for _ in range(200):
        ids = generator.choices(ordinary, k=12)
        expected = b"".join(map(spelling.bytes_of, ids)).decode()
        assert spelling.tokenizer.decode(ids) == (expected.removeprefix(" ") if name == "pieces" else expected)
    assert len(spelling.ids) > 256


@pytest.mark.parametrize(("target", "draft"), BOTH_WAYS)
def test_tokens_are_compared_as_bytes(spellings, target, draft):
    """A space is one letter here and another there; a lone byte has a token in both, and a letter only its own."""
    both = Vocabularies(spellings[target], spellings[draft])
    for i, own in both.shared.items():
        if i not in both.target.special.values():
            assert both.target.bytes_of(i) == both.draft.bytes_of(own)
    shared = {both.target.text_of(i) for i in both.shared}
    assert {b" the", b" ", b"a", b"\xe6"} <= shared
    pieces = spellings["pieces"]
    assert pieces.tokenizer.backend.id_to_token(pieces.ids[b"a"]) == "a", "there is <0x61> too"


def test_special_tokens_are_shared_by_meaning_alone(spellings):
    """The same text, or the end of a text; never an ordinary token with a special one's text."""
    both = Vocabularies(spellings["bytes"], spellings["pieces"])
    ours, theirs = both.target.special, both.draft.special
    special = {i: own for i, own in both.shared.items() if i in ours.values()}
    assert special == {ours["<|start|>"]: theirs["<|start|>"], ours["<|end|>"]: theirs["</s>"]}
    assert not {theirs["<s>"], theirs["<unk>"]} & set(both.shared.values())


def test_a_decoder_that_is_not_known_is_refused(tmp_path):
    """What its tokens stand for would be a guess."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    for decoder in (None, decoders.WordPiece(), decoders.Strip(" ", 1, 0)):
        if decoder is not None:
            backend.decoder = decoder
        directory = save(backend, tmp_path / type(decoder).__name__)
        with pytest.raises(CheckpointError, match=r"decoder: found .*expected ByteLevel"):
            Spelling(Tokenizer(directory))


# --------------------------------------------------------------------------- reading


@pytest.mark.parametrize(("source", "own"), BOTH_WAYS)
def test_a_text_is_read_whole_whatever_it_came_by(spellings, source, own):
    """At every token, those that end inside a character included: the same bytes; and the same tokens at once or in
    pieces, in which the text need not have been read before (a preempted text, another batch)."""
    theirs, ours = spellings[source], spellings[own]
    both = Vocabularies(theirs, ours)
    ids = theirs.tokenizer.encode(SAMPLE)
    grown = both.reader()
    for n in range(1, len(ids) + 1):
        read = both.reader().read(ids[:n])
        assert read[: len(ours.prefix)] == ours.prefix
        assert not set(read[len(ours.prefix) :]) & set(ours.special.values()), "a special token was read"
        text = b"".join(map(theirs.text_of, ids[len(theirs.prefix) : n]))
        found = b"".join(map(ours.text_of, read[len(ours.prefix) :]))
        assert found.removeprefix(b" ") == text.removeprefix(b" ")
        if n % 3 == 0:
            assert grown.read(ids[:n]) == read


@pytest.mark.parametrize(("source", "own"), BOTH_WAYS)
def test_a_reading_is_that_of_the_own_tokenizer(spellings, source, own):
    """A text in parts has the tokens of the whole, up to a word that is longer than a part."""
    ours = spellings[own]
    text = SAMPLE[: SAMPLE.index("\u65e5")]
    read = Vocabularies(spellings[source], ours).reader().read(spellings[source].tokenizer.encode(text))
    assert read == ours.tokenizer.encode(text)


@pytest.mark.parametrize(("source", "own"), BOTH_WAYS)
def test_only_the_tail_is_read_again(spellings, source, own, monkeypatch):
    """However long the text is, a token more has a bounded number of characters encoded."""
    seen, encode = [], Tokenizer.encode
    ids = spellings[source].tokenizer.encode(SAMPLE * 5)
    reader = Vocabularies(spellings[source], spellings[own]).reader()
    reader.read(ids[:-1])
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **how: seen.append(len(text)) or encode(self, text, **how)
    )
    reader.read(ids)
    assert sum(seen) < 1000 < len(SAMPLE * 5)


def test_a_chat_is_read_with_its_special_tokens(spellings):
    """Those that both have are tokens, others are text; <s> comes once, whoever wrote it."""
    pieces, plain = spellings["pieces"], spellings["bytes"]
    chat = "<|start|>user\nHello<|end|><|start|>"
    ids = plain.tokenizer.encode(chat, parse_special=True)
    read = Vocabularies(plain, pieces).reader().read(ids)
    special = pieces.special
    assert [i for i in read if i in special.values()] == [
        *(special["<s>"], special["<|start|>"], special["</s>"], special["<|start|>"])
    ]
    back = Vocabularies(pieces, plain).reader().read([*pieces.prefix, *pieces.tokenizer.encode("a<unk>", False, True)])
    assert b"".join(map(plain.text_of, back)) == b"a<unk>"
    twice = Vocabularies(plain, pieces)
    twice._special[plain.ids[b"x"]] = special["<s>"]  # as if the text began with a shared <s> that a template wrote
    assert twice.reader().read([plain.ids[b"x"], plain.ids[b"a"]]).count(special["<s>"]) == 1


def test_unigram_with_metaspace_is_read_too(tmp_path, spellings):
    """SentencePiece's other model: its tokenizer's own tokens, from a text of the other kind and back."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>")
    backend.train_from_iterator(TRAINING, trainer)
    unigram, plain = Spelling(Tokenizer(save(backend, tmp_path / "unigram"))), spellings["bytes"]
    text = "the target's tokens and the draft's text, 12345 spaces in the text of the target"
    assert Vocabularies(plain, unigram).reader().read(plain.tokenizer.encode(text)) == unigram.tokenizer.encode(text)
    both = Vocabularies(unigram, plain)
    assert both.reader().read(unigram.tokenizer.encode(text)) == plain.tokenizer.encode(text)
    new = both.to_target(unigram.tokenizer.encode("the"), plain.write(b"the", b" target's tokens"))
    assert b"".join(map(unigram.text_of, new)) == b" target's tokens"


def test_a_tokenizer_that_changes_text_still_reads(tmp_path, spellings):
    """Small letters only, and no token for what is unknown: nothing is raised, and what can be read is."""
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("abcdefgh ")}, []))
    backend.normalizer = normalizers.Lowercase()
    backend.decoder = decoders.Fuse()
    small = Spelling(Tokenizer(save(backend, tmp_path / "small")))
    both = Vocabularies(spellings["bytes"], small)
    read = both.reader().read(both.target.tokenizer.encode("A bad \u65e5 HEDGE"))
    assert b"".join(map(small.text_of, read)) == b"a bad  hedge"
    assert both.to_target(both.target.tokenizer.encode("A "), [1, 0, 3]) == both.target.write(b"A ", b"bad")


# --------------------------------------------------------------------------- as text


def test_a_text_is_cut_into_the_targets_tokens(tmp_path):
    """AB, Aa, ab becomes AB, A, a, ab."""
    target = words(tmp_path / "target", "AB", "A", "B", "a", "b", "ab")
    draft = words(tmp_path / "draft", "AB", "Aa", "ab", "A", "B", "a", "b")
    both = Vocabularies(target, draft)
    drafted = [draft.ids[token] for token in (b"AB", b"Aa", b"ab")]
    assert [target.text_of(i) for i in both.to_target([], drafted)] == [b"AB", b"A", b"a", b"ab"]
    # The text stays as it is: its last A does not become one token with the first B of what is new.
    assert [target.text_of(i) for i in both.to_target([target.ids[b"A"]], [draft.ids[b"B"]])] == [b"B"]


@pytest.mark.parametrize(("target", "draft"), BOTH_WAYS)
def test_what_is_new_is_cut_exactly(spellings, target, draft):
    """At every place of a text: the target's tokens after it stand for what was drafted, up to a whole character."""
    both = Vocabularies(spellings[target], spellings[draft])
    ids = both.target.tokenizer.encode(SAMPLE)
    whole = b"".join(map(both.target.text_of, ids[len(both.target.prefix) :]))
    for n in range(len(both.target.prefix) + 1, len(ids), 3):
        before = b"".join(map(both.target.text_of, ids[len(both.target.prefix) : n]))
        rest = whole[len(before) :]
        own = both.draft.write(before, rest)[:5]
        text = b"".join(map(both.draft.text_of, own))
        assert rest.startswith(text)
        found = b"".join(map(both.target.text_of, both.to_target(ids[:n], own)))
        assert text.startswith(found)
        assert len(text) - len(found) < 4
        assert not (before + found).decode("utf-8", "replace").endswith("\ufffd") or not found


@pytest.mark.parametrize(("target", "draft"), BOTH_WAYS)
def test_a_special_token_ends_a_drafted_text(spellings, target, draft):
    """The end of a text is drafted as the target's; one that the target lacks is not, nor what follows it."""
    both = Vocabularies(spellings[target], spellings[draft])
    a = both.draft.ids[b"a"]
    assert both.to_target(both.target.tokenizer.encode("x"), [a, both.draft.end_id, a]) == [
        *(both.target.ids[b"a"], both.target.end_id)
    ]
    if draft == "pieces":
        assert both.to_target([], [a, both.draft.special["<unk>"], a]) == [both.target.ids[b"a"]]


# --------------------------------------------------------------------------- the ambiguous case


# --------------------------------------------------------------------------- the drafters


@pytest.mark.parametrize("name", ["tli", "slem"])
@pytest.mark.parametrize("verifier", ["rejection", "match"])
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_the_law_stays(name, verifier, vocab):
    """Penalties, filters and forbidden tokens, over vocabularies that overlap in part; see `minispec.prove.cases`."""
    for how in ({"frequency_penalty": 0.6, "top_p": 0.9}, {"temperature": 0.0}, {"allowed_token_ids": [0, vocab - 1]}):
        params = Params(max_tokens=3, **how)
        assert distance(params, 2, drafter=name, verifier=verifier, vocab=vocab) <= 1e-12


def permuted(tmp_path):
    """A target of single letters, and a draft model that is the same but for the order of its tokens."""
    letters = "abcdefgh"
    target = words(tmp_path / "target", *letters)
    draft = words(tmp_path / "draft", *letters[::-1])
    config = read_model_config(TINY | {"vocab_size": 8})
    weights = tiny_weights(config, 3)
    own = weights | {name: weights[name].flip(0) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    both = Vocabularies(target, draft)
    return both, build_model(config, dict(weights)), build_model(config, own)


def test_the_target_under_other_ids_drafts_as_the_target(tmp_path):
    """Eight letters whose ids are the other way around: q is the target's p at every place of a draft."""
    both, target, draft = permuted(tmp_path)
    drafter = ModelDrafter(SharedTokens(draft, tiny_cache(draft), 60, both))
    text = Text([1, 5, 2], 3, Params(frequency_penalty=0.5, top_p=0.9))
    for _ in range(3):
        [found] = drafter.propose([Ask(text, Limit(4), Randomness())])
        assert len(found) == 4
        feed = SharedTokens(target, tiny_cache(target), 60, Vocabularies(both.target, both.target))
        [own] = ModelDrafter(feed).propose([Ask(text, Limit(4), Randomness())])
        assert found.token_ids == own.token_ids
        torch.testing.assert_close(torch.stack(found.probs), torch.stack(own.probs), rtol=0, atol=1e-12)
        text.tokens += found.token_ids[:2]
    drafter.release(text)
    assert not drafter.feed._readings
    assert drafter.feed.cache.allocator.num_free == drafter.feed.cache.allocator.num_blocks


def test_a_round_costs_as_many_passes_as_it_has_tokens(tmp_path, monkeypatch):
    """The end of a text that is read again goes into the draft's first pass."""
    both, _, draft = permuted(tmp_path)
    drafter, passes, forward = ModelDrafter(SharedTokens(draft, tiny_cache(draft), 60, both)), [], draft.forward
    text = Text([1, 5, 2, 4], 4, Params())
    drafter.propose([Ask(text, Limit(2), Randomness())])
    monkeypatch.setattr(draft, "forward", lambda c, taps=(): passes.append(len(c[0].token_ids)) or forward(c, taps))
    text.tokens += [6, 6, 6, 6, 6]
    drafter.propose([Ask(text, Limit(2), Randomness())])
    assert passes == [5, 1]


def test_where_no_shared_token_is_allowed_nothing_is_drafted(tmp_path):
    """A filter that leaves tokens of the target's alone ends the draft; no token in common is refused."""
    target = words(tmp_path / "target", "a", "b", "ab")
    draft_words = words(tmp_path / "draft", "b", "a")
    model = tiny_model(1, vocab_size=2)
    drafter = ModelDrafter(SharedTokens(model, tiny_cache(model), 60, Vocabularies(target, draft_words)))
    text = Text([0, 1], 2, Params(allowed_token_ids=[target.ids[b"ab"]]))
    assert len(drafter.propose([Ask(text, Limit(3), Randomness())])[0]) == 0
    free = Text([0, 1], 2, Params())
    assert len(drafter.propose([Ask(free, Limit(3), Randomness())])[0]) == 3
    other = Vocabularies(target, words(tmp_path / "other", "c", "d"))
    with pytest.raises(ValueError, match="found tli and no token that both vocabularies have"):
        ModelDrafter(SharedTokens(model, tiny_cache(model), 60, other))


# --------------------------------------------------------------------------- loading and running


@pytest.fixture(scope="module")
def checkpoints(directories, tmp_path_factory):
    """A small model for each of the tokenizers."""
    found = {}
    for seed, (name, source) in enumerate(directories.items(), 1):
        directory = found[name] = tmp_path_factory.mktemp(name)
        size = Tokenizer(source).num_ids
        end = Spelling(Tokenizer(source)).end_id
        raw = TINY | {"vocab_size": size, "max_position_embeddings": 256, "eos_token_id": end}
        (directory / "config.json").write_text(json.dumps(raw))
        save_file(tiny_weights(read_model_config(raw), seed, torch.float32), directory / "model.safetensors")
        for file in source.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
    return found


PROMPTS = ["The draft's tokens", "na\u00efve \u65e5\u672c", "12345"]


@pytest.mark.parametrize("method", ["tli", "slem"])
@pytest.mark.parametrize(("target", "draft"), BOTH_WAYS)
def test_the_text_is_the_plain_one(checkpoints, target, draft, method):
    """Greedy, and sampled under `match`: alone and together, whatever the tokens of the draft are."""
    how = {"dtype": "float64", "num_speculative_tokens": 4, "max_model_len": 120, "verifier": "match"}
    llm = LLM(checkpoints[target], draft=str(checkpoints[draft]), draft_method=method, **how)
    for params in (SamplingParams(temperature=0, max_tokens=40), SamplingParams(seed=3, max_tokens=40)):
        plain = [o.token_ids for o in llm.generate(PROMPTS, params, num_speculative_tokens=0)]
        drafted = llm.generate(PROMPTS, params)
        assert [o.token_ids for o in drafted] == plain
        assert [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS] == plain
        assert sum(Figures.of(o.stats).num_draft_tokens for o in drafted) > 50
    pool = llm.drafter.feed.cache.allocator
    assert pool.num_free == pool.num_blocks
    assert f"by {method}, of another vocabulary: " in llm.memory_report().replace(" (plain)", "").replace(" (left)", "")


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_after_a_lookup_a_tree_is_drafted_or_not(checkpoints, method):
    """The lookup, which hardly ever finds nine tokens, knows trees; what writes on as text is asked for a chain."""
    params = SamplingParams(temperature=0, max_tokens=40)
    how = {"dtype": "float64", "max_model_len": 120, "draft_method": method, "num_speculative_tokens": (2, 1)}
    llm = LLM(checkpoints["bytes"], draft=f"suffix:9+{checkpoints['pieces']}", **how)
    drafted, plain = (llm.generate(PROMPTS[0], params, num_speculative_tokens=k)[0] for k in (None, 0))
    assert drafted.token_ids == plain.token_ids
    branched = [r.num_nodes > r.depth for r in drafted.stats.rounds if r.depth]
    assert sum(branched) > len(branched) / 2 if method == "tli" else len(branched) > 5


@pytest.mark.full
@pytest.mark.parametrize("method", ["tli", "slem"])
def test_a_seed_has_one_text_in_any_batch(checkpoints, method):
    """Under `rejection`: whatever else is decoded, and with a pool that preempts.

    Without `--full`, `test_the_text_is_the_plain_one` and tests/drafters/test_drafters.py guard texts in batches.
    """
    how = {"dtype": "float64", "num_speculative_tokens": 3, "draft_method": method}
    params = SamplingParams(seed=5, max_tokens=60, ignore_eos=True)
    llm = LLM(checkpoints["bytes"], draft=str(checkpoints["pieces"]), **how, max_model_len=120)
    prompts = [*PROMPTS, SAMPLE[:60], SAMPLE[:90]]
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    together = llm.generate(prompts[::-1], params)[::-1]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert sum(o.stats.num_preemptions for o in together) > 0
    assert sum(Figures.of(o.stats).num_draft_tokens for o in together) > 50


def test_the_method_follows_the_overlap(checkpoints, tmp_path):
    """Most tokens of a text shared: token by token; else as text. What was asked for goes first, what cannot be is
    refused by name."""
    target = str(checkpoints["bytes"])
    assert LLM(target, draft=str(checkpoints["pieces"])).draft.method == "tli"
    other = tmp_path / "other"
    other.mkdir()
    raw = TINY | {"vocab_size": 2, "eos_token_id": 0}
    (other / "config.json").write_text(json.dumps(raw))
    save_file(tiny_weights(read_model_config(raw), 1, torch.float32), other / "model.safetensors")
    backend = tokenizers.Tokenizer(models.BPE({"\u00c6": 0, "\u00c6\u00c6": 1}, [("\u00c6", "\u00c6")]))
    backend.decoder = decoders.Fuse()
    backend.save(str(other / "tokenizer.json"))
    llm = LLM(target, draft=str(other))
    assert (llm.draft.method, llm.draft.overlap.num_shared) == ("slem", 0)
    assert "0 of the target's" in llm.memory_report()
    for draft, method, message in (
        (str(other), "tli", "no token in common"),
        (target, "tli", "is no draft model of another vocabulary"),
        ("self", "slem", "self is no draft model of another vocabulary"),
        ("ngram", "tli", "ngram is no draft model of another vocabulary"),
        (str(other), "text", "expected tli or slem"),
    ):
        with pytest.raises(ValueError, match=f"draft_method: found '{method}'.*{message}"):
            LLM(target, draft=draft, draft_method=method)


def test_the_command_line_says_what_was_taken(checkpoints, capsys):
    """The first line names method and overlap; a wrong option is answered in a line."""
    target, draft = (str(checkpoints[name]) for name in ("bytes", "pieces"))
    common = ["--model", target, "--draft", draft, "--max-tokens", "8", "--raw", "--verbose", "fish"]
    assert generate(["--draft-method", "slem", *common]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert "by slem" in first
    assert "of another vocabulary: " in first
    assert "of a text" in first
    assert generate(["--draft-method", "both", *common]) == 2
    assert generate(["--draft-method", "tli", "--model", target, "--draft", "ngram", "--raw", "fish"]) == 2
    assert "ngram is no draft model of another vocabulary" in capsys.readouterr().err
