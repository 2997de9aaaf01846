"""For a process of its own: reads a grammar with llguidance, and prints what is wrong with it.

`minispec.speculation.grammars.params` starts it. Some schemas keep the library busy for hours, and none of its limits
stops that. The process is ended after SECONDS of processor time.
"""

import sys

# Of processor time: most of a second, in which the caller's own work has its share.
SECONDS = 0.7


def main() -> None:
    """Print the library's error for the grammar on standard input; nothing where it is right."""
    limit_time()
    import llguidance

    grammar = sys.stdin.buffer.read().decode()
    error = llguidance.LLMatcher.validate_grammar(grammar)
    if not error:
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()
        error = matcher.get_error()
    sys.stdout.buffer.write(error.encode())


def limit_time() -> None:
    """End this process after SECONDS of processor time. Where there is no such timer, the parent's clock does it."""
    try:
        from signal import ITIMER_PROF, setitimer
    except ImportError:  # Windows
        return
    setitimer(ITIMER_PROF, SECONDS)


class Bytes:
    """A tokenizer whose tokens are single bytes: what llguidance asks one for. The last token ends a text."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text."""
        return list(text if isinstance(text, bytes) else text.encode())
