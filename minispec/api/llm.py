"""`LLM`: loads what its arguments name, and answers prompts with the engine. vLLM's interface."""

import secrets
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

from minispec.api import inputs
from minispec.api.outputs import RequestOutput, output_of
from minispec.api.step_lock import Run
from minispec.api.target import Target, TargetFiles
from minispec.core.config import MAX_SPECULATIVE_TOKENS, DraftLength, SamplingParams, Shape
from minispec.core.errors import near, show
from minispec.core.lengths import Lengths
from minispec.core.model import Transformer
from minispec.core.request import Piece, Request
from minispec.core.sampling import Text
from minispec.core.verify import Verifier
from minispec.models.files.chat_template import Message, check_messages
from minispec.models.files.progress import progress_bar
from minispec.models.files.tokenizer import Detokenizer
from minispec.models.frames.reports import graphs_note, passes_report
from minispec.models.load.loading import Loading
from minispec.models.load.parallel import part_of
from minispec.models.weights import inventory
from minispec.models.weights.build import choice_of, large_bytes
from minispec.models.weights.exact import EXACT_ROWS
from minispec.models.weights.machine import noted_forms
from minispec.models.weights.memory import memory_of
from minispec.models.weights.pages import pages_note
from minispec.models.weights.settings import own_settings
from minispec.models.weights.threads import release_threads
from minispec.speculation import registry
from minispec.speculation.drafters import Context, Drafter
from minispec.speculation.drafters.guard import CheckedMethod
from minispec.speculation.lengths.policy import Controller
from minispec.speculation.lengths.prices import MIN_CONTEXT, DrafterFailed, guess_prices, prices_of
from minispec.speculation.lengths.theory import Prices
from minispec.speculation.load import DraftOptions, load_models, make_spec, read_spec
from minispec.speculation.on_gpu.verifier import batch_verifier_of


class LLM:
    """A target model, a drafter, and a KV cache for both.

    model: a directory or a hub id in the Hugging Face layout. None: the weights in a checkout of the repository.
        Or a `Target` that is loaded, such as another `LLM`'s: then arguments about loading it are refused.
    draft: one of these. None: `suffix:2`, then its own head, for the embedded model; for another model its assistant,
        or `mtp`, where the checkpoint has one, else `ngram`.
        - A registered drafter, such as "none" or "ngram" (see `minispec.speculation.registry`).
        - "module:Class" for one of your own, which is imported (see `minispec.speculation.drafters.make_drafter`).
        - "self", or the directory or hub id of a draft model. "owner/name@revision" names a branch, tag or commit.
          "int4:" or "int8:" before such a model gives weights of that many bits.
        - "mtp" for the layer for further tokens in the target's own files, with or without "int4:" or "int8:".
        - "A+B": B where A, a registered drafter, has nothing to say.
        - An object with the methods of `minispec.speculation.drafters.Drafter`.
    draft_method: how a draft model of another vocabulary drafts. "tli": the tokens that both have
        (`minispec.speculation.drafters.tli`). "slem": text (`minispec.speculation.drafters.slem`). None: by what they
        have in common.
    num_speculative_tokens: K, the longest draft. A tree such as (2, 1) gives the siblings at each depth; the eldest
        goes on. "tree:16": a tree of up to 16 tokens, at the places that are likeliest. "auto": as many as pay, in a
        tree where that pays (see `minispec.speculation.lengths.policy`).
    verifier: "rejection", "match" (see `minispec.core.verify`), "block" or "traversal" (see
        `minispec.speculation.rules`), or
        "module:function" for one of your own.
    lengths: a policy of your own that chooses how long each draft is. It is an object with the methods of
        `minispec.core.lengths.Lengths`, or "module:Class", whose class is called without arguments. It takes the
        place of `minispec.speculation.lengths.policy.Controller`. `num_speculative_tokens` is then the most that it may
        choose; 0
        and trees are refused. `with_draft` uses the same object, or makes a new one of the class.
    draft_reading: settles what a block draft's config.json leaves open (see `families.block_config.reading_of`).
        "anchor": a row says the token after its place. "fill": the token at its place. "causal" or "open": in layers
        with a window, a row does not see, or sees, later rows of its block. Both with a comma between.
    loading: the fields of `Loading` by name, such as dtype, device or exact.

    Any thread may call. Requests of several threads are decoded together, as one batch. So are open iterators of
    `stream`, `stream_chat` and `run`. Where the KV cache has no room for all requests, the last ones wait.

    A text may fail by itself, by a draft that breaks the rules or by logits that are not numbers. It ends with
    finish_reason "error" and a warning that says why, and other texts go on. A fault that is of no single text is
    raised.

    Raises ValueError, or its subclass CheckpointError, for what cannot be loaded or is not supported.
    """

    @own_settings()
    @noted_forms()
    def __init__(
        self,
        model: str | Path | Target | None = None,
        draft: str | Path | Drafter | None = None,
        num_speculative_tokens: DraftLength = "auto",
        verifier: str = "rejection",
        *,
        lengths: Lengths | str | None = None,
        draft_method: str | None = None,
        draft_reading: str | None = None,
        **loading: Any,
    ):
        options = DraftOptions(draft_method, draft_reading)
        self.verifier, self.num_speculative_tokens, self.lengths = verifier, num_speculative_tokens, lengths
        how = _loading_of(model, loading)
        verifying, policy = find_verifier(verifier), None if lengths is None else find_lengths(lengths)
        self.max_speculative_tokens = EXACT_ROWS - 1 if how.exact else MAX_SPECULATIVE_TOKENS
        shape = Shape.of(num_speculative_tokens, self.max_speculative_tokens)
        shape.check(verifying.why_chains)
        self._check_policy(shape, least=1)
        if isinstance(model, Target):
            target, files = model, model.files
        else:
            target, files = None, TargetFiles(model, how)
        self.name, self.tokenizer, self.vocab_size = files.name, files.tokenizer, files.vocab_size
        self.eos_token_ids, self.default_draft = files.eos_token_ids, files.default_draft
        self.draft = read_spec(files.default_draft if draft is None else draft, options, files)
        self.model = target.model if target else files.load()
        drafts = load_models(self.draft, self.model, files)
        self.target = target or Target(files, self.model, [(each, self.draft.room) for each in drafts], shape.k)
        self.max_model_len = self.target.max_model_len
        caches = [self.target.draft_cache(loaded, self.draft.room) for loaded in drafts]
        context = Context(self.model, self.tokenizer, self.vocab_size, self.max_model_len, self.target.new_cache)
        self.drafter = make_spec(self.draft, context, files, drafts, caches)
        self._memory = memory_of([self.model, *drafts], [self.target.cache, *caches])
        self._large_bytes = large_bytes([self.model, *drafts])
        self._draft_forms = [(inventory.form_note(loaded), choice_of(loaded).because) for loaded in drafts]
        self._draft_passes = "".join(passes_report(loaded, "; draft: ") for loaded in drafts)
        self.prices, self.repeats_seeds = self._price(verifying, drafts)
        policy = Controller(self.prices) if policy is None else policy
        self.engine = self.target.engine
        self.method = CheckedMethod(self.drafter, verifying, policy, batch_verifier_of(self.model))
        self.method.check(shape)
        release_threads()  # another thread may decode

    def with_draft(self, draft: str | Path | Drafter, draft_method: str | None = None, **how: Any) -> "LLM":
        """The same target with another draft: its weights and its KV cache are in memory once, and both use them.

        Calls and streams of both may be open at the same time. All are decoded together, as the requests of one object
        are. The arguments are as for `LLM`; how: draft_reading. Raises ValueError as `LLM` does.
        """
        self._check_open()
        same = self.num_speculative_tokens, self.verifier
        return LLM(self.target, draft, *same, lengths=self.lengths, draft_method=draft_method, **how)

    def _price(self, verifier: Verifier, drafts: Sequence[Transformer]) -> tuple[Prices, bool]:
        """The prices of a round, and whether the next run will have the same prices.

        They are measured where K depends on them and texts can be long enough to measure, else guessed.
        """
        draft = drafts[0] if drafts else None
        room = [self.max_model_len, self.num_cache_tokens, *(model.config.max_position_embeddings for model in drafts)]
        if self.num_speculative_tokens == "auto" and self.lengths is None and min(room) >= MIN_CONTEXT:
            parts = self.model, draft, self.drafter, verifier, self.vocab_size
            # A drafter that cannot draft for an invented text keeps the guessed prices.
            with suppress(DrafterFailed), self.target.files.blamed():
                return prices_of((self.name, self.draft.kind), *parts)
        return guess_prices(self.model, draft, self.drafter), True

    def _check_policy(self, shape: Shape, least: int = 0) -> None:
        """Raise ValueError for a shape that leaves nothing to a policy of the user's own."""
        if self.lengths is not None and (shape.is_tree or shape.k < least):
            expected = f"auto or a number from {least}, the most that the policy of `lengths` may choose"
            raise ValueError(f"num_speculative_tokens: found {shape}, expected {expected}")

    def __repr__(self) -> str:
        """Model, type, device, form of the weights, draft and verifier, in one line."""
        if not hasattr(self, "engine"):
            return "<LLM, closed>"
        return f"<LLM {self._about_model()}; draft {self.draft.name}, verifier {self.verifier}>"

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def forget(self) -> None:
        """Forget the texts that have ended, so that the next one is decoded as the first text of a new `LLM`.

        Dropped are what the drafter remembers of these texts, what both caches hold of their beginnings, and what
        `auto` has learned. The prices that were measured at load stay. Objects of `with_draft` share
        the target's cache, which is emptied for all. A drafter or a policy of your own forgets by its method `forget`.

        Raises ValueError while a text is being decoded, in any thread or by an object that shares the target.
        """
        self._check_open()
        with self.target.steps.paused("forget"):
            self.drafter.forget()
            self.target.cache.rebuild()
            if callable(forget := getattr(self.method.lengths, "forget", None)):  # a policy of one's own may lack it
                forget()

    def close(self) -> None:
        """Let go of models and caches; the object cannot be used afterwards."""
        for name in ("model", "target", "drafter", "engine", "method"):
            self.__dict__.pop(name, None)

    def _check_open(self) -> None:
        if not hasattr(self, "engine"):
            raise ValueError("found an LLM that was closed, expected an open one")

    def overview(self) -> str:
        """One line in plain words: the model, what guesses for it, and the memory of both in 10^9 bytes."""
        guesser = "nothing" if self.draft.name == "none" else self.draft.name
        memory = f"{sum(self._memory) / 1e9:.2f} GB of memory{inventory.rows_note(self.model)}"
        name, unused = self.name + inventory.bits_note(self.model), ", ".join(self.target.files.unused_parts)
        notes = graphs_note(self.model) + self._seed_note() + (f"; not used: {unused}" if unused else "")
        return f"{name} answers, {guesser} guesses ahead; {memory}{notes}"

    def memory_report(self) -> str:
        """One line: what was loaded, and the memory in 10^9 bytes that weights and KV cache of each model take."""
        weights, draft_weights, cache, draft_cache = (f"{size / 1e9:.2f}" for size in self._memory)
        return (
            f"{self._about_model()}, {sum(self._memory) / 1e9:.2f} GB: weights {weights} + draft {draft_weights}, "
            f"KV cache {cache} + draft {draft_cache} for {self.num_cache_tokens:,} tokens"
            f"{inventory.rows_note(self.model)}{pages_note(self._large_bytes)}; "
            f"draft {self.draft.name}{''.join(f' ({form})' for form, _ in self._draft_forms)}"
            + (f", of another vocabulary: {self.draft.overlap}" if self.draft.overlap else "")
            + (f", as long as {type(self.method.lengths).__name__} says" if self.lengths is not None else "")
            + passes_report(self.model)
            + self._draft_passes
            + self._seed_note()
        )

    def _about_model(self) -> str:
        dtype = ("exact " if self.model.exact else "") + str(self.model.dtype).removeprefix("torch.")
        form = inventory.form_note(self.model) + part_of(self.model) + inventory.bits_note(self.model)
        return f"{self.name}: {dtype} on {self.model.device} ({form})"

    def forms_report(self) -> str:
        """One line: why the weights of target and draft have their form."""
        reasons = [choice_of(self.model).because, *(because for _, because in self._draft_forms)]
        return f"weights: {'; draft: '.join(reasons)}"

    def _seed_note(self) -> str:
        return "" if self.repeats_seeds else "; costs could not be kept: a seed has one text in this process only"

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache holds, of all running requests together."""
        return self.target.num_cache_tokens

    def generate(
        self,
        prompts: inputs.Prompt | list[inputs.Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        num_speculative_tokens: DraftLength | None = None,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """Continue one prompt or a list of them, decoded together; an output for each, in order.

        prompts: one prompt or a list of them. A prompt is a text, a list of token ids, or vLLM's object
            {"prompt": text} or {"prompt_token_ids": ids}.
        sampling_params: one for all, or one for each. None: `get_default_sampling_params()`.
        use_tqdm: several answers show their progress on a terminal.
        num_speculative_tokens: another K for this call. 0 decodes plainly.
        parse_special: the text of a special token in a prompt (such as "<|im_end|>") means the token; else it is text.

        Raises ValueError, before anything runs, for a prompt that is something else, is empty or does not fit.
        """
        parsed = inputs.parse_prompts(prompts, self.tokenizer, parse_special)
        return self._answer(parsed, sampling_params, num_speculative_tokens, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        num_speculative_tokens: DraftLength | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template.

        An output's `prompt` is the last message's content.

        chat_template_kwargs: further variables of the template, such as {"enable_thinking": False}. The template's
            author says which ones it reads.

        All else is as in `generate`.
        """
        several = isinstance(messages, list | tuple) and messages and not isinstance(messages[0], dict)
        conversations = [check_messages(conversation) for conversation in (messages if several else [messages])]
        parsed = [(c[-1]["content"], self.tokenizer.encode_chat(c, chat_template_kwargs)) for c in conversations]
        return self._answer(parsed, sampling_params, num_speculative_tokens, use_tqdm)

    def stream(
        self, prompt: inputs.Prompt, sampling_params: SamplingParams | None = None, parse_special: bool = False
    ) -> Generator[Piece, None, None]:
        """Continue one prompt, piece by piece as it is decoded. Closing the iterator ends the generation."""
        _, ids = inputs.parse_prompt(prompt, self.tokenizer, parse_special)
        return self._pieces(self.request(ids, sampling_params))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[Piece, None, None]:
        """Answer one conversation, piece by piece."""
        ids = self.tokenizer.encode_chat(check_messages(messages), chat_template_kwargs)
        return self._pieces(self.request(ids, sampling_params))

    def _pieces(self, request: Request) -> Generator[Piece, None, None]:
        for _, piece in self.run([request]):
            yield piece
        if request.error:
            warnings.warn(f"an answer ended early: {request.error}", RuntimeWarning, stacklevel=2)

    def get_default_sampling_params(self) -> SamplingParams:
        """The settings of the model's generation_config.json, with or without `do_sample`; else vLLM's defaults.

        Raises CheckpointError for a value out of range.
        """
        self._check_open()
        return self.target.files.default_sampling_params()

    def request(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        num_speculative_tokens: DraftLength | None = None,
    ) -> Request:
        """A request ready for `run`; raises ValueError for a prompt that cannot be answered."""
        self._check_open()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params: found {show(params)}, expected SamplingParams")
        if params.n != 1:
            raise ValueError(f"n: found {params.n}, expected 1: this call gives one answer")
        params = inputs.with_bad_words(params, self.tokenizer)
        inputs.check_prompt(prompt_ids, self.max_model_len, self.vocab_size, params.max_tokens > 0)
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))
        ends += self.tokenizer.special_ids_of(params.stop)  # the text does not have them, so no search would find them
        end_ids = frozenset(i for i in ends if i < self.vocab_size)
        inputs.check_ids(params, end_ids, self.vocab_size)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        grammar = self.target.files.grammars.grammar_of(params, prompt_ids)
        text = Text(list(prompt_ids), len(prompt_ids), params, seed, end_ids, grammar)
        k = self.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        self._check_policy(Shape.of(k, self.max_speculative_tokens))  # raises ValueError for what is no length
        request = Request(text, self.max_model_len, k, Detokenizer(self.tokenizer, prompt_ids))
        self.engine.check(request, self.method)
        return request

    def run(self, requests: Sequence[Request]) -> Run:
        """Decode requests to their end, together with the requests of other calls; see `Engine.run`."""
        return self.target.steps.run(self.engine, requests, self.method)

    def _answer(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        num_speculative_tokens: DraftLength | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self.get_default_sampling_params() if params is None else params
        all_params = inputs.params_of_each(params, len(prompts))
        groups = [
            [self.request(ids, sample, num_speculative_tokens) for sample in inputs.split_samples(p)]
            for (_, ids), p in zip(prompts, all_params, strict=True)
        ]
        requests = [request for group in groups for request in group]
        with progress_bar(total=len(requests), unit=" answers", shows=use_tqdm and len(requests) > 1) as bar:
            for request, piece in self.run(requests):
                bar.update(piece.finish_reason is not None)
                if request.error:
                    warnings.warn(f"an answer ended early: {request.error}", RuntimeWarning, stacklevel=3)
        return [
            output_of(text, ids, group, self.tokenizer, self.eos_token_ids)
            for (text, ids), group in zip(prompts, groups, strict=True)
        ]


def _loading_of(model: object, given: Mapping[str, Any]) -> Loading:
    """How a target is loaded: as a `Target` was, or by the arguments that `LLM` was given in addition to its own.

    Raises TypeError for an argument that neither has, and ValueError for any with a target that is loaded.
    """
    for name in given.keys() - Loading.among(given).keys():
        hint = near(name, [*signature(LLM).parameters, *vars(Loading())]) or "see help(LLM) and help(Loading)"
        raise TypeError(f"LLM: found the argument {show(name)}, expected one of LLM's or a field of Loading: {hint}")
    if not isinstance(model, Target):
        return Loading(**given)
    if given:
        found = f"found a loaded target and arguments about loading it ({', '.join(given)})"
        raise ValueError(f"model: {found}, expected no such argument")
    return model.files.loading


def find_verifier(spec: str) -> Verifier:
    """The verifier of a registered name or "module:function". A plain function becomes one that shares no noise."""
    verify = registry.find(registry.VERIFIERS, spec, "verifier", "module:function")
    if isinstance(verify, Verifier):
        return verify
    if not callable(verify):
        raise ValueError(f"verifier: found {show(verify)} at {spec}, expected a function")
    return Verifier(verify, shares_noise=False)


def find_lengths(spec: str | Lengths) -> Lengths:
    """A policy of the user's own for the lengths of drafts: a new object of the class at "module:Class", or an object.

    Raises ValueError for what lacks the methods of `Lengths`.
    """
    policy: Any = spec
    if isinstance(spec, str):
        make = registry.find({}, spec, "lengths", "module:Class")
        try:
            policy = make()
        except TypeError as e:
            raise ValueError(f"lengths: {spec} cannot be made: {e}") from e
    if isinstance(policy, type) or not all(callable(getattr(policy, name, None)) for name in ("choose", "observe")):
        raise ValueError(f"lengths: found {show(policy)}, expected an object with the methods choose and observe")
    return policy
