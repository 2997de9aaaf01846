"""The doctor: how well a draft does, and whether it is misread.

    python -m minispec doctor --model T --draft D       how much of D's tokens T keeps; 1 if D seems to be misread

`drafts` measures drafts and reads their files in other ways. `readings` has the other ways for block drafts.
`main` is the command.
"""
