# SPDX-License-Identifier: Apache-2.0
"""Text to token ids the way the model will see a prompt: its special tokens, its chat template."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from patternsearch.errors import RecipeError

__all__ = ["Encoder", "Message", "Tokenizer"]

TokenIds = NDArray[np.int32]
Message = dict[str, str]
"""``{"role": ..., "content": ...}``."""

_MARK = "PatternsearchContentGoesHere"


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return a mapping with ``input_ids``."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a conversation."""


class Encoder:
    """A tokenizer together with how prompts begin and end.

    Args:
        tokenizer: a transformers tokenizer.
        chat_template: True renders conversations with the tokenizer's own template; False as a
            plain transcript.

    Attributes:
        chat_template: as given.
        prefix: token ids that every plain prompt begins with (such as BOS); may be empty.

    Raises:
        RecipeError: a chat template is asked for and the tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat_template: bool) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        if chat_template and not getattr(tokenizer, "chat_template", None):
            raise RecipeError(
                "the recipe says chat_template: true but the model's tokenizer has no chat "
                "template: set chat_template: false, or take a model with one"
            )
        self.prefix = np.empty(0, dtype=np.int32) if chat_template else self._find_prefix()

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of the text alone, int32, shape [tokens]."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return what :meth:`encode` returns for each text; fast tokenizers use all cores."""
        if not texts:
            return []
        rows = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=np.int32).reshape(-1) for row in rows]

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text on its own."""
        return [row.size for row in self.encode_all(texts)]

    def render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        """Return a conversation as text; ``is_prompt`` ends it where the assistant shall answer.

        Raises:
            RecipeError: the model's template refuses the conversation.
        """
        if not self.chat_template:
            turns = [f"{m['role'].capitalize()}: {m['content']}" for m in messages]
            return "\n\n".join(turns + (["Assistant:"] if is_prompt else []))
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=is_prompt
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            roles = ", ".join(dict.fromkeys(m["role"] for m in messages))
            raise RecipeError(
                f"the model's chat template refuses a conversation with the roles {roles}: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; "
                "use chat_template: false or another source"
            ) from None
        return text

    def frame(self) -> tuple[TokenIds, TokenIds]:
        """Return the token ids before and after a text that is a prompt by itself."""
        if not self.chat_template:
            return self.prefix, np.empty(0, dtype=np.int32)
        before, after = self.split_at_mark([{"role": "user", "content": _MARK}], _MARK)
        return self.encode(before), self.encode(after)

    def split_at_mark(
        self, messages: Sequence[Message], mark: str, *, lead: str = ""
    ) -> tuple[str, str]:
        """Render a prompt whose text holds ``mark`` once; return what is before and after it.

        The prompt ends with ``lead``, the beginning of the answer. A single turn without a chat
        template is not labelled as one: it is the text itself.
        """
        if self.chat_template:
            text = self.render(messages, is_prompt=True) + lead.lstrip()
        elif len(messages) == 1:
            text = messages[0]["content"] + lead
        else:
            text = f"{self.render(messages, is_prompt=True)} {lead.lstrip()}".rstrip()
        before, found, after = text.partition(mark)
        if not found:
            raise RecipeError(
                "the model's chat template drops what the user says: set chat_template: false"
            )
        return before, after

    def _find_prefix(self) -> TokenIds:
        probe = "a"
        plain = self._tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"]
        full = self._tokenizer(probe, add_special_tokens=True, verbose=False)["input_ids"]
        for length in range(len(full) - len(plain) + 1):
            if list(full[length : length + len(plain)]) == list(plain):
                return np.asarray(full[:length], dtype=np.int32).reshape(-1)
        return np.empty(0, dtype=np.int32)
