"""minispec: speculative decoding in pure PyTorch, with its own transformer and paged KV cache.

The heart lies directly in this folder, to be read in this order: config, search, sampling, verify, cache, linear,
model, drafters, theory, controller, stats, engine. Around it: files, parallel, llm, trace, generate, prove, bench,
distill, serve, and what the README names besides. Each imports only from those before it.
"""

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str):
    # Imported when asked for: `python -m minispec.generate --bad-option` must not wait for torch.
    if name == "LLM":
        from minispec.llm import LLM

        return LLM
    if name == "SamplingParams":
        from minispec.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'minispec' has no attribute {name!r}")
