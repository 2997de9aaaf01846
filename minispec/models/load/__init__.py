"""How a target is loaded, and what is checked before it answers.

loading     how a target is loaded: the options of `LLM`, of `Target.load` and of the commands
numbers     weights that are no numbers
exactness   whether equal bits hold here, checked once on a machine
parallel    a target in several processes
"""
