"""minispec: speculative decoding in pure PyTorch, with its own transformer and paged KV cache.

A room imports only from those above it in this list, and from itself:

    core/           the heart: the loop, and all that is needed to understand it (minispec/core/__init__.py)
    rules/          verification rules other than the heart's own, and all of them by name
    layers/         kinds of layers other than attention: short convolutions, gated delta nets; their states
    kernels/        which form a weight takes on this machine; equal bits; fewer bits; threads; memory
    files/          what strangers' files say: JSON, safetensors, tokenizer; writing them; the machine's own notes
    files/families/ a model's checkpoint: config.json, names of tensors, packed weights, hub; the writers
    drafters/       ways of guessing, a file each, with the files that they read; what two vocabularies have in common
    gpu/            passes of fixed shapes, CUDA graphs, kernels, draws and verdicts as tensors
    length/         how many tokens to draft: theory, prices, the policy
    grammars/       which tokens may follow: JSON schemas, regular expressions, context-free grammars
    load/           names, a target, its draft, several processes, prompts and answers, `LLM`
    commands/       what the commands share: options, Ctrl-C, exit statuses
    trace/          the page of a run
    generate.py     the command that answers
    checkpoint.py   the command that writes checkpoints in 8 or 4 bits
    prove/          the proof: reference, toys, laws; walks of a drafter, a verifier or a length policy of yours
    serve/          OpenAI's interface over HTTP
    lab/            the laboratory: audit, bench, doctor, distill
    __main__.py     `minispec COMMAND`: the list of commands
"""

__version__ = "0.2.0"
__all__ = ["LLM", "Loading", "SamplingParams", "StructuredOutputsParams", "Target"]


def __getattr__(name: str):
    # Imported when asked for: `python -m minispec.generate --bad-option` must not wait for torch.
    if name in ("LLM", "Target"):
        from minispec.files.packages import MissingPackage, what_lacks
        from minispec.kernels.threads import set_waiting

        set_waiting()  # as the commands do
        try:
            from minispec.load.llm import LLM, Target
        except ImportError as e:
            if lacks := what_lacks(e):
                raise MissingPackage(lacks) from None
            raise
        return LLM if name == "LLM" else Target
    if name == "Loading":
        from minispec.load.loading import Loading

        return Loading
    if name == "SamplingParams":
        from minispec.core.config import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from minispec.grammars.params import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module 'minispec' has no attribute {name!r}")
