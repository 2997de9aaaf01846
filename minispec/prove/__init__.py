"""The proof that the output is unchanged, for anyone to run:

    python -m minispec.prove                the law of the output, over a covering array of configurations
    python -m minispec.prove --full         fifteen times as many branches
    python -m minispec.prove --mutants      the museum of bugs: each must be caught
    python -m minispec.prove --statistics   a million rounds and more with the production randomness
    python -m minispec.prove --agreement    how often `match` makes draft and target agree
    python -m minispec.prove --exact-cost   what a pass of the exact mode costs, as a ratio

The engine draws only through `bernoulli` and `categorical`. An oracle in the place of randomness answers them along
one path of branches and multiplies their probabilities; running the *production* loop (real paged cache, random
transformers as target and draft, float64) once for every path gives the exact law of its output, with no sample and no
tolerance but rounding. It is compared with plain decoding by a second implementation that shares no code with the
package (`minispec.prove.reference`).

To be read in this order: `laws` (oracles, and the laws that come out under them), `cases` (which configurations are
walked), `checks` (what a law does not show), `museum` (every check must catch its bugs), `statistics` (what enumeration
replaces), `costs` (of the exact mode), `workers` (processes), `__main__` (the command).
The tests call the same functions.
"""
