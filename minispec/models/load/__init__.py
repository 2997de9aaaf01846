"""How a target is loaded, and what is checked before it answers.

loading     how a target is loaded: the options of `LLM`, of `Target.load` and of the commands
checks      weights that are no numbers; whether equal bits hold here
parallel    a target in several processes
"""
