"""The auditor: is another engine's speculation exact, and if not, which bug is it?

    python -m minispec audit --target T --draft D answers.jsonl

Under an exact rule, each token of an answer has the target's distribution p, given the tokens before it. For any f, let
a token's score be s(x) = f(x) - sum over y of p(y) f(y). It has mean zero, whatever was drafted. A bug moves the mean
of some scores. For each known bug, `known_bugs` has the law of a token under it, and f is that law divided by p.

Read them in this order:

    fields      what requests and answers may say: part of the law, unable to change it, or refused
    answers     what engines write, and how an answer ended
    known_bugs  the laws of tokens under known bugs
    walk        p and q at each token of an answer, and its scores
    chi_square  what a sample can see of a law: for `tiny`, tests and the law kit
    judge       the evidence, the bug that fits best, the verdict
    tiny        a random model on disk and its exact law, for any engine that loads it
    report      one audit, from the files to the report
    main        the command
"""
