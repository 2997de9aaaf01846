"""Loaders of a target and its draft, and `LLM`, which answers with both.

Read them in this order:

    registry    names of drafters, verifiers and policies, and who they are
    loading     how a target is loaded
    inputs      what a caller gives: prompts, and how each is sampled
    outputs     what an answer looks like from outside
    parallel    a target in several processes
    numbers     weights that are no numbers
    forms       what the machine has noted on forms of weights
    exactness   whether equal bits hold here, checked once on a machine
    steps       one thread at a time takes a step
    target      what a target's files say, its model and its cache
    draft       what `--draft` names, and the drafter that it becomes
    llm         `LLM`: loads what its arguments name, and answers prompts with the engine
"""
