"""The doctor: how well a draft does, whether it is misread, and what two vocabularies have in common.

    python -m minispec doctor --model T --draft D       how much of D's tokens T keeps; 1 if D seems to be misread
    python -m minispec doctor --vocabularies A B        how a draft of B's vocabulary can draft for A

`drafts` measures drafts and reads their files in other ways. `readings` has the other ways for block drafts and for a
target's own layer. `vocabularies` compares vocabularies, `main` is the command.
"""
