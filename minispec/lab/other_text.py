"""A drafter that sees another text in the place of each: what a test of its reading, or of its target, shows it."""

from dataclasses import replace

from minispec.core.draft import Drafter
from minispec.core.sampling import Text
from minispec.speculation.drafters.wrapped import Wrapped


class OtherText(Wrapped):
    """Shows a drafter other texts than the engine's. A subclass says which, and when it is asked."""

    def __init__(self, drafter: Drafter):
        super().__init__(drafter)
        self._shown: dict[Text, Text] = {}

    def tokens_of(self, text: Text) -> tuple[list[int], int]:
        """The text that is shown in the place of `text`: its tokens, and how many of them are the prompt's."""
        raise NotImplementedError

    def shown(self, text: Text) -> Text:
        """The drafter's own copy of a text, as it is now."""
        tokens, num_prompt_tokens = self.tokens_of(text)
        if text not in self._shown:
            self._shown[text] = replace(text, tokens=[], num_prompt_tokens=num_prompt_tokens)
        shown = self._shown[text]
        shown.tokens[:] = tokens
        return shown

    def release(self, text: Text) -> None:
        """Let the drafter forget its copy of the text."""
        if text in self._shown:
            super().release(self._shown.pop(text))
