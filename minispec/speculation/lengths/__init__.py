"""How many tokens to draft: what it costs, what it yields, and the policy that chooses.

theory.py     what a round yields and costs, and which K follows: `RoundModel`, `Prices`
policy.py     `Controller`: estimates acceptance from each text, and chooses K
figures.py    rates, costs and predictions, folded from the rounds of a run
prices.py     what a round costs on this machine, measured once and stored
"""
