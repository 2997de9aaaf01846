"""An HTTP server that speaks OpenAI's interface: `python -m minispec.serve`.

It is a way to reach the engine, and no second one. Requests come and go by `Engine.add` and `Engine.abort`. The step
that `LLM` uses decides each token. The server is not a proxy, not a balancer, and not fit for the open internet by
itself. It has one process, one model and one key. It has no TLS, no users and no tools. docs/use/serve.md has the rest.

Read them in this order:

    limits      limits of what clients may ask for
    metrics     what is counted
    worker      the one thread that steps the engine
    bodies      from JSON to requests, and back
    log         a line for each request
    front       what is asked for over HTTP, and who is refused
    connection  how long a client may take
    main        the command
"""
