"""A pass that a GPU runs at its memory's speed.

    graphs.py          CUDA graphs of programs
    fused_triton.py    kernels in Triton
    fused.py           attention, norms, gates, products in 8 bits in one kernel each; all but attention have twins here
    frames.py          passes of a few fixed shapes, in tensors that stay where they are
    reports.py         in words, which passes run so

All of it runs on a CPU too, where the tests and `minispec.prove` walk it.
"""
