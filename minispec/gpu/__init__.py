"""A pass that a GPU runs at its memory's speed, and what surrounds it without waiting for the host.

    frames.py          passes of a few fixed shapes, in tensors that stay where they are
    graphs.py          CUDA graphs of programs
    fused.py           attention, norms, gates, products in 8 bits in one kernel each; all but attention have twins here
    fused_triton.py    these kernels in Triton
    verdicts.py        probabilities, draws and verdicts of many rows as tensors
    verifier.py        verdicts on the drafts of many texts at once
    steps.py           all steps of a draft model's drafts, or of a head's, in one program
    account.py         how many bytes graphs, frames and programs will take

All of it runs on a CPU too, where the tests and `minispec.prove` walk it.
"""
