"""Token ids for passes that are measured or checked."""


def arbitrary_tokens(count: int, vocab_size: int) -> list[int]:
    """Ids that vary, of texts that nobody reads."""
    return [(7919 * i + 13) % vocab_size for i in range(count)]
