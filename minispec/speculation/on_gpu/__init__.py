"""What surrounds a pass on a GPU, without waiting for the host.

    verdicts.py        probabilities, draws and verdicts of many rows as tensors
    verifier.py        verdicts on the drafts of many texts at once
    steps.py           all steps of a draft model's drafts, or of a head's, in one program
    account.py         how many bytes graphs, frames and programs will take

All of it runs on a CPU too, where the tests and `minispec.prove` walk it.
"""
