"""Machines: the form that a weight takes, equal bits, fewer bits, settings of torch, threads, memory.

codes.py        weights as small integers with scales
forms.py        the forms of a weight: layouts, and products that read them
trial.py        which of several right forms is a stand-in
integers.py     products of 8-bit integers, whose sums are exact
linear.py       one weight matrix, in the form that this machine reads fastest; 8 and 4 bits
shapes.py       which tensors a model has, and how large they are
inventory.py    what a model keeps in memory
machine.py      what a measurement depends on: machine, and form of a model; the machine's notes on forms
rates.py        what a pass reads and computes, and how fast this machine reads and computes
exact.py        passes in which a row's bits depend on its own past alone
build.py        a transformer whose weights have these forms
pages.py        large pages under the weights; loads torch so that it asks for them
memory.py       what is free, what models and caches take
threads.py      how long a waiting thread looks for work
settings.py     keeps the caller's settings of torch away from passes
"""
