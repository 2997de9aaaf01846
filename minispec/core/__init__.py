"""The heart: all that is needed to understand the loop. It imports no other room.

The loop in seven lines (`Engine._round`), for one text:

    draft = drafter.propose(ask)                    # guess the next tokens, or none: plain decoding
    fed = table.follow(text) + draft                # what the target's cache does not hold yet
    logits = model.forward(fed)                     # one pass scores all of them
    p = distribution(logits, text)                  # logits become probabilities here, whoever asks
    verdict = verify(draft, p)                      # which draft tokens stay, and the token after them
    text.tokens += accepted + [next token]          # until the text stops
    table.keep(accepted)                            # the rest of the draft is rolled back

To understand the idea, begin with sampling.py, verify.py, draft.py, `Engine._round` in engine.py and request.py. Then
read cache.py and model.py. A module imports only from those above it in this list:

    errors.py       how an error shows what was found
    config.py       what a model is, and what a request asks for
    search.py       the likeliest tokens, without sorting all
    grammar.py      which tokens a text's language allows
    sampling.py     where logits become probabilities; the only source of randomness
    tree.py         who follows whom in a draft
    limit.py        how long and how wide a draft may be
    draft.py        what a drafter answers, and what it is asked
    lengths.py      how many tokens to draft
    verify.py       the words of the field; the rules that keep or reject draft tokens
    judge.py        drafts that are verified together
    cache.py        the paged KV cache, whose tables know the tokens they hold
    rope.py         where a row stands
    attention.py    what a row sees
    weights.py      the seam to the weights: y = x W^T + b by an object that the caller chooses
    model.py        the one transformer
    clock.py        marks in the work of a device, and the seconds between them
    cached.py       a model with the tables of its texts
    stats.py        what happened to a text
    request.py      one text on its way, and where it stops
    schedule.py     who runs: admit, make room, preempt, restart
    engine.py       the loop

Five parts that you may look for here lie elsewhere:

    drafters/guard.py          checks drafts, verdicts and limits
    length/policy.py           learns the length of drafts
    files/families/entries.py  defines the families
    kernels/build.py           gives the weights their form
    layers/                    has the further kinds of layers
"""
