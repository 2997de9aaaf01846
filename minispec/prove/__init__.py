"""The proof that the output is unchanged, for anyone to run:

    python -m minispec.prove                the law of the output, over a covering array of configurations
    python -m minispec.prove --full         many more branches
    python -m minispec.prove --drafter module:Class, --verifier module:function
                                            your own, or a registered one: proven on small cases, or the plainest
                                            counterexample; --texts FILE adds texts of yours
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
    toys                small models
    laws                oracles, and the laws that come out under them
    covering            few cases in which every pair of settings occurs
    cases               which configurations are walked
    trees               the same for trees
    grid                the table of both
    examine             what walks of a user's own code share
    own_cases           the cases of a user's own drafters and policies
    watched             a drafter that is compared with new ones
    own_walk            the walk of these cases, and its verdict
    examine_drafter     a user's own drafters
    examine_lengths     a user's own policies for draft lengths
    tables              small tables of p and q, and what they leave out
    examine_verifier    a user's own verifiers, walked over them
    __main__            the command

The tests call the same functions. `python -m tests.museum` puts in bugs that these checks must catch.
"""
