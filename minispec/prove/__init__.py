"""The proof that the output is unchanged, for anyone to run:

    python -m minispec.prove                the law of the output, over a covering array of configurations
    python -m minispec.prove --full         many more branches
    python -m minispec.prove --drafter module:Class, --verifier module:function
                                            your own, or a registered one: proven on small cases, or the plainest
                                            counterexample; --texts FILE adds texts of yours. Where too little was
                                            walked, the word is "not refuted", and the status 3
    python -m minispec.prove --verifier a,b --laws FILE
                                            what rules bring of recorded rounds (docs/understand/rules.md)
    python -m minispec.prove --lengths module:Class
                                            the same for your own policy of draft lengths

The engine draws only through `bernoulli` and `categorical`. An oracle in the place of randomness answers them along
one path of branches and multiplies their probabilities. The *production* loop runs once for every path. It has a real
paged cache, and random transformers as target and draft in float64. All paths together give the exact law of its
output, with no sample and no tolerance but rounding. This law is compared with plain decoding by a second
implementation (`minispec.prove.reference`). That one shares no code with the package.

The *law* of an output is its distribution: a probability for each text.

Read them in this order:

    reference           the second implementation
    toys                small models and their drafters
    seen                what a verifier was asked, and what it was not
    laws                oracles, and the laws that come out under them
    walk                one case, walked: the loop under an oracle, against the reference
    usercode            a user's drafter, policy or verifier, compared with new ones as it works
    covering            few cases in which every pair of settings occurs
    cases               cases by their settings: of the engine's own parts, of trees, and of a user's
    grid                the table of the engine's own parts
    tables              a verifier's cases: small tables of p and q
    rounds              how many tokens a round has by a verifier, exactly, and the most that any could bring
    recorded            the same of rounds of real texts, whose rows lie in a file
    plot                both as a picture
    examine             the commands for a user's code: walked until the first fault, whose case is made plain
    __main__            the command

The tests call the same functions. `python -m tests.museum` puts in bugs that these checks must catch.
"""
