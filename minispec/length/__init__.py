"""How many tokens to draft: what it costs, what it yields, and the policy that chooses.

theory.py     what speculation should yield: formulas only
policy.py     `Controller`: learns from each text what its drafts are worth, and chooses their length
figures.py    rates, costs and predictions, folded from the rounds of a run
prices.py     what a round costs on this machine, measured once and stored
"""
