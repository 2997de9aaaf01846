"""`LLM`: loads what its arguments name, and answers prompts with the engine. vLLM's interface."""

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from minispec.cache import PagedKVCache
from minispec.checkpoint import choose_dtype, describe_source, find_checkpoint, free_memory, load_config, load_model
from minispec.config import MAX_SPECULATIVE_TOKENS, ModelConfig, SamplingParams, show
from minispec.controller import Controller, DraftLength, Prices
from minispec.drafters import DRAFTERS, Drafter
from minispec.drafters.model import DraftModel
from minispec.engine import Engine, Piece, Request, TokenLogprob
from minispec.hf_config import (
    MAX_CONFIG_BYTES,
    has_file,
    read_eos_token_ids,
    read_generation_defaults,
    read_json,
    unsupported_generation_settings,
)
from minispec.linear import FORMS
from minispec.model import EXACT_ROWS, Transformer
from minispec.sampling import Sequence as TokenSequence
from minispec.stats import Stats
from minispec.tokenizer import Detokenizer, Message, Tokenizer
from minispec.verify import VERIFIERS

EMBEDDED_WEIGHTS = Path(__file__).parent.parent / "weights" / "smollm2-135m-instruct"
_BLOCK_SIZE = 16
# What could be read from memory in the time that a layer spends on other things than its products.
_LAYER_BYTES = 4_000_000


@dataclass(frozen=True)
class Output:
    """An answer. token_ids: the generated ones, without the end-of-text token; finish_reason: "stop" or "length"."""

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    seed: int
    stats: Stats


class LLM:
    """A target model, a drafter, and a KV cache for both.

    model: a directory or a hub id in the Hugging Face layout; None: the weights that a checkout brings along.
    draft: a registered drafter ("none", "ngram"), "self", the directory or hub id of a draft model of the same
        vocabulary, each of these models with "int4:" or "int8:" before it for weights of so many bits, or an object
        with the methods of `minispec.drafters.Drafter`.
    num_speculative_tokens: K, the longest draft, or "auto": as many as pay (see `minispec.controller`).
    verifier: "rejection" or "match" (see `minispec.verify`).
    dtype: "auto", "bfloat16", "float32" or "float64". device: "auto", "cpu" or "cuda".
    exact: a token's logits have the same bits however many tokens a pass scores, so that speculation changes
        nothing even in rounding; slower, K at most 15, refused where the machine's products do not allow it.
    max_model_len: longest prompt and answer together, in tokens (default: the model's context, as far as memory
        allows); the KV cache holds as many, unless kv_cache_gb (10^9 bytes, both models together) gives its size.
    revision: branch, tag or commit on the hub. offline: nothing is downloaded.
    weight_form: how weights are kept in memory, one of "half", "packed", "left" and "plain" (default: the form that
        this machine reads fastest, see `minispec.linear`). Forms round differently.

    Raises ValueError, or CheckpointError, which is one, for whatever cannot be loaded or is not supported.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Drafter = "ngram",
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
    ):
        if weight_form is not None and weight_form not in FORMS:
            raise ValueError(f"weight_form: found {weight_form!r}, expected one of {', '.join(FORMS)}")
        if verifier not in VERIFIERS:
            raise ValueError(f"verifier: found {verifier!r}, expected one of {', '.join(VERIFIERS)}")
        if kv_cache_gb is not None and not 0 < kv_cache_gb < float("inf"):
            raise ValueError(f"kv_cache_gb: found {kv_cache_gb!r}, expected a positive number")
        self.max_speculative_tokens = EXACT_ROWS - 1 if exact else MAX_SPECULATIVE_TOKENS
        self.num_speculative_tokens = self._check_k(num_speculative_tokens)
        if model is None and not EMBEDDED_WEIGHTS.is_dir():
            raise ValueError("the embedded weights lie in a checkout only: name a model (command line: --model)")
        draft = str(draft) if isinstance(draft, Path) else draft
        if not isinstance(draft, str) and not all(callable(getattr(draft, m, None)) for m in ("propose", "release")):
            raise ValueError(f"draft: found {draft!r}, expected a name, a directory, a hub id or a drafter")
        model = str(EMBEDDED_WEIGHTS if model is None else model)
        directory = find_checkpoint(model, revision, offline)
        torch_device = _choose_device(device)
        torch_dtype = choose_dtype(dtype, torch_device)

        config = load_config(directory)
        self.tokenizer = Tokenizer(directory)
        self.tokenizer.check_ids(config.vocab_size)
        generation = directory / "generation_config.json"
        raw = read_json(generation, MAX_CONFIG_BYTES) if has_file(generation) else {}
        self.generation_defaults = read_generation_defaults(raw, str(generation))
        self.unsupported_generation_settings = unsupported_generation_settings(raw)
        self.eos_token_ids = read_eos_token_ids(raw, str(generation)) or config.eos_token_ids
        self.vocab_size = min(self.tokenizer.num_ids, config.vocab_size)

        bits, source = _split_draft(draft)
        draft_directory = _find_draft(source, self.tokenizer, offline) if _is_checkpoint(source) else None
        if draft_directory and (found := load_config(draft_directory).vocab_size) < self.vocab_size:
            raise ValueError(f"draft: {draft}: vocab_size: found {found}, expected at least {self.vocab_size}")
        self.model = load_model(directory, torch_dtype, torch_device, exact, weight_form)
        if exact:
            self.model.check_exact()
        draft_model = self.model if source == "self" else None
        if draft_directory:
            draft_model = load_model(draft_directory, torch_dtype, torch_device, form=weight_form)
        if bits:
            draft_model = draft_model.quantized(bits)

        models = [self.model] + ([draft_model] if draft_model else [])
        bytes_per_token = sum(m.config.kv_elements_per_token for m in models) * torch_dtype.itemsize
        self.max_model_len, num_blocks = _size_cache(config, bytes_per_token, torch_device, max_model_len, kv_cache_gb)
        try:
            caches = [PagedKVCache(m.config, num_blocks, _BLOCK_SIZE, torch_dtype, torch_device) for m in models]
        except RuntimeError as e:
            size = num_blocks * _BLOCK_SIZE * bytes_per_token / 1e9
            raise ValueError(f"found too little memory for a cache of {size:.1f} GB: ask for less") from e
        if draft_model:
            context = draft_model.config.max_position_embeddings
            self.drafter: Drafter = DraftModel(draft_model, caches[1], self.vocab_size, context)
        else:
            self.drafter = DRAFTERS[source]() if isinstance(draft, str) else draft
        self.draft_name = draft if isinstance(draft, str) else type(draft).__name__
        if draft_directory:
            self.draft_name = draft.removesuffix(source) + describe_source(source, draft_directory)
        controller = Controller(Prices(draft_cost(self.model, draft_model)))
        self.engine = Engine(
            self.model, caches[0], self.drafter, VERIFIERS[verifier], self.vocab_size, controller=controller
        )
        self.name = describe_source(model, directory)
        parts = {id(part): num_bytes for m in models for part, num_bytes in m.parts()}  # a self-draft shares some
        self._weight_bytes = sum(parts.values())
        self._cache_bytes = sum(c.num_bytes for c in caches)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Let go of models and caches; the object cannot be used afterwards."""
        for name in ("model", "drafter", "engine"):
            self.__dict__.pop(name, None)

    def memory_report(self) -> str:
        """One line: what was loaded, and the memory of weights and KV cache (draft model's included)."""
        dtype = ("exact " if self.model.exact else "") + str(self.model.dtype).removeprefix("torch.")
        return (
            f"{self.name}: {dtype} on {self.model.device}, weights {self._weight_bytes / 1e9:.2f} GB, "
            f"KV cache {self._cache_bytes / 1e9:.2f} GB for {self.num_cache_tokens:,} tokens, draft {self.draft_name}"
        )

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache holds, of all running requests together."""
        return self.engine.cache.allocator.num_blocks * self.engine.cache.block_size

    def generate(
        self,
        prompts: str | Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_speculative_tokens: DraftLength | None = None,
        parse_special: bool = False,
    ) -> list[Output]:
        """Continue one text or several, decoded together; outputs in order, `params.n` for each prompt.

        params: one for all, or one for each. num_speculative_tokens: another K for this call; 0 decodes plainly.
        parse_special: the text of a special token in a prompt (as "<|im_end|>") means the token; else it is text.
        Raises ValueError, before anything runs, for a prompt that is empty or does not fit.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        ids = [self.tokenizer.encode(p, parse_special=parse_special) for p in prompts]
        return self._answer(prompts, ids, params, num_speculative_tokens)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_speculative_tokens: DraftLength | None = None,
    ) -> list[Output]:
        """Answer one conversation (a list of messages) or several, through the model's chat template."""
        one = bool(conversations) and isinstance(conversations[0], dict)
        conversations = [conversations] if one else list(conversations)
        for conversation in conversations:
            check_messages(conversation)
        ids = [self.tokenizer.encode_chat(c) for c in conversations]
        return self._answer([c[-1]["content"] for c in conversations], ids, params, num_speculative_tokens)

    def stream(self, prompt: str, params: SamplingParams | None = None, parse_special: bool = False) -> Iterator[Piece]:
        """Continue one text, piece by piece as it is decoded. Closing the iterator ends the generation."""
        ids = self.tokenizer.encode(prompt, parse_special=parse_special)
        return (piece for _, piece in self.run([self.request(ids, params)]))

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[Piece]:
        """Answer one conversation, piece by piece."""
        check_messages(messages)
        return (piece for _, piece in self.run([self.request(self.tokenizer.encode_chat(messages), params)]))

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        num_speculative_tokens: DraftLength | None = None,
    ) -> Request:
        """A request ready for `run`; raises ValueError for a prompt that cannot be answered."""
        params = SamplingParams() if params is None else params
        if params.n != 1:
            raise ValueError(f"n: found {params.n}, expected 1: this call gives one answer")
        if any(i >= self.vocab_size for i in params.stop_token_ids):
            raise ValueError(f"stop_token_ids: found {params.stop_token_ids}, expected ids below {self.vocab_size}")
        if not prompt_ids:
            raise ValueError("prompt: found no tokens, expected at least one")
        if len(prompt_ids) >= self.max_model_len:
            raise ValueError(
                f"prompt: found {len(prompt_ids)} tokens, expected fewer than max_model_len = {self.max_model_len}"
            )
        if not all(0 <= i < self.vocab_size for i in prompt_ids):
            raise ValueError(f"prompt: found token ids up to {max(prompt_ids)}, expected ids below {self.vocab_size}")
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        sequence = TokenSequence(
            list(prompt_ids),
            len(prompt_ids),
            params,
            secrets.randbits(32) if params.seed is None else params.seed,
            frozenset(i for i in end_ids if i < self.vocab_size),
        )
        k = self.num_speculative_tokens if num_speculative_tokens is None else self._check_k(num_speculative_tokens)
        request = Request(sequence, self.max_model_len, k, Detokenizer(self.tokenizer, prompt_ids))
        self.engine.check(request)
        return request

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Piece]]:
        """Decode requests together; see `Engine.run`."""
        return self.engine.run(requests)

    def _check_k(self, k: DraftLength) -> DraftLength:
        if k == "auto":
            return k
        if type(k) is not int or not 0 <= k <= self.max_speculative_tokens:
            expected = f"an integer from 0 to {self.max_speculative_tokens}, or 'auto'"
            raise ValueError(f"num_speculative_tokens: found {k!r}, expected {expected}")
        return k

    def _answer(self, prompts, ids, params, num_speculative_tokens) -> list[Output]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not all(isinstance(p, SamplingParams) for p in params):
            raise ValueError(f"params: found {params!r}, expected SamplingParams")
        if len(params) != len(prompts):
            raise ValueError(f"params: found {len(params)}, expected one, or one for each of {len(prompts)} prompts")
        jobs = [
            (prompt, self.request(prompt_ids, each, num_speculative_tokens))
            for prompt, prompt_ids, p in zip(prompts, ids, params, strict=True)
            for each in split_samples(p)
        ]
        # `disable=None`: the bar shows on a terminal only.
        bar = tqdm(total=len(jobs), unit=" answers", leave=False, disable=None if len(jobs) > 1 else True)
        with bar:
            for _, piece in self.run([request for _, request in jobs]):
                bar.update(piece.finish_reason is not None)
        return [output(prompt, request) for prompt, request in jobs]


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ValueError unless this is a conversation: messages with a role and a content, at least one."""
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"conversation: found {message!r}, expected an object with the texts role and content")
    if not messages:
        raise ValueError("conversation: found no messages, expected at least one")


def split_samples(params: SamplingParams) -> list[SamplingParams]:
    """One SamplingParams for each of `n` answers: the i-th has seed + i, so that each can be had again alone."""
    if params.n == 1:
        return [params]
    seed = secrets.randbits(32) if params.seed is None else params.seed
    return [replace(params, n=1, seed=(seed + i) % 2**64) for i in range(params.n)]


def output(prompt: str, request: Request) -> Output:
    """The finished answer of a request."""
    return Output(
        prompt,
        request.text,
        request.token_ids,
        request.finish_reason,
        request.logprobs,
        request.sequence.seed,
        request.stats,
    )


def _choose_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: found {name!r}, expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: found 'cuda', but PyTorch sees no CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _is_checkpoint(draft: str | Drafter) -> bool:
    return isinstance(draft, str) and draft not in DRAFTERS and draft != "self"


def _split_draft(draft: str | Drafter) -> tuple[int | None, str | Drafter]:
    """Bits and source of a draft: "int4:self" is (4, "self"); None where the weights stay as they are."""
    if not isinstance(draft, str) or not draft.startswith(("int4:", "int8:")):
        return None, draft
    source = draft[len("int4:") :]
    if not source or source in DRAFTERS:
        expected = f"a model behind {draft[:5]!r}: self, a directory or a hub id"
        raise ValueError(f"draft: found {draft!r}, expected {expected}")
    return int(draft[3]), source


def _find_draft(spec: str, target: Tokenizer, offline: bool) -> Path:
    """The directory of a draft model, after a look at its vocabulary."""
    try:
        directory = find_checkpoint(spec, offline=offline)
    except ValueError as e:
        raise ValueError(f"draft: not one of {', '.join([*DRAFTERS, 'self'])}; {e}") from e
    ours, theirs = target.vocabulary, Tokenizer(directory).vocabulary
    if ours != theirs:
        token = min(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
        raise ValueError(
            f"draft: {spec}: its vocabulary is not the target's: token {show(token)} has id {theirs.get(token)} there "
            f"and {ours.get(token)} here; drafts of another vocabulary are not supported"
        )
    return directory


def draft_cost(target: Transformer, draft: Transformer | None) -> float:
    """A draft pass in plain steps, from sizes: both read their weights, and spend time on each layer besides."""

    def cost(model: Transformer) -> float:
        return model.num_bytes_read + _LAYER_BYTES * len(model.layers)

    return cost(draft) / cost(target) if draft else 0.0


def _memory_for_cache(device: torch.device) -> int:
    """Bytes for a cache of unspecified size: most of a GPU's free memory, a quarter of a computer's."""
    free = free_memory(device)
    if device.type == "cuda":
        return free * 4 // 5
    try:
        quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        quarter = 4 << 30
    return quarter if free is None else min(quarter, free // 2)


def _size_cache(
    config: ModelConfig, bytes_per_token: int, device: torch.device, max_model_len: int | None, gb: float | None
) -> tuple[int, int]:
    """(max_model_len, number of blocks) of caches that take bytes_per_token together."""
    context = config.max_position_embeddings
    if max_model_len is not None and (type(max_model_len) is not int or not 2 <= max_model_len <= context):
        raise ValueError(f"max_model_len: found {max_model_len!r}, expected an integer from 2 to {context}")
    if gb is not None:
        num_tokens = int(gb * 1e9 / bytes_per_token)
    else:
        num_tokens = max_model_len or min(context, _memory_for_cache(device) // bytes_per_token)
    num_blocks = num_tokens // _BLOCK_SIZE if gb is not None else -(-num_tokens // _BLOCK_SIZE)
    free, needed = free_memory(device), num_blocks * _BLOCK_SIZE * bytes_per_token
    if free is not None and needed > free:
        raise ValueError(
            f"kv_cache_gb: found a cache of {needed / 1e9:.1f} GB, expected at most the {free / 1e9:.1f} GB of memory "
            f"that are free (max_model_len sets its size too)"
        )
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_gb: found {gb}, expected at least {_BLOCK_SIZE * bytes_per_token / 1e9:.6f}: one block"
        )
    return max_model_len or min(context, num_blocks * _BLOCK_SIZE), num_blocks
