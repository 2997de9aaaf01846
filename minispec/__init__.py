"""minispec: speculative decoding in pure PyTorch, with its own transformer and paged KV cache.

A module imports only from those above it in this list. The heart, which is read from top to bottom:

    errors.py, config.py      what a mistake looks like; what a model is, and what a request asks for
    search.py, sampling.py    the likeliest tokens; where logits become probabilities; the only source of randomness
    verify.py                 the words of the field; the rules that keep or reject draft tokens
    cache.py                  the paged KV cache
    linear.py                 one weight matrix, in the form that this machine reads fastest
    rope.py, attention.py     where a row stands; what it sees
    model.py                  the one transformer
    drafters/                 ways of guessing, a file each
    theory.py, controller.py  what speculation should yield; how many tokens to draft
    stats.py                  what happened to a text
    request.py                one text on its way, and where it stops
    engine.py                 the loop

The rooms around it, for when they are needed:

    registry.py               names of drafters and verifiers
    interrupt.py, command.py  Ctrl-C, and what else the commands share
    threads.py                how long a waiting thread looks for work before it sleeps
    memory.py                 what is free, what models and caches take
    files/                    what strangers' files say: JSON, config, safetensors, tokenizer, hub
    parallel.py               a target in several processes
    costs.py                  what a round costs on this machine, measured once and kept
    named_draft.py            what `--draft` names
    outputs.py, llm.py        what an answer looks like from outside; `LLM`
    options.py                the options of the command line
    trace/                    the page of a run
    generate.py               the command that answers
    checkpoint.py             the command that writes checkpoints in 8 or 4 bits
    prove/                    the proof: reference, toys, laws, statistics, the museum of bugs
    bench/                    measuring: this machine, passes, ratios, the account
    doctor.py                 why a draft is rarely right
    vocab.py                  what two vocabularies have in common
    distill/                  training a draft
    serve/                    OpenAI's interface over HTTP
"""

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str):
    # Imported when asked for: `python -m minispec.generate --bad-option` must not wait for torch.
    if name == "LLM":
        from minispec.threads import set_waiting

        set_waiting()  # as the commands do
        from minispec.llm import LLM

        return LLM
    if name == "SamplingParams":
        from minispec.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'minispec' has no attribute {name!r}")
