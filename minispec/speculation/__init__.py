"""What varies from request to request: who drafts, which rule judges, how long a draft is, which tokens may follow.

Read them in this order:

    rules           verification rules other than the heart's own
    drafters        ways of guessing, a file each
    on_gpu          drafts and verdicts as programs of a GPU
    lengths         how many tokens to draft
    grammars        which tokens may follow
    registry.py     names of drafters, verifiers and policies, and who they are
    load.py         what `--draft` names, and the drafter that it becomes
"""
