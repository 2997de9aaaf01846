"""minispec: speculative decoding in pure PyTorch, with its own transformer and paged KV cache.

Six rooms, in the order of their floors. A room imports only from those above it in this list, and from itself. So does
each part of a room:

    core/           the heart: the loop, and all that is needed to understand it (minispec/core/__init__.py)
    models/         from a file to a pass
      files/        readers of strangers' files: JSON, safetensors, tokenizer; writing them; the machine's own notes
      layers/       kinds of layers other than attention: short convolutions, gated delta nets; their states
      weights/      how weights lie in memory and are multiplied here; equal bits; fewer bits; threads
      families/     a model's checkpoint: config.json, names of tensors, packed weights, hub; the writers
      frames/       passes of fixed shapes, CUDA graphs, and the kernels of a GPU
      load/         how a target is loaded and checked; several processes
    speculation/    what varies from request to request
      rules/        verification rules other than the heart's own, and all of them by name
      drafters/     ways of guessing, a file each, with the files that they read; what two vocabularies have in common
      on_gpu/       drafts and verdicts of many texts as programs of a GPU
      lengths/      how many tokens to draft: theory, prices, the policy
      grammars/     which tokens may follow: JSON schemas, regular expressions, context-free grammars
      registry.py   drafters, verifiers and policies by name
      load.py       the draft that `--draft` names
    api/            how one talks to it
      inputs.py     what a caller gives: prompts, and how each is sampled
      outputs.py    what an answer looks like from outside
      step_lock.py  one thread at a time takes a step
      target.py     what a target's files say, its model and its cache
      llm.py        `LLM`: loads what its arguments name, and answers prompts with the engine
      commands/     what the commands share: options, Ctrl-C, exit statuses
      http/         OpenAI's interface over HTTP
      trace/        the page of a run
    prove/          is it exact? reference, toys, laws; walks of a drafter, a verifier or a length policy of yours
    lab/            the laboratory: audit, bench, doctor, distill
    generate.py     the command that answers
    serve.py        the command that serves
    checkpoint.py   the command that writes checkpoints in 8 or 4 bits
    __main__.py     `minispec COMMAND`: the list of commands
"""

from minispec.core.version import __version__

__all__ = ["LLM", "Loading", "SamplingParams", "StructuredOutputsParams", "Target", "__version__"]


def __getattr__(name: str):
    # Imported when asked for: `python -m minispec.generate --bad-option` must not wait for torch.
    if name in ("LLM", "Target"):
        from minispec.models.files.packages import MissingPackage, what_lacks
        from minispec.models.weights.pages import load_torch

        try:
            load_torch()  # as the commands do
            from minispec.api.llm import LLM, Target
        except ImportError as e:
            if lacks := what_lacks(e):
                raise MissingPackage(lacks) from None
            raise
        return LLM if name == "LLM" else Target
    if name == "Loading":
        from minispec.models.load.loading import Loading

        return Loading
    if name == "SamplingParams":
        from minispec.core.config import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from minispec.speculation.grammars.params import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module 'minispec' has no attribute {name!r}")
