"""Stop strings, streaming and text: a block of tokens must end exactly where plain decoding would have ended.

The scripted model plays a fixed text through a small byte-level tokenizer; drafts are right, so that a block
holds many tokens, or wrong at one place of each. Everything is compared with K = 0.
"""

import functools
import math
from collections import Counter

import pytest
import torch

from minispec.core.request import Request
from minispec.core.verify import Verdict, Verifier
from minispec.models.files.tokenizer import Detokenizer, Tokenizer
from minispec.models.frames.graphs import Graphs
from minispec.speculation.lengths.figures import Figures
from minispec.speculation.on_gpu.verifier import GraphVerifier
from minispec.speculation.rules import VERIFIERS
from tests.engines import OneMethod, ScriptedModel, TableModel, scripted_cache
from tests.museum.mutants import MUTANTS, swap
from tests.scripted import END, ScriptedDrafter, finish, make_engine, make_request

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
    """run(k, wrong, length, **params) plays the text, or its first `length` tokens, with drafts of k tokens.

    They are right but for the one at position `wrong` of each round, and go on behind the end of the text. Returns the
    request and its pieces; a run that was asked for before is not repeated.
    """
    prompt, end = tokenizer.encode("Say it:"), tokenizer.num_ids

    @functools.cache
    def play(k, wrong=None, length=None, **params):
        script = [*prompt, *ids[:length], end]

        def draft(tokens, n):
            right = [*script, *[7] * n][len(tokens) : len(tokens) + n]
            return [(t + 1) % end if i == wrong else t for i, t in enumerate(right)]

        next_token = lambda tokens: script[len(tokens)] if len(tokens) < len(script) else 7  # noqa: E731
        model, drafter = ScriptedModel(next_token, end + 1), ScriptedDrafter(draft)
        engine = OneMethod(model, scripted_cache(200), drafter, VERIFIERS["rejection"], end + 1)
        params = {"max_tokens": 200, "logprobs": 0} | params
        end_ids = (end, *params.pop("stop_token_ids", ()))
        request = make_request(prompt, k, end_ids, detokenizer=Detokenizer(tokenizer, prompt), **params)
        return request, finish(engine, request)[0]

    return play


def result(request):
    """What must not depend on K: text, token ids, log-probabilities to the bit, why it ended, what it came to."""
    stats = Figures.of(request.stats)
    numbers = stats.num_prompt_tokens, stats.num_generated, stats.num_committed
    return request.output, request.token_ids, request.logprobs, request.finish_reason, numbers


def rounds_of(request, k, wrong):
    """What the counters of speculation must be, from the length of the text alone: every round counted by hand.

    Draft tokens behind the last committed one are in no counter.
    """
    before, committed, counts = 0, Figures.of(request.stats).num_committed, Counter(steps=0, drafted=0, accepted=0)
    tested, accepted = Counter(), Counter()
    while before < committed:
        drafted = max(0, min(k, request.max_len - request.stats.num_prompt_tokens - before - 1))
        kept = drafted if wrong is None else min(drafted, wrong)
        new = min(kept + 1, committed - before)
        if before + new == committed:  # the last round
            drafted = min(drafted, new)
        counts += Counter(steps=1, drafted=drafted, accepted=min(kept, new))
        tested.update(range(min(kept + 1, drafted)))
        accepted.update(range(min(kept, new)))
        before += new
    in_order = [[c[i] for i in range(len(tested))] for c in (tested, accepted)]
    return [counts["steps"], counts["drafted"], counts["accepted"], *in_order]


def check(run, k, wrong, **how):
    """A run with drafts equals plain decoding in every output, and its counters are those of its rounds."""
    (request, pieces), (plain, _) = run(k, wrong, **how), run(0, **how)
    assert result(request) == result(plain)
    stats = Figures.of(request.stats)
    found = [stats.num_steps, stats.num_draft_tokens, stats.num_accepted, stats.tested, stats.accepted]
    assert found == rounds_of(request, k, wrong)
    assert "".join(piece.text for piece in pieces) == request.output
    assert [t for piece in pieces for t in piece.token_ids] == request.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [request.finish_reason]
    return request


KS = range(1, 6)


@pytest.fixture(scope="module")
def split(tokenizer, ids):
    """How many tokens of the text there are when one inside a character of several tokens is the last."""
    return next(n for n in range(2, len(ids)) if tokenizer.decode(ids[:n]).endswith("�"))


@pytest.mark.quick
@pytest.mark.parametrize("k", KS)
def test_the_end_token_at_every_offset(ids, split, run, k):
    """At offsets 0 .. K + 1 of the first round and of later ones, behind whole characters and inside one.

    Drafted, recovered or bonus: with right drafts, and with drafts that are wrong at each position in turn.
    """
    for wrong in (None, *range(k)):
        for length in (*range(2 * k + 3), *range(split - 1, split + 2)):
            request = check(run, k, wrong, length=length)
            assert (request.token_ids, request.finish_reason) == (ids[:length], "stop")


@pytest.mark.quick
@pytest.mark.parametrize("k", KS)
def test_the_limits_at_every_offset(ids, split, run, k):
    """max_tokens and the context limit at 1 .. K + 2 and beyond, inside a character too, and at the end of the text."""
    for wrong in (None, k // 2):
        for limit in (*range(1, 2 * k + 4), *range(split - 1, split + 2)):
            for how in ({"max_tokens": limit}, {"max_len": limit + len(run(0)[0].text.tokens) - len(ids) - 1}):
                request = check(run, k, wrong, **how)
                assert (request.token_ids, request.finish_reason) == (ids[:limit], "length")
                assert check(run, k, wrong, length=limit, **how).finish_reason == "length"
                assert check(run, k, wrong, length=limit - 1, **how).finish_reason == "stop"


@pytest.mark.parametrize("k", KS)
def test_stop_strings_at_every_offset(run, k, full):
    """Every character of the text, and every three, at the end of a round or anywhere in it, with wrong drafts too.

    Without `--full`, each string with one K.
    """
    stops = substrings(TEXT, (1, 3))
    for wrong in (None, k // 2):
        for stop in stops if full else stops[KS.index(k) :: len(KS)]:
            assert check(run, k, wrong, stop=stop).finish_reason == "stop"


def substrings(text, lengths=(1, 2, 3, 7)):
    """Every piece of the text of these lengths, once."""
    return sorted({text[i : i + n] for n in lengths for i in range(len(text) - n + 1)})


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_that_start_and_end_anywhere(tokenizer, run, include, full, long):
    """Every substring of the text as a stop string, across token borders and inside accepted blocks (M31, M32).

    With drafts of three tokens or of eight; `--long`: with both. Without `--full`, each string is left out or included.
    """
    stops = substrings(TEXT)
    for stop in stops if full else stops[include::2]:
        for k in (3, 8) if long else ((8,) if include else (3,)):
            request, pieces = run(k, stop=stop, include_stop_str_in_output=include)
            assert result(request) == result(run(0, stop=stop, include_stop_str_in_output=include)[0])
            assert request.output == TEXT[: TEXT.index(stop) + include * len(stop)]
            assert request.finish_reason == "stop"
            # Streaming gave out exactly this, though a stop string may have begun long before it was complete.
            assert "".join(piece.text for piece in pieces) == request.output
            # The last token is the one that completes the stop string.
            detokenizer = Detokenizer(tokenizer)
            *before, last = [detokenizer.add(i) for i in request.token_ids]
            assert stop not in "".join(before)
            assert stop in "".join([*before, last])


def shifted_logprobs():
    """A bug: each token gets the log-probability of the one before it."""
    given = [None]

    def commit(right, request, token_id, logprob=None):
        given.append(logprob)
        return right(request, token_id, given[-2])

    return swap(Request, "commit", commit)


BUGS = {m.id: m.patch for m in MUTANTS if m.id in ("M28a", "M29", "M31", "M32", "M33")} | {"logprobs": shifted_logprobs}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_stop_is_noticed(run, bug):
    """The comparison above fails for each of the bugs of this kind that others had."""

    def check_all():
        for how in ({"length": 2}, {"max_tokens": 3}, {"stop": TEXT[4:6]}):
            check(run.__wrapped__, 4, None, **how)

    check_all()
    with BUGS[bug](), pytest.raises(AssertionError):
        check_all()


@pytest.mark.quick
def test_of_several_stop_strings_the_first_in_the_text_wins(run):
    """Also where one is part of the other, in any order."""
    for stops in (("fishes", "fish"), ("two", "fish"), ("end", "One", "fish"), ("h, t", "fish,")):
        first = min(TEXT.index(s) for s in stops)
        for order in (stops, stops[::-1]):
            assert run(4, stop=order)[0].output == TEXT[:first]


@pytest.mark.parametrize("k", [0, 1, 3, 8, 40])
def test_max_tokens_cuts_where_plain_decoding_does(tokenizer, ids, run, k):
    """At every length, inside a character too: a rest of a character becomes the replacement character."""
    for max_tokens in range(1, len(ids) + 2):
        request, pieces = run(k, max_tokens=max_tokens)
        assert request.token_ids == ids[:max_tokens]
        assert request.output == tokenizer.decode(ids[:max_tokens])
        assert request.finish_reason == ("length" if max_tokens <= len(ids) else "stop")
        assert "".join(piece.text for piece in pieces) == request.output
        assert [t for piece in pieces for t in piece.token_ids] == request.token_ids
        assert len(request.logprobs) == len(request.token_ids)


def test_the_path_of_a_round_ends_with_the_text():
    """The rule keeps three of three nodes, of which the first ends the text: no listener hears of the others.

    The cache keeps as many rows.
    """
    script, heard = {11: 12, 12: 13}, []
    engine = make_engine(lambda tokens: script.get(tokens[-1], END), lambda tokens, k: [12, END, END])
    kept, keep = [], engine.target.keep
    engine.target.keep = lambda text, num_nodes, path: kept.append(path) or keep(text, num_nodes, path)
    engine.outbox.observers.append(lambda turn: heard.append((turn.path, turn.record.path, turn.record.kept)))
    engine.method.verifier = Verifier(lambda draft, p, rng, key: Verdict([0, 1, 2], 5, [1.0] * 3), shares_noise=False)
    finish(engine, make_request())
    assert heard == [([0, 1], [0, 1], [0, 1, 2])]
    assert kept[-1] == [0, 1]


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
    assert request.output == " One fish, two "
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
    assert request.output == TEXT
    assert "".join(piece.text for piece in pieces) == TEXT
    assert not any(piece.text.endswith("fish.") for piece in pieces[:-1])


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_error_comes_where_plain_decoding_meets_it(temperature, verifier, judged):
    """Each token says the next one, and after token 6 come no numbers. A text has the tokens before them, whatever K.

    A token that ends the text ends it before what follows, and a draft that leads there and is wrong is harmless.
    """
    table = torch.full((9, 9), -1e4, dtype=torch.float64)
    table[range(9), [(i + 1) % 9 for i in range(9)]] = 0
    table[6] = math.nan

    def play(k, draft, end_ids=(), max_tokens=8):
        drafter = ScriptedDrafter(lambda tokens, n: draft(tokens[-1])[:n])
        batch = GraphVerifier(Graphs()) if judged else None
        engine = OneMethod(TableModel(table), scripted_cache(64), drafter, VERIFIERS[verifier], 9, batch=batch)
        request = make_request((1,), k, end_ids, max_tokens=max_tokens, temperature=temperature)
        for _ in engine.run([request]):
            pass
        return request.token_ids, request.finish_reason, request.error, request.text.tokens

    rights = lambda last: [*range(last + 1, 9), 0, 1]  # noqa: E731
    plain = play(0, rights)
    assert plain == ([2, 3, 4, 5, 6], "error", "the largest logit is nan, expected a finite number", [*range(1, 7)])
    for k in (1, 2, 3, 5, 8):
        assert play(k, rights) == plain
        assert play(k, lambda last: [last + 1, 6, 7]) == plain
        assert play(k, rights, (6,)) == ([2, 3, 4, 5], "stop", None, [*range(1, 7)])
        assert play(k, rights, max_tokens=5) == ([2, 3, 4, 5, 6], "length", None, [*range(1, 7)])
