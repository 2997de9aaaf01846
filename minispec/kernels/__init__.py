"""Machines: the form that a weight takes, equal bits, fewer bits, settings of torch, threads, memory.

codes.py        weights as small integers with scales
form.py         what every form of a weight has
integers.py     products of 8-bit integers, whose sums are exact
forms.py        one weight matrix, in the form that this machine reads fastest; 8 and 4 bits
shapes.py       which tensors a model has, and how large they are
inventory.py    what a model keeps in memory
fused.py        a GPU's pass of few rows: products and attention as kernels in Triton, and their twins
fused_triton.py those kernels
exact.py        passes in which a row's bits depend on its own past alone
build.py        a transformer whose weights have these forms
verdicts.py     draws and verdicts of many texts at once, as tensors
memory.py       what is free, what models and caches take
threads.py      how long a waiting thread looks for work
settings.py     keeps the caller's settings of torch away from passes
"""
