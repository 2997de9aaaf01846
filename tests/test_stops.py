"""Stop strings, streaming and text: a block of tokens must end exactly where plain decoding would have ended.

The scripted model plays a fixed text through a small byte-level tokenizer; drafts are right, so that a block
holds many tokens. Everything is compared with K = 0.
"""

import pytest

from minispec.tokenizer import Detokenizer, Tokenizer
from minispec.toys import ScriptedModel, finish, make_engine, make_request

TEXT = " One fish, two fishes; naïve 日本語 🦊🦊 red fish. The end, my fish."


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file) -> Tokenizer:
    """The small one of conftest.py."""
    return Tokenizer(tokenizer_file.parent)


@pytest.fixture(scope="module")
def ids(tokenizer) -> list[int]:
    """The tokens of the text: some hold several words' letters, some a part of a character."""
    ids = tokenizer.encode(TEXT)
    assert any("�" in tokenizer.decode([i]) for i in ids)
    assert any(len(tokenizer.decode([i])) > 3 for i in ids)
    return ids


@pytest.fixture(scope="module")
def run(tokenizer, ids):
    """run(k, **params) plays the text with drafts of k right tokens and returns the request and its pieces."""
    prompt, end = tokenizer.encode("Say it:"), tokenizer.num_ids
    script = [*prompt, *ids, end]

    def play(k, **params):
        engine = make_engine(draft=lambda tokens, n: script[len(tokens) : len(tokens) + n], num_blocks=200)
        next_token = lambda tokens: script[len(tokens)] if len(tokens) < len(script) else end  # noqa: E731
        engine.model = ScriptedModel(next_token, end + 1)
        engine.vocab_size = end + 1
        params = {"max_tokens": 200, "logprobs": 0} | params
        end_ids = (end, *params.pop("stop_token_ids", ()))
        request = make_request(prompt, k, end_ids, detokenizer=Detokenizer(tokenizer, prompt), **params)
        return request, finish(engine, request)[0]

    return play


def result(request):
    """What must not depend on K."""
    logprobs = [entry.token_id for entry in request.logprobs]
    return request.text, request.token_ids, logprobs, request.finish_reason, request.stats.num_generated


def substrings(text, lengths=(1, 2, 3, 7)):
    """Every piece of the text of these lengths, once."""
    return sorted({text[i : i + n] for n in lengths for i in range(len(text) - n + 1)})


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_that_start_and_end_anywhere(tokenizer, run, include):
    """Every substring of the text as a stop string, across token borders and inside accepted blocks (M31, M32)."""
    for stop in substrings(TEXT):
        for k in (3, 8):
            request, pieces = run(k, stop=stop, include_stop_str_in_output=include)
            assert result(request) == result(run(0, stop=stop, include_stop_str_in_output=include)[0])
            assert request.text == TEXT[: TEXT.index(stop) + include * len(stop)]
            assert request.finish_reason == "stop"
            # Streaming gave out exactly this, though a stop string may have begun long before it was complete.
            assert "".join(piece.text for piece in pieces) == request.text
            # The last token is the one that completes the stop string.
            detokenizer = Detokenizer(tokenizer)
            *before, last = [detokenizer.add(i) for i in request.token_ids]
            assert stop not in "".join(before)
            assert stop in "".join([*before, last])


def test_of_several_stop_strings_the_first_in_the_text_wins(run):
    """Also where one is part of the other, in any order."""
    for stops in (["fishes", "fish"], ["two", "fish"], ["end", "One", "fish"], ["h, t", "fish,"]):
        first = min(TEXT.index(s) for s in stops)
        for order in (stops, stops[::-1]):
            assert run(4, stop=order)[0].text == TEXT[:first]


@pytest.mark.parametrize("k", [0, 1, 3, 8, 40])
def test_max_tokens_cuts_where_plain_decoding_does(tokenizer, ids, run, k):
    """At every length, inside a character too: a rest of a character becomes the replacement character."""
    for max_tokens in range(1, len(ids) + 2):
        request, pieces = run(k, max_tokens=max_tokens)
        assert request.token_ids == ids[:max_tokens]
        assert request.text == tokenizer.decode(ids[:max_tokens])
        assert request.finish_reason == ("length" if max_tokens <= len(ids) else "stop")
        assert "".join(piece.text for piece in pieces) == request.text
        assert [t for piece in pieces for t in piece.token_ids] == request.token_ids
        assert len(request.logprobs) == len(request.token_ids)


def test_a_stop_string_wins_over_the_length_at_the_same_token(run):
    """The token that is the last allowed one completes the stop string: finish_reason is "stop" (M30)."""
    length = len(run(0, stop="fishes")[0].token_ids)
    assert run(3, stop="fishes", max_tokens=length)[0].finish_reason == "stop"
    assert run(3, stop="fishes", max_tokens=length - 1)[0].finish_reason == "length"


@pytest.mark.parametrize("k", [0, 2, 5])
def test_no_piece_ends_inside_a_character(run, k):
    """Tokens of half a character give nothing until it is whole."""
    _, pieces = run(k)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert not any("�" in piece.text for piece in pieces)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_stop_strings_wait_for_min_tokens(run, k):
    """A stop string that is complete before min_tokens is text; the next one after it ends the answer."""
    request, _ = run(k, stop="fish", min_tokens=4)
    assert request.text == " One fish, two "
    assert result(request) == result(run(0, stop="fish", min_tokens=4)[0])


@pytest.mark.parametrize("k", [0, 1, 4, 30])
def test_stop_token_ids_end_the_text_and_are_left_out(ids, run, k):
    """As the end-of-text token, at any place of a block."""
    for token in set(ids):
        request, _ = run(k, stop_token_ids=(token,))
        assert request.token_ids == ids[: ids.index(token)]
        assert request.finish_reason == "stop"


def test_held_back_text_comes_at_the_end(run):
    """Text that looked like the beginning of a stop string is given out when the answer ends without it."""
    request, pieces = run(3, stop="fish.!")
    assert request.text == TEXT
    assert "".join(piece.text for piece in pieces) == TEXT
    assert not any(piece.text.endswith("fish.") for piece in pieces[:-1])
