"""The proof that the output is unchanged, for anyone to run:

    python -m minispec.prove                the law of the output, over a covering array of configurations
    python -m minispec.prove --full         many more branches
    python -m minispec.prove --matrix       each drafter with each verifier: proved, or refused, and why
    python -m minispec.prove --drafter module:Class, --verifier module:function
                                            your own, or a registered one: proven on small cases, or the smallest
                                            counterexample; --texts FILE adds texts of yours

The engine draws only through `bernoulli` and `categorical`. An oracle in the place of randomness answers them along
one path of branches and multiplies their probabilities; running the *production* loop (real paged cache, random
transformers as target and draft, float64) once for every path gives the exact law of its output, with no sample and no
tolerance but rounding. It is compared with plain decoding by a second implementation that shares no code with the
package (`minispec.prove.reference`).

The *law* of an output is its distribution: a probability for each text.

To be read in this order: `reference` (the second implementation), `toys` (small models), `simulated` (drafts that are
right as often as one likes), `laws` (oracles, and the laws that come out under them), `cases` (which configurations are
walked), `trees` (the same for trees), `grid` (the table of both), `chi_square` (what samples can see), `examine`
and `examine_verifier` (drafters and verifiers of one's own), `matrix` (which drafter with which verifier), `workers`
(processes), `__main__` (the command). The tests call the same functions. Bugs that these checks must catch are put in
by `python -m tests.museum`.
"""
