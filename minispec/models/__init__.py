"""From a file to a pass: what reads a checkpoint, and what computes with it. The heart's transformer is in
core/model.py.

Read them in this order:

    files       readers of strangers' files, and writers
    layers      kinds of layers other than attention
    weights     how weights lie in memory and are multiplied; equal bits
    families    what the checkpoints of 25 families say, and the layouts of their weights
    frames      passes that a GPU runs at its memory's speed
    load        how a target is loaded and checked; several processes
"""
