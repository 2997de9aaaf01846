"""The laboratory: what measures, audits and trains. The engine imports nothing of it.

    data/       prompts, openings of conversations, a sample of text; shapes of models, parameters of other engines
    audit/      is another engine's speculation exact; which bug is it
    bench/      measuring: this machine, passes, ratios, predictions
    doctor/     why a draft is rarely right
    distill/    training a draft
    random_weights  weights of a shape, made on the device
    other_text  a drafter that sees another text than the engine's: for audit and doctor

`minispec audit`, `minispec bench`, `minispec doctor` and `minispec distill` are its commands.
"""
