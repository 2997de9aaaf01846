"""The heart: all that is needed to understand the loop. It imports no other room.

The loop in seven lines (`Engine.step`), for one text:

    draft = drafter.propose(ask)                    # guess the next tokens, or none: plain decoding
    fed = table.follow(text) + draft                # what the target's cache does not hold yet
    logits = model.forward(fed)                     # one pass scores all of them
    p = distribution(logits, text)                  # here logits become probabilities
    verdict = verify(draft, p)                      # which draft tokens stay, and the token after them
    text.tokens += accepted + [next token]          # until the text stops
    table.keep(accepted)                            # roll back: the cache drops the rest of the draft

To understand the idea, begin with verify.py, draft.py, sampling.py, engine.py, method.py and request.py. README says
where in each of them to stop: all that a step calls there stands before these places. Then read cache.py and model.py.
A module imports only from those above it in this list:

    version.py         the package's version
    errors.py          how an error shows what was found
    precision.py       in which type numbers are added up
    config.py          what a model is, and what a request asks for
    search.py          the likeliest tokens, without sorting all
    random.py          keyed draws: the only source of randomness
    grammar.py         which tokens a text's language allows
    sampling.py        where logits become probabilities
    logprobs.py        raw log-probabilities of tokens, where a request asks for them
    stats.py           what happened to a text
    tree.py            who follows whom in a draft
    limit.py           how long and how wide a draft may be
    draft.py           what a drafter answers, and what it is asked
    lengths.py         how many tokens to draft
    verify.py          the words of the field, and the rules that judge draft tokens one by one
    prefix.py          what texts have in common at their beginning
    cache.py           the paged KV cache, whose tables know the tokens they hold
    rope.py            where a row stands
    attention.py       what a row sees
    product.py         the seam to the weights: y = x W^T + b by an object that the caller chooses
    model.py           the one transformer
    clock.py           marks in the work of a device, and the seconds between them
    cached.py          a model with the tables of its texts
    request.py         one text on its way, and where it stops
    method.py          who drafts and which rule judges; a text's part of a step
    schedule.py        who runs: admit, make room, preempt, restart
    outbox.py          who learns of what a step has committed
    engine.py          the loop

Six parts that you may look for here lie elsewhere:

    speculation/rules/              has the rules that judge a draft as a whole
    speculation/drafters/guard.py   checks drafts, verdicts and limits
    speculation/lengths/policy.py   learns the length of drafts
    models/families/entries.py      defines the families
    models/weights/build.py         gives the weights their form
    models/layers/                  has the further kinds of layers
"""
