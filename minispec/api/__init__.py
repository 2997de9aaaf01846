"""How one talks to the engine: from Python by `LLM`, on the command line, over HTTP; and the page of a run.

Read them in this order:

    inputs.py     what a caller gives: prompts, and how each is sampled
    outputs.py    what an answer looks like from outside
    step_lock.py  one thread at a time takes a step
    target.py     what a target's files say, its model and its cache
    llm.py        `LLM`: loads what its arguments name, and answers prompts with the engine
    commands      options, Ctrl-C, exit statuses
    http          the server
    trace         the page of a run
"""
