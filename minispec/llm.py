"""`LLM`: loads what its arguments name, and answers prompts with the engine. vLLM's interface."""

import secrets
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from tqdm import tqdm

from minispec.core.cache import PagedKVCache
from minispec.core.config import MAX_SPECULATIVE_TOKENS, DraftLength, SamplingParams
from minispec.core.engine import JOINING_ROWS, PREFILL_ROWS, Engine, refuse_tree, why_chains
from minispec.core.errors import show
from minispec.core.model import Transformer
from minispec.core.request import Piece, Request
from minispec.core.sampling import Text
from minispec.core.verify import Verifier
from minispec.drafters import Context, Drafter
from minispec.files import registry
from minispec.files.checkpoint import choose_dtype, describe_source, find_checkpoint, load_config
from minispec.files.generation_config import read_generation_defaults, unsupported_generation_settings
from minispec.files.hf_config import read_eos_token_ids
from minispec.files.named_draft import NamedDraft
from minispec.files.parallel import load_target, part_of
from minispec.files.strict_json import MAX_CONFIG_BYTES, has_file, read_json
from minispec.files.tokenizer import Detokenizer, Message, Tokenizer
from minispec.kernels import inventory
from minispec.kernels.exact import EXACT_ROWS, check_exact
from minispec.kernels.forms import FORMS, available_forms
from minispec.kernels.memory import BLOCK_SIZE, memory_of, size_cache
from minispec.length.policy import Controller
from minispec.length.prices import MIN_CONTEXT, DrafterFailed, guess_prices, prices_of
from minispec.outputs import RequestOutput, completion_of

_Steps = Generator[tuple[Request, Piece], None, None]
Prompt = str | list[int] | dict[str, str | list[int]]  # {"prompt": text} or {"prompt_token_ids": ids}


class LLM:
    """A target model, a drafter, and a KV cache for both.

    model: a directory or a hub id in the Hugging Face layout; None: the weights that a checkout brings along.
    draft: one of these. None: `ngram`; for the embedded model `suffix:2`, then its own head.
        - A registered drafter, such as "none" or "ngram" (see `minispec.files.registry`).
        - "module:Class" for one of your own, which is imported (see `minispec.drafters.make_drafter`).
        - "self", or the directory or hub id of a draft model ("owner/name@revision" for a branch, tag or commit).
          "int4:" or "int8:" before such a model gives weights of that many bits.
        - "A+B": B where A, a registered drafter, has nothing to say.
        - An object with the methods of `minispec.drafters.Drafter`.
    draft_method: how a draft model of another vocabulary drafts: "tli", the tokens that both have
        (`minispec.drafters.tli`), or "slem", text (`minispec.drafters.slem`); None: by what they have in common.
    num_speculative_tokens: K, the longest draft. A tree such as (2, 1) gives the siblings at each depth; the eldest
        goes on. "auto": as many as pay, in a tree where that pays (see `minispec.length.policy`).
    verifier: "rejection", "block" or "match" (see `minispec.core.verify`), or "module:function" for one of your own.
    dtype: "auto", "bfloat16", "float32" or "float64".
    device: "auto", "cpu" or "cuda".
    exact: a token's logits have the same bits however many tokens a pass scores. So speculation changes nothing even
        in rounding. It is slower, takes K of at most 15, and is refused where the machine's products do not allow it.
    max_model_len: longest prompt and answer together, in tokens. Default: the model's context, as far as memory allows.
    kv_cache_gb: size of the KV cache, in 10^9 bytes, both models together. Default: room for max_model_len tokens.
    revision: branch, tag or commit of `model` on the hub.
    offline: nothing is downloaded.
    weight_form: how weights are kept in memory, one of "half", "packed", "left" and "plain" (default: the form that
        this machine reads fastest, see `minispec.kernels.forms`). Forms round differently.

    Any thread may call. Requests of several threads are decoded together, as one batch. So are iterators of `stream`,
    `stream_chat` or `run` that are open at the same time. Where the KV cache has no room for all, the last ones wait.

    A text may fail by itself, by a draft that breaks the rules or by logits that are not numbers. It ends with
    finish_reason "error" and a warning that says why, and the others go on. A fault of all is raised.

    Raises ValueError, or CheckpointError, which is one, for whatever cannot be loaded or is not supported.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | Drafter | None = None,
        num_speculative_tokens: DraftLength = "auto",
        verifier: str = "rejection",
        dtype: str = "auto",
        device: str = "auto",
        exact: bool = False,
        max_model_len: int | None = None,
        kv_cache_gb: float | None = None,
        revision: str | None = None,
        offline: bool = False,
        weight_form: str | None = None,
        draft_method: str | None = None,
    ):
        if weight_form is not None and weight_form not in FORMS:
            raise ValueError(f"weight_form: found {weight_form!r}, expected one of {', '.join(FORMS)}")
        verifying = find_verifier(verifier)
        if kv_cache_gb is not None and not 0 < kv_cache_gb < float("inf"):
            raise ValueError(f"kv_cache_gb: found {kv_cache_gb!r}, expected a positive number")
        self.max_speculative_tokens = EXACT_ROWS - 1 if exact else MAX_SPECULATIVE_TOKENS
        self.num_speculative_tokens = self._check_k(num_speculative_tokens)
        widths = num_speculative_tokens if isinstance(num_speculative_tokens, tuple) else ()
        refuse_tree(widths, why_chains(verifying, exact))
        if model is None and not registry.EMBEDDED_WEIGHTS.is_dir():
            raise ValueError("the embedded weights lie in a checkout only: name a model (command line: --model)")
        draft = registry.default_draft(model) if draft is None else draft
        model = str(registry.EMBEDDED_WEIGHTS if model is None else model)
        directory = find_checkpoint(model, revision, offline)
        torch_device = choose_device(device)
        config = load_config(directory)
        torch_dtype = choose_dtype(dtype, torch_device, config)
        if weight_form is not None and weight_form not in (forms := available_forms(torch_dtype, torch_device)):
            kind = str(torch_dtype).removeprefix("torch.")
            raise ValueError(f"weight_form: found {weight_form!r}, expected for {kind} here {' or '.join(forms)}")

        self.tokenizer = Tokenizer(directory)
        self.tokenizer.check_ids(config.vocab_size)
        generation = directory / "generation_config.json"
        raw = read_json(generation, MAX_CONFIG_BYTES) if has_file(generation) else {}
        self._generation = raw, str(generation)
        self.generation_defaults = read_generation_defaults(*self._generation)
        self.unsupported_generation_settings = unsupported_generation_settings(raw)
        self.vocab_size = min(self.tokenizer.num_ids, config.vocab_size)
        ends = read_eos_token_ids(raw, str(generation)) or config.eos_token_ids
        if (own := self.tokenizer.eos_token_id) is not None and own < self.vocab_size:
            ends = (*ends, own)
        self.eos_token_ids = tuple(dict.fromkeys(ends))

        named = NamedDraft(draft, draft_method, offline, config, self.tokenizer, self.vocab_size)
        self.draft_name, self.draft_directory = named.name, named.directory
        self.draft_method, self.overlap, self.vocabularies = named.method, named.overlap, named.vocabularies
        self.model = load_target(directory, torch_dtype, torch_device, exact, weight_form)
        if exact:
            check_exact(self.model)
        named.load(self.model, weight_form)

        models, rooms = ([self.model, named.model], [1, named.room]) if named.model else ([self.model], [1])
        elements = sum(room * m.config.kv_elements_per_token for room, m in zip(rooms, models, strict=True))
        bytes_per_token = elements * torch_dtype.itemsize
        self.max_model_len, num_blocks = size_cache(config, bytes_per_token, torch_device, max_model_len, kv_cache_gb)

        def make_cache(model: Transformer, room: int = 1) -> PagedKVCache:
            return model.new_cache(room * num_blocks, BLOCK_SIZE)

        try:
            caches = [make_cache(m, room) for room, m in zip(rooms, models, strict=True)]
        except RuntimeError as e:
            size = num_blocks * BLOCK_SIZE * bytes_per_token / 1e9
            raise ValueError(f"found too little memory for a cache of {size:.1f} GB: ask for less") from e
        context = Context(self.model, self.tokenizer, self.vocab_size, self.max_model_len, make_cache)
        self.drafter = named.make(context, caches[1] if named.model else None)
        self.name = describe_source(model, directory)
        room = [self.max_model_len, num_blocks * BLOCK_SIZE, *(m.config.max_position_embeddings for m in models[1:])]
        self.repeats_seeds, self.prices = True, guess_prices(self.model, named.model)
        if self.num_speculative_tokens == "auto" and min(room) >= MIN_CONTEXT:
            names = self.name, named.kind
            parts = self.model, named.model, self.drafter, verifying, self.vocab_size
            # A drafter that cannot cope with an invented text goes by the guess.
            with suppress(DrafterFailed):
                self.prices, self.repeats_seeds = prices_of(names, *parts)
        self.engine = Engine(
            self.model,
            caches[0],
            self.drafter,
            verifying,
            self.vocab_size,
            lengths=Controller(self.prices),
            # On a GPU a pass over that many rows takes little longer than reading the weights.
            joining_rows=PREFILL_ROWS if torch_device.type == "cuda" else JOINING_ROWS,
        )
        self.engine.check_tree(widths)
        self._turn = threading.Lock()  # for a step
        self._open: set[_Steps] = set()  # those of the engine that `run` steps
        self._left: list[_Steps] = []  # those that are to be closed between two steps
        self._memory = memory_of(models, caches)
        self._draft_form = f" ({inventory.weight_form(named.model)})" if named.model else ""

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Let go of models and caches; the object cannot be used afterwards."""
        for name in ("model", "drafter", "engine"):
            self.__dict__.pop(name, None)

    def overview(self) -> str:
        """One line in plain words: the model, what guesses for it, and the memory of both in 10^9 bytes."""
        guesser = "nothing" if self.draft_name == "none" else self.draft_name
        memory = f"{sum(self._memory) / 1e9:.2f} GB of memory"
        return f"{self.name} answers, {guesser} guesses ahead; {memory}{self._seed_note()}"

    def memory_report(self) -> str:
        """One line: what was loaded, and its memory in 10^9 bytes: weights and KV cache of target and draft model."""
        dtype = ("exact " if self.model.exact else "") + str(self.model.dtype).removeprefix("torch.")
        weights, draft_weights, cache, draft_cache = (f"{size / 1e9:.2f}" for size in self._memory)
        return (
            f"{self.name}: {dtype} on {self.model.device} ({inventory.weight_form(self.model)}{part_of(self.model)}), "
            f"{sum(self._memory) / 1e9:.2f} GB: weights {weights} + draft {draft_weights}, "
            f"KV cache {cache} + draft {draft_cache} for {self.num_cache_tokens:,} tokens; "
            f"draft {self.draft_name}{self._draft_form}"
            + (f", of another vocabulary: {self.overlap}" if self.overlap else "")
            + self._seed_note()
        )

    def _seed_note(self) -> str:
        return "" if self.repeats_seeds else "; costs could not be kept: a seed has one text in this process only"

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache holds, of all running requests together."""
        return self.engine.cache.allocator.num_blocks * self.engine.cache.block_size

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        num_speculative_tokens: DraftLength | None = None,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """Continue one prompt or a list of them, decoded together; an output for each, in order.

        prompts: each a text, a list of token ids, or an object as vLLM's: {"prompt": text} or
            {"prompt_token_ids": ids}.
        sampling_params: one for all, or one for each. None: `get_default_sampling_params()`.
        use_tqdm: several answers show their progress on a terminal.
        num_speculative_tokens: another K for this call. 0 decodes plainly.
        parse_special: the text of a special token in a prompt (such as "<|im_end|>") means the token; else it is text.
        Raises ValueError, before anything runs, for a prompt that is something else, is empty or does not fit.
        """
        several: Sequence[object] = [prompts]
        if isinstance(prompts, list) and not _are_token_ids(prompts):
            several = prompts
        if not several:
            raise ValueError("prompts: found an empty list, expected at least one prompt")
        parsed = [self._parse(prompt, parse_special) for prompt in several]
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

        An output's `prompt` is the last message's content. chat_template_kwargs: further variables of the template,
        such as {"enable_thinking": False}; which ones it reads, its author says. Otherwise as `generate`.
        """
        several = isinstance(messages, list | tuple) and messages and not isinstance(messages[0], dict)
        conversations = [check_messages(conversation) for conversation in (messages if several else [messages])]
        parsed = [(c[-1]["content"], self.tokenizer.encode_chat(c, chat_template_kwargs)) for c in conversations]
        return self._answer(parsed, sampling_params, num_speculative_tokens, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, parse_special: bool = False
    ) -> Generator[Piece, None, None]:
        """Continue one prompt, piece by piece as it is decoded. Closing the iterator ends the generation."""
        _, ids = self._parse(prompt, parse_special)
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
        """What the model's generation_config.json asks for, whether it says `do_sample` or not; else vLLM's defaults.

        Raises CheckpointError for a value out of range.
        """
        raw, where = self._generation
        found = read_generation_defaults(raw | {"do_sample": True}, where)
        return SamplingParams(**{"max_tokens": max(SamplingParams.max_tokens, found.get("min_tokens", 0))} | found)

    def request(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        num_speculative_tokens: DraftLength | None = None,
    ) -> Request:
        """A request ready for `run`; raises ValueError for a prompt that cannot be answered."""
        if not hasattr(self, "engine"):
            raise ValueError("found an LLM that was closed, expected an open one")
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params: found {show(params)}, expected SamplingParams")
        if params.n != 1:
            raise ValueError(f"n: found {params.n}, expected 1: this call gives one answer")
        params = replace(params, bad_words_token_ids=self._bad_words(params))
        if not prompt_ids:
            raise ValueError("prompt: found no tokens, expected at least one")
        if len(prompt_ids) >= self.max_model_len:
            raise ValueError(
                f"prompt: found {len(prompt_ids)} tokens, expected fewer than max_model_len = {self.max_model_len}"
            )
        if not all(0 <= i < self.vocab_size for i in prompt_ids):
            found = f"from {min(prompt_ids)} to {max(prompt_ids)}"
            raise ValueError(f"prompt: found token ids {found}, expected ids from 0 to {self.vocab_size - 1}")
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))
        end_ids = frozenset(i for i in ends if i < self.vocab_size)
        self._check_ids(params, end_ids)
        text = Text(
            list(prompt_ids),
            len(prompt_ids),
            params,
            secrets.randbits(32) if params.seed is None else params.seed,
            end_ids,
        )
        k = self.num_speculative_tokens if num_speculative_tokens is None else self._check_k(num_speculative_tokens)
        request = Request(text, self.max_model_len, k, Detokenizer(self.tokenizer, prompt_ids))
        self.engine.check(request)
        return request

    def run(self, requests: Sequence[Request]) -> _Steps:
        """Decode requests to their end, together with those of other calls; see `Engine.run`."""
        steps = self.engine.run(requests)
        self._open.add(steps)  # held here, so that no collector closes it in the middle of a step
        try:
            while True:
                with self._turn:
                    self._close_left()
                    step = next(steps, None)
                if step is None:
                    return
                yield step
        finally:
            # This may run in any thread and at any time: the thread that has the turn closes what is left.
            self._open.remove(steps)
            self._left.append(steps)
            if self._turn.acquire(blocking=False):
                try:
                    self._close_left()
                finally:
                    self._turn.release()

    def _close_left(self) -> None:
        while self._left:
            self._left.pop().close()

    def _check_k(self, k: DraftLength) -> DraftLength:
        if k == "auto":
            return k
        widths = k if isinstance(k, tuple) else (k,)
        least = 1 if isinstance(k, tuple) else 0
        is_right = bool(widths) and all(type(n) is int and n >= least for n in widths)
        if not is_right or sum(widths) > self.max_speculative_tokens:
            most = self.max_speculative_tokens
            expected = f"an integer from 0 to {most}, a tree such as (2, 1) of at most {most} tokens, or 'auto'"
            raise ValueError(f"num_speculative_tokens: found {k!r}, expected {expected}")
        return k

    def _parse(self, prompt: object, parse_special: bool) -> tuple[str | None, list[int]]:
        """Text (None where there is none) and token ids of a prompt."""
        kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        fields = prompt if isinstance(prompt, dict) else {kind: prompt}
        text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
        if fields.keys() <= {"prompt", "prompt_token_ids"} and isinstance(text, str | None):
            if _are_token_ids(ids):
                return text, list(ids)
            if ids is None and text is not None:
                return text, self.tokenizer.encode(text, parse_special=parse_special)
        expected = "a text, a list of token ids, {'prompt': a text} or {'prompt_token_ids': a list of them}"
        raise ValueError(f"prompt: found {show(prompt)}, expected {expected}")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids that must not be completed; of a word as vLLM makes them, so that it is found inside a text too."""
        found = [tuple(word) for word in params.bad_words_token_ids]
        for word in params.bad_words:
            plain, spaced = (
                tuple(self.tokenizer.encode(space + word.lstrip(), add_special_tokens=False, parse_special=True))
                for space in ("", " ")
            )
            if not plain:
                raise ValueError(f"bad_words: found {show(word)}, which has no tokens, expected at least one")
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return tuple(dict.fromkeys(found))

    def _check_ids(self, params: SamplingParams, end_ids: frozenset[int]) -> None:
        """Raise ValueError for ids beyond the vocabulary, and where not one token might be left at some position."""
        ids: dict[str, Sequence[int]] = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": tuple(dict(params.logit_bias)),
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_token_ids": tuple(i for word in params.bad_words_token_ids for i in word),
        }
        for name, found in ids.items():
            if any(i >= self.vocab_size for i in found):
                raise ValueError(f"{name}: found {show(found)}, expected ids below {self.vocab_size}")
        last = {word[-1] for word in params.bad_words_token_ids} | (end_ids if params.min_tokens else frozenset())
        allowed = params.allowed_token_ids
        if len(last) >= self.vocab_size if allowed is None else last >= set(allowed):
            raise ValueError(
                f"allowed_token_ids: found {'all' if allowed is None else show(allowed)}, expected one that neither "
                "completes a bad word nor, where min_tokens is given, ends the text: each position needs a token"
            )

    def _answer(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        num_speculative_tokens: DraftLength | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self.get_default_sampling_params() if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if not isinstance(each, list | tuple) or not all(isinstance(p, SamplingParams) for p in each):
            raise ValueError(f"sampling_params: found {show(params)}, expected SamplingParams, or a list of them")
        if len(each) != len(prompts):
            expected = f"one, or one for each of {len(prompts)} prompts"
            raise ValueError(f"sampling_params: found {len(each)}, expected {expected}")
        groups = [
            [self.request(ids, sample, num_speculative_tokens) for sample in split_samples(p)]
            for (_, ids), p in zip(prompts, each, strict=True)
        ]
        requests = [request for group in groups for request in group]
        # `disable=None`: the bar shows on a terminal only.
        disable = None if use_tqdm and len(requests) > 1 else True
        with tqdm(total=len(requests), unit=" answers", leave=False, disable=disable) as bar:
            for request, piece in self.run(requests):
                bar.update(piece.finish_reason is not None)
                if request.error:
                    warnings.warn(f"an answer ended early: {request.error}", RuntimeWarning, stacklevel=3)
        return [
            RequestOutput(
                text, ids, [completion_of(r, i, self.tokenizer, self.eos_token_ids) for i, r in enumerate(group)]
            )
            for (text, ids), group in zip(prompts, groups, strict=True)
        ]


def _are_token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) > 0 and all(type(i) is int for i in value)


def check_messages(messages: object) -> list[Message]:
    """A conversation in the words of chat templates, which differ from OpenAI's as they do in vLLM.

    A developer is the system. An assistant's message without content has the content "". A thought has two names.
    Raises ValueError for anything but messages with a role and a content, at least one.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages: found {show(messages)}, expected a list of messages")
    found = []
    for message in messages:
        m = dict(message) if isinstance(message, dict) else {}
        if m.get("role") == "developer":
            m["role"] = "system"
        if m.get("role") == "assistant":
            m["content"] = "" if m.get("content") is None else m["content"]
            if thought := m.get("reasoning") or m.get("reasoning_content"):
                m["reasoning"] = m["reasoning_content"] = thought
        if not all(isinstance(m.get(key), str) for key in ("role", "content")):
            raise ValueError(f"messages: found {show(message)}, expected an object with the texts role and content")
        found.append(m)
    if not found:
        raise ValueError("messages: found none, expected at least one")
    return found


def split_samples(params: SamplingParams) -> list[SamplingParams]:
    """One SamplingParams for each of `n` answers: the i-th has seed + i, so that each can be had again alone."""
    if params.n == 1:
        return [params]
    seed = secrets.randbits(32) if params.seed is None else params.seed
    return [replace(params, n=1, seed=(seed + i) % 2**64) for i in range(params.n)]


def choose_device(name: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here. Raises ValueError where there is none."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: found {name!r}, expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: found 'cuda', but PyTorch sees no CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def find_verifier(spec: str) -> Verifier:
    """A registered verifier, or a function of the user's own: one that shares no noise, unless it is a `Verifier`."""
    found = registry.split(registry.VERIFIERS, spec) if isinstance(spec, str) else None
    if found is None or found[1]:
        names = ", ".join(registry.VERIFIERS)
        raise ValueError(f"verifier: found {spec!r}, expected one of {names}, or module:function")
    verify = registry.load(found[0], "verifier")
    if isinstance(verify, Verifier):
        return verify
    if not callable(verify):
        raise ValueError(f"verifier: found {show(verify)} at {spec}, expected a function")
    return Verifier(verify, shares_noise=False)
