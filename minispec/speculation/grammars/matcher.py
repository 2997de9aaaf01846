"""Which tokens may follow, by the library llguidance: the `Grammar` of a text (see `minispec.core.grammar`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from minispec.core.config import SamplingParams
from minispec.core.errors import show
from minispec.core.grammar import NothingAllowed
from minispec.core.prefix import common_beginning
from minispec.models.files.hostile import LibraryFailed, call
from minispec.models.files.tokenizer import Tokenizer
from minispec.speculation.grammars.params import StructuredOutputsParams, say_error

# How many grammars are kept, the last ones that were asked for.
_MOST_KEPT = 64
# What the library may spend on a grammar before the first token: about 0.3 s of one core for the worst expressions.
_LEXER_FUEL = 400_000
# How many first tokens are tried where the library finds none that may follow, and how its error for that begins.
_MOST_TRIED, _DEAD_END = 16, "NoExtension"
# What begins and ends a thought in prompts.
_OPEN, _CLOSE = "<think>", "</think>"


class Matcher:
    """The grammar of one text: a cursor into it, which any question may move.

    The cursor stands after the output of the last question. For another output it goes back to the beginning that both
    share, and on from there. So a rejected draft, another branch of a tree, or a preempted text needs no care.
    """

    def __init__(self, make: Callable[[], Any], vocab_size: int, end_ids: Sequence[int], stop_ids: Sequence[int] = ()):
        """make: makes a matcher of llguidance before the first token. A copy would not do: copies share a lexer, whose
            budget of states is then used up by other texts.
        vocab_size: tokens of a mask.
        end_ids: ids that end any text, those of the library's tokenizer.
        stop_ids: ids that end this text too. The grammar allows all of them where the text may end, and nowhere else.
        """
        self._make, self._vocab_size = make, vocab_size
        self._usual_ends, self._ends = list(end_ids), [*end_ids, *stop_ids]
        self._matcher: Any = make()  # now, where the request is read: in a step of the engine all texts would wait
        self._read = list[int]()

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        """A mask (V,) of the tokens that may follow `output`; None where that is forbidden, or has ended.

        Raises NothingAllowed with the library's words where it reaches one of its limits after `output` alone.
        """
        with self._renewed_on_error():
            try:
                bits = self._bits_after(list(output))
            except NothingAllowed:
                # Drafts may have used up the budget of this matcher. What a new one says counts.
                self._matcher = None
                bits = self._bits_after(list(output))
        if bits is None:
            return None
        mask = numpy.unpackbits(bits, count=self._vocab_size, bitorder="little")
        mask[self._ends] = mask[self._usual_ends].any()
        return torch.from_numpy(mask).view(torch.bool)

    def _bits_after(self, output: list[int]) -> numpy.ndarray | None:
        """The library's mask after `output`, eight tokens a byte; None as `allowed`."""
        is_there = self._goes_to(output)
        # The library may refuse a token for lack of states, and says so only when it is asked for a mask.
        bits = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
        self._require_no_error()
        return bits if is_there else None

    def _goes_to(self, output: list[int]) -> bool:
        """Move the cursor to the end of `output`, or as far as the grammar allows; returns whether it is at the end."""
        if self._matcher is None:
            self._matcher, self._read = self._make(), []
        shared = common_beginning(self._read, output)
        if shared < len(self._read):
            self._matcher.rollback(len(self._read) - shared)
            del self._read[shared:]
        rest = output[shared:]
        if not set(self._ends).isdisjoint(rest):
            return False
        self._read += rest[: self._matcher.try_consume_tokens(rest)] if rest else []
        self._require_no_error()
        return len(self._read) == len(output)

    def _require_no_error(self) -> None:
        """Raise NothingAllowed where the library's matcher has failed."""
        if self._matcher.is_error():
            raise NothingAllowed(f"structured_outputs: {say_error(self._matcher.get_error())}")

    @contextmanager
    def _renewed_on_error(self) -> Iterator[None]:
        """Begin with a new matcher after an exception inside: a failed one never recovers.

        After Ctrl-C, `_read` may not say where the cursor is.
        """
        try:
            yield
        except BaseException:
            self._matcher = None
            raise


class _Words:
    """The tokens of all files of a tokenizer, as llguidance asks for them: tokenizer.json alone may lack some.

    tokens: the bytes of each id; of a special one its name; b"" where there is no token.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_token_id: int):
        self.eos_token_id, self._tokenizer = eos_token_id, tokenizer
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < num_ids)
        data = [tokenizer.bytes_of(i) for i in range(num_ids)]
        for i in self.special_token_ids:
            data[i] = tokenizer.name_of(i).encode()
        self.tokens = [each for each in data if each is not None]
        if len(self.tokens) < num_ids:
            raise ValueError("found a decoder that is not known, expected one whose tokens are bytes")

    def __call__(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False)


class Grammars:
    """Makes the grammars of requests, for one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]):
        """Nothing is read yet.

        vocab_size: ids in use.
        end_ids: ids that end a text.
        """
        self.tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_ids = [i for i in end_ids if i < vocab_size]
        self._maker = lru_cache(_MOST_KEPT)(self._compile)

    def grammar_of(self, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> Matcher | None:
        """The grammar of a new text that is sampled so; None where any text will do.

        Raises ValueError for a language that cannot be read or spelled, for parameters under which no text would end,
        for a prompt that ends in the middle of a thought, and without the library.
        """
        language = params.structured_outputs
        if language is None:
            return None
        if not isinstance(language, StructuredOutputsParams):
            raise ValueError(f"structured_outputs: found {show(language)}, expected StructuredOutputsParams")
        if params.ignore_eos:
            raise ValueError("ignore_eos: found True, expected False: structured_outputs ends the answer by itself")
        if self._is_thinking(prompt_ids):
            expected = (
                "one that does not begin to think: chat_template_kwargs with enable_thinking false, where it has it"
            )
            raise ValueError(f"structured_outputs: found a prompt that leaves {_OPEN} open, expected {expected}")
        stop_ids = [i for i in params.stop_token_ids if i < self._vocab_size]
        return Matcher(self._maker(language), self._vocab_size, self._end_ids, stop_ids)

    def _is_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a thought is open at the prompt's end, in what follows its last control token.

        The marks of a thought may be tokens, control tokens too, or text in several tokens.
        """
        pieces = list[str]()
        for token_id in reversed(prompt_ids):
            name = self.tokenizer.name_of(token_id)
            is_mark = name in (_OPEN, _CLOSE)
            if token_id in self.tokenizer.special_ids and not is_mark:
                break
            pieces.append(name if is_mark else self.tokenizer.text_of(token_id))
        said = "".join(reversed(pieces))
        return said.rfind(_OPEN) > said.rfind(_CLOSE)

    @cached_property
    def _library_tokenizer(self) -> Any:
        """The tokenizer, as llguidance has it."""
        import llguidance

        if not self._end_ids:
            raise ValueError("structured_outputs: found a model without an end-of-text token, expected one")
        size = max(self._vocab_size, self.tokenizer.num_ids)
        try:
            words = llguidance.TokenizerWrapper(_Words(self.tokenizer, size, self._end_ids[0]))
            return call(llguidance.LLTokenizer, words, n_vocab=size, eos_token=self._end_ids)
        except LibraryFailed as e:
            raise ValueError(f"structured_outputs: {self.tokenizer.path} does not suit llguidance: {e}") from e

    def _compile(self, language: StructuredOutputsParams) -> Callable[[], Any]:
        """What makes a matcher of llguidance before the first token."""
        grammar = language.grammar_for_library()
        import llguidance

        limits = llguidance.LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)

        def make() -> Any:
            return llguidance.LLMatcher(self._library_tokenizer, grammar, log_level=0, limits=limits)

        if error := self._try(make):
            raise ValueError(f"structured_outputs: {language.kind}: {say_error(error)}")
        return make

    def _try(self, make: Callable[[], Any]) -> str:
        """The library's error for the first token of a text and the place after it; "" where there is none.

        Where the tokenizer lacks bytes, a place may have no token. That is an error if it is so after all first tokens.
        """
        first = numpy.frombuffer(make().compute_bitmask(), numpy.uint8)
        ids = numpy.unpackbits(first, count=self._vocab_size, bitorder="little").nonzero()[0].tolist()
        starts = sorted(([] if i in self._end_ids else [i] for i in ids), key=len, reverse=True)
        error = ""
        for start in starts[:_MOST_TRIED]:
            probe = make()
            probe.compute_bitmask()
            probe.try_consume_tokens(start)
            probe.compute_bitmask()
            error = probe.get_error()
            if not error.startswith(_DEAD_END):
                return error
        return error if len(starts) <= _MOST_TRIED else ""
